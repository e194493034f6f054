"""What a router has counted since it started: two answers of one router give what happened between them.

Belongs here: the form and the widths of the buckets. Does not belong here: counting (``observing.batch``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial

import msgspec

Buckets = dict[int, int]
"""Durations: bucket → count."""
_SHORTEST = 1e-4
_STEPS = 8
_LAST = 200
"""Bucket of everything from about 55 minutes on."""
_ENDS = tuple(_SHORTEST * 2.0 ** (number / _STEPS) for number in range(_LAST))
"""Of every bucket but the last; a bucket's end belongs to it."""


def bucket_of(seconds: float) -> int:
    """The bucket of a duration; one is 2^(1/8) wide, so a percentile is right within 4.5 %."""
    return bisect_left(_ENDS, seconds)


def buckets_of(durations: Iterable[float]) -> Counter[int]:
    """How many durations lie in each bucket."""
    return Counter(map(partial(bisect_left, _ENDS), durations))


def add_buckets(buckets: Buckets, more: Mapping[int, int]) -> None:
    """Add the counts of ``more`` to ``buckets``, in place."""
    for bucket, count in more.items():
        buckets[bucket] = buckets.get(bucket, 0) + count


def middle_of(bucket: int) -> float:
    """The duration in seconds that stands for all durations of a bucket."""
    return _SHORTEST if bucket == 0 else float(_SHORTEST * 2.0 ** ((bucket - 0.5) / _STEPS))


class Totals(msgspec.Struct, frozen=True):
    """Counters; they only grow. Lengths in tokens."""

    since: float = 0.0
    """When counting began, seconds since 1970: another value than before means that the router was started again."""
    arrivals: int = 0
    """Requests that were let in."""
    arrived_tokens: int = 0
    """Of their prompts, as their size tells (``router.api.prompt.PromptLengths``)."""
    measured: int = 0
    """Requests that ended well, with both lengths known."""
    prompt_tokens: int = 0
    """Of those."""
    measured_size: int = 0
    """Of those, as ``arrived_tokens`` counts."""
    prompt_squares: int = 0
    """Sum of their squared prompt lengths."""
    output_tokens: int = 0
    """Of those."""
    handovers: int = 0
    handover_s: float = 0.0
    """Seconds of all hand-overs together."""
    ttft: Buckets = {}
    tpot: Buckets = {}
