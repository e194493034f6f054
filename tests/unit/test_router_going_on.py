"""A stream that has begun goes on at another pair, and moves away from an instance that leaves."""

from __future__ import annotations

import pytest
from exchanges import Drive, FakeBudget, FakePicks, FakeStream, begun, lost

from xpyd_sidecar.router.api.faults import FailureKind, unavailable
from xpyd_sidecar.router.serving.instructions import (
    AttemptAnswered,
    AttemptBegun,
    AttemptEnded,
    AttemptLeaves,
    DeadlinePassed,
    GivenUp,
)


@pytest.mark.parametrize("kind", [kind for kind in FailureKind if kind not in {FailureKind.DIFFERS, FailureKind.LACKING}])
def test_a_stream_that_breaks_goes_on_at_another_pair(kind: FailureKind) -> None:
    drive = begun(stream=FakeStream())
    assert drive.on(lost(2, kind)) == ["resume", "send 3 p0 a2", "send 4 d1 a2"]
    assert drive.on(AttemptAnswered(3, 200)) == []
    assert drive.on(AttemptBegun(4)) == ["relay 4"]
    assert drive.on(AttemptEnded(4)) == ["complete", "over ok"]
    assert (drive.exchange.continued, drive.exchange.retries) == (1, 2)


def test_a_stream_whose_router_lacks_what_a_connection_takes_ends_without_a_word_about_an_engine() -> None:
    drive = begun(stream=FakeStream())
    drive.on(lost(2))
    assert drive.on(lost(4, FailureKind.LACKING)) == ["break 503", "cancel 3", "over broken"]
    drive = begun(stream=FakeStream())
    drive.on(lost(2))
    assert drive.on(lost(3, FailureKind.LACKING)) == ["send 5 p1 a3"], "its prefill alone: what waits may have one by now"


def test_what_failed_may_be_asked_again_once_the_stream_has_gone_on() -> None:
    drive = begun(stream=FakeStream())
    drive.on(lost(2))
    drive.on(AttemptBegun(4))
    assert drive.on(lost(4)) == ["cancel 3", "resume", "send 5 p0 a3", "send 6 d0 a3"]


def test_a_stream_that_cannot_go_on_is_broken_off() -> None:
    stream = FakeStream()
    stream.goes_on = False
    for drive in (begun(), begun(stream=stream), begun(stream=FakeStream(), picks=FakePicks(2, 1))):
        assert drive.on(lost(2)) == ["break 502", "over broken"]
    assert begun(stream=FakeStream()).on(lost(2, FailureKind.DIFFERS)) == ["break 502", "over broken"]


def test_a_stream_that_is_whole_but_for_its_tail_is_ended_here() -> None:
    stream = FakeStream()
    drive = begun(stream=stream)
    stream.rest = b"[DONE]"
    assert drive.on(lost(2)) == ["complete [DONE]", "over ok"]


def test_a_second_half_that_is_refused_is_a_failed_leg() -> None:
    for event in (AttemptAnswered(4, 400), AttemptAnswered(4, 500), AttemptAnswered(4, 200),
                  AttemptAnswered(4, 200, aborted=True)):
        drive = begun(stream=FakeStream(), picks=FakePicks(2, 3))
        drive.on(lost(2))
        assert drive.on(event) == ["cancel 3", "resume", "send 5 p0 a3", "send 6 d2 a3"]


def test_prefill_of_a_second_half_is_replaced_while_decode_waits() -> None:
    for event in (lost(3), AttemptAnswered(3, 400), AttemptAnswered(3, 500)):
        drive = begun(stream=FakeStream())
        drive.on(lost(2))
        assert drive.on(event) == ["send 5 p1 a3"]
        assert drive.on(lost(5)) == ["cancel 4", "resume", "send 6 d1 alone"]
        drive.on(AttemptBegun(6))
        assert drive.on(lost(6)) == ["resume", "send 7 p0 a4", "send 8 d0 a4"], "with prefill again"


def test_a_second_half_without_prefill_is_broken_off_where_decode_must_not_prefill() -> None:
    drive = begun(stream=FakeStream(), picks=FakePicks(1, 2), on_no_prefill="reject")
    drive.on(lost(2))
    assert drive.on(lost(3)) == ["break 503", "cancel 4", "over broken"]


def test_a_second_half_ends_in_time_and_with_its_client() -> None:
    for event, said in ((DeadlinePassed(), "break 504"), (GivenUp("stopped", unavailable("bye")), "break 503")):
        drive = begun(stream=FakeStream(), pair_s=1000.0)
        drive.on(lost(2))
        assert drive.on(event, 100.0)[:3] == [said, "cancel 3", "cancel 4"]
    drive = begun(stream=FakeStream())
    drive.on(lost(2))
    assert drive.on(GivenUp("client_gone")) == ["cancel 3", "cancel 4", "over client_gone"]


def test_the_budget_is_for_engines_that_live() -> None:
    assert Drive(budget=FakeBudget(0)).on(lost(2)) == ["cancel 1", "send 3 p0 a2", "send 4 d1 a2"], "a death"
    assert Drive(budget=FakeBudget(0)).on(lost(2, FailureKind.ABORTED)) == ["refuse 502", "cancel 1", "over failed"]
    assert Drive(budget=FakeBudget(0)).on(AttemptAnswered(2, 500)) == ["pass 2", "cancel 1", "over failed"]
    assert Drive(budget=FakeBudget(1)).on(AttemptAnswered(2, 500)) == ["cancel 1", "send 3 p0 a2", "send 4 d1 a2"]
    assert Drive(budget=FakeBudget(0)).on(AttemptAnswered(1, 500)) == ["cancel 2", "send 3 d0 alone"]
    assert Drive(budget=FakeBudget(0)).on(lost(1)) == ["send 3 p1 a2"]
    drive = begun(stream=FakeStream(), picks=FakePicks(1, 3), budget=FakeBudget(0))
    first = drive.on(lost(2, FailureKind.ABORTED))
    assert first == ["resume", "send 3 p0 a2", "send 4 d1 a2"], "the first break of a stream"
    assert drive.on(lost(4, FailureKind.ABORTED)) == ["break 502", "cancel 3", "over broken"]


def test_a_stream_moves_from_an_instance_that_leaves_while_its_leg_still_runs() -> None:
    drive = Drive(stream=FakeStream())
    drive.on(AttemptAnswered(1, 200))
    drive.on(AttemptBegun(2))
    assert drive.on(AttemptLeaves(2)) == ["cancel 2", "resume", "send 3 p0 a2", "send 4 d1 a2"]
    assert drive.on(AttemptLeaves(2)) == [], "the leg is elsewhere"
    drive.on(AttemptAnswered(3, 200))
    drive.on(AttemptBegun(4))
    assert drive.on(AttemptEnded(4)) == ["complete", "over ok"]
    assert drive.exchange.continued == 1


def test_a_request_without_a_byte_moves_as_a_whole_and_prefill_legs_stay() -> None:
    drive = Drive()
    assert drive.on(AttemptLeaves(1)) == []
    assert drive.on(AttemptLeaves(2)) == ["cancel 1", "cancel 2", "send 3 p0 a2", "send 4 d1 a2"]


def test_what_cannot_go_elsewhere_stays_on_an_instance_that_leaves() -> None:
    stream = FakeStream()
    nobody = Drive(FakePicks(decodes=1), stream=stream)
    nobody.on(AttemptBegun(2))
    assert nobody.on(AttemptLeaves(2)) == [], "nobody else decodes"
    for drive in (Drive(), Drive(stream=stream)):
        drive.on(AttemptBegun(2))
        stream.goes_on = False
        assert drive.on(AttemptLeaves(2)) == [], "the stream cannot go on"
        assert drive.on(AttemptEnded(2)) == ["complete"]
    stream.goes_on, stream.rest = True, b"tail"
    drive = Drive(stream=stream)
    drive.on(AttemptBegun(2))
    assert drive.on(AttemptLeaves(2)) == [], "the client has its finish reason"
