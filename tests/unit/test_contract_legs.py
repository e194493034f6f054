"""What the router tells the connectors, field by field."""

from __future__ import annotations

import msgspec
import pytest

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, Role, TransferId
from xpyd_sidecar.contract.legs import Leg, Peer

D = Peer(InstanceName("d"), Incarnation("d" * 32), HostPort("10.0.0.1:5"))


def leg(role: Role = Role.DECODE, limit_s: float | None = None) -> Leg:
    return Leg(1, role, TransferId("a" * 32), Attempt(2), 60.0, D if role is Role.PREFILL else None, limit_s)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("limit_s", [None, 599.5])
def test_a_leg_comes_back_as_it_was(role: Role, limit_s: float | None) -> None:
    assert legs.decode(legs.encode(leg(role, limit_s))) == leg(role, limit_s)


def test_a_leg_may_leave_it_to_the_engine_how_long_the_attempt_takes() -> None:
    assert "limit_s" not in legs.encode(leg())
    assert legs.decode(legs.encode(leg())).limit_s is None


@pytest.mark.parametrize(("change", "words"), [
    ({"limit_s": 0}, "limit_s: must be above 0"), ({"limit_s": -1}, "limit_s"), ({"limit_s": float("nan")}, "limit_s"),
    ({"limit_s": "9"}, "limit_s"), ({"xpyd": 2}, "version 2 is not 1"), ({"transfer": "b"}, "32 hex digits"),
    ({"remaining_s": 0}, "remaining_s"), ({"attempt": 0}, "attempt"), ({"attempt": 1 << 32}, "attempt"),
    ({"peer": msgspec.structs.asdict(D)}, "not allowed")])
def test_what_is_wrong_is_named(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        legs.decode(legs.encode(leg()) | change)
