"""An exchange: which legs are sent, replaced and taken back, and how a request ends."""

from __future__ import annotations

import pytest
from exchanges import Drive, FakeBudget, FakePicks, FakeStream, begun, lost

from xpyd_sidecar.router.api.faults import FailureKind, unavailable
from xpyd_sidecar.router.serving.exchange import MAX_REFUSALS
from xpyd_sidecar.router.serving.instructions import (
    AttemptAnswered,
    AttemptBegun,
    AttemptEnded,
    AttemptStalls,
    DeadlinePassed,
    Event,
    GivenUp,
)


def test_both_legs_are_sent_at_once_with_one_transfer_and_attempt() -> None:
    drive = Drive()
    assert drive.said == ["send 1 p0 a1", "send 2 d0 a1"]
    prefill, decode = (send.params for send in drive.sent)
    assert prefill is not None
    assert decode is not None
    assert prefill.peer is not None
    assert (prefill.peer.instance, prefill.peer.incarnation, prefill.peer.control) == ("d0", "i-d0", "d0:2")
    assert (decode.peer, decode.remaining_s, prefill.remaining_s) == (None, 10.0, 10.0)
    assert prefill.transfer == decode.transfer == "0" * 32


def limits(drive: Drive) -> list[float | None]:
    return [send.params.limit_s for send in drive.sent if send.params is not None]


def test_prefill_may_take_longer_than_its_announcement_and_both_legs_know_how_long_in_all() -> None:
    drive = Drive(pair_s=10.0, load_s=50.0)
    assert limits(drive) == [60.0, 60.0]
    assert drive.exchange.deadline == 60.0
    assert drive.on(DeadlinePassed(), 59.9) == []
    assert drive.on(DeadlinePassed(), 60.0) == ["cancel 1", "cancel 2", "send 3 d0 alone"]


def test_no_attempt_may_take_longer_than_its_request() -> None:
    drive = Drive(pair_s=10.0, load_s=500.0)
    assert limits(drive) == [100.0, 100.0]
    assert drive.on(lost(1), 4.0) == ["send 3 p1 a2"]
    assert limits(drive)[2:] == [96.0]
    assert drive.on(DeadlinePassed(), 100.0) == ["refuse 504", "cancel 3", "cancel 2", "over timeout"]


def test_another_prefill_is_asked_only_while_decode_may_wait_for_an_announcement() -> None:
    drive = Drive(pair_s=10.0, load_s=50.0)
    assert drive.on(lost(1), 10.0) == ["cancel 2", "send 3 d0 alone"]
    drive = Drive(pair_s=10.0, load_s=50.0)
    drive.on(lost(1), 9.0)
    assert limits(drive)[2:] == [51.0]
    assert drive.exchange.deadline == 60.0, "the whole does not begin anew"


def test_after_prefills_end_decode_has_the_requests_time() -> None:
    drive = Drive(pair_s=10.0, load_s=50.0)
    drive.on(AttemptAnswered(1, 200), 30.0)
    assert drive.exchange.deadline == 100.0


def test_a_stream_runs_to_its_end() -> None:
    drive = Drive()
    assert drive.on(AttemptAnswered(1, 200)) == []
    assert drive.on(AttemptBegun(2)) == ["relay 2"]
    assert drive.on(AttemptEnded(2)) == ["complete", "over ok"]
    assert drive.exchange.over


def test_a_whole_answer_is_passed_on() -> None:
    drive = Drive()
    drive.on(AttemptAnswered(1, 200))
    assert drive.on(AttemptAnswered(2, 200)) == ["pass 2", "over ok"]


def test_prefill_may_end_after_decode_but_not_for_ever() -> None:
    drive = Drive()
    assert drive.on(AttemptAnswered(2, 200)) == ["pass 2"]
    assert drive.exchange.deadline == 2.0
    assert drive.on(AttemptAnswered(1, 200)) == ["over ok"]
    drive = Drive()
    drive.on(AttemptAnswered(2, 200))
    assert drive.on(DeadlinePassed(), 2.0) == ["cancel 1", "over ok"]


@pytest.mark.parametrize("event",
                         [lost(1), lost(1, FailureKind.REFUSED), AttemptAnswered(1, 500), AttemptAnswered(1, 503),
                          AttemptAnswered(1, 200, aborted=True),
                                   AttemptAnswered(1, 429)])
def test_prefill_fails_and_another_takes_over_while_decode_waits(event: Event) -> None:
    drive = Drive()
    assert drive.on(event, 4.0) == ["send 3 p1 a2"]
    again = drive.sent[-1].params
    assert again is not None
    assert (again.remaining_s, again.peer and again.peer.instance) == (6.0, "d0")
    drive.on(AttemptAnswered(3, 200))
    assert drive.on(AttemptBegun(2)) == ["relay 2"]


def test_no_prefill_left_and_decode_goes_on_alone() -> None:
    drive = Drive(FakePicks(prefills=1))
    assert drive.on(lost(1)) == ["cancel 2", "send 3 d0 alone"]
    assert drive.on(AttemptAnswered(3, 200)) == ["pass 3", "over ok"]


def test_no_prefill_left_and_the_request_is_refused_where_that_was_asked() -> None:
    drive = Drive(FakePicks(prefills=1), on_no_prefill="reject")
    assert drive.on(lost(1)) == ["refuse 503", "cancel 2", "over failed"]


def test_no_prefill_at_all() -> None:
    assert Drive(FakePicks(prefills=0)).said == ["send 1 d0 alone"]
    assert Drive(FakePicks(prefills=0), on_no_prefill="reject").said == ["refuse 503", "over unavailable"]
    assert Drive(FakePicks(prefills=0), "n",
                 on_no_prefill="reject").said == ["send 1 d0 alone"], "what skips prefill needs none"


def test_no_decode_at_all_is_said_at_once() -> None:
    assert Drive(FakePicks(decodes=0)).said == ["refuse 503", "over unavailable"]


def test_prefill_attempts_are_bounded() -> None:
    drive = Drive(FakePicks(prefills=9), prefill_legs=3)
    assert drive.on(lost(1)) == ["send 3 p1 a2"]
    assert drive.on(lost(3)) == ["send 4 p2 a3"]
    assert drive.on(lost(4)) == ["cancel 2", "send 5 d0 alone"]


@pytest.mark.parametrize(("leg", "other"), [(1, 2), (2, 1)])
def test_what_the_router_lacks_ends_the_request_and_nobody_else_is_asked(leg: int, other: int) -> None:
    drive = Drive()
    assert drive.on(lost(leg, FailureKind.LACKING)) == ["refuse 503", f"cancel {other}", "over unavailable"]
    assert drive.exchange.retries == 0


@pytest.mark.parametrize("event", [lost(2), lost(2, FailureKind.REFUSED), lost(2, FailureKind.ABORTED),
                                   AttemptAnswered(2, 200, aborted=True), AttemptAnswered(2, 500)])
def test_decode_fails_before_its_first_byte_and_both_legs_are_made_anew(event: Event) -> None:
    drive = Drive()
    assert drive.on(event) == ["cancel 1", "send 3 p0 a2", "send 4 d1 a2"]
    peer = drive.sent[-2].params and drive.sent[-2].params.peer
    assert peer is not None
    assert peer.instance == "d1"
    assert drive.on(AttemptBegun(4)) == ["relay 4"]
    assert drive.exchange.retries == 2


def test_a_second_error_status_is_relayed_as_the_engine_gave_it() -> None:
    drive = Drive(FakePicks(decodes=3))
    drive.on(AttemptAnswered(2, 500))
    assert drive.on(AttemptAnswered(4, 500)) == ["pass 4", "cancel 3", "over failed"]


def test_an_error_status_without_another_decode_is_relayed() -> None:
    drive = Drive(FakePicks(decodes=1))
    assert drive.on(AttemptAnswered(2, 500)) == ["pass 2", "cancel 1", "over failed"]


@pytest.mark.parametrize("event", [AttemptAnswered(2, 500), AttemptAnswered(1, 500)])
def test_a_retry_for_which_nobody_is_left_is_not_taken_from_the_budget(event: Event) -> None:
    budget = FakeBudget(3)
    Drive(FakePicks(prefills=1, decodes=1), budget=budget).on(event)
    assert budget.left == 3
    Drive(budget=budget).on(event)
    assert budget.left == 2


def test_a_lost_decode_without_another_is_refused() -> None:
    assert Drive(FakePicks(decodes=1)).on(lost(2)) == ["refuse 502", "cancel 1", "over failed"]
    assert Drive(FakePicks(decodes=1)).on(lost(2, FailureKind.REFUSED)) == ["refuse 503", "cancel 1", "over failed"]


def test_decode_attempts_are_bounded() -> None:
    drive = Drive(FakePicks(decodes=9), decode_legs=2)
    drive.on(lost(2))
    assert drive.on(lost(4)) == ["refuse 502", "cancel 3", "over failed"]


def test_an_engine_that_refuses_the_connection_never_saw_the_leg_so_it_does_not_count() -> None:
    drive = Drive(FakePicks(prefills=0, decodes=20), decode_legs=2)
    for leg in range(1, 1 + MAX_REFUSALS):
        assert drive.on(lost(leg, FailureKind.REFUSED)) == [f"send {leg + 1} d{leg} alone"]
    drive.on(lost(1 + MAX_REFUSALS))
    assert drive.on(lost(2 + MAX_REFUSALS)) == ["refuse 502", "over failed"]


def test_when_the_others_refuse_connections_the_one_that_broke_its_own_is_asked_again() -> None:
    drive = Drive(FakePicks(prefills=0, decodes=2))
    assert drive.on(lost(1)) == ["send 2 d1 alone"]
    assert drive.on(lost(2, FailureKind.REFUSED)) == ["send 3 d0 alone"]
    assert drive.on(lost(3, FailureKind.REFUSED)) == ["send 4 d1 alone"], "it may be there again"
    assert drive.on(lost(4)) == ["send 5 d0 alone"]
    assert drive.on(lost(5)) == ["refuse 502", "over failed"]


def test_a_stream_that_has_begun_gets_more_legs_since_nobody_else_can_ask_for_its_rest() -> None:
    drive = Drive(FakePicks(prefills=0, decodes=9), stream=FakeStream(), decode_legs=1, stream_legs=3)
    drive.on(AttemptBegun(1))
    assert drive.on(lost(1))[-1] == "send 2 d1 alone"
    assert drive.on(lost(2))[-1] == "send 3 d2 alone"
    assert drive.on(lost(3)) == ["break 502", "over broken"]


def test_a_stream_that_everybody_has_failed_once_goes_back_to_one_that_lives_rather_than_to_nobody() -> None:
    drive = Drive(FakePicks(prefills=0, decodes=2), stream=FakeStream())
    drive.on(AttemptBegun(1))
    assert drive.on(lost(1))[-1] == "send 2 d1 alone"
    assert drive.on(lost(2))[-1] == "send 3 d0 alone"
    assert drive.on(AttemptBegun(3)) == ["relay 3"]


def test_a_broken_stream_ends_with_an_error_event_and_is_never_begun_again() -> None:
    drive = Drive()
    drive.on(AttemptBegun(2))
    assert drive.on(lost(2)) == ["break 502", "cancel 1", "over broken"]
    assert drive.on(AttemptBegun(2)) == []


def test_what_decode_refuses_of_the_request_is_relayed_and_the_other_leg_cancelled() -> None:
    assert Drive().on(AttemptAnswered(2, 400)) == ["pass 2", "cancel 1", "over client_error"]
    assert Drive().on(AttemptAnswered(2, 404)) == ["pass 2", "cancel 1", "over client_error"]


@pytest.mark.parametrize("status", [400, 404, 405, 413, 415, 422])
def test_what_prefill_refuses_is_decodes_to_judge_alone(status: int) -> None:
    for judged, end in ((200, "ok"), (400, "client_error")):
        drive = Drive(FakePicks(prefills=3))
        assert drive.on(AttemptAnswered(1, status)) == ["cancel 2", "send 3 d0 alone"]
        assert drive.exchange.refused
        assert drive.on(AttemptAnswered(3, judged)) == ["pass 3", f"over {end}"]
    drive = Drive(FakePicks(prefills=3))
    drive.on(AttemptAnswered(1, status))
    assert drive.on(lost(3)) == ["send 4 d1 alone"], "prefill is asked no more"


@pytest.mark.parametrize("status", [401, 403, 408, 425, 429])
def test_what_prefill_says_of_itself_is_no_judgement(status: int) -> None:
    drive = Drive(FakePicks(prefills=2))
    assert drive.on(AttemptAnswered(1, status)) == ["send 3 p1 a2"]
    assert drive.on(AttemptAnswered(3, status)) == ["cancel 2", "send 4 d0 alone"]
    assert not drive.exchange.refused


def test_where_decode_may_not_compute_prompts_prefills_refusal_stands() -> None:
    drive = Drive(on_no_prefill="reject")
    assert drive.on(AttemptAnswered(1, 400)) == ["pass 1", "cancel 2", "over client_error"]
    assert not drive.exchange.refused


def test_a_failing_prefill_matters_no_more_once_the_stream_has_begun() -> None:
    for event in (lost(1), AttemptAnswered(1, 500), AttemptAnswered(1, 400)):
        drive = Drive()
        drive.on(AttemptBegun(2))
        assert drive.on(event) == []
        assert drive.on(AttemptEnded(2)) == ["complete", "over ok"]


def test_the_client_goes_and_both_legs_are_aborted() -> None:
    assert Drive().on(GivenUp("client_gone")) == ["cancel 1", "cancel 2", "over client_gone"]
    drive = Drive()
    drive.on(AttemptAnswered(1, 200))
    drive.on(AttemptBegun(2))
    assert drive.on(GivenUp("client_gone")) == ["cancel 2", "over client_gone"]
    drive = Drive()
    drive.on(AttemptAnswered(2, 200))
    assert drive.on(GivenUp("client_gone")) == ["cancel 1", "over ok"], "the answer was given"


def test_decode_does_not_wait_for_prefill_for_ever() -> None:
    drive = Drive()
    assert drive.exchange.deadline == 10.0
    assert drive.on(DeadlinePassed(), 10.0) == ["cancel 1", "cancel 2", "send 3 d0 alone"]
    assert drive.exchange.deadline == 100.0
    drive = Drive()
    drive.on(AttemptAnswered(1, 200))
    assert drive.exchange.deadline == 100.0, "prefill is done"


def test_prefill_attempts_share_one_time_to_pair() -> None:
    drive = Drive()
    assert drive.on(lost(1), 10.0) == ["cancel 2", "send 3 d0 alone"]


def test_a_request_ends_in_time() -> None:
    drive = Drive(pair_s=1000.0)
    assert drive.on(DeadlinePassed(), 99.0) == []
    assert drive.on(DeadlinePassed(), 100.0) == ["refuse 504", "cancel 1", "cancel 2", "over timeout"]
    drive = Drive()
    drive.on(AttemptBegun(2))
    assert drive.on(DeadlinePassed(), 100.0) == ["break 504", "cancel 1", "cancel 2", "over timeout"]


def test_a_stopping_router_says_so() -> None:
    assert Drive().on(GivenUp("stopped", unavailable("bye"))) == ["refuse 503", "cancel 1", "cancel 2", "over stopped"]
    drive = Drive()
    drive.on(AttemptBegun(2))
    assert drive.on(GivenUp("stopped", unavailable("bye"))) == ["break 503", "cancel 1", "cancel 2", "over stopped"]


def test_events_of_legs_that_are_not_open_change_nothing() -> None:
    drive = Drive()
    drive.on(lost(1))
    for event in (lost(1), AttemptAnswered(1, 200), AttemptBegun(1), AttemptEnded(1), AttemptAnswered(77, 200)):
        assert drive.on(event) == []


def test_a_stream_leg_that_stalls_before_its_first_byte_is_asked_elsewhere_and_costs_the_budget() -> None:
    budget = FakeBudget(1)
    drive = Drive(budget=budget)
    drive.on(AttemptAnswered(1, 200))
    assert drive.on(AttemptStalls(2)) == ["cancel 2", "send 3 p0 a2", "send 4 d1 a2"]
    assert budget.left == 0
    drive.on(AttemptAnswered(3, 200))
    assert drive.on(AttemptStalls(4)) == [], "nobody else is left, and nothing is lost by waiting"
    assert drive.on(AttemptBegun(4)) == ["relay 4"]


def test_without_budget_a_silent_leg_stays_unless_its_instance_is_known_to_hang() -> None:
    drive = Drive(budget=FakeBudget(0))
    drive.on(AttemptAnswered(1, 200))
    assert drive.on(AttemptStalls(2)) == []
    assert drive.on(AttemptStalls(2, free=True)) == ["cancel 2", "send 3 p0 a2", "send 4 d1 a2"]


def test_a_prefill_leg_that_stalls_is_replaced_while_decode_waits() -> None:
    drive = Drive(budget=FakeBudget(1))
    assert drive.on(AttemptStalls(1)) == ["cancel 1", "send 3 p1 a2"]
    assert drive.on(AttemptStalls(3)) == [], "no other is left: decode computes alone only where it is known to hang"
    assert drive.on(AttemptStalls(3, free=True)) == ["cancel 3", "cancel 2", "send 4 d0 alone"]
    assert drive.on(AttemptStalls(3)) == [], "that leg is over"


def test_a_prefill_leg_stays_where_decode_may_not_do_without() -> None:
    drive = Drive(picks=FakePicks(prefills=1), on_no_prefill="reject")
    assert drive.on(AttemptStalls(1, free=True)) == []
    assert drive.on(AttemptAnswered(1, 200)) == []


def test_a_stream_that_pauses_goes_on_elsewhere_only_if_it_can() -> None:
    stream = FakeStream()
    drive = begun(stream=stream)
    stream.goes_on = False
    assert drive.on(AttemptStalls(2, free=True)) == []
    stream.goes_on = True
    assert drive.on(AttemptStalls(2)) == ["cancel 2", "resume", "send 3 p0 a2", "send 4 d1 a2"]


def test_what_was_answered_does_not_stall() -> None:
    drive = Drive()
    drive.on(AttemptAnswered(2, 200))
    assert drive.on(AttemptStalls(1, free=True)) == []
