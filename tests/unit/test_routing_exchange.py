from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import pytest

from xpyd_sidecar.contract.ids import Fingerprint, HostPort, Incarnation, InstanceName, Role, TransferId
from xpyd_sidecar.routing.exchange import MAX_REFUSALS, Course, Exchange, Limits
from xpyd_sidecar.routing.moves import (
    Answered,
    Begun,
    Break,
    Cancel,
    ClientGone,
    Complete,
    Ended,
    Event,
    Failed,
    Instruction,
    Kind,
    Leaving,
    Over,
    Pass,
    Refuse,
    Relay,
    Resume,
    Send,
    Stop,
    Tick,
)
from xpyd_sidecar.routing.pick import Pair, Target


def target(name: str) -> Target:
    return Target(InstanceName(name), Incarnation(f"i-{name}"), Fingerprint("f"), HostPort(f"{name}:1"),
                  HostPort(f"{name}:2"))


class FakePicks:
    """The first instance of each role that is not left out."""

    def __init__(self, prefills: int = 2, decodes: int = 2) -> None:
        self.prefills = [f"p{i}" for i in range(prefills)]
        self.decodes = [f"d{i}" for i in range(decodes)]

    def pair(self, *, alone: bool, not_prefill: Collection[InstanceName] = (),
             not_decode: Collection[InstanceName] = ()) -> Pair | None:
        decodes = [name for name in self.decodes if name not in not_decode]
        if not decodes:
            return None
        prefill = None if alone else self.prefill_for(target(decodes[0]), not_prefill)
        return Pair(target(decodes[0]), prefill)

    def prefill_for(self, decode: Target, not_prefill: Collection[InstanceName] = ()) -> Target | None:
        return next((target(name) for name in self.prefills if name not in not_prefill), None)

    def why_not(self, role: Role) -> str:
        return f"no {role}"


class FakeCourse:
    """A stream that can go on elsewhere, until a test says otherwise."""

    def __init__(self) -> None:
        self.goes_on = True
        self.rest: bytes | None = None

    def tail(self) -> bytes | None:
        return self.rest


class FakeBudget:
    """So many retries."""

    def __init__(self, left: int) -> None:
        self.left = left

    def may_retry(self, now: float) -> bool:
        assert now >= 0
        self.left -= 1
        return self.left >= 0


class Drive:
    """An exchange, and what it said, in short words."""

    def __init__(self, picks: FakePicks | None = None, skips: str = "", course: Course | None = None,
                 budget: FakeBudget | None = None, **limits: Any) -> None:
        self.now = 0.0
        self.exchange = Exchange(TransferId("0" * 32), picks or FakePicks(),
                                 Limits(**({"request_s": 100.0, "pair_s": 10.0} | limits)),
                                 skips=skips, now=0.0, course=course, budget=budget)
        self.sent: list[Send] = []
        self.said = self._note(self.exchange.start(0.0))

    def _note(self, out: list[Instruction]) -> list[str]:
        words = []
        for i in out:
            match i:
                case Send(leg=leg, target=to, params=params):
                    self.sent.append(i)
                    words.append(f"send {leg} {to.instance}" + (f" a{params.attempt}" if params else " alone"))
                case Refuse(fault=fault) | Break(fault=fault):
                    words.append(f"{type(i).__name__.lower()} {fault.status}")
                case Over(outcome=outcome):
                    words.append(f"over {outcome}")
                case Cancel(leg=leg) | Relay(leg=leg) | Pass(leg=leg):
                    words.append(f"{type(i).__name__.lower()} {leg}")
                case Complete(tail=tail):
                    words.append("complete" + (f" {tail.decode()}" if tail else ""))
                case Resume():
                    words.append("resume")
        return words

    def on(self, event: Event, at: float | None = None) -> list[str]:
        self.now = self.now if at is None else at
        return self._note(self.exchange.handle(event, self.now))


def lost(leg: int, kind: Kind = Kind.LOST) -> Failed:
    return Failed(leg, kind, "it broke")


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


def test_a_stream_runs_to_its_end() -> None:
    drive = Drive()
    assert drive.on(Answered(1, 200)) == []
    assert drive.on(Begun(2)) == ["relay 2"]
    assert drive.on(Ended(2)) == ["complete", "over ok"]
    assert drive.exchange.over


def test_a_whole_answer_is_passed_on() -> None:
    drive = Drive()
    drive.on(Answered(1, 200))
    assert drive.on(Answered(2, 200)) == ["pass 2", "over ok"]


def test_prefill_may_end_after_decode_but_not_for_ever() -> None:
    drive = Drive()
    assert drive.on(Answered(2, 200)) == ["pass 2"]
    assert drive.exchange.deadline == 2.0
    assert drive.on(Answered(1, 200)) == ["over ok"]
    drive = Drive()
    drive.on(Answered(2, 200))
    assert drive.on(Tick(), 2.0) == ["cancel 1", "over ok"]


@pytest.mark.parametrize("event",
                         [lost(1), lost(1, Kind.REFUSED), Answered(1, 500), Answered(1, 503),
                          Answered(1, 200, aborted=True),
                                   Answered(1, 429)])
def test_prefill_fails_and_another_takes_over_while_decode_waits(event: Event) -> None:
    drive = Drive()
    assert drive.on(event, 4.0) == ["send 3 p1 a2"]
    again = drive.sent[-1].params
    assert again is not None
    assert (again.remaining_s, again.peer and again.peer.instance) == (6.0, "d0")
    drive.on(Answered(3, 200))
    assert drive.on(Begun(2)) == ["relay 2"]


def test_no_prefill_left_and_decode_goes_on_alone() -> None:
    drive = Drive(FakePicks(prefills=1))
    assert drive.on(lost(1)) == ["cancel 2", "send 3 d0 alone"]
    assert drive.on(Answered(3, 200)) == ["pass 3", "over ok"]


def test_no_prefill_left_and_the_request_is_refused_where_that_was_asked() -> None:
    drive = Drive(FakePicks(prefills=1), on_no_prefill="reject")
    assert drive.on(lost(1)) == ["cancel 2", "refuse 503", "over failed"]


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


@pytest.mark.parametrize("event", [lost(2), lost(2, Kind.REFUSED), lost(2, Kind.ABORTED), Answered(2, 200, aborted=True),
                                   Answered(2, 500)])
def test_decode_fails_before_its_first_byte_and_both_legs_are_made_anew(event: Event) -> None:
    drive = Drive()
    assert drive.on(event) == ["cancel 1", "send 3 p0 a2", "send 4 d1 a2"]
    peer = drive.sent[-2].params and drive.sent[-2].params.peer
    assert peer is not None
    assert peer.instance == "d1"
    assert drive.on(Begun(4)) == ["relay 4"]
    assert drive.exchange.retries == 2


def test_a_second_error_status_is_relayed_as_the_engine_gave_it() -> None:
    drive = Drive(FakePicks(decodes=3))
    drive.on(Answered(2, 500))
    assert drive.on(Answered(4, 500)) == ["pass 4", "cancel 3", "over failed"]


def test_an_error_status_without_another_decode_is_relayed() -> None:
    drive = Drive(FakePicks(decodes=1))
    assert drive.on(Answered(2, 500)) == ["pass 2", "cancel 1", "over failed"]


def test_a_lost_decode_without_another_is_refused() -> None:
    assert Drive(FakePicks(decodes=1)).on(lost(2)) == ["refuse 502", "cancel 1", "over failed"]
    assert Drive(FakePicks(decodes=1)).on(lost(2, Kind.REFUSED)) == ["refuse 503", "cancel 1", "over failed"]


def test_decode_attempts_are_bounded() -> None:
    drive = Drive(FakePicks(decodes=9), decode_legs=2)
    drive.on(lost(2))
    assert drive.on(lost(4)) == ["refuse 502", "cancel 3", "over failed"]


def test_an_engine_that_refuses_the_connection_never_saw_the_leg_so_it_does_not_count() -> None:
    drive = Drive(FakePicks(prefills=0, decodes=20), decode_legs=2)
    for leg in range(1, 1 + MAX_REFUSALS):
        assert drive.on(lost(leg, Kind.REFUSED)) == [f"send {leg + 1} d{leg} alone"]
    drive.on(lost(1 + MAX_REFUSALS))
    assert drive.on(lost(2 + MAX_REFUSALS)) == ["refuse 502", "over failed"]


def test_when_the_others_refuse_connections_the_one_that_broke_its_own_is_asked_again() -> None:
    drive = Drive(FakePicks(prefills=0, decodes=2))
    assert drive.on(lost(1)) == ["send 2 d1 alone"]
    assert drive.on(lost(2, Kind.REFUSED)) == ["send 3 d0 alone"]
    assert drive.on(lost(3, Kind.REFUSED)) == ["send 4 d1 alone"], "it may be there again"
    assert drive.on(lost(4)) == ["send 5 d0 alone"]
    assert drive.on(lost(5)) == ["refuse 502", "over failed"]


def test_a_stream_that_has_begun_gets_more_legs_since_nobody_else_can_ask_for_its_rest() -> None:
    drive = Drive(FakePicks(prefills=0, decodes=9), course=FakeCourse(), decode_legs=1, stream_legs=3)
    drive.on(Begun(1))
    assert drive.on(lost(1))[-1] == "send 2 d1 alone"
    assert drive.on(lost(2))[-1] == "send 3 d2 alone"
    assert drive.on(lost(3)) == ["break 502", "over broken"]


def test_a_stream_that_everybody_has_failed_once_goes_back_to_one_that_lives_rather_than_to_nobody() -> None:
    drive = Drive(FakePicks(prefills=0, decodes=2), course=FakeCourse())
    drive.on(Begun(1))
    assert drive.on(lost(1))[-1] == "send 2 d1 alone"
    assert drive.on(lost(2))[-1] == "send 3 d0 alone"
    assert drive.on(Begun(3)) == ["relay 3"]


def test_a_broken_stream_ends_with_an_error_event_and_is_never_begun_again() -> None:
    drive = Drive()
    drive.on(Begun(2))
    assert drive.on(lost(2)) == ["break 502", "cancel 1", "over broken"]
    assert drive.on(Begun(2)) == []


def test_what_an_engine_refuses_of_the_request_is_relayed_and_the_other_leg_cancelled() -> None:
    assert Drive().on(Answered(2, 400)) == ["pass 2", "cancel 1", "over client_error"]
    assert Drive().on(Answered(2, 404)) == ["pass 2", "cancel 1", "over client_error"]
    assert Drive().on(Answered(1, 400)) == ["pass 1", "cancel 2", "over client_error"]


def test_a_failing_prefill_matters_no_more_once_the_stream_has_begun() -> None:
    for event in (lost(1), Answered(1, 500), Answered(1, 400)):
        drive = Drive()
        drive.on(Begun(2))
        assert drive.on(event) == []
        assert drive.on(Ended(2)) == ["complete", "over ok"]


def test_the_client_goes_and_both_legs_are_aborted() -> None:
    assert Drive().on(ClientGone()) == ["cancel 1", "cancel 2", "over client_gone"]
    drive = Drive()
    drive.on(Answered(1, 200))
    drive.on(Begun(2))
    assert drive.on(ClientGone()) == ["cancel 2", "over client_gone"]
    drive = Drive()
    drive.on(Answered(2, 200))
    assert drive.on(ClientGone()) == ["cancel 1", "over ok"], "the answer was given"


def test_decode_does_not_wait_for_prefill_for_ever() -> None:
    drive = Drive()
    assert drive.exchange.deadline == 10.0
    assert drive.on(Tick(), 10.0) == ["cancel 1", "cancel 2", "send 3 d0 alone"]
    assert drive.exchange.deadline == 100.0
    drive = Drive()
    drive.on(Answered(1, 200))
    assert drive.exchange.deadline == 100.0, "prefill is done"


def test_prefill_attempts_share_one_time_to_pair() -> None:
    drive = Drive()
    assert drive.on(lost(1), 10.0) == ["cancel 2", "send 3 d0 alone"]


def test_a_request_ends_in_time() -> None:
    drive = Drive(pair_s=1000.0)
    assert drive.on(Tick(), 99.0) == []
    assert drive.on(Tick(), 100.0) == ["refuse 504", "cancel 1", "cancel 2", "over timeout"]
    drive = Drive()
    drive.on(Begun(2))
    assert drive.on(Tick(), 100.0) == ["break 504", "cancel 1", "cancel 2", "over timeout"]


def test_a_stopping_router_says_so() -> None:
    assert Drive().on(Stop("bye")) == ["refuse 503", "cancel 1", "cancel 2", "over stopped"]
    drive = Drive()
    drive.on(Begun(2))
    assert drive.on(Stop("bye")) == ["break 503", "cancel 1", "cancel 2", "over stopped"]


def test_events_of_legs_that_are_not_open_change_nothing() -> None:
    drive = Drive()
    drive.on(lost(1))
    for event in (lost(1), Answered(1, 200), Begun(1), Ended(1), Answered(77, 200)):
        assert drive.on(event) == []


def begun(**options: Any) -> Drive:
    """A stream that is being relayed, and prefill's leg ended."""
    drive = Drive(**options)
    drive.on(Answered(1, 200))
    assert drive.on(Begun(2)) == ["relay 2"]
    return drive


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.DIFFERS])
def test_a_stream_that_breaks_goes_on_at_another_pair(kind: Kind) -> None:
    drive = begun(course=FakeCourse())
    assert drive.on(lost(2, kind)) == ["resume", "send 3 p0 a2", "send 4 d1 a2"]
    assert drive.on(Answered(3, 200)) == []
    assert drive.on(Begun(4)) == ["relay 4"]
    assert drive.on(Ended(4)) == ["complete", "over ok"]
    assert (drive.exchange.continued, drive.exchange.retries) == (1, 2)


def test_what_failed_may_be_asked_again_once_the_stream_has_gone_on() -> None:
    drive = begun(course=FakeCourse())
    drive.on(lost(2))
    drive.on(Begun(4))
    assert drive.on(lost(4)) == ["cancel 3", "resume", "send 5 p0 a3", "send 6 d0 a3"]


def test_a_stream_that_cannot_go_on_is_broken_off() -> None:
    course = FakeCourse()
    course.goes_on = False
    for drive in (begun(), begun(course=course), begun(course=FakeCourse(), picks=FakePicks(2, 1))):
        assert drive.on(lost(2)) == ["break 502", "over broken"]
    assert begun(course=FakeCourse()).on(lost(2, Kind.DIFFERS)) == ["break 502", "over broken"]


def test_a_stream_that_is_whole_but_for_its_tail_is_ended_here() -> None:
    course = FakeCourse()
    drive = begun(course=course)
    course.rest = b"[DONE]"
    assert drive.on(lost(2)) == ["complete [DONE]", "over ok"]


def test_a_second_half_that_is_refused_is_a_failed_leg() -> None:
    for event in (Answered(4, 400), Answered(4, 500), Answered(4, 200), Answered(4, 200, aborted=True)):
        drive = begun(course=FakeCourse(), picks=FakePicks(2, 3))
        drive.on(lost(2))
        assert drive.on(event) == ["cancel 3", "resume", "send 5 p0 a3", "send 6 d2 a3"]


def test_prefill_of_a_second_half_is_replaced_while_decode_waits() -> None:
    for event in (lost(3), Answered(3, 400), Answered(3, 500)):
        drive = begun(course=FakeCourse())
        drive.on(lost(2))
        assert drive.on(event) == ["send 5 p1 a3"]
        assert drive.on(lost(5)) == ["cancel 4", "resume", "send 6 d1 alone"]
        drive.on(Begun(6))
        assert drive.on(lost(6)) == ["resume", "send 7 p0 a4", "send 8 d0 a4"], "with prefill again"


def test_a_second_half_without_prefill_is_broken_off_where_decode_must_not_prefill() -> None:
    drive = begun(course=FakeCourse(), picks=FakePicks(1, 2), on_no_prefill="reject")
    drive.on(lost(2))
    assert drive.on(lost(3)) == ["cancel 4", "break 503", "over broken"]


def test_a_second_half_ends_in_time_and_with_its_client() -> None:
    for event, said in ((Tick(), "break 504"), (Stop("bye"), "break 503")):
        drive = begun(course=FakeCourse(), pair_s=1000.0)
        drive.on(lost(2))
        assert drive.on(event, 100.0)[:3] == [said, "cancel 3", "cancel 4"]
    drive = begun(course=FakeCourse())
    drive.on(lost(2))
    assert drive.on(ClientGone()) == ["cancel 3", "cancel 4", "over client_gone"]


def test_the_budget_is_for_engines_that_live() -> None:
    assert Drive(budget=FakeBudget(0)).on(lost(2)) == ["cancel 1", "send 3 p0 a2", "send 4 d1 a2"], "a death"
    assert Drive(budget=FakeBudget(0)).on(lost(2, Kind.ABORTED)) == ["refuse 502", "cancel 1", "over failed"]
    assert Drive(budget=FakeBudget(0)).on(Answered(2, 500)) == ["pass 2", "cancel 1", "over failed"]
    assert Drive(budget=FakeBudget(1)).on(Answered(2, 500)) == ["cancel 1", "send 3 p0 a2", "send 4 d1 a2"]
    assert Drive(budget=FakeBudget(0)).on(Answered(1, 500)) == ["cancel 2", "send 3 d0 alone"]
    assert Drive(budget=FakeBudget(0)).on(lost(1)) == ["send 3 p1 a2"]
    drive = begun(course=FakeCourse(), picks=FakePicks(1, 3), budget=FakeBudget(0))
    assert drive.on(lost(2, Kind.ABORTED)) == ["resume", "send 3 p0 a2", "send 4 d1 a2"], "the first break of a stream"
    assert drive.on(lost(4, Kind.ABORTED)) == ["break 502", "cancel 3", "over broken"]


def test_a_stream_moves_from_an_instance_that_leaves_while_its_leg_still_runs() -> None:
    drive = Drive(course=FakeCourse())
    drive.on(Answered(1, 200))
    drive.on(Begun(2))
    assert drive.on(Leaving(2, "it ends soon")) == ["cancel 2", "resume", "send 3 p0 a2", "send 4 d1 a2"]
    assert drive.on(Leaving(2, "it ends soon")) == [], "the leg is elsewhere"
    drive.on(Answered(3, 200))
    drive.on(Begun(4))
    assert drive.on(Ended(4)) == ["complete", "over ok"]
    assert drive.exchange.continued == 1


def test_a_request_without_a_byte_moves_as_a_whole_and_prefill_legs_stay() -> None:
    drive = Drive()
    assert drive.on(Leaving(1, "it ends soon")) == []
    assert drive.on(Leaving(2, "it ends soon")) == ["cancel 1", "cancel 2", "send 3 p0 a2", "send 4 d1 a2"]


def test_what_cannot_go_elsewhere_stays_on_an_instance_that_leaves() -> None:
    course = FakeCourse()
    nobody = Drive(FakePicks(decodes=1), course=course)
    nobody.on(Begun(2))
    assert nobody.on(Leaving(2, "it ends soon")) == [], "nobody else decodes"
    for drive in (Drive(), Drive(course=course)):
        drive.on(Begun(2))
        course.goes_on = False
        assert drive.on(Leaving(2, "it ends soon")) == [], "the stream cannot go on"
        assert drive.on(Ended(2)) == ["complete"]
    course.goes_on, course.rest = True, b"tail"
    drive = Drive(course=course)
    drive.on(Begun(2))
    assert drive.on(Leaving(2, "it ends soon")) == [], "the client has its finish reason"


@pytest.mark.parametrize("seed", range(60))
def test_simulated_with_random_events_the_laws_hold(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(60):
        _simulate(dice)


def _simulate(dice: random.Random) -> None:
    picks = FakePicks(dice.randrange(4), dice.randrange(4))
    limits = Limits(request_s=100.0, pair_s=dice.choice([5.0, 500.0]), on_no_prefill=dice.choice(["decode", "reject"]),
                    prefill_legs=dice.randrange(1, 4), decode_legs=dice.randrange(1, 4), stream_legs=dice.randrange(1, 6))
    exchange = Exchange(TransferId("0" * 32), picks, limits, skips=dice.choice(["", "", "n"]), now=0.0,
                        course=dice.choice([None, FakeCourse()]), budget=FakeBudget(dice.choice([0, 1, 100])))
    now, attempt, terminal, over = 0.0, 0, 0, 0
    open_legs: dict[int, Role] = {}
    sent = 0
    relaying: int | None = None
    begun = False
    resumed = False
    ended: int | None = None
    out = exchange.start(now)
    for _ in range(200):
        attempts: set[int] = set()
        for i in out:
            assert not over, "something after Over"
            match i:
                case Send(leg=leg, role=role, params=params):
                    assert not terminal
                    assert relaying not in open_legs
                    assert leg not in open_legs
                    assert resumed or not begun, "a leg that begins anew behind a stream"
                    assert role not in open_legs.values(), "two legs of a role"
                    open_legs[leg] = role
                    sent += 1
                    if params is not None:
                        assert params.attempt >= attempt
                        assert params.remaining_s > 0
                        attempts.add(params.attempt)
                        if role is Role.PREFILL:
                            assert params.attempt > attempt, "attempts grow with every prefill leg"
                case Cancel(leg=leg):
                    del open_legs[leg]
                case Resume():
                    assert begun
                    assert not open_legs
                    resumed = True
                case Relay(leg=leg):
                    assert open_legs[leg] is Role.DECODE
                    assert not terminal
                    relaying, begun, resumed = leg, True, False
                case Complete() | Break():
                    assert begun
                    terminal += 1
                case Pass(leg=leg):
                    assert not begun
                    assert leg == ended, "an answer that is not there"
                    terminal += 1
                case Refuse():
                    assert not begun
                    terminal += 1
                case Over():
                    over += 1
                    assert not open_legs, "over with a leg open"
        attempt = max(attempts, default=attempt)
        assert terminal <= 1
        if over:
            break
        assert open_legs, "neither over nor waiting for anything"
        out, ended, now = _random_event(exchange, dice, open_legs, relaying in open_legs, now)
    assert over == 1
    assert exchange.over
    assert exchange.handle(ClientGone(), now) == []
    most = limits.prefill_legs + 2 * (limits.decode_legs + limits.stream_legs + MAX_REFUSALS) + 2
    assert sent <= (1 + exchange.continued) * most


def _random_event(exchange: Exchange, dice: random.Random, open_legs: dict[int, Role], relaying: bool,
                  now: float) -> tuple[list[Instruction], int | None, float]:
    now += dice.random() * 3
    roll = dice.random()
    if roll < 0.04:
        return exchange.handle(ClientGone(), now), None, now
    if now >= exchange.deadline or roll < 0.1:
        return exchange.handle(Tick(), now), None, now
    if roll < 0.15:
        return exchange.handle(Answered(999, 200), now), None, now
    leg = dice.choice(list(open_legs))
    if roll < 0.2:
        return exchange.handle(Leaving(leg, "it ends soon"), now), None, now
    if open_legs[leg] is Role.DECODE and relaying:
        if roll < 0.6:
            return [], None, now
        event: Event = dice.choice([Ended(leg), lost(leg, Kind.ABORTED)])
    elif open_legs[leg] is Role.DECODE and roll < 0.4:
        return exchange.handle(Begun(leg), now), None, now
    else:
        event = dice.choice([Answered(leg, dice.choice([200, 200, 400, 429, 500])), Answered(leg, 200, aborted=True),
                             lost(leg, dice.choice(list(Kind)))])
    del open_legs[leg]
    return exchange.handle(event, now), leg if isinstance(event, Answered) else None, now
