"""What it is worth to do without an instance, and what it risks: when a role may have fewer.

An instance that is away for T seconds is worth T of its time. Where it is needed again within a cold start of C seconds,
about what it would have answered in C is late, and a late request costs as much as ``late_cost`` answered ones. Hence

    growth      fewer only if the chance to need them within C is below 1 / late_cost. It is counted: from each moment at
                which the demand was much as now, by how much did it rise at most within C? The share 1 - 1 / late_cost of
                these looks, and of ``PRIOR`` looks at a rise by ``FIRST_GROWTH``, is kept in hand.
    patience    what looks do not know: fewer must have been enough for ``late_cost`` / 3 cold starts. That is how long one
                waits who expects a third of all removals to be wrong; each one that was doubles it.
    regret      a role is short with fewer instances than before its last removal, and they were away for less than
                late_cost · C. Away for longer, they have paid for what their absence costs.
    calm        without a regret for so long, patience is halved. Each regret doubles the calm that is needed, so regrets
                grow with the logarithm of time under whatever repeats itself, up to the bounds.
    descent     a part of what is spare at a time, and then a look at what comes.

Ski rental (Karlin et al. 1988) with a rate that is learned; the share is the critical fractile of a newsvendor.
"""

from __future__ import annotations

import math
from itertools import accumulate

import msgspec

FIRST_GROWTH, PRIOR = 0.5, 20
"""Before anything was seen: a rise by so much of the demand, worth so many looks."""
SIMILAR = 1.5
"""A demand is much as now within this factor."""
SMOOTH = 3
"""Intervals whose mean is compared, so that chance is less of a rise."""
LOOKS = 720
"""Intervals of demand that are remembered, at most."""
EXPECTED = 1 / 3
"""Share of removals that is taken to be wrong before any was."""
MOST_PATIENCE = 24.0
"""Times the first patience; beyond it a removal is tried again however often it was regretted."""
CALM_S, MOST_CALM_S = 5400.0, 604_800.0
PART = 2
"""Half of what is spare goes at a time, one instance at least."""
PAUSE = 3
"""Intervals between two parts."""


class RemovalPatience(msgspec.Struct, frozen=True):
    """Of one role: how its removals turned out. Times are seconds since the planner began."""

    times: float = 1.0
    """Of the first patience."""
    calm_s: float = CALM_S
    """Without a regret for so long, patience is halved."""
    changed_s: float = 0.0
    """When ``times`` changed last."""
    removed_s: float = 0.0
    """When instances went last."""
    before: int = 0
    """Instances before the first part of the last descent; 0: there is none that could be regretted."""
    regrets: int = 0
    regretted_s: float = 0.0

    def seconds(self, late_cost: float, cold_start_s: float) -> float:
        """How long fewer must have been enough."""
        return self.times * EXPECTED * late_cost * cold_start_s

    def with_interval(self, now_s: float, count: int, asked: int, worth_s: float) -> RemovalPatience:
        """The patience after one more interval, in which ``asked`` were needed of a role that has ``count``.

        ``worth_s``: an absence of that length has paid for itself.
        """
        found = self
        if found.before and (found.before <= count or now_s - found.removed_s > worth_s):
            found = msgspec.structs.replace(found, before=0)
        if found.before and asked > count:
            return msgspec.structs.replace(
                found, times=min(MOST_PATIENCE, 2 * found.times), calm_s=min(MOST_CALM_S, 2 * found.calm_s),
                changed_s=now_s, before=0, regrets=found.regrets + 1, regretted_s=now_s)
        if found.times > 1 and now_s - found.changed_s >= found.calm_s:
            return msgspec.structs.replace(found, times=max(1.0, found.times / 2), changed_s=now_s)
        return found

    def is_resting(self, now_s: float, interval_s: float) -> bool:
        """Whether instances went so lately that nothing can be seen of it yet; an interval may be a little shorter."""
        return bool(self.before) and now_s - self.removed_s < (PAUSE - 0.5) * interval_s

    def with_removal(self, now_s: float, count: int) -> RemovalPatience:
        """The patience after some of ``count`` instances went at ``now_s``."""
        return msgspec.structs.replace(self, removed_s=now_s, before=max(self.before, count))


def part(count: int, floor: int) -> int:
    """How many instances are left after the next part of a descent from ``count`` towards ``floor``."""
    return count - max(1, (count - floor) // PART) if count > floor else count


def append_demand(looks: tuple[float, ...], demand: float) -> tuple[float, ...]:
    """The last demands with that of one more interval; the oldest give way beyond ``LOOKS`` of them."""
    return (*looks[-(LOOKS - 1) :], demand)


def growth(looks: tuple[float, ...], steps: int, late_cost: float) -> float:
    """By how much the demand may rise within ``steps`` intervals, for all that is worth keeping in hand; from 0 on."""
    if not looks:
        return 0.0
    size = min(SMOOTH, len(looks))
    sums = list(accumulate(looks, initial=0.0))
    means = [(sums[at + size] - sums[at]) / size for at in range(len(looks) - size + 1)]
    level = means[-1]
    steps = max(size, steps)
    rises = [
        max(means[at + 1 : at + steps + 1]) - mean
        for at, mean in enumerate(means[: max(0, len(means) - steps)])
        if level / SIMILAR <= mean <= level * SIMILAR
    ]
    rises += [FIRST_GROWTH * level] * PRIOR
    rises.sort()
    return max(0.0, rises[min(len(rises) - 1, math.ceil((1 - 1 / late_cost) * len(rises)))])
