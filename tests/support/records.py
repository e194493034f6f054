"""Records of requests made by hand."""

from __future__ import annotations

from typing import Any

from xpyd_sidecar.contract.ids import InstanceName, Role, TransferId
from xpyd_sidecar.router.observing.record import LegRecord, Record


def leg(role: Role, name: str, attempt: int, opened: float, first: float, ended: float,  # noqa: PLR0917
        result: str = "2xx") -> LegRecord:
    """One leg that is over."""
    return LegRecord(role, InstanceName(name), attempt, opened, first, ended, result)


def record(*legs: LegRecord, **fields: Any) -> Record:
    """A chat stream of 11 tokens that came at 10 s, began after half a second and went on for two."""
    made: dict[str, Any] = {"stream": True, "outcome": "ok", "status": 200, "first_at": 10.5, "last_at": 12.5, "tokens": 11,
                            "request_id": "r", "transfer": TransferId("0" * 32), "api": "chat", "arrived": 10.0,
                            "arrived_unix": 1000.0}
    return Record(legs=list(legs), **(made | fields))


P1 = leg(Role.PREFILL, "p1", 1, 10.0, 10.3, 10.3)
D1 = leg(Role.DECODE, "d1", 1, 10.0, 10.5, 12.5)


def pair(prefill: str, decode: str, handover: float = 0.2) -> tuple[LegRecord, LegRecord]:
    """Two legs that worked."""
    return (leg(Role.PREFILL, prefill, 1, 10.0, 10.3, 10.3), leg(Role.DECODE, decode, 1, 10.0, 10.3 + handover, 12.5))
