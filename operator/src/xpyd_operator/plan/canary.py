"""What a role's new revision turns out to be: nobody knows whose KV it can exchange before one of it runs.

A role rolls while something of another revision serves in it. One instance of the wanted revision, the canary, shows its
fingerprint, and that decides:

    FREE        nothing old serves: nothing can be lost
    BLIND       nobody tells fingerprints, so a new revision counts as other KV (``rollout`` says what follows)
    PROBING     the canary is not ready, or its fingerprint is not known: nothing old that serves is given up for more
    SAME        it computes the KV that the old ones do: one by one, whatever the other role does
    DIFFERENT   it computes other KV: it comes up beside the old, with prefill and decode in balance
    HELD        it computes other KV than the other role's wanted revision: it could never pair, nothing old goes
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from xpyd_operator.plan.desired import RoleTarget
from xpyd_operator.plan.observed import Instance, Phase
from xpyd_sidecar.contract.ids import Fingerprint, Role


class Stage(StrEnum):
    """How far a role has come with its wanted revision; see the module."""

    FREE = "free"
    BLIND = "blind"
    PROBING = "probing"
    SAME = "same"
    DIFFERENT = "different"
    HELD = "held"


class RoleView(msgspec.Struct, frozen=True):
    """The instances of one role beside what is wanted of it. Lost ones are not among them."""

    role: Role
    target: RoleTarget
    everything: tuple[Instance, ...]
    fresh: tuple[Instance, ...]
    """Of the wanted revision, not leaving."""
    stale: tuple[Instance, ...]
    """Of another revision, not leaving."""
    serving: tuple[Instance, ...]
    """Those of both that serve, the fresh ones first."""

    @property
    def wanted_count(self) -> int:
        """How many instances of the role are asked for."""
        return self.target.replicas

    @property
    def ready(self) -> int:
        """Instances that serve."""
        return len(self.serving)

    @property
    def fresh_ready(self) -> int:
        """Instances of the wanted revision that serve."""
        return sum(instance.ready for instance in self.fresh)

    @property
    def full(self) -> bool:
        """None of the wanted revision is there, and no place for one."""
        return not self.fresh and len(self.stale) >= self.wanted_count + self.target.max_surge

    @property
    def fresh_fails(self) -> bool:
        """The wanted revision crashes and none of it serves: what is old is worth keeping."""
        return bool(self.fresh) and not self.fresh_ready and any(instance.crashes >= 1 for instance in self.fresh)

    @property
    def coming(self) -> bool:
        """Fewer serve than asked for, and that will change: not all that is missing is in trouble that lasts."""
        late = [instance for instance in (*self.fresh, *self.stale) if not instance.ready]
        stuck = sum(1 for instance in late if not instance.serves_soon)
        return self.ready + stuck < self.wanted_count and (stuck == 0 or len(late) > stuck)


def view(role: Role, target: RoleTarget, instances: tuple[Instance, ...]) -> RoleView:
    """Sort the instances of one role out of all."""
    mine = tuple(instance for instance in instances if instance.role is role and instance.phase is not Phase.LOST)
    staying = [instance for instance in mine if not instance.leaving]
    fresh = tuple(instance for instance in staying if instance.revision == target.revision)
    stale = tuple(instance for instance in staying if instance.revision != target.revision)
    serving = tuple(instance for instance in (*fresh, *stale) if instance.ready)
    return RoleView(role=role, target=target, everything=mine, fresh=fresh, stale=stale, serving=serving)


def prints(instances: Iterable[Instance]) -> frozenset[Fingerprint]:
    """The known fingerprints of those that serve."""
    return frozenset(instance.fingerprint for instance in instances if instance.ready and instance.fingerprint)


def stage(mine: RoleView, other: RoleView, *, fleet_known: bool) -> Stage:
    """How far a role has come. One revision may show several fingerprints (where KV depends on the processor)."""
    old = [instance for instance in mine.stale if instance.ready]
    if not old:
        return Stage.FREE
    if fleet_known and not prints((*mine.serving, *other.serving)):
        return Stage.BLIND
    new = prints(mine.fresh)
    if not new:
        return Stage.PROBING
    if new & prints(old):
        return Stage.SAME
    theirs = prints(other.fresh)
    if other.wanted_count and theirs and not theirs & new:
        return Stage.HELD
    return Stage.DIFFERENT


def is_canary_stage(at: Stage) -> bool:
    """Whether at this stage one instance of the wanted revision is all that is made for now."""
    return at in (Stage.PROBING, Stage.HELD)


def clash(mine: RoleView, other: RoleView) -> str:
    """Why a role is HELD, naming both fingerprints."""
    return (
        f"the new {mine.role} revision computes KV {_join(prints(mine.fresh))}, "
        f"{other.role} computes {_join(prints(other.fresh))}: they could not pair"
    )


def _join(found: frozenset[Fingerprint]) -> str:
    return ", ".join(sorted(found))
