"""The election: who may work when, on clocks that nobody compares."""

from __future__ import annotations

import copy
import datetime as dt
import random
from typing import Any

import pytest

from xpyd_operator.kube.election.leader import Election, LeaseLost, LeaseWait, Times, Write

WALL = dt.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=dt.UTC)


def candidate(identity: str = "a", **times: Any) -> Election:
    return Election("ns", "lock", identity, Times(**times))


def stored(step: Write | LeaseWait | LeaseLost, version: int = 1) -> dict[str, Any]:
    """What the API server answers to a write."""
    assert isinstance(step, Write)
    body = copy.deepcopy(step.body)
    body["metadata"]["resourceVersion"] = str(version)
    return body


def led(identity: str, now: float) -> tuple[Election, dict[str, Any]]:
    """A candidate that has just become the leader, and its Lease."""
    election = candidate(identity)
    lease = stored(election.on_lease(None, now, WALL))
    election.on_written(lease, now)
    return election, lease


def test_without_a_lease_the_first_makes_one() -> None:
    election = candidate()
    step = election.on_lease(None, 100.0, WALL)
    assert isinstance(step, Write)
    assert step.body == {
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"namespace": "ns", "name": "lock"},
        "spec": {"holderIdentity": "a", "leaseDurationSeconds": 10, "renewTime": "2026-01-02T03:04:05.678901Z",
                 "acquireTime": "2026-01-02T03:04:05.678901Z", "leaseTransitions": 0}}
    assert not election.leading
    election.on_written(stored(step), 100.0)
    assert election.leading


def test_a_follower_waits_for_the_holders_own_duration_counted_from_the_last_change() -> None:
    _, lease = led("a", 0.0)
    lease["spec"]["leaseDurationSeconds"] = 30
    follower = candidate("b")
    assert follower.on_lease(lease, 1000.0, WALL) == LeaseWait(2.0, "a")
    assert follower.on_lease(lease, 1029.5, WALL) == LeaseWait(0.5, "a")
    lease["spec"]["renewTime"] = "2026-01-02T03:04:35.000000Z"
    assert follower.on_lease(lease, 1029.9, WALL) == LeaseWait(2.0, "a")
    assert isinstance(follower.on_lease(lease, 1059.9, WALL), Write)


def test_taking_over_counts_a_transition_and_keeps_what_others_put_there() -> None:
    _, lease = led("a", 0.0)
    lease["metadata"]["labels"] = {"team": "x"}
    lease["spec"]["strategy"] = "OldestEmulationVersion"
    follower = candidate("b")
    follower.on_lease(lease, 5.0, WALL)
    taken = stored(follower.on_lease(lease, 15.0, WALL))
    assert taken["spec"]["holderIdentity"] == "b"
    assert taken["spec"]["leaseTransitions"] == 1
    assert taken["spec"]["strategy"] == "OldestEmulationVersion"
    assert taken["metadata"]["labels"] == {"team": "x"}


def test_a_renewal_keeps_the_time_of_taking() -> None:
    election, lease = led("a", 0.0)
    step = election.on_lease(lease, 2.0, WALL + dt.timedelta(seconds=2))
    assert isinstance(step, Write)
    assert step.body["spec"]["acquireTime"] == "2026-01-02T03:04:05.678901Z"
    assert step.body["spec"]["renewTime"] == "2026-01-02T03:04:07.678901Z"
    assert step.body["metadata"]["resourceVersion"] == "1"


def test_a_leader_that_does_not_renew_stops_before_followers_may_start() -> None:
    election, lease = led("a", 0.0)
    election.on_written(stored(election.on_lease(lease, 2.0, WALL)), 2.0)
    assert election.stop_at() == 9.0
    assert election.overdue(8.99) is None
    assert election.overdue(9.0) == LeaseLost("not renewed for 7 s")
    assert not election.leading
    assert election.overdue(20.0) is None


def test_a_leader_that_sees_another_name_stops() -> None:
    election, lease = led("a", 0.0)
    lease["spec"]["holderIdentity"] = "b"
    assert election.on_lease(lease, 1.0, WALL) == LeaseLost("the Lease is held by b")
    assert not election.leading


def test_a_leader_whose_lease_was_deleted_stops_and_then_takes_part_again() -> None:
    election, _ = led("a", 0.0)
    assert election.on_lease(None, 1.0, WALL) == LeaseLost("the Lease is held by nobody")
    assert isinstance(election.on_lease(None, 1.1, WALL), Write)


def test_a_released_lease_is_taken_at_once() -> None:
    election, lease = led("a", 0.0)
    given = election.release(lease, WALL)
    assert given is not None
    assert given["spec"]["holderIdentity"] == ""
    assert given["metadata"]["resourceVersion"] == "1"
    assert not election.leading
    assert isinstance(candidate("b").on_lease(given, 1.0, WALL), Write)


def test_nobody_releases_what_is_anothers() -> None:
    election, lease = led("a", 0.0)
    lease["spec"]["holderIdentity"] = "b"
    assert election.release(lease, WALL) is None
    assert election.release(None, WALL) is None


def test_a_lease_that_says_nothing_is_free() -> None:
    assert isinstance(candidate().on_lease({"metadata": {"name": "lock", "resourceVersion": "3"}}, 0.0, WALL), Write)
    assert isinstance(candidate().on_lease({"metadata": {}, "spec": {"holderIdentity": None}}, 0.0, WALL), Write)


@pytest.mark.parametrize("times", [{"renew_s": 9.5}, {"retry_s": 7.0}, {"retry_s": 0.0}, {"lease_s": 7}])
def test_times_that_leave_no_room_are_refused(times: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a lease of"):
        Times(**times)


def test_never_two_at_work_whatever_is_lost_and_however_clocks_differ() -> None:
    """Three candidates over a lossy store, each with a clock of its own; after a loss, work ends within the margin."""
    for seed in range(200):
        draw = random.Random(seed)
        offsets = [draw.uniform(-1e6, 1e6) for _ in range(3)]
        elections = [candidate(name) for name in "abc"]
        turns = [draw.uniform(0, 2) for _ in elections]
        lease: dict[str, Any] | None = None
        version = 0
        led_by: set[str] = set()
        now = 0.0
        while now < 120:
            number = min(range(3), key=turns.__getitem__)
            now = turns[number]
            election, local = elections[number], now + offsets[number]
            pause = 2.0
            election.overdue(local)
            if draw.random() < 0.15:  # away, or hanging
                pause = draw.uniform(0, 15)
            elif draw.random() > 0.2:  # the request reached the server
                step = election.on_lease(copy.deepcopy(lease), local, WALL + dt.timedelta(seconds=now))
                if isinstance(step, Write):
                    version += 1
                    lease = stored(step, version)
                    if draw.random() > 0.2:  # and its answer came back
                        election.on_written(copy.deepcopy(lease), local)
                elif isinstance(step, LeaseWait):
                    pause = step.seconds
            turns[number] = now + pause
            working = [each.identity for each, offset in zip(elections, offsets, strict=True)
                       if each.held_since is not None and now + offset < each.stop_at()]
            assert len(working) <= 1, f"seed {seed}: {working} at {now}"
            led_by.update(working)
        assert led_by
