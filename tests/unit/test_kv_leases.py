"""Leases are values of a clock that is given."""

from __future__ import annotations

from xpyd_sidecar.kv.leases import Lease, Listened


def test_a_lease_is_over_at_its_end() -> None:
    lease = Lease.of(100.0, 2.5)
    assert not lease.over(102.4)
    assert lease.over(102.5)
    assert (lease.left(101.0), lease.left(200.0)) == (1.5, 0.0)


def test_shortening_never_lengthens() -> None:
    lease = Lease.of(0.0, 10.0)
    assert lease.shortened(2.0, 1.0) == Lease(3.0)
    assert lease.shortened(9.5, 1.0) == lease


def test_a_side_listens_no_longer_than_it_looks() -> None:
    listened = Listened(20.0)
    assert [listened.look(now) for now in (100.0, 101.0, 106.0, 1000.0, 1001.0)] == [0.0, 1.0, 6.0, 11.0, 12.0]


def test_a_clock_that_goes_back_takes_nothing_away() -> None:
    listened = Listened(20.0)
    assert [listened.look(now) for now in (100.0, 102.0, 50.0, 51.0)] == [0.0, 2.0, 2.0, 3.0]
