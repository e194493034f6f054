from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from beats import Beater
from beats import beat as beat_of
from router_fleet import KEY, fleet
from scripted_engine import Play

from xpyd_sidecar.contract.ids import HostPort, Incarnation, InstanceName, Role, State
from xpyd_sidecar.router.api.faults import FailureReason
from xpyd_sidecar.router.fleet.member import HealthResult, InstanceLost, ProbeInstance, RosterChange
from xpyd_sidecar.router.observing.observer import TELL_S

LOOPS = ("uvloop",)


async def test_an_ack_tells_how_many_legs_are_open_on_the_instance() -> None:
    async with fleet() as f:
        held = asyncio.Event()
        f.d[0].default = Play(hold=held)
        tasks = [asyncio.create_task(f.complete()) for _ in range(2)]
        await f.wait(lambda: len(f.d[0].seen) == 2, "two legs")
        agent = Beater(f.router.members_port, KEY)
        try:
            draining = beat_of("d0", http=f.d[0].address, state=State.DRAINING, interval_s=60.0)
            assert (await agent.say(draining)).in_flight == 2
            held.set()
            assert [(await task).status for task in tasks] == [200, 200]
            await f.wait_quiet()
            assert (await agent.say(draining)).in_flight == 0
        finally:
            agent.close()


async def test_requests_that_ended_are_told_of_in_time_and_whenever_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And there is one timer for it, however often somebody asks meanwhile."""
    told: list[int] = []
    monkeypatch.setattr("xpyd_sidecar.process.logs.tell_all", lambda _logger, records, _form: told.append(len(records)))
    async with fleet(access_log=True) as f:
        due: list[Callable[[], None]] = []
        later = f.context.loop.call_later

        def hold(delay: float, callback: Any, *args: object) -> asyncio.TimerHandle:
            if callback != f.context.observer._tell:
                return later(delay, callback, *args)
            assert delay == TELL_S
            due.append(callback)
            return later(3600.0, callback)  # the test says when it is time

        monkeypatch.setattr(f.context.observer, "_loop", Delegate(f.context.loop, call_later=hold))
        for number in range(5):
            assert (await f.complete(stream=True)).status == 200
            assert f.context.observer.metrics.in_flight == 0
            recent = f.context.observer.recent
            assert len(recent) == number + 1, "asked at once, all is told"
            assert (sum(told), len(due)) == (number + 1, 1)
        await f.complete(stream=True)
        assert sum(told) == 5
        due[-1]()
        assert sum(told) == 6, "it is time"
        f.context.observer.tell()
        assert sum(told) == 6
        with monkeypatch.context() as patched:
            patched.setattr("xpyd_sidecar.router.observing.observer.MAX_OVER", 1)
            await f.complete(stream=True)
            assert sum(told) == 7, "they are bounded"
        await f.complete(stream=True)
    assert sum(told) == 8, "the end of the router takes it along"


class Delegate:
    """An object with some other methods."""

    def __init__(self, of: object, **methods: object) -> None:
        self._of = of
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


async def test_a_probe_that_the_roster_asks_for_is_made_and_told() -> None:
    async with fleet() as f:
        f.d[0].health = 503
        f.context.watch.take([ProbeInstance(InstanceName("d0"), Incarnation("i-d0"), f.d[0].address)])
        await f.wait(lambda: f.context.roster.pickable(Role.DECODE) == (), "d0's suspension")
        assert f.context.roster.members()[0].suspended == "GET /health answered 503"
        assert f.context.roster.why_not(Role.DECODE) == "no decode instance is ready (d0 suspended)"
        f.d[0].health = 200
        await f.wait(lambda: len(f.context.roster.pickable(Role.DECODE)) == 1, "d0's return, by the next probe")


async def test_a_probe_takes_as_long_as_the_roster_says() -> None:
    async with fleet() as f:
        server = await asyncio.start_server(lambda *_: asyncio.sleep(60), "127.0.0.1", 0)
        address, told = HostPort(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"), list[HealthResult]()
        f.context.watch._note_probe = told.append
        began = time.monotonic()  # does not go on while nothing of this process runs (``fair_clock``)
        f.context.watch.take([ProbeInstance(InstanceName("d0"), Incarnation("i-d0"), address, (), 0.2)])
        await f.wait(lambda: told == [HealthResult.SILENT], "the end of the probe")
        assert 0.2 <= time.monotonic() - began < 4.0
        server.close()


async def test_what_is_lost_ends_only_the_legs_of_that_incarnation() -> None:
    async with fleet(1, 2) as f:
        held = asyncio.Event()
        for engine in f.d:
            engine.plays.append(Play(hold=held))
        tasks = [asyncio.create_task(f.complete(stream=True)) for _ in range(2)]
        await f.wait(lambda: len(f.d[0].seen) == len(f.d[1].seen) == 1, "a leg on each")
        f.context.watch.take([InstanceLost(InstanceName("d0"), Incarnation("another"), FailureReason("x")),
                                     RosterChange(InstanceName("d0"), "y")])
        await asyncio.sleep(0.02)
        assert (f.d[0].aborts, f.d[1].aborts) == (0, 0)
        f.context.watch.take([InstanceLost(InstanceName("d0"), Incarnation("i-d0"), FailureReason("x"))])
        await f.wait(lambda: len(f.d[1].seen) == 2, "the retry elsewhere")
        assert (f.d[0].aborts, f.d[1].aborts) == (1, 0)
        held.set()
        assert [(await task).text for task in tasks] == ["t0 t1 t2 "] * 2


async def test_models_are_the_configured_one_and_those_that_are_served() -> None:
    async with fleet(1, 1, model="first") as f:
        assert f.context.models() == ["first", "tiny"]
        f.beat(f.d[0], model="other")
        assert f.context.models() == ["first", "other", "tiny"]
        assert (await f.complete(model="other")).status == 200
        assert (await f.complete(model="none")).status == 404
    async with fleet(0, 0) as f:
        assert f.context.models() == []
        assert (await f.complete(model="any")).status == 503, "nobody is known yet, so no model is unknown"
