"""While a service gets another key: a router with the old one, agents of both over real sockets, clients that never stop.

    old    P0 D0, beats under the old key          go away once the others serve
    new    P1 D1, agents that have both keys       the router hears them under the old one
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from beats import FINGERPRINT, beat
from router_fleet import KEY, RouterFleet, fleet
from scripted_engine import ScriptedEngine

from xpyd_sidecar.agent.beats import Beats
from xpyd_sidecar.contract.ids import Fingerprint, HostPort, Role, State
from xpyd_sidecar.contract.keys import ServiceKey

LOOPS = ("uvloop",)
NEW = ServiceKey(b"n" * 32)


@contextlib.asynccontextmanager
async def agents(f: RouterFleet, key: ServiceKey, before: ServiceKey | None, *engines: tuple[ScriptedEngine, Role],
                 mark: str) -> AsyncIterator[Any]:
    """Agents that beat to the router; what they say is changed by what is called.

    They beat much oftener than they say, so that none is taken for silent where this process is held up.
    """
    links = [Beats((HostPort(f"127.0.0.1:{f.router.members_port}"),), key, heartbeat_s=0.1, resolve_s=60.0, before=before)
             for _ in engines]
    said: dict[str, Any] = {"state": State.READY}
    numbers = iter(range(2, 1_000_000))

    async def speak() -> None:
        while True:
            number = next(numbers)
            for link, (engine, role) in zip(links, engines, strict=True):
                link.send(beat(engine.name, role, engine.address, seq=number, interval_s=5.0,
                               fingerprint=Fingerprint(f"{FINGERPRINT}{mark}"), **said))
            await asyncio.sleep(0.05)

    for link in links:
        await link.resolve_once()
    task = asyncio.create_task(speak())
    try:
        yield lambda **more: said.update(more)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for link in links:
            await link.close()


async def test_no_request_is_lost_and_none_crosses_from_one_key_to_the_other() -> None:
    async with fleet(1, 1) as f:
        p1, d1 = [await ScriptedEngine(name).start() for name in ("p1", "d1")]
        (p0,), (d0,) = f.p, f.d
        statuses: list[int] = []
        ending = asyncio.Event()

        async def client() -> None:
            while not ending.is_set():
                statuses.append((await f.complete(stream=bool(len(statuses) % 2))).status)

        clients = [asyncio.create_task(client()) for _ in range(4)]
        try:
            async with (agents(f, KEY, None, (p0, Role.PREFILL), (d0, Role.DECODE), mark="") as old,
                        agents(f, NEW, KEY, (p1, Role.PREFILL), (d1, Role.DECODE), mark="-1a2b3c4d")):
                await f.wait(lambda: len(p1.seen) > 20 and len(d1.seen) > 20, "the new pair serves beside the old one")
                assert len(d0.seen) > 20
                old(state=State.DRAINING)
                await f.wait(lambda: not f.context.roster.find("d0", "i-d0").pickable, "the old pair drains")
                await f.wait(lambda: not (d0.open or p0.open or f.context.roster.find("d0", "i-d0").in_flight),
                             "it has nothing left, nor on its way")
                served = len(d0.seen)
                await f.wait(lambda: len(d1.seen) > 200, "clients go on")
                assert len(d0.seen) == served
                ending.set()
                await asyncio.gather(*clients)
        finally:
            ending.set()
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            for engine in (p1, d1):
                await engine.stop()
        assert set(statuses) == {200}
        assert transfers(p0) == transfers(d0), "each prefill is of the decode with its key"
        assert transfers(p1) == transfers(d1)


def transfers(engine: ScriptedEngine) -> set[str]:
    return {str(each.body["kv_transfer_params"]["transfer"]) for each in engine.seen}
