"""Leases are values of a clock that is given."""

from __future__ import annotations

from xpyd_sidecar.kv.leases import Lease


def test_a_lease_is_over_at_its_end() -> None:
    lease = Lease.of(100.0, 2.5)
    assert not lease.over(102.4)
    assert lease.over(102.5)
    assert (lease.left(101.0), lease.left(200.0)) == (1.5, 0.0)


def test_shortening_never_lengthens() -> None:
    lease = Lease.of(0.0, 10.0)
    assert lease.shortened(2.0, 1.0) == Lease(3.0)
    assert lease.shortened(9.5, 1.0) == lease
