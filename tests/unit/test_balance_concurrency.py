"""Limits in simulated time: none for an engine that keeps up, however it batches; one that costs nothing for the others."""

from __future__ import annotations

import math
from collections import deque

import msgspec
import pytest
from members import member
from more_cases import more

from xpyd_sidecar.contract.ids import Incarnation, Role
from xpyd_sidecar.contract.membership import Load
from xpyd_sidecar.router.balance.limits import LEAST, SLACK, WAIT_S, ConcurrencyLimits

BEAT_S = 3.0


class Engine(msgspec.Struct):
    """Batches: at every step up to ``seats`` requests run, each for ``steps`` steps."""

    seats: int
    step_s: float
    steps: int
    clients: int
    """They send the next request as soon as the last one is over."""


def run(engine: Engine, limits: ConcurrencyLimits, seconds: float = 120.0, *, routers: int = 1) -> tuple[int, float, int]:
    """Requests that ended, the last limit, and the most that waited in the engine in the last half."""
    one = member("e0", Role.PREFILL)
    running: list[int] = []
    waiting = 0
    held = deque([None] * engine.clients)  # in the router
    done, now, beat, most = 0, 0.0, BEAT_S, 0
    while now < seconds:
        while held and limits.has_room([one]):
            held.popleft()
            waiting += 1
            one.in_flight += 1
        now += engine.step_s
        room = engine.seats - len(running)
        running += [engine.steps] * min(room, waiting)
        waiting -= min(room, waiting)
        running = [left - 1 for left in running]
        for _ in range(running.count(0)):
            one.in_flight -= 1
            one.ended += 1
            held.append(None)
            done += 1
        running = [left for left in running if left]
        if now >= beat:
            beat += BEAT_S
            one.load, one.in_flight_at_beat = Load(running=len(running) * routers, waiting=waiting * routers), one.in_flight
            one.beat_at = now
            limits.adjust(now, [one])
        if now > seconds / 2:
            most = max(most, waiting)
    return done, limits.limit_of(one), most


ENGINES = {
    "prefill of long prompts": Engine(seats=2, step_s=0.4, steps=1, clients=60),
    "prefill of short prompts, all in one step": Engine(seats=200, step_s=0.02, steps=1, clients=300),
    "decode with hundreds of seats": Engine(seats=256, step_s=0.03, steps=200, clients=400),
    "decode that keeps up": Engine(seats=256, step_s=0.03, steps=200, clients=250),
    "one at a time": Engine(seats=1, step_s=3.0, steps=1, clients=40),
    "very slow": Engine(seats=4, step_s=0.5, steps=120, clients=40),
}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("routers", [1, *more([3])])
def test_a_limit_costs_no_throughput(name: str, routers: int) -> None:
    engine = ENGINES[name]
    without, _, _ = run(engine, ConcurrencyLimits(fixed=10**6), routers=routers)
    with_limits, _, _ = run(engine, ConcurrencyLimits(), routers=routers)
    assert with_limits >= 0.99 * without, (with_limits, without)


@pytest.mark.parametrize("name", ["decode that keeps up", "prefill of short prompts, all in one step"])
def test_an_engine_that_keeps_up_gets_no_limit(name: str) -> None:
    assert run(ENGINES[name], ConcurrencyLimits())[1] == math.inf


@pytest.mark.parametrize("name", ["prefill of long prompts", "one at a time", "very slow", "decode with hundreds of seats"])
def test_what_an_overloaded_engine_cannot_begin_stays_in_the_router(name: str) -> None:
    engine = ENGINES[name]
    seconds = 1200.0 if engine.step_s > 0.1 else 120.0
    done, limit, most = run(engine, ConcurrencyLimits(), seconds)
    rate = done / seconds
    assert limit < math.inf
    assert most <= max(LEAST, SLACK + engine.seats * 0.1, 1.6 * rate * WAIT_S + SLACK), (most, limit, rate)
    assert run(engine, ConcurrencyLimits(fixed=10**6), seconds)[2] > most


def test_a_limit_goes_when_the_queue_has_gone() -> None:
    limits, one = ConcurrencyLimits(), member("e0", Role.PREFILL)
    limits.adjust(0.0, [one])

    def beat(at: float, running: int, waiting: int, in_flight: int) -> None:
        one.load, one.in_flight, one.in_flight_at_beat, one.beat_at = Load(running, waiting), in_flight, in_flight, at
        limits.adjust(at, [one])

    beat(3.0, 10, 90, 100)
    assert limits.limit_of(one) == math.inf, "once is a burst"
    beat(6.0, 10, 90, 100)
    assert limits.limit_of(one) == 70, "sinks by 30 % at most"
    beat(9.0, 10, 60, 70)
    assert limits.limit_of(one) == 49
    assert limits.free([one]) == [one], "where none has room, all are candidates"
    assert not limits.has_room([one])
    beat(12.0, 40, 0, 40)
    assert limits.limit_of(one) == 75
    assert limits.has_room([one])
    for at in (15.0, 18.0):
        beat(at, 40, 0, 40)
    assert limits.limit_of(one) == math.inf


def test_decodes_that_wait_for_their_kv_are_no_queue() -> None:
    limits, one = ConcurrencyLimits(), member("e0", Role.DECODE)
    for at in range(1, 6):
        one.load, one.in_flight = Load(running=5, waiting=90, transfers=88), 95
        one.in_flight_at_beat, one.beat_at = 95, float(at)
        limits.adjust(float(at), [one])
    assert limits.limit_of(one) == math.inf


def test_a_restarted_or_lost_instance_has_no_limit_and_leaves_nothing_behind() -> None:
    limits, one = ConcurrencyLimits(), member("e0", Role.PREFILL)
    for at in range(1, 5):
        one.load, one.in_flight_at_beat, one.beat_at = Load(running=2, waiting=50), 52, float(at)
        limits.adjust(float(at), [one])
    assert limits.limit_of(one) < math.inf
    one.incarnation = Incarnation("b" * 32)
    limits.adjust(6.0, [one])
    assert limits.limit_of(one) == math.inf
    limits.adjust(7.0, [])
    assert not limits._seen
    assert limits.unlimited


def test_a_fixed_limit_is_that_of_each_instance() -> None:
    limits = ConcurrencyLimits(fixed=2)
    full, free = member("a", in_flight=2), member("b", in_flight=1)
    assert limits.free((full, free)) == [free]
    assert limits.has_room([full, free])
    assert not limits.has_room([full])
    assert limits.has_room([]), "nobody frees a place where nobody is"
    limits.adjust(1.0, [full, free])
    assert limits.limit_of(free) == 2
