from __future__ import annotations

import asyncio

from beats import Beater
from beats import beat as beat_of
from router_fleet import KEY, fleet
from scripted_engine import Play

from xpyd_sidecar.contract.ids import Incarnation, InstanceName, Role, State
from xpyd_sidecar.routing.roster import Changed, Lost, Probe

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


async def test_a_probe_that_the_roster_asks_for_is_made_and_told() -> None:
    async with fleet() as f:
        f.d[0].health = 503
        f.dispatch.watch.do([Probe(InstanceName("d0"), Incarnation("i-d0"), f.d[0].address)])
        await f.wait(lambda: f.dispatch.roster.pickable(Role.DECODE) == (), "d0's suspension")
        assert "GET /health answered 503" in f.dispatch.roster.why_not(Role.DECODE)
        f.d[0].health = 200
        await f.wait(lambda: len(f.dispatch.roster.pickable(Role.DECODE)) == 1, "d0's return, by the next probe")


async def test_what_is_lost_ends_only_the_legs_of_that_incarnation() -> None:
    async with fleet(1, 2) as f:
        held = asyncio.Event()
        for engine in f.d:
            engine.plays.append(Play(hold=held))
        tasks = [asyncio.create_task(f.complete(stream=True)) for _ in range(2)]
        await f.wait(lambda: len(f.d[0].seen) == len(f.d[1].seen) == 1, "a leg on each")
        f.dispatch.watch.do([Lost(InstanceName("d0"), Incarnation("another"), "x"), Changed(InstanceName("d0"), "y")])
        await asyncio.sleep(0.02)
        assert (f.d[0].aborts, f.d[1].aborts) == (0, 0)
        f.dispatch.watch.do([Lost(InstanceName("d0"), Incarnation("i-d0"), "x")])
        await f.wait(lambda: len(f.d[1].seen) == 2, "the retry elsewhere")
        assert (f.d[0].aborts, f.d[1].aborts) == (1, 0)
        held.set()
        assert [(await task).text for task in tasks] == ["t0 t1 t2 "] * 2


async def test_models_are_the_configured_one_and_those_that_are_served() -> None:
    async with fleet(1, 1, model="first") as f:
        assert f.dispatch.models() == ["first", "tiny"]
        f.beat(f.d[0], model="other")
        assert f.dispatch.models() == ["first", "other", "tiny"]
        assert (await f.complete(model="other")).status == 200
        assert (await f.complete(model="none")).status == 404
    async with fleet(0, 0) as f:
        assert f.dispatch.models() == []
        assert (await f.complete(model="any")).status == 503, "nobody is known yet, so no model is unknown"
