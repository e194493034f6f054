"""What a higher ``min`` would have saved in the last hour, and what it would have cost.

Nobody can see a spike coming that never was there before: whoever wants its requests in time pays for a floor. So the floor
is named with its price, and whoever reads it decides.
"""

from __future__ import annotations

import msgspec

HOUR_S = 3600.0
MOST = 720
"""Intervals that are remembered."""
WORTH_TELLING = 0.01
"""Of the hour's requests; and ten at least."""
FEWEST = 10
Pair = tuple[int, int]


class Interval(msgspec.Struct, frozen=True):
    """What is kept of an interval that is over, to be looked at in hindsight."""

    over_s: float
    arrivals: int
    late: bool
    """A goal was missed."""
    needed: Pair
    ready: Pair
    wanted: Pair
    """Counts that were paid for."""


class Floor(msgspec.Struct, frozen=True):
    """A ``min`` of one role that would have been enough."""

    role: int
    count: int
    saved: int
    """Requests that came while a goal was missed and the role was short."""
    hours: float
    """More instance-hours in the same time."""


def append_interval(past: tuple[Interval, ...], one: Interval) -> tuple[Interval, ...]:
    """The past with one more interval, and without what is older than an hour."""
    kept: list[Interval] = []
    seconds = 0.0
    for each in reversed((*past[-(MOST - 1) :], one)):
        kept.append(each)
        seconds += each.over_s
        if seconds >= HOUR_S:
            break
    return tuple(reversed(kept))


def floor(past: tuple[Interval, ...], ranges: tuple[Pair, Pair]) -> Floor | None:
    """The one that would have saved the most; None where little was late for want of instances, or nothing is to choose."""
    arrivals = sum(each.arrivals for each in past)
    found: list[Floor] = []
    for role in (0, 1):
        low, high = ranges[role]
        short = [each for each in past if each.late and each.needed[role] > each.ready[role]]
        saved = sum(each.arrivals for each in short)
        count = min(high, max((each.needed[role] for each in short), default=0))
        if saved >= max(FEWEST, WORTH_TELLING * arrivals) and count > low:
            hours = sum(max(0, count - each.wanted[role]) * each.over_s for each in past) / HOUR_S
            found.append(Floor(role, count, saved, hours))
    return max(found, key=lambda each: each.saved, default=None)
