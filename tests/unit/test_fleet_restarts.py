"""Which of those that stand still may be restarted: never two, never none for ever."""

from __future__ import annotations

import math

from beats import beat
from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.contract.ids import HostPort, Incarnation, InstanceName, Role, State
from xpyd_sidecar.contract.liveness import RestartWish
from xpyd_sidecar.router.fleet.member import FleetMember
from xpyd_sidecar.router.fleet.restarts import COMMON_S, holds, is_stalled

NOW = 10_000.0


def member(name: str, restart: RestartWish = RestartWish.NONE, *, state: State = State.READY, role: Role = Role.DECODE,
           since: float = NOW - 1.0) -> FleetMember:
    return FleetMember(InstanceName(name), role=role, state=state, incarnation=Incarnation(f"i-{name}"), restart=restart,
                       http=(HostPort(f"{name}:1"),), still_since=since if restart else math.inf)


def may(members: list[FleetMember], now: float = NOW) -> list[str]:
    return [one.name for one in members if one.restart and not holds(now, one, members)]


def test_one_among_others_may() -> None:
    assert may([member("d0"), member("d1", RestartWish.WANTED)]) == ["d1"]
    assert may([member("d0"), member("d1"), member("d2", RestartWish.WANTED)]) == ["d2"]


def test_an_only_one_may() -> None:
    others = [member(f"p{index}", role=Role.PREFILL) for index in range(3)]
    assert may([*others, member("d0", RestartWish.WANTED)]) == ["d0"]


def test_of_two_one_may_and_whoever_has_begun_goes_on() -> None:
    serving = [member(f"e{index}") for index in range(4)]
    assert may([*serving, member("d0", RestartWish.WANTED), member("d1", RestartWish.WANTED)]) == ["d0"]
    assert may([*serving, member("d0", RestartWish.WANTED), member("d1", RestartWish.BEGUN)]) == ["d1"]
    assert may([*serving, member("d0", RestartWish.BEGUN), member("d1", RestartWish.BEGUN)]) == ["d0"]
    gone = member("d1", RestartWish.BEGUN, state=State.STARTING)
    assert may([*serving, member("d0", RestartWish.BEGUN), gone]) == ["d1"], "it does not serve: another one must wait"


def test_none_may_while_most_of_the_role_stands_still_for_a_common_cause() -> None:
    both = [member("d0", RestartWish.WANTED), member("d1", RestartWish.WANTED)]
    assert may(both) == []
    assert may([*both, member("d2")]) == []
    assert may([*both, member("d2"), member("d3")]) == ["d0"]
    assert may([*both, *(member(f"p{index}", role=Role.PREFILL) for index in range(4))]) == [], "nor the other role"
    starting = [member(f"d{index}", state=State.STARTING) for index in range(2, 6)]
    assert may([*both, *starting]) == [], "who starts does not count"


def test_after_a_while_one_at_a_time_may_all_the_same() -> None:
    both = [member("d0", RestartWish.WANTED), member("d1", RestartWish.WANTED)]
    assert may(both, NOW + COMMON_S - 2.0) == []
    assert may(both, NOW + COMMON_S) == ["d0"]


STATES = st.tuples(st.sampled_from([RestartWish.NONE, RestartWish.WANTED, RestartWish.BEGUN]),
                   st.sampled_from([State.READY, State.STARTING, State.DRAINING]), st.sampled_from(list(Role)),
                   st.floats(0.0, 2 * COMMON_S))


@given(st.lists(STATES, max_size=12), st.randoms())
def test_of_any_fleet_at_most_one_of_a_role_may_and_in_time_one_does(
        made: list[tuple[RestartWish, State, Role, float]], random: object) -> None:
    members = [member(f"e{index}", restart, state=state, role=role, since=NOW - since)
               for index, (restart, state, role, since) in enumerate(made)]
    shuffled = members.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert sorted(may(members)) == sorted(may(shuffled)), "every router decides alike"
    for role in Role:
        peers = [one for one in members if one.role is role]
        assert len(may(peers)) <= 1
        if any(one.restart for one in peers):
            assert len(may(peers, NOW + COMMON_S)) == 1, "no role waits for ever"
        serving = [one for one in peers if one.state is State.READY and not one.restart]
        new = [one for one in peers if one.restart and NOW - one.still_since < COMMON_S]
        if len(new) == sum(bool(one.restart) for one in peers) > max(1, len(serving)):
            assert may(peers) == [], "most of it stands still"


def test_since_when_it_stands_still_is_counted_from_its_first_beat_that_says_so() -> None:
    one = member("d0")
    for now, restart in ((1.0, RestartWish.NONE), (2.0, RestartWish.WANTED), (3.0, RestartWish.BEGUN)):
        one.take_beat(now, beat("d0", restart=restart))
    assert one.still_since == 2.0
    one.take_beat(4.0, beat("d0"))
    assert one.still_since == math.inf


def test_a_router_says_that_it_waits_while_it_does_and_while_a_canary_is_not_answered() -> None:
    one = member("d0")
    assert not is_stalled(one)
    one.stalled_s = 21.0
    assert is_stalled(one)
    one.stalled_s, one.ejected, one.hung = 0.0, "it answers nothing", True
    assert is_stalled(one)
    one.hung = False
    assert not is_stalled(one), "it is ejected for failures"
    one.ejected, one.hung = "", True
    assert not is_stalled(one), "it was picked again"
