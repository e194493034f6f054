"""How many instances of each role are wanted: what the document or the pools say, within the limits.

A pool's value counts where its role has ``scaling``, held within ``min`` and ``max``. Then ``spec.limits`` hold, whoever
asks, in this order:

    maxInstances    the role that is further above its least gives one, again and again; decode among equals
    minRatio        decode comes down to what the prefill instances suffice for
    maxRatio        prefill comes down to what the decode instances suffice for

Nothing goes below its least (``min``, or ``replicas``, and one decode). Only a service that may have no instances at all
(``ServiceSpec.to_zero``) has none of decode, and then none of prefill: that serves nobody alone. Where the least of one
role needs more of the other, that other one is raised, within its own bounds and ``maxInstances``. What cannot be kept even
so is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from xpyd_operator.api.operation import Limits, Ratio, Rollout
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

    def of(self, role: Role) -> int:
        """Wanted instances of one role."""
        return self.prefill if role is Role.PREFILL else self.decode


Pair = tuple[int, int]
"""Prefill and decode."""
_PREFILL: Final = 0
_DECODE: Final = 1


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
    limits = service.spec.limits
    floors = (prefill_spec.least, max(1, decode_spec.least))
    tops = (prefill_spec.most, decode_spec.most)
    asked = (max(prefill, floors[0]), max(decode, floors[1]))
    if limits.max_instances is not None:
        asked, before = _total(limits.max_instances, asked, floors), asked
        said.change(f"maxInstances {limits.max_instances}", before, asked)
    for name, ratio, short in _ratios(limits):
        asked, before = _held(limits.max_instances, asked, floors, tops[short], (ratio, short)), asked
        said.change(f"{name} {ratio.prefill}:{ratio.decode}", before, asked)
    for words in _broken(limits, *asked):
        said.words.append((words, True, True))
    return said.counts(*asked)


def target(wanted: int, revision: Revision, rollout: Rollout, parts: int = 1) -> RoleTarget:
    """What is wanted of one role, with the bounds of a rollout as numbers."""
    return RoleTarget(wanted, revision, rollout.surge(wanted), rollout.unavailable(wanted), parts)


def _asked(role: Role, spec: RoleSpec, pool: int | None, said: _Said) -> int:
    """The count that the document or its pool asks for, within ``scaling``."""
    if spec.scaling is None or pool is None:
        return spec.least
    held = min(spec.most, max(spec.least, pool))
    if held != pool:
        bound = f"max {spec.most}" if held < pool else f"min {spec.least}"
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


def _ratios(limits: Limits) -> list[tuple[str, Ratio, int]]:
    """The ratios that are set: name, ratio, and which role may not be too few against the other one."""
    both = (("minRatio", limits.min_ratio, _PREFILL), ("maxRatio", limits.max_ratio, _DECODE))
    return [(name, ratio, short) for name, ratio, short in both if ratio is not None]


def _kept(asked: Pair, ratio: Ratio, short: int) -> bool:
    """``asked[short] / asked[long] >= share / against``, in whole numbers."""
    parts = (ratio.prefill, ratio.decode)
    return asked[short] * parts[1 - short] >= asked[1 - short] * parts[short]


def _held(total: int | None, asked: Pair, floors: Pair, top: int, held: tuple[Ratio, int]) -> Pair:
    """The role ``short`` rises (to ``top`` at most) as far as the least of the other needs it; the other one comes down."""
    ratio, short = held
    if _kept(asked, ratio, short):
        return asked
    long = 1 - short
    share, against = (ratio.prefill, ratio.decode)[short], (ratio.prefill, ratio.decode)[long]
    few, many = asked[short], asked[long]
    raised = max(few, min(top, -(-floors[long] * share // against)))
    if total is not None:
        raised = max(few, min(raised, total - floors[long]))
        many = max(floors[long], min(many, total - raised))
    many = max(floors[long], min(many, raised * against // share))
    return (raised, many) if short == _PREFILL else (many, raised)


def _broken(limits: Limits, prefill: int, decode: int) -> list[str]:
    """The limits that these counts still break, since nothing may go below its least or above its most."""
    names = [] if limits.max_instances is None or prefill + decode <= limits.max_instances else ["maxInstances"]
    names += [name for name, ratio, short in _ratios(limits) if not _kept((prefill, decode), ratio, short)]
    why = f"cannot be kept with {_shape(prefill, decode)}: the bounds of the roles leave no room"
    return [f"limits.{name} {why}" for name in names]


def _shape(prefill: int, decode: int) -> str:
    return f"{prefill}P{decode}D"
