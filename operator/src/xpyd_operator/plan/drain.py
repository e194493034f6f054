"""Which instances go first when there are too many."""

from __future__ import annotations

from collections.abc import Iterable

from xpyd_operator.plan.observed import Instance, Phase


def victims(candidates: Iterable[Instance]) -> list[Instance]:
    """The candidates in the order in which they should go.

    First what serves nothing (crashed, then the one that began to start last), then what costs least: those whose router
    clients do not reach, the lowest cost, and the highest ordinal among equals, so that small ordinals stay.

        cost = load / mean load + cached / mean cached        over the candidates; a mean of 0 counts for nothing

    Load is what must end or move before it can go; cached is what others must compute again.
    """
    all_of_them = list(candidates)
    load, cached = (sum(values) / max(1, len(all_of_them)) for values in
                    ([one.load for one in all_of_them], [one.cached for one in all_of_them]))

    def order(one: Instance) -> tuple[int, bool, float, int]:
        if one.phase is Phase.CRASHED:
            return (0, False, -one.crashes, -one.ordinal)
        if one.phase is Phase.STARTING:
            return (1, False, -one.since, -one.ordinal)
        cost = (one.load / load if load else 0.0) + (one.cached / cached if cached else 0.0)
        return (2, one.router, cost, -one.ordinal)

    return sorted(all_of_them, key=order)
