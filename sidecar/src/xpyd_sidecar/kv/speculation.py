"""Whether a decode engine may take KV from a prefill engine that speculates otherwise, and which arrays then stay behind.

    decode          prefill         model without states                            model with states
    ─               ─               all                                             all
    any             the same        all, the draft's too                            all, the draft's too
    drafts itself   otherwise, ─    all but drafts'; warned: few are accepted       refused, with the field
    by tokens, ─    by a model      all but drafts'; warned: they are for nothing   refused, with the field
    by tokens       ─, by tokens    all                                             refused, with the field

"Drafts itself" means with KV of its own (EAGLE, MTP, draft models), "by tokens" without (n-gram, suffix). The number of
drafts counts only for states, whose pages hold a column for each.
"""

from __future__ import annotations

from typing import NamedTuple

from xpyd_sidecar.contract.speculation import ALIKE, Speculation, difference

ALL = (*ALIKE, "num_speculative_tokens")


class DraftRule(NamedTuple):
    """What becomes of drafts between two engines."""

    refused: str = ""
    """Why no KV is taken at all, with the field."""
    warning: str = ""
    """What is lost although KV is taken."""
    left_out: frozenset[str] = frozenset()
    """Layers whose arrays are not handed over."""


def judge(decode: Speculation, prefill: Speculation) -> DraftRule:
    """What holds for KV of ``prefill`` at ``decode``."""
    differs = difference(decode, prefill, ALL)
    if differs and (decode.states or prefill.states):
        words = "the states of this model are laid out by it, so both roles must speculate alike"
        return DraftRule(refused=f"{differs}; {words}")
    if not (decode.layers or prefill.layers) or not (differs := difference(decode, prefill)):
        return DraftRule()
    left_out = frozenset(decode.layers) | frozenset(prefill.layers)
    if decode.layers:
        words = f"{differs}; prefill computes no KV for decode's draft ({decode.method}), so few drafts will be accepted"
    else:
        words = f"{differs}; decode has no use for the KV of prefill's draft ({prefill.method}), which costs prefill time"
    return DraftRule(warning=words, left_out=left_out)
