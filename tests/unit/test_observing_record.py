from __future__ import annotations

from xpyd_sidecar.contract.ids import InstanceName, Role, TransferId
from xpyd_sidecar.router.observing.record import LegRecord, Record


def record() -> Record:
    return Record("r", TransferId("0" * 32), "chat", True, 1.0, 2.0)


def test_it_knows_where_the_last_leg_of_a_role_went() -> None:
    one = record()
    assert one.last_instance(Role.DECODE) == ""
    for name in ("d0", "d1"):
        one.legs.append(LegRecord(Role.DECODE, InstanceName(name), 1, 1.0))
    assert (one.last_instance(Role.DECODE), one.last_instance(Role.PREFILL)) == ("d1", "")


def test_records_share_no_list() -> None:
    one, other = record(), record()
    one.legs.append(LegRecord(Role.DECODE, InstanceName("d0"), 1, 1.0))
    assert not other.legs
