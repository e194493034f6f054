"""Counts as the document and the pools have them, until the planner holds them within the limits itself."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from xpyd_operator.api.service import DisaggService
from xpyd_operator.plan.round import Round
from xpyd_sidecar.contract.ids import Role


class Counts(msgspec.Struct, frozen=True):
    """Wanted instances."""

    prefill: int
    decode: int
    held: str = ""


class News(msgspec.Struct, frozen=True):
    """One thing that happened."""

    reason: str
    message: str
    warning: bool = False


def counts(service: DisaggService, pools: Mapping[Role, int]) -> Counts:
    """The pool's count within min and max where the role scales, else the document's."""
    def one(role: Role) -> int:
        spec = service.spec.role(role)
        return spec.least if spec.scaling is None else min(spec.most, max(spec.least, pools.get(role, spec.least)))

    return Counts(one(Role.PREFILL), one(Role.DECODE))


def news(before: Round | None, after: Round) -> tuple[News, ...]:
    """Nothing."""
    return ()
