"""Rounds of a group on a clock of the test's own: when it serves, when a round is over, and in which words."""

from __future__ import annotations

from xpyd_sidecar.agent.group import Lead, Seat
from xpyd_sidecar.contract.group import GroupRound, MemberAnswer, MemberHello, MemberState
from xpyd_sidecar.contract.ids import InstanceName


def hello(index: int, seq: int, held: str, call: str, beat: str = "", *, boot: str = "b", why: str = "") -> MemberHello:
    return MemberHello(1, InstanceName("q-e3"), index, "x", boot, seq, held, call, beat, why)  # type: ignore[arg-type]


def serving(now: float = 100.0) -> Lead:
    lead = Lead.restore("f" * 24, 2, 0.0, None)
    for index in (0, 1):
        lead = lead.receive(hello(index, 1, "free", lead.call), 0.0)
    assert lead.life == lead.call == "f" * 24 + "00000001"
    for index in (0, 1):
        lead = lead.receive(hello(index, 2, "running", lead.life, "1"), now)
    assert lead.problem(now) == ""
    return lead


def test_a_life_begins_when_all_have_promised_it_and_not_before() -> None:
    lead = Lead.restore("f" * 24, 2, 0.0, None)
    lead = lead.receive(hello(0, 1, "free", lead.call), 0.0)
    assert (lead.life, lead.problem(0.0)) == ("", "waits for members 1 of 2")
    lead = lead.receive(hello(1, 1, "free", "another call"), 0.0)
    assert lead.life == ""
    late = lead.receive(hello(1, 2, "free", lead.call), 6.0)
    assert (late.life, late.problem(6.0)) == ("", "waits for members 0 of 2"), "the promise of 0 is 6 s old"
    assert late.receive(hello(0, 2, "free", late.call), 6.5).life == late.call


def test_five_seconds_of_silence_are_not_ready_and_eight_end_nothing() -> None:
    lead = serving(100.0).receive(hello(0, 3, "running", serving().life, "2"), 108.0).tick(108.0)
    assert lead.problem(104.9) == ""
    assert lead.problem(108.0) == "member 1 of 2 is silent for 8 s"
    assert lead.life
    assert lead.receive(hello(1, 3, "running", lead.life, "2"), 108.0).problem(108.0) == ""


def test_an_engine_that_says_hello_and_does_not_beat_is_silent_too() -> None:
    lead = serving(100.0)
    for second in range(1, 16):
        lead = lead.receive(hello(0, 2 + second, "running", lead.life, str(second)), 100.0 + second)
        lead = lead.receive(hello(1, 2 + second, "running", lead.life, "1"), 100.0 + second).tick(100.0 + second)
        assert bool(lead.problem(100.0 + second)) == (second > 5)
        assert lead.life
    lead = lead.tick(115.1)
    assert (lead.life, lead.ended) == ("", "member 1 was silent for 15 s")
    assert lead.call == "f" * 24 + "00000002"


def test_the_end_of_one_engine_ends_the_round_with_its_words() -> None:
    lead = serving().receive(hello(1, 3, "over", serving().life, why="killed by SIGKILL"), 101.0)
    assert lead.life == ""
    assert lead.ended == "the engine of member 1 ended: killed by SIGKILL"
    assert lead.problem(101.0) == f"waits for members 0, 1 of 2; the last round: {lead.ended}"


def test_a_new_pod_in_a_members_place_ends_the_round() -> None:
    lead = serving().receive(hello(1, 1, "free", "", boot="c"), 101.0)
    assert (lead.life, lead.ended) == ("", "member 1 was started anew")


def test_an_older_hello_changes_nothing() -> None:
    lead = serving()
    assert lead.receive(hello(1, 1, "over", lead.life), 101.0) is lead


def test_a_lead_that_is_started_again_goes_on_with_the_life_of_its_file() -> None:
    before = serving()
    lead = Lead.restore("e" * 24, 2, 200.0, GroupRound(3, before.life, "10.0.0.1", 31001))
    assert lead.answer() == (before.life, before.life)
    for index in (0, 1):
        lead = lead.receive(hello(index, 9, "running", before.life, "7"), 201.0)
    assert lead.problem(201.0) == ""
    over = lead.receive(hello(1, 10, "over", before.life), 202.0)
    assert over.call.startswith("e" * 24)


def test_a_seat_begins_what_it_has_promised_once_and_only_while_its_launcher_is_free() -> None:
    free = MemberState("l", 1)
    seat = Seat.restore(0.0, None)
    assert seat.member_state == "absent"
    seat = seat.watch(free)
    assert seat.receive(MemberAnswer(1, "c1", "c1", "h", 1), 0.0).life == "", "it has promised nothing"
    seat = seat.receive(MemberAnswer(1, "c1"), 0.0)
    assert (seat.promised, seat.member_state) == ("c1", "free")
    seat = seat.receive(MemberAnswer(1, "c1", "c1", "h", 1), 1.0)
    assert seat.round == GroupRound(1, "c1", "h", 1)
    assert seat.member_state == "busy"
    seat = seat.watch(MemberState("l", 2, 1, "c1", running=True))
    assert seat.member_state == "running"
    seat = seat.watch(MemberState("l", 3, 1, "c1", running=False))
    assert seat.member_state == "over"
    assert seat.receive(MemberAnswer(1, "c1", "c1", "h", 1), 2.0).round == seat.round, "not a second time"
    seat = seat.receive(MemberAnswer(1, "c2"), 3.0)
    assert (seat.round, seat.member_state) == (GroupRound(2), "busy"), "the launcher has not seen that nothing is to run"
    assert seat.watch(MemberState("l", 4, 2, "c1")).member_state == "free"


def test_a_seat_that_hears_nothing_for_fifteen_seconds_ends_its_engine() -> None:
    kept = GroupRound(4, "c1", "h", 1)
    seat = Seat.restore(50.0, kept).watch(MemberState("l", 9, 4, "c1", running=True))
    assert (seat.promised, seat.member_state) == ("c1", "running")
    assert seat.tick(64.9).life == "c1"
    assert seat.tick(65.1).round == GroupRound(5)


def test_a_seat_whose_file_was_lost_tells_its_launcher_anew_what_is_to_run() -> None:
    seat = Seat.restore(50.0, None).watch(MemberState("l", 9, 4, "c1", running=True))
    assert (seat.round, seat.member_state) == (GroupRound(5), "busy"), "the launcher is told that nothing is to run"
    assert seat.watch(MemberState("l", 10, 5, "c1")).member_state == "free"
