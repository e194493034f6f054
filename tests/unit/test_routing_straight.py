from __future__ import annotations

from collections.abc import Collection

import msgspec
import pytest

from xpyd_sidecar.contract.ids import Fingerprint, HostPort, Incarnation, InstanceName, Role, TransferId
from xpyd_sidecar.routing.budget import RetryBudget
from xpyd_sidecar.routing.exchange import Exchange, Limits
from xpyd_sidecar.routing.moves import Answered, Begun, Complete, Ended, Event, Failed, Instruction, Kind, Over, Relay, Tick
from xpyd_sidecar.routing.pick import Pair, Target
from xpyd_sidecar.routing.reason import Reason
from xpyd_sidecar.routing.straight import DECODE, NO_DEADLINE_S, PREFILL, Straight

TRANSFER = TransferId("a" * 32)
LIMITS = Limits(request_s=60.0, pair_s=12.3456)
HEARD: list[Event] = [Answered(PREFILL, 200), Begun(DECODE), Ended(DECODE)]


def target(name: str) -> Target:
    return Target(InstanceName(name), Incarnation(f"i-{name}"), Fingerprint("f"), HostPort(f"{name}:1"),
                  HostPort(f"{name}:2"))


PAIR = Pair(target("d"), target("p"))


class Picks:
    """Picks one pair, and counts how often."""

    asked = 0

    def pair(self, *, alone: bool, not_prefill: Collection[InstanceName] = (),
             not_decode: Collection[InstanceName] = ()) -> Pair | None:
        self.asked += 1
        return None if "d" in not_decode else PAIR

    def prefill_for(self, decode: Target, not_prefill: Collection[InstanceName] = ()) -> Target | None:
        return None

    def why_not(self, role: Role) -> str:
        return "nobody"


def real(picks: Picks) -> Exchange:
    return Exchange(TRANSFER, picks, LIMITS, now=100.0, budget=BUDGET)


def made(course: Straight, picks: Picks) -> Exchange:
    return course.exchange(TRANSFER, picks, LIMITS, BUDGET, skips="", course=None)


def state(exchange: Exchange) -> dict[str, object]:
    open_legs = {name: getattr(exchange, name) for name in ("_prefill", "_decode")}
    others = {name: getattr(exchange, name) for name in Exchange.__slots__ if name != "_picks" and name not in open_legs}
    return others | {name: None if leg is None else msgspec.structs.asdict(leg) for name, leg in open_legs.items()}


def noted(course: Straight, event: Event, at: float) -> list[Instruction]:
    if event == HEARD[1]:
        return course.begun(at)
    course.prefilled(at)
    return []


BUDGET = RetryBudget(0.2)


@pytest.mark.parametrize("order", [HEARD, [HEARD[1], HEARD[0], HEARD[2]]])
def test_the_straight_course_is_what_an_exchange_says_of_it_and_goes_on_as_one_from_everywhere(order: list[Event]) -> None:
    picks = Picks()
    exchange, course = real(picks), Straight(100.0)
    steps: list[tuple[list[Instruction], list[Instruction]]] = [
        (course.start(PAIR, TRANSFER, LIMITS), exchange.start(100.0))]
    assert state(made(course, picks)) == state(exchange)
    for at, event in ((101.0, order[0]), (102.0, order[1])):
        steps.append((noted(course, event, at), exchange.handle(event, at)))
        assert state(made(course, picks)) == state(exchange)
    steps.append((course.ended(), exchange.handle(HEARD[2], 103.0)))
    for straight, decided in steps:
        assert straight == decided
    assert steps[-1][0] == [Complete(), Over("ok")]
    assert (exchange.attempt, exchange.retries, exchange.continued) == (1, 0, 0)
    assert picks.asked == 1, "an exchange that comes later picks nobody again"


@pytest.mark.parametrize("order", [HEARD, [HEARD[1], HEARD[0]]])
@pytest.mark.parametrize("heard", [0, 1, 2])
@pytest.mark.parametrize("event", [Failed(DECODE, Kind.LOST, Reason("gone")), Failed(PREFILL, Kind.LOST, Reason("gone")),
                                   Answered(DECODE, 500), Tick(), Ended(DECODE)])
def test_whatever_else_happens_is_decided_by_an_exchange_that_heard_all_before(order: list[Event], heard: int,
                                                                                       event: Event) -> None:
    picks = Picks()
    exchange, course = real(picks), Straight(100.0)
    exchange.start(100.0)
    course.start(PAIR, TRANSFER, LIMITS)
    for number in range(heard):
        exchange.handle(order[number], 101.0)
        noted(course, order[number], 101.0)
    late = made(course, picks)
    assert repr(late.handle(event, 120.0)) == repr(exchange.handle(event, 120.0))
    assert state(late) == state(exchange)


def test_a_stream_that_is_whole_before_prefill_answered_is_a_case_for_an_exchange() -> None:
    course = Straight(0.0)
    course.start(PAIR, TRANSFER, LIMITS)
    assert course.begun(1.0) == [Relay(DECODE)]
    assert course.ended() == []


@pytest.mark.parametrize(("pair", "limits"), [
    (Pair(PAIR.decode, None), LIMITS),
    (Pair(msgspec.structs.replace(PAIR.decode, p2p="x"), PAIR.prefill), LIMITS),
    (Pair(PAIR.decode, msgspec.structs.replace(target("p"), p2p="x")), LIMITS),
    (PAIR, Limits(request_s=60.0, pair_s=NO_DEADLINE_S - 1)),
    (PAIR, Limits(request_s=NO_DEADLINE_S - 1, pair_s=60.0)),
])
def test_other_courses_are_an_exchanges_from_their_start(pair: Pair, limits: Limits) -> None:
    course = Straight(100.0)
    assert course.start(pair, TRANSFER, limits) == []
    picks = Picks()
    late = course.exchange(TRANSFER, picks, limits, BUDGET, skips="", course=None)
    assert state(late) == state(Exchange(TRANSFER, picks, limits, now=100.0, budget=BUDGET)), "it has heard nothing"


def test_no_deadline_comes_before_an_exchange_minds_it() -> None:
    least = Limits(request_s=NO_DEADLINE_S, pair_s=NO_DEADLINE_S)
    course = Straight(100.0)
    assert course.start(PAIR, TRANSFER, least)
    assert course.exchange(TRANSFER, Picks(), least, BUDGET, skips="", course=None).deadline >= 100.0 + NO_DEADLINE_S
