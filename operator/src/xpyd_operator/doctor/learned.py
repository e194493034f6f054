"""What the traffic of the last hour tells of the engines: what a prefill takes, a decode step, a hand-over. Pure.

    prefill     start + L * per_token                 by prefill legs: the quicker quarter of those like it did not wait
    step        base + n * per_request                by TPOT against how many were decoding at the time
    handover    from the end of the prefill leg to decode's first event

All are medians or quarters of what was measured, so that a few odd ones do nothing; a fit needs ``LEAST`` requests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from statistics import median
from typing import Final

import msgspec

from xpyd_sidecar.contract.sample import Sample, SampledRequest

LEAST: Final = 30
QUICK: Final = 0.25
PRIOR: Final = 8.0
"""So many requests' worth is the guess that a step costs nothing for one more request."""


class LearnedFigures(msgspec.Struct, frozen=True):
    """What a sample of requests tells of engines and traffic. Times in seconds, lengths in tokens."""

    prefill_start: float
    prefill_per_token: float
    step_base: float
    step_per_request: float
    handover: float
    """Median; decode's first step is in it, with what is left of the one before it."""
    prompt: float
    """Mean."""
    output: float
    """Mean of those that are known."""
    rate: float
    """Requests a second."""
    alone: float
    """Share of the requests that decode served without prefill."""
    running: float = 0.0
    """Requests that decode at a time on one instance, median."""

    def prefill_s(self, prompt: float) -> float:
        """What a prompt takes a prefill engine that has nothing else to do."""
        return self.prefill_start + prompt * self.prefill_per_token

    def step_s(self, requests: float) -> float:
        """A decode step of so many requests."""
        return self.step_base + requests * self.step_per_request

    @property
    def pays_from(self) -> float:
        """Prompts shorter than this are computed in less time than their hand-over takes, tokens."""
        if not self.prefill_per_token:
            return 0.0
        return max(0.0, self.handover - self.prefill_start) / self.prefill_per_token


def learn(sample: Sample | None, decodes: int) -> LearnedFigures | None:
    """From a sample. ``decodes``: instances that share the decoding. None: too little is known."""
    if sample is None or not sample.covers_s:
        return None
    paired = [one for one in sample.requests if one.prefill > 0 and one.handover >= 0 and one.prompt > 0]
    steps = _steps(sample.requests, max(1, decodes))
    if len(paired) < LEAST or len(steps) < LEAST:
        return None
    start, per_token = _prefill(paired)
    base, slope = _line(steps)
    outputs = [one.output for one in sample.requests if one.output > 0]
    return LearnedFigures(
        prefill_start=start, prefill_per_token=per_token, step_base=base, step_per_request=slope,
        handover=median(one.handover for one in paired),
        prompt=sum(one.prompt for one in sample.requests) / len(sample.requests), output=sum(outputs) / len(outputs),
        rate=len(sample.requests) / sample.covers_s, alone=1 - len(paired) / len(sample.requests),
        running=median(n for n, _ in steps))


def _prefill(paired: Sequence[SampledRequest]) -> tuple[float, float]:
    """Start and seconds for a token: a line through the quick quarters of the shorter and of the longer half."""
    ordered = sorted(paired, key=lambda one: one.prompt)
    half = len(ordered) // 2
    (short, short_s), (long, long_s) = _quick(ordered[:half]), _quick(ordered[half:])
    if long >= 1.5 * short:
        per_token = max(0.0, (long_s - short_s) / (long - short))
        if per_token:
            return max(0.0, short_s - short * per_token), per_token
    return 0.0, long_s / long


def _quick(those: Sequence[SampledRequest]) -> tuple[float, float]:
    """Mean length and time of the quarter that took least for its length."""
    quick = sorted(those, key=lambda one: one.prefill / one.prompt)[:max(1, round(QUICK * len(those)))]
    return sum(one.prompt for one in quick) / len(quick), sum(one.prefill for one in quick) / len(quick)


def _steps(requests: Sequence[SampledRequest], decodes: int) -> list[tuple[float, float]]:
    """How many were decoding on an instance in the middle of each stream, and its TPOT."""
    streams = [one for one in requests if one.ttft > 0 and one.output > 1 and one.total > one.ttft]
    begins = sorted(one.at + one.ttft for one in streams)
    ends = sorted(one.at + one.total for one in streams)
    found = []
    for one in streams:
        middle = one.at + (one.ttft + one.total) / 2
        running = bisect_right(begins, middle) - bisect_right(ends, middle)
        found.append((max(1.0, running / decodes), (one.total - one.ttft) / (one.output - 1)))
    return found


def _line(steps: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Base and slope of a step by the requests in it: ridge, the guess being that there is no slope."""
    typical = median(seconds for _, seconds in steps)
    kept = [(n, seconds) for n, seconds in steps if seconds <= 4 * typical]
    mean_n = sum(n for n, _ in kept) / len(kept)
    mean_s = sum(seconds for _, seconds in kept) / len(kept)
    spread = sum((n - mean_n) ** 2 for n, _ in kept)
    slope = sum((n - mean_n) * (seconds - mean_s) for n, seconds in kept) / (spread + PRIOR * mean_n ** 2)
    slope = min(max(0.0, slope), mean_s / mean_n)
    return mean_s - slope * mean_n, slope
