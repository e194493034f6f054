import pytest

from xpyd_sidecar.dp.frames import VERSION, Grant
from xpyd_sidecar.dp.look_ahead import LookAhead
from xpyd_sidecar.dp.rank import Dummy, Event, Forward, GrantReceived, Idle, LeaveAsked, PauseAsked, Rank
from xpyd_sidecar.errors import OurFault


def after(rank: Rank, *events: Event) -> Rank:
    for event in events:
        rank, _ = rank.handle(event)
    return rank


def grant(step: int, frozen: int = 0, at: int = 0, epoch: int = 1, *, leave: bool = False) -> GrantReceived:
    return GrantReceived(Grant(VERSION, epoch, step, frozen, at, leave))


def test_a_forward_beyond_what_is_granted_is_announced_once() -> None:
    rank, want = Rank(1, 0, LookAhead(2)).handle(Forward(10))
    assert want is not None
    assert (want.local, want.step) == (1, 3)
    rank, want = rank.handle(Forward(9))
    assert want is None
    rank, want = rank.handle(Forward(8))
    assert want is None
    rank, want = rank.handle(Forward(7))
    assert want is not None
    assert (rank.local, rank.granted, rank.asked) == (4, 6, 6)


def test_a_request_of_one_token_asks_for_nothing_more() -> None:
    rank = after(Rank(1, 0), Forward(1))
    assert (rank.local, rank.granted, rank.is_behind) == (1, 1, False)


def test_a_forward_in_anothers_lease_is_not_announced() -> None:
    rank, want = after(Rank(1, 0), grant(2)).handle(Forward(1))
    assert want is None
    assert (rank.local, rank.granted, rank.asked) == (1, 2, 0)


def test_a_rank_that_is_behind_runs_dummies_up_to_the_grant() -> None:
    rank = after(Rank(1, 1), grant(2))
    assert rank.is_behind
    assert not after(rank, Dummy(), Dummy()).is_behind


def test_a_dummy_that_nobody_waits_for_is_a_fault() -> None:
    with pytest.raises(OurFault, match="granted 0"):
        Rank(1, 1).handle(Dummy())


def test_idle_while_behind_is_a_fault() -> None:
    with pytest.raises(OurFault, match="granted 2"):
        after(Rank(1, 1), grant(2)).handle(Idle())


def test_late_and_foreign_frames_change_nothing() -> None:
    rank = after(Rank(1, 1), grant(5))
    assert after(rank, grant(3)) == rank
    assert after(rank, grant(9, 3, 9, epoch=2)) == rank


def test_a_pause_is_voted_for_once_and_holds_at_the_agreed_step() -> None:
    rank = after(Rank(1, 1), PauseAsked())
    assert rank.pausing
    rank, want = rank.handle(Idle())
    assert want is not None
    assert (want.vote, want.step) == (1, 0)
    assert rank.handle(Idle())[1] is None
    rank = after(rank, grant(2, frozen=1, at=2))
    assert rank.pausing
    assert not after(rank, Dummy(), Dummy()).pausing


def test_a_second_pause_needs_a_second_vote() -> None:
    rank = after(Rank(1, 1), PauseAsked(), Idle(), grant(0, frozen=1), PauseAsked())
    assert rank.pausing
    rank, want = rank.handle(Idle())
    assert want is not None
    assert want.vote == 2


def test_leaving_is_said_once_and_ends_when_all_leave() -> None:
    rank, want = Rank(1, 1).handle(LeaveAsked())
    assert want is not None
    assert want.leaving
    assert rank.handle(LeaveAsked())[1] is None
    assert not rank.leave
    assert after(rank, grant(0, leave=True)).leave


def test_the_ramp_counts_from_when_the_rank_was_idle() -> None:
    rank = after(Rank(1, 0), *[Forward(1)] * 40, Idle())
    _, want = rank.handle(Forward(100))
    assert want is not None
    assert want.step - want.local == 1
