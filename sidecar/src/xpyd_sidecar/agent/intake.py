"""What became of an engine's prompts, from the text of its ``/metrics``. Pure.

Belongs here: which series make up ``contract.intake.Intake``. The load is ``agent.engine``'s.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.contract.intake import MOST_LINKS, MOST_OUTCOMES, Counts, Intake

PROMPTS = "vllm:prompt_tokens_total"
SOURCES = "vllm:prompt_tokens_by_source_total"
CACHED = "local_cache_hit"
"""Its label ``source``, where the engine had them."""
_PLAIN = (PROMPTS, f"{metrics.LOADED_TOKENS}_total", f"{metrics.WAIT_SECONDS}_total", metrics.BLOCKS_WAITING)
_LABELLED = {SOURCES: "source", f"{metrics.TRANSFERS}_total": "outcome", f"{metrics.LINK_BYTES}_total": "link",
             f"{metrics.LINKS_REFUSED}_total": "link"}
"""Series, and which label tells their values apart."""
_SAMPLE = re.compile(rb"^(" + b"|".join(re.escape(name.encode()) for name in (*_PLAIN, *_LABELLED))
                     + rb")(?:\{(.*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')
_SIDE = "receive"
"""Of transfers: those that this engine awaited."""


def parse(text: bytes) -> Intake | None:
    """What one text, or those of several servers of one engine together, say. Values that are no finite number from 0 on
    are left out. None: the engine has no connector of ours, or tells no prompts.
    """
    plain: defaultdict[str, float] = defaultdict(float)
    labelled = {name: Counter[str]() for name in _LABELLED}
    seen = set()
    for raw_name, raw_labels, raw_value in _SAMPLE.findall(text):
        name = raw_name.decode()
        try:
            value = float(raw_value)
        except ValueError:
            continue
        if not 0 <= value < math.inf:
            continue
        seen.add(name)
        if name not in labelled:
            plain[name] += value
            continue
        labels = {key.decode(): word.decode(errors="replace") for key, word in _LABEL.findall(raw_labels)}
        if labels.get("side", _SIDE) == _SIDE and (word := labels.get(_LABELLED[name], "")):
            labelled[name][word[:64]] += round(value)
    if PROMPTS not in seen or not any(name.startswith("xpyd_kv_") for name in seen):
        return None
    return Intake(
        prompts=round(plain[PROMPTS]), cached=labelled[SOURCES][CACHED],
        received=round(plain[f"{metrics.LOADED_TOKENS}_total"]),
        outcomes=_most(labelled[f"{metrics.TRANSFERS}_total"], MOST_OUTCOMES),
        links=_most(labelled[f"{metrics.LINK_BYTES}_total"], MOST_LINKS),
        refused=_most(labelled[f"{metrics.LINKS_REFUSED}_total"], MOST_LINKS),
        wait_s=plain[f"{metrics.WAIT_SECONDS}_total"], blocks_waiting=round(plain[metrics.BLOCKS_WAITING]))


def _most(found: Counter[str], most: int) -> Counts:
    """The greatest, by name."""
    return tuple(sorted((word, count) for word, count in found.most_common(most) if count))
