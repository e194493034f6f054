"""Leases are values of a clock that is given."""

from __future__ import annotations

from xpyd_sidecar.kv.leases import Lease, ListeningClock


def test_a_lease_is_over_at_its_end() -> None:
    lease = Lease.start(100.0, 2.5)
    assert not lease.is_over(102.4)
    assert lease.is_over(102.5)
    assert (lease.seconds_left(101.0), lease.seconds_left(200.0)) == (1.5, 0.0)


def test_shortening_never_lengthens() -> None:
    lease = Lease.start(0.0, 10.0)
    assert lease.shorten(2.0, 1.0) == Lease(3.0)
    assert lease.shorten(9.5, 1.0) == lease


def test_a_side_listens_no_longer_than_it_looks() -> None:
    listened = ListeningClock(20.0)
    assert [listened.advance(now) for now in (100.0, 101.0, 106.0, 1000.0, 1001.0)] == [0.0, 1.0, 6.0, 11.0, 12.0]


def test_a_clock_that_goes_back_takes_nothing_away() -> None:
    listened = ListeningClock(20.0)
    assert [listened.advance(now) for now in (100.0, 102.0, 50.0, 51.0)] == [0.0, 2.0, 2.0, 3.0]
