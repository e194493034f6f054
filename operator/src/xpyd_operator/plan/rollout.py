"""One role: how many to make, which to drain, which to remove.

With ``w`` wanted, ``s`` surge, ``u`` unavailable, over the instances of one role (both roles roll at once):

    fresh   of the wanted revision, not leaving          stale   of another revision, not leaving
    all     fresh + stale + leaving                      ready   those of fresh + stale that serve

    take back        draining ones of the wanted revision, up to w - fresh
    make             min(w - fresh, w + s - all)         leaving ones count: they still hold memory and devices
    keep of stale    max(0, w - u - ready fresh)         an old one goes when a new one serves in its place
    drain            only while ready - 1 >= w - u       serving never falls below what is asked for
    remove at once   what serves nothing and is surplus, or stale once the new revision serves

``canary`` says what is known of the wanted revision's KV, and so how these bounds tighten:

    PROBING, HELD    one fresh one at most; nothing old that serves is drained, but one where without it no canary has room
    DIFFERENT        an old one goes only once the new KV is served by both roles, and in balance (``balance``)
    BLIND            as DIFFERENT, by revision: an old one goes when the other role has a new one that serves, or has
                     nothing old, or has no room for a new one
    SAME, FREE       the bounds alone
"""

from __future__ import annotations

import msgspec

from xpyd_operator.plan import balance
from xpyd_operator.plan.canary import RoleView, Stage, clash, is_canary_stage, stage
from xpyd_operator.plan.drain import victims
from xpyd_operator.plan.observed import Instance, Phase

UNKNOWN_LOAD = "no router tells the load of the instances"


def returning(mine: RoleView) -> list[Instance]:
    """Instances whose drain is taken back, because they are wanted again; the lowest ordinals first."""
    usable = [
        i for i in mine.everything if i.phase is Phase.DRAINING and i.revision == mine.target.revision and not i.switching
    ]
    return sorted(usable, key=lambda instance: instance.ordinal)[: max(0, mine.wanted_count - len(mine.fresh))]


def missing(mine: RoleView, back: int, *, canary: bool = False) -> int:
    """How many instances to make now, beside those whose drain is taken back; ``canary``: so that there is one at most."""
    wanted = min(1, mine.wanted_count) if canary else mine.wanted_count
    return max(0, min(wanted - len(mine.fresh) - back, mine.wanted_count + mine.target.max_surge - len(mine.everything)))


class Retire(msgspec.Struct, frozen=True):
    """Who goes. ``held`` would be drained, were it not for what stands beside it."""

    remove: tuple[tuple[Instance, str], ...] = ()
    drain: tuple[tuple[Instance, str], ...] = ()
    held: tuple[tuple[Instance, str], ...] = ()

    def hold(self, stay: dict[str, str]) -> Retire:
        """The same, but without draining those in ``stay`` (name → why), which are held."""
        drain = tuple((instance, why) for instance, why in self.drain if instance.name not in stay)
        held = tuple((instance, stay[instance.name]) for instance, _ in self.drain if instance.name in stay)
        return Retire(self.remove, drain, (*self.held, *held))

    def with_reason(self, more: str) -> Retire:
        """The same with ``more`` added to why each one is drained, or will be."""
        drain, held = (tuple((instance, f"{why}; {more}") for instance, why in those) for those in (self.drain, self.held))
        return Retire(self.remove, drain, held)


class _Due(msgspec.Struct, frozen=True):
    """Who of one role is due to go, before the other role is asked. The first to go first."""

    idle: list[Instance]
    """Old ones that serve nothing."""
    surplus: list[Instance]
    """Of the wanted revision, above the wanted count."""
    fewer: list[Instance]
    """Those above the wanted count that serve, of any revision."""
    newer: list[Instance]
    """Old ones that serve and are replaced."""


def _due(mine: RoleView, other: RoleView, at: Stage) -> _Due:
    first = balance.rank(mine, other)
    none = (False, 0, "")
    old = sorted(
        victims(instance for instance in mine.stale if instance.ready),
        key=lambda instance: first.get(instance.fingerprint, none),
    )
    surplus = victims(mine.fresh)[: max(0, len(mine.fresh) - mine.wanted_count)]
    idle = _idle(mine, at)
    above = max(0, len(old) - mine.wanted_count)
    room = _room(mine, mine.target.max_unavailable if old else 0)
    fewer = ([instance for instance in surplus if instance.ready] + old[:above])[:room]
    newer = old[above : _replaced(mine, at, len(old), idle=len(idle))][: room - len(fewer)]
    return _Due(idle, surplus, fewer, newer)


def retire(mine: RoleView, other: RoleView, *, fleet_known: bool) -> Retire:
    """Who of one role goes now, as far as this role alone decides."""
    at = stage(mine, other, fleet_known=fleet_known)
    due = _due(mine, other, at)
    remove = [(instance, "of an old revision and not serving") for instance in due.idle]
    remove += [(instance, "more than asked for, and not serving") for instance in due.surplus if not instance.ready]
    drain: list[tuple[Instance, str]] = []
    held: list[tuple[Instance, str]] = []
    if not fleet_known:
        return Retire(tuple(remove), (), tuple((instance, UNKNOWN_LOAD) for instance in (*due.fewer, *due.newer)))
    if due.fewer and other.coming:
        held += [(instance, f"{other.role} has {other.ready} of {other.wanted_count} ready") for instance in due.fewer]
    else:
        drain += [(instance, "more than asked for") for instance in due.fewer]
    go, why = _allowed(mine, other, at, len(due.newer))
    drain += [(instance, "of an old revision, replaced") for instance in due.newer[:go]]
    held += [(instance, why) for instance in due.newer[go:]]
    return Retire(tuple(remove), tuple(drain), tuple(held))


def _room(mine: RoleView, max_unavailable: int) -> int:
    """How many that serve may go before fewer serve than are asked for."""
    return max(0, mine.ready - (mine.wanted_count - max_unavailable))


def _replaced(mine: RoleView, at: Stage, old: int, *, idle: int) -> int:
    """How many of the old ones that serve are replaced by now, those above the wanted count included."""
    above = max(0, old - mine.wanted_count)
    if at is Stage.HELD:
        return above
    if at is Stage.PROBING:
        return 1 if mine.full and not above and not idle else above
    return max(above, old - max(0, mine.wanted_count - mine.target.max_unavailable - mine.fresh_ready))


def _allowed(mine: RoleView, other: RoleView, at: Stage, count: int) -> tuple[int, str]:
    """How many of ``count`` old ones may be drained for new ones, as far as the other role goes; and why not more."""
    if at is Stage.BLIND and other.target.max_surge > 0 and other.stale and other.wanted_count and not other.fresh_ready:
        return 0, f"no {other.role} instance of the new revision is ready"
    if at is Stage.PROBING and mine.ready <= 1 and not balance.may_go_blank(mine, other):
        return 0, f"the new revision is tried as {other.role} first"
    if at is not Stage.DIFFERENT:
        return count, ""
    if not balance.can_pair(mine, other) and not (other.target.max_surge > 0 and other.full):
        return 0, f"no {other.role} instance with the KV of the new revision is ready"
    follow = len(_due(other, mine, stage(other, mine, fleet_known=True)).newer)
    return min(count, balance.lead(mine, other, follow)), f"{other.role} is behind with the new revision"


def _idle(mine: RoleView, at: Stage) -> list[Instance]:
    """The old ones that serve nothing and go at once.

    They are kept, up to the wanted count, while the new revision may be worse: it is only being tried, it crashes, it can
    not pair; or none of it serves yet and an old one is likely to come back by itself.
    """
    idle = victims(instance for instance in mine.stale if not instance.ready)
    serving = len(mine.stale) - len(idle)
    doubt = is_canary_stage(at) or mine.fresh_fails
    worth = [i for i in idle if doubt or (not mine.fresh_ready and not i.units and i.serves_soon)]
    keep = max(0, mine.wanted_count - serving)
    if mine.full:
        keep = min(keep, max(0, len(worth) - 1))
    stay = {instance.name for instance in worth[max(0, len(worth) - keep) :]}
    return [instance for instance in idle if instance.name not in stay]


def reason_to_wait(mine: RoleView, other: RoleView, at: Stage) -> str:
    """Why no more than a canary is made of the wanted revision."""
    if at is Stage.HELD:
        return clash(mine, other)
    names = ", ".join(instance.name for instance in mine.fresh) or "an instance"
    return f"the new revision is tried on {names} first"
