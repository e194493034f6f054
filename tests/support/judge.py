"""Whether what a client has is what one engine would have answered, and what is wrong where it is not.

    verdict = judge(request, events, complete=True)     → Verdict; .fault says what, .finished whether it is whole
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from recorded import SAMPLE, Request, Seen, seen_of

NUMBER = re.compile(rf"{SAMPLE}\d+{SAMPLE}")
NEAR = 1e-3
"""Log probabilities of the same token differ by about 1e-5 between batches."""


@dataclass(frozen=True)
class Verdict:
    """One answer."""

    finished: bool
    """It ended properly: [DONE], and no error event."""
    fault: str = ""
    """Empty: nothing in it is wrong, though it may have ended early with an error event."""
    kind: str = ""
    """``lost``, ``duplicated`` or ``wrong``."""


def judge(request: Request, events: list[Any], *, complete: bool) -> Verdict:
    """Compare a stream with the recorded one. ``complete``: its HTTP body ended properly."""
    try:
        seen = seen_of(events)
    except (AssertionError, KeyError) as error:
        return Verdict(finished=False, fault=f"not a stream of one answer: {error!r}", kind="wrong")
    if request.way == "error" and (fault := _one_sample(seen)):
        return Verdict(False, fault, "wrong")
    expected = _expected(request, seen)
    if len(seen.names) > 1 or len(seen.created) > 1:
        return Verdict(False, f"ids {seen.names}, created {seen.created}", "wrong")
    if seen.error is None and (not complete or not events or events[-1] != "[DONE]"):
        return Verdict(False, f"ended without [DONE] and without an error event: {str(events[-1:])[:300]}", "lost")
    for index, channels in seen.texts.items():
        for channel, text in channels.items():
            right = expected.texts.get(index, {}).get(channel, "")
            if not right.startswith(text):
                return Verdict(False, f"choice {index} {channel}: {right!r} expected, {text!r} got", _kind(right, text))
    if seen.error is not None:
        return Verdict(finished=False)
    fault = _difference(expected, seen)
    return Verdict(not fault, fault, ("lost" if seen.texts != expected.texts else "wrong") if fault else "")


def _expected(request: Request, seen: Seen) -> Seen:
    """What was recorded. Of a sampled answer that is two samples, one with ids, which a client sees that asked for them."""
    plain = seen_of(list(request.plain))
    if request.way != "error":
        return plain
    other = seen_of(list(request.ids))
    if not request.body.get("return_token_ids"):
        other.prompt, other.tokens = None, {index: [] for index in other.tokens}
    begins = all(other.texts.get(index, {}).get(channel, "").startswith(text)
                 for index, channels in seen.texts.items() for channel, text in channels.items())
    return other if begins else plain


def _one_sample(seen: Seen) -> str:
    """Take the samples' numbers out of the texts; what is wrong where there are several."""
    numbers = set()
    for channels in seen.texts.values():
        for name, text in channels.items():
            numbers |= set(NUMBER.findall(text))
            channels[name] = NUMBER.sub("", text)
    return f"parts of the samples {sorted(numbers)}" if len(numbers) > 1 else ""


def _kind(right: str, text: str) -> str:
    differing = (place for place, (a, b) in enumerate(zip(right, text, strict=False)) if a != b)
    common = next(differing, min(len(right), len(text)))
    if text[common:] and text[common:common + 8] in text[:common]:
        return "duplicated"
    return "lost" if text[common:] and text[common:] in right[common:] else "wrong"


def _difference(expected: Seen, seen: Seen) -> str:
    for name in ("texts", "finish", "roles", "tokens", "prompt", "usage"):
        right, got = getattr(expected, name), getattr(seen, name)
        if right != got:
            return f"{name}: {right!r} expected, {got!r} got"
    if seen.after_finish:
        return "something follows the finish reason"
    if not _near(expected.logprobs, seen.logprobs):
        return f"logprobs: {str(expected.logprobs)[:600]} expected, {str(seen.logprobs)[:600]} got"
    totals = [usage["completion_tokens"] for usage in seen.usages]
    prompts = {usage["prompt_tokens"] for usage in seen.usages}
    last = [_given(usages[-1]) for usages in (expected.usages, seen.usages) if usages]
    if totals != sorted(totals) or len(prompts) > 1 or last[:1] != last[1:]:
        return f"usage all along: {expected.usages[-1:]} expected at the end, {seen.usages} got"
    return ""


def _given(usage: dict[str, int]) -> dict[str, int]:
    return {name: number for name, number in usage.items() if number is not None}


def _near(right: Any, got: Any) -> bool:
    if isinstance(right, dict):
        return isinstance(got, dict) and right.keys() == got.keys() and all(_near(right[key], got[key]) for key in right)
    if isinstance(right, list):
        return isinstance(got, list) and len(right) == len(got) and all(map(_near, right, got))
    if isinstance(right, float) and isinstance(got, float | int):
        return math.isclose(right, got, abs_tol=NEAR)
    return bool(right == got)
