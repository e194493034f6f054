"""Which instances go first when there are too many."""

from __future__ import annotations

from collections.abc import Iterable

from xpyd_operator.plan.observed import Instance, Phase


def victims(candidates: Iterable[Instance]) -> list[Instance]:
    """The candidates in the order in which they should go.

    First what serves nothing (crashed, then the one that began to start last), then what serves least: those whose router
    clients do not reach, the lowest load, and the highest ordinal among equals, so that small ordinals stay.
    """
    return sorted(candidates, key=_order)


def _order(instance: Instance) -> tuple[int, bool, float, int]:
    if instance.phase is Phase.CRASHED:
        return (0, False, -instance.crashes, -instance.ordinal)
    if instance.phase is Phase.STARTING:
        return (1, False, -instance.since, -instance.ordinal)
    return (2, instance.router, instance.load, -instance.ordinal)
