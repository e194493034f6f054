"""What a launcher does next, and when it gives up."""

from __future__ import annotations

import pytest

from xpyd_sidecar.contract.group import GroupRound, MemberState
from xpyd_sidecar.member.__main__ import fill_marks, gives_up, next_step

IDLE = MemberState("l", 0)
RUNS = MemberState("l", 0, 1, "a", running=True)
RAN = MemberState("l", 0, 1, "a")


@pytest.mark.parametrize(("state", "told", "action"), [
    (IDLE, None, ""), (IDLE, GroupRound(0), ""), (IDLE, GroupRound(1, "a"), "begin"),
    (RUNS, GroupRound(1, "a"), ""), (RUNS, GroupRound(2), "end"), (RUNS, GroupRound(2, "b"), "end"), (RUNS, None, "end"),
    (RAN, GroupRound(1, "a"), ""), (RAN, GroupRound(3, "b"), "begin"), (RAN, GroupRound(2), ""),
])
def test_a_life_is_begun_once_and_ended_when_it_is_wanted_no_more(state: MemberState, told: GroupRound | None,
                                                                  action: str) -> None:
    assert next_step(state, told) == action


def test_the_third_failure_within_ten_minutes_is_the_last() -> None:
    assert not gives_up([], 0.0)
    assert not gives_up([0.0, 10.0], 20.0)
    assert gives_up([0.0, 10.0, 600.0], 600.0)
    assert not gives_up([0.0, 10.0, 601.0], 601.0)
    assert gives_up([0.0, 10.0, 601.0, 602.0], 602.0)


def test_what_is_known_only_now_is_filled_in_everywhere() -> None:
    told = GroupRound(1, "ab" * 16, "fd00::1", 31007)
    args = ["--master-addr", "{xpyd:leader}", "--master-port", "{xpyd:port}", '{"engine_id":"{xpyd:life}","x":"{life}"}']
    assert fill_marks(args, told) == ["--master-addr", "fd00::1", "--master-port", "31007",
                                  '{"engine_id":"' + "ab" * 16 + '","x":"{life}"}']
