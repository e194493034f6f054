import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.dp.coordinator import Coordinator, join
from xpyd_sidecar.dp.frames import VERSION, Want
from xpyd_sidecar.errors import ProtocolError


def want(rank: int, step: int, vote: int = 0, *, leaving: bool = False, epoch: int = 1) -> Want:
    return Want(VERSION, epoch, rank, 0, step, vote, leaving)


def heard(*wants: Want) -> Coordinator:
    state = Coordinator.initial(1, 2)
    for one in wants:
        state = state.receive(one)
    return state


def test_the_step_is_the_largest_that_anybody_asked_for() -> None:
    assert heard(want(0, 5), want(1, 3)).grant.step == 5


def test_a_pause_is_frozen_at_the_step_of_its_last_vote_and_stays_there() -> None:
    state = heard(want(0, 5, 1))
    assert (state.frozen, state.at) == (0, 0)
    state = state.receive(want(1, 6, 1))
    assert (state.grant.frozen, state.grant.at) == (1, 6)
    state = state.receive(want(0, 9, 1))
    assert (state.grant.step, state.grant.at) == (9, 6)


def test_all_leave_or_none() -> None:
    assert not heard(want(0, 1, leaving=True)).grant.leave
    assert heard(want(0, 1, leaving=True), want(1, 1, leaving=True)).grant.leave


def test_frames_of_another_epoch_are_ignored() -> None:
    assert heard(want(0, 9, 3, epoch=2)) == heard()


def test_an_unknown_rank_is_refused() -> None:
    with pytest.raises(ProtocolError, match="rank 2: there are 2 ranks"):
        heard(want(2, 1))


wants = st.builds(lambda rank, step, vote, leaving: want(rank, step, vote, leaving=leaving), st.integers(0, 1),
                  st.integers(0, 5), st.integers(0, 3), st.booleans())


@given(st.lists(wants, max_size=12), st.data())
def test_lost_order_and_repetition_do_not_matter_to_step_votes_and_leaving(frames: list[Want], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(frames + frames[:3]))
    one, other = heard(*frames), heard(*shuffled)
    assert (one.step, one.votes, one.leaving, one.frozen) == (other.step, other.votes, other.leaving, other.frozen)


def test_lines_in_shared_memory_give_the_same_join() -> None:
    grant = join(1, votes=(1, 2), steps=(4, 7), leaving=(True, False))
    assert (grant.step, grant.frozen, grant.at, grant.leave) == (7, 1, 7, False)
