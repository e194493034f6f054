"""How many instances of each role are wanted: what the document or the pools say, within the limits.

A pool's value counts where its role has ``scaling``, held within ``min`` and ``max``. Then ``spec.limits`` hold, whoever
asks, in this order:

    maxInstances    the role that is further above its least gives one, again and again; decode among equals
    minRatio        decode comes down to what the prefill instances suffice for
    maxRatio        prefill comes down to what the decode instances suffice for

Nothing goes below its least (``min``, or ``replicas``, and one decode). Where the least of one role needs more of the
other, that other one is raised, within its own bounds and ``maxInstances``. What cannot be kept even so is said.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from xpyd_operator.api.operation import Limits
from xpyd_operator.api.roles import RoleSpec
from xpyd_operator.api.service import DisaggService
from xpyd_sidecar.contract.ids import Role


class Counts(msgspec.Struct, frozen=True):
    """Wanted instances."""

    prefill: int
    decode: int
    held: str = ""
    """Which limit keeps them from what was asked for, in words; empty where none does."""

    def of(self, role: Role) -> int:
        """Wanted instances of one role."""
        return self.prefill if role is Role.PREFILL else self.decode


def counts(service: DisaggService, pools: Mapping[Role, int | None]) -> Counts:
    """What is wanted; ``pools`` has ``spec.replicas`` of each role's pool, None where there is none yet."""
    said: list[str] = []
    prefill_spec, decode_spec = service.spec.prefill, service.spec.decode
    prefill = _asked(Role.PREFILL, prefill_spec, pools.get(Role.PREFILL), said)
    decode = _asked(Role.DECODE, decode_spec, pools.get(Role.DECODE), said)
    limits = service.spec.limits
    floors = (prefill_spec.least, max(1, decode_spec.least))
    prefill, decode = max(prefill, floors[0]), max(decode, floors[1])
    total = _total(limits, (prefill, decode), floors)
    if total != (prefill, decode):
        said.append(f"limits.maxInstances {limits.max_instances} makes {_shape(prefill, decode)} {_shape(*total)}")
    prefill, decode = _least_prefill(limits, total, floors, prefill_spec.most, said)
    prefill, decode = _most_prefill(limits, (prefill, decode), floors, decode_spec.most, said)
    said += _broken(limits, prefill, decode)
    return Counts(prefill, decode, "; ".join(said))


def _asked(role: Role, spec: RoleSpec, pool: int | None, said: list[str]) -> int:
    """The count that the document or its pool asks for, within ``scaling``."""
    if spec.scaling is None or pool is None:
        return spec.least
    held = min(spec.most, max(spec.least, pool))
    if held != pool:
        bound = f"max {spec.most}" if held < pool else f"min {spec.least}"
        said.append(f"{role}.scaling.{bound} makes {pool} {held}")
    return held


def _total(limits: Limits, asked: tuple[int, int], floors: tuple[int, int]) -> tuple[int, int]:
    prefill, decode = asked
    most = limits.max_instances
    while most is not None and prefill + decode > most:
        spare = (prefill - floors[0], decode - floors[1])
        if max(spare) <= 0:
            break
        if spare[1] >= spare[0]:
            decode -= 1
        else:
            prefill -= 1
    return prefill, decode


def _least_prefill(
    limits: Limits, asked: tuple[int, int], floors: tuple[int, int], most: int, said: list[str]
) -> tuple[int, int]:
    """``prefill / decode >= p / d``, in whole numbers: ``prefill * d >= decode * p``."""
    prefill, decode = asked
    low = limits.min_ratio
    if low is None or prefill * low.decode >= decode * low.prefill:
        return asked
    raised = max(prefill, min(most, -(-floors[1] * low.prefill // low.decode)))
    if limits.max_instances is not None:
        raised = max(prefill, min(raised, limits.max_instances - floors[1]))
        decode = max(floors[1], min(decode, limits.max_instances - raised))
    decode = max(floors[1], min(decode, raised * low.decode // low.prefill))
    if (raised, decode) != asked:
        said.append(f"limits.minRatio {low.prefill}:{low.decode} makes {_shape(*asked)} {_shape(raised, decode)}")
    return raised, decode


def _most_prefill(
    limits: Limits, asked: tuple[int, int], floors: tuple[int, int], most: int, said: list[str]
) -> tuple[int, int]:
    """``prefill / decode <= p / d``, in whole numbers: ``prefill * d <= decode * p``."""
    prefill, decode = asked
    high = limits.max_ratio
    if high is None or prefill * high.decode <= decode * high.prefill:
        return asked
    raised = max(decode, min(most, -(-floors[0] * high.decode // high.prefill)))
    if limits.max_instances is not None:
        raised = max(decode, min(raised, limits.max_instances - floors[0]))
        prefill = max(floors[0], min(prefill, limits.max_instances - raised))
    prefill = max(floors[0], min(prefill, raised * high.prefill // high.decode))
    if (prefill, raised) != asked:
        said.append(f"limits.maxRatio {high.prefill}:{high.decode} makes {_shape(*asked)} {_shape(prefill, raised)}")
    return prefill, raised


def _broken(limits: Limits, prefill: int, decode: int) -> list[str]:
    """The limits that these counts still break, since nothing may go below its least or above its most."""
    low, high, most = limits.min_ratio, limits.max_ratio, limits.max_instances
    names = []
    if most is not None and prefill + decode > most:
        names.append("maxInstances")
    if low is not None and prefill * low.decode < decode * low.prefill:
        names.append("minRatio")
    if high is not None and prefill * high.decode > decode * high.prefill:
        names.append("maxRatio")
    why = f"cannot be kept with {_shape(prefill, decode)}: the bounds of the roles leave no room"
    return [f"limits.{name} {why}" for name in names]


def _shape(prefill: int, decode: int) -> str:
    return f"{prefill}P{decode}D"
