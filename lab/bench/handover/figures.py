"""From what was seen to figures. A ratio is taken within a round; a figure is the median, with the quartiles beside it.

How well a median is known says its interval: 95 % of the medians of as many rounds, drawn from these with replacement.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any, Final

DRAWS: Final = 2000


def spread(values: Sequence[float], digits: int = 3) -> dict[str, Any]:
    """Median and quartiles."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {"median": round(statistics.median(values), digits), "p25": round(low, digits), "p75": round(high, digits),
            "of": len(values)}


def milliseconds(values: Sequence[float]) -> dict[str, Any]:
    """Likewise of durations."""
    return spread([1000 * value for value in values], 2)


def pairs(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """Ratios within a round."""
    return [one / other for one, other in zip(ones, others, strict=True)]


def ratios(ones: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """Their spread, and the interval of their median."""
    values = pairs(ones, others)
    return spread(values) | {"interval": interval(values)}


def interval(values: Sequence[float], base: Sequence[float] = (1.0,), digits: int = 3) -> list[float]:
    """Of the median of values divided by that of ``base``; the draws are the same each time."""
    draw = random.Random(0)

    def drawn_of(ones: Sequence[float]) -> float:
        return statistics.median(draw.choices(ones, k=len(ones)))

    drawn = sorted(drawn_of(values) / drawn_of(base) for _ in range(DRAWS))
    return [round(drawn[int(share * (DRAWS - 1))], digits) for share in (0.025, 0.975)]


def handover(events: Sequence[Any]) -> float | None:
    """Seconds from the end of prefill's last forward to the beginning of decode's first, less decode's others in between.

    Below 0 where decode began before prefill had ended: the last layer's KV leaves before what follows it is computed.
    None: the trace lacks one of them (a prompt that decode computed itself).
    """
    done = [one.at + one.seconds for one in events if one.name == "prefill forward"]
    first = [one.at for one in events if one.name == "first decode forward"]
    if not done or not first:
        return None
    return _between(events, max(done), min(first))


def last_kv(events: Sequence[Any]) -> float | None:
    """The same from the moment at which the last copy of KV was handed to the link."""
    pushed = [one.at for one in events if one.name == "push"]
    first = [one.at for one in events if one.name == "first decode forward"]
    return _between(events, max(pushed), min(first)) if pushed and first else None


def _between(events: Sequence[Any], begin: float, end: float) -> float:
    if end <= begin:
        return end - begin
    others = sum(max(0.0, min(end, one.at + one.seconds) - max(begin, one.at)) for one in events
                 if one.name == "forward of others")
    return end - begin - others
