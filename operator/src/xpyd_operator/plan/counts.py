"""How many instances of each role are wanted: what the document or the pools say, within the limits.

A pool's value counts where its role has ``scaling``, held within ``min`` and ``max``. Then ``limits.maxInstances`` holds,
whoever asks: the role that is further above its least gives one, again and again; decode among equals.

Nothing goes below its least (``min``, or ``replicas``, and one decode). Only a service that may have no instances at all
(``ServiceSpec.to_zero``) has none of decode, and then none of prefill: that serves nobody alone. What cannot be kept is
said.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from xpyd_operator.api.operation import Rollout
from xpyd_operator.api.roles import RoleSpec
from xpyd_operator.api.service import DisaggService
from xpyd_operator.plan.desired import Revision, RoleTarget
from xpyd_sidecar.contract.ids import Role


class Counts(msgspec.Struct, frozen=True):
    """How many instances of each role are wanted, and which limit holds these counts."""

    prefill: int
    decode: int
    held: str = ""
    """Which limit keeps them from what was asked for, in words; empty where none does."""
    limited: tuple[str, str] = ("", "")
    """The part of it that is about prefill, and about decode."""

    def count_of(self, role: Role) -> int:
        """How many instances of one role are wanted."""
        return self.prefill if role is Role.PREFILL else self.decode


Pair = tuple[int, int]
"""Prefill and decode."""


class _Said:
    """What is said, and of which role."""

    def __init__(self) -> None:
        self.words: list[tuple[str, bool, bool]] = []

    def of(self, role: Role, words: str) -> None:
        """Of one role alone."""
        self.words.append((words, role is Role.PREFILL, role is Role.DECODE))

    def change(self, limit: str, before: Pair, now: Pair) -> None:
        """A limit on both together changed what was asked for; nothing where it did not."""
        if before != now:
            words = f"limits.{limit} makes {_shape(*before)} {_shape(*now)}"
            self.words.append((words, before[0] != now[0], before[1] != now[1]))

    def counts(self, prefill: int, decode: int) -> Counts:
        """With everything that was said."""
        ours, theirs = ("; ".join(each[0] for each in self.words if each[index]) for index in (1, 2))
        return Counts(prefill, decode, "; ".join(each[0] for each in self.words), (ours, theirs))


def counts(service: DisaggService, pools: Mapping[Role, int | None]) -> Counts:
    """What is wanted; ``pools`` has ``spec.replicas`` of each role's pool, None where there is none yet."""
    said = _Said()
    prefill_spec, decode_spec = service.spec.prefill, service.spec.decode
    prefill = _asked(Role.PREFILL, prefill_spec, pools.get(Role.PREFILL), said)
    decode = _asked(Role.DECODE, decode_spec, pools.get(Role.DECODE), said)
    if service.spec.to_zero and decode < 1:
        return said.counts(0, 0)
    most = service.spec.limits.max_instances
    floors = (prefill_spec.min_instances, max(1, decode_spec.min_instances))
    asked = (max(prefill, floors[0]), max(decode, floors[1]))
    if most is not None:
        asked, before = _total(most, asked, floors), asked
        said.change(f"maxInstances {most}", before, asked)
        if sum(asked) > most:
            why = f"cannot be kept with {_shape(*asked)}: the bounds of the roles leave no room"
            said.words.append((f"limits.maxInstances {why}", True, True))
    return said.counts(*asked)


def target(wanted: int, revision: Revision, rollout: Rollout, parts: int = 1) -> RoleTarget:
    """What is wanted of one role, with the bounds of a rollout as numbers."""
    return RoleTarget(wanted, revision, rollout.surge(wanted), rollout.unavailable(wanted), parts)


def _asked(role: Role, spec: RoleSpec, pool: int | None, said: _Said) -> int:
    """The count that the document or its pool asks for, within ``scaling``."""
    if spec.scaling is None or pool is None:
        return spec.min_instances
    held = min(spec.max_instances, max(spec.min_instances, pool))
    if held != pool:
        bound = f"max {spec.max_instances}" if held < pool else f"min {spec.min_instances}"
        said.of(role, f"{role}.scaling.{bound} makes {pool} {held}")
    return held


def _total(most: int, asked: Pair, floors: Pair) -> Pair:
    prefill, decode = asked
    while prefill + decode > most:
        spare = (prefill - floors[0], decode - floors[1])
        if max(spare) <= 0:
            break
        if spare[1] >= spare[0]:
            decode -= 1
        else:
            prefill -= 1
    return prefill, decode


def _shape(prefill: int, decode: int) -> str:
    return f"{prefill}P{decode}D"
