"""One role: how many to make, which to drain, which to remove.

With ``w`` wanted, ``s`` surge, ``u`` unavailable, over the instances of one role:

    fresh   of the wanted revision, not leaving          stale   of another revision, not leaving
    all     fresh + stale + leaving                      ready   those of fresh + stale that serve

    take back        draining ones of the wanted revision, up to w - fresh
    make             min(w - fresh, w + s - all)         leaving ones count: they still hold memory and devices
    keep of stale    max(0, w - u - ready fresh)         an old one goes when a new one serves in its place
    drain            only while ready - 1 >= w - u       serving never falls below what is asked for
    remove at once   what serves nothing and is surplus, or stale while the new revision is not in a crash loop

Both roles roll together, since a new revision may compute other KV, which pairs only with itself: below ``w`` an old
instance is drained only when the other role has a new one that serves, or has nothing old (surge 0 has no room for that).
"""

from __future__ import annotations

import msgspec

from xpyd_operator.plan.backoff import LOOPING
from xpyd_operator.plan.desired import RoleTarget
from xpyd_operator.plan.drain import victims
from xpyd_operator.plan.observed import Instance, Phase
from xpyd_sidecar.contract.ids import Role


class RoleView(msgspec.Struct, frozen=True):
    """The instances of one role beside what is wanted of it."""

    role: Role
    target: RoleTarget
    everything: tuple[Instance, ...]
    fresh: tuple[Instance, ...]
    stale: tuple[Instance, ...]

    @property
    def wanted(self) -> int:
        """Instances asked for."""
        return self.target.replicas

    @property
    def ready(self) -> int:
        """Instances that serve."""
        return sum(instance.ready for instance in (*self.fresh, *self.stale))

    @property
    def fresh_ready(self) -> int:
        """Instances of the wanted revision that serve."""
        return sum(instance.ready for instance in self.fresh)

    @property
    def fresh_fails(self) -> bool:
        """The wanted revision crashes and none of it serves: what is old is worth keeping."""
        return bool(self.fresh) and not self.fresh_ready and any(instance.crashes >= 1 for instance in self.fresh)

    @property
    def coming(self) -> bool:
        """Fewer serve than asked for, and that will change: not all that is missing is in a crash loop."""
        hopeless = sum(1 for instance in (*self.fresh, *self.stale) if not instance.ready and instance.crashes >= LOOPING)
        return self.ready + hopeless < self.wanted


def view(role: Role, target: RoleTarget, instances: tuple[Instance, ...]) -> RoleView:
    """Sort the instances of one role out of all."""
    mine = tuple(instance for instance in instances if instance.role is role)
    staying = tuple(instance for instance in mine if not instance.leaving)
    return RoleView(
        role=role,
        target=target,
        everything=mine,
        fresh=tuple(instance for instance in staying if instance.revision == target.revision),
        stale=tuple(instance for instance in staying if instance.revision != target.revision),
    )


def returning(mine: RoleView) -> list[Instance]:
    """Instances whose drain is taken back, because they are wanted again; the lowest ordinals first."""
    usable = [i for i in mine.everything if i.phase is Phase.DRAINING and i.revision == mine.target.revision]
    return sorted(usable, key=lambda instance: instance.ordinal)[: max(0, mine.wanted - len(mine.fresh))]


def missing(mine: RoleView, back: int, max_surge: int) -> int:
    """How many instances to make now, beside those whose drain is taken back."""
    return max(0, min(mine.wanted - len(mine.fresh) - back, mine.wanted + max_surge - len(mine.everything)))


class Retire(msgspec.Struct, frozen=True):
    """Who goes. ``held`` would be drained, were it not for ``why``."""

    remove: tuple[tuple[Instance, str], ...] = ()
    drain: tuple[tuple[Instance, str], ...] = ()
    held: tuple[Instance, ...] = ()
    why: str = ""


def retire(mine: RoleView, other: RoleView, *, max_surge: int, max_unavailable: int, fleet_known: bool) -> Retire:
    """Who of one role goes now."""
    remove: list[tuple[Instance, str]] = []
    ready_stale = [instance for instance in mine.stale if instance.ready]
    idle_stale = [instance for instance in mine.stale if not instance.ready]
    if mine.fresh_fails:
        keep = max(0, mine.wanted - len(ready_stale))
        idle_stale = victims(idle_stale)[: max(0, len(idle_stale) - keep)]
    remove += [(instance, "of an old revision and not serving") for instance in idle_stale]

    surplus = victims(mine.fresh)[: max(0, len(mine.fresh) - mine.wanted)]
    remove += [(instance, "more than asked for, and not serving") for instance in surplus if not instance.ready]

    old = victims(ready_stale)
    above = max(0, len(old) - mine.wanted)
    replaced = max(above, len(old) - max(0, mine.wanted - max_unavailable - mine.fresh_ready))
    fewer = [instance for instance in surplus if instance.ready] + old[:above]
    newer = old[above:replaced]
    room = max(0, mine.ready - (mine.wanted - (max_unavailable if old else 0)))
    fewer = fewer[:room]
    newer = newer[: room - len(fewer)]

    if not fleet_known and (fewer or newer):
        return Retire(tuple(remove), (), (*fewer, *newer), "no router tells the load of the instances")
    drain = [(instance, "more than asked for") for instance in fewer]
    drain_newer = [(instance, "of an old revision, replaced") for instance in newer]
    if fewer and other.coming:
        held, why = tuple(fewer), f"{other.role} has {other.ready} of {other.wanted} ready"
        return Retire(tuple(remove), tuple(drain_newer), held, why)
    if newer and max_surge > 0 and other.stale and other.wanted and not other.fresh_ready:
        return Retire(tuple(remove), tuple(drain), tuple(newer), f"no {other.role} instance of the new revision is ready")
    return Retire(tuple(remove), (*drain, *drain_newer))
