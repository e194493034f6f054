"""Measures of requests, with the names and definitions of ``vllm bench serve``.

    TTFT    first chunk with text - start of the request
    ITL     time between two chunks
    TPOT    (end - first chunk) / (tokens - 1), of requests with two tokens or more
    E2EL    last chunk - start of the request

A percentile lies between two values where need be (linear, as NumPy's).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

SHARES = (50, 90, 95, 99)


class RequestOutcome(msgspec.Struct):
    """One request. Times in seconds on one clock."""

    planned: float
    """When it should have been sent."""
    started: float = math.nan
    prompt_tokens: int = 0
    output_tokens: int = 0
    first: float = math.nan
    ended: float = math.nan
    gaps: list[float] = []
    error: str = ""

    @property
    def ok(self) -> bool:
        """A whole answer came."""
        return not self.error and not math.isnan(self.ended)

    @property
    def ttft(self) -> float:
        """Seconds."""
        return self.first - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds; None with fewer than two tokens."""
        return (self.ended - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class Spread(msgspec.Struct, frozen=True):
    """Of one measure, milliseconds."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


class Result(msgspec.Struct, frozen=True):
    """Of one run."""

    completed: int
    failed: int
    duration_s: float
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    input_tokens: int
    output_tokens: int
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    e2el_ms: Spread
    late_ms_p99: float
    """How much later than planned requests were sent: the load generator's own shortcoming."""
    goodput: float | None = None
    """Share of all requests within the goals that were given; what failed is not within."""
    errors: tuple[tuple[str, int], ...] = ()
    """The commonest first."""


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of values in order; 0 without any."""
    if not ordered:
        return 0.0
    at = (len(ordered) - 1) * share / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(values: Sequence[float]) -> Spread:
    """In milliseconds, of seconds."""
    ordered = sorted(values)
    if not ordered:
        return Spread()
    found = [percentile(ordered, share) * 1e3 for share in SHARES]
    return Spread(sum(ordered) / len(ordered) * 1e3, *found)


def measure(outcomes: Sequence[RequestOutcome], *, ttft_s: float | None = None, tpot_s: float | None = None) -> Result:
    """All measures; with goals also the goodput."""
    good = [each for each in outcomes if each.ok]
    begun = min((each.started for each in outcomes if not math.isnan(each.started)), default=0.0)
    late = sorted(each.started - each.planned for each in outcomes if not math.isnan(each.started))
    length = max((each.ended for each in good), default=begun) - begun
    length = max(length, 1e-9)
    prompts, answers = sum(each.prompt_tokens for each in good), sum(each.output_tokens for each in good)
    errors: dict[str, int] = {}
    for each in outcomes:
        if not each.ok:
            why = each.error or "no answer"
            errors[why] = errors.get(why, 0) + 1
    within = sum(
        (ttft_s is None or each.ttft <= ttft_s) and (tpot_s is None or (each.tpot or 0.0) <= tpot_s) for each in good
    )
    asked = ttft_s is not None or tpot_s is not None
    return Result(
        completed=len(good), failed=len(outcomes) - len(good), duration_s=length, request_throughput=len(good) / length,
        output_throughput=answers / length, total_token_throughput=(prompts + answers) / length, input_tokens=prompts,
        output_tokens=answers, ttft_ms=spread([each.ttft for each in good]),
        tpot_ms=spread([each.tpot for each in good if each.tpot is not None]),
        itl_ms=spread([gap for each in good for gap in each.gaps]),
        e2el_ms=spread([each.ended - each.started for each in good]),
        late_ms_p99=percentile(late, 99) * 1e3,
        goodput=within / len(outcomes) if asked and outcomes else None,
        errors=tuple(sorted(errors.items(), key=lambda item: -item[1])[:5]),
    )


def table(found: Result) -> str:
    """For a person."""
    lines = [
        f"{'Successful requests':32}{found.completed:>14}", f"{'Failed requests':32}{found.failed:>14}",
        f"{'Benchmark duration (s)':32}{found.duration_s:>14.2f}",
        f"{'Total input tokens':32}{found.input_tokens:>14}", f"{'Total generated tokens':32}{found.output_tokens:>14}",
        f"{'Request throughput (req/s)':32}{found.request_throughput:>14.2f}",
        f"{'Output token throughput (tok/s)':32}{found.output_throughput:>14.2f}",
        f"{'Total token throughput (tok/s)':32}{found.total_token_throughput:>14.2f}",
    ]
    if found.goodput is not None:
        lines.append(f"{'Within the goals':32}{found.goodput:>14.2%}")
    lines += [f"{'Sent late, P99 (ms)':32}{found.late_ms_p99:>14.2f}", "",
              f"{'(ms)':8}" + "".join(f"{name:>12}" for name in ("mean", "P50", "P90", "P95", "P99"))]
    for name, each in (("TTFT", found.ttft_ms), ("TPOT", found.tpot_ms), ("ITL", found.itl_ms), ("E2EL", found.e2el_ms)):
        values: tuple[Any, ...] = (each.mean, each.p50, each.p90, each.p95, each.p99)
        lines.append(f"{name:8}" + "".join(f"{value:12.2f}" for value in values))
    lines += [f"{count} x {why}" for why, count in found.errors]
    return "\n".join(lines)
