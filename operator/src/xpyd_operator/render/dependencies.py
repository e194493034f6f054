"""What is not made before what, and what goes when: the one table of it, by kind (decision 0071).

    read forwards    an object is made once all is there that its kind needs (``render.needs`` says which objects these are)
    read backwards   an object that lasts has no owner, and goes once nothing is left of the kinds that need or use it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec


class Row(msgspec.Struct, frozen=True):
    """Of one kind."""

    needs: tuple[str, ...] = ()
    """Kinds without which none of this one is made."""
    uses: tuple[str, ...] = ()
    """Kinds that it can do without for a while: they hold nothing up, and stay as long as this one is there."""
    lasts: bool = False
    """It has no owner, so that the garbage collector does not take it with the service."""


_AROUND_PODS = ("Service", "PodDisruptionBudget", "DisaggPool", "HTTPRoute", "BackendTLSPolicy", "InferencePool")

TABLE: Final[Mapping[str, Row]] = {
    "NetworkPolicy": Row(lasts=True),
    "Service": Row(lasts=True),
    "HTTPRoute": Row(needs=("BackendTLSPolicy", "InferencePool"), lasts=True),
    "BackendTLSPolicy": Row(lasts=True),
    "InferencePool": Row(lasts=True),
    "Secret": Row(),
    "DisaggPool": Row(),
    "PodDisruptionBudget": Row(),
    "PodGroup": Row(),
    "DaemonSet": Row(),
    "Job": Row(),
    "Deployment": Row(needs=("Secret", "NetworkPolicy"), uses=_AROUND_PODS),
    "Pod": Row(needs=("Secret", "NetworkPolicy", "PodGroup", "Pod"), uses=_AROUND_PODS),
}
"""Every kind of a service. That a pod needs pods is said of a leader, which comes after the other members."""


def stage(kind: str) -> int:
    """0 for what needs nothing; else one more than the last of what it needs."""
    return 1 + max((stage(each) for each in TABLE[kind].needs if each != kind), default=-1)


def stages(kinds: Iterable[str]) -> tuple[frozenset[str], ...]:
    """Kinds in the order in which they are made; those of one stage may be made side by side."""
    found: dict[int, set[str]] = {}
    for kind in kinds:
        found.setdefault(stage(kind), set()).add(kind)
    return tuple(frozenset(found[number]) for number in sorted(found))


def keepers(kind: str) -> frozenset[str]:
    """The kinds that need or use this one, so that it stays as long as there is one of them."""
    return frozenset(other for other, row in TABLE.items() if kind in (*row.needs, *row.uses) and other != kind)
