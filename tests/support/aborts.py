"""Clients that leave at random moments, and how long it takes until nothing of their requests is left.

    report = await abort_scripted(f, count=9500, seed=1)       scripted engines, a router in this process
    report = await abort_real(cluster, count=500, seed=1)      real engines
    report.check()

A client leaves while it sends its request, while it waits, in the middle of its answer, or with a second request behind the
first; with a FIN or with a RST. They come in bursts; after each burst all is looked at.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster import Cluster
from engines import held
from processes import kept_waiting_s
from recorded import Request, load
from recorded_requests import PATHS
from router_fleet import RouterFleet, read_answer, request_bytes
from scripted_engine import Play

from xpyd_sidecar.contract.fleet import FleetInstance

BURST = 50
GONE_S = 1.0
PATIENCE_S = 20.0
STALL_S = 0.1
"""A turn of the loop that took longer counts as this: the machine stood still, and with it engines and router."""
LEAVES = ("sending", "waiting", "reading", "pipelined")


@dataclass
class Aborts:
    """What came of it."""

    aborts: int = 0
    left: list[str] = field(default_factory=list)
    """What was still there so long after a burst."""
    longest_s: float = 0.0
    """From the last abort of a burst until nothing was left."""
    by_moment: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LEAVES, 0))

    def check(self) -> None:
        """A second later (``gone_s``) nothing is left."""
        assert not self.left, (self.longest_s, self.left[:5])

    def told(self) -> dict[str, Any]:
        """For the results file."""
        return {"aborts": self.aborts, "left_behind": len(self.left), "examples": self.left[:5],
                "longest_s": round(self.longest_s, 3), "by_moment": self.by_moment}


async def leave(port: int, source: random.Random, report: Aborts, raw: bytes, longest_s: float) -> None:
    """One client: connects, sends, waits up to ``longest_s`` or for some bytes, and is gone."""
    moment = source.choice(LEAVES)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    if moment == "sending":
        raw = raw[:source.randrange(1, len(raw))]
    elif moment == "pipelined":
        raw += raw
    writer.write(raw)
    try:
        async with asyncio.timeout(source.uniform(0.0, longest_s)):
            wanted = source.randrange(1, 4000) if moment in {"reading", "pipelined"} else 1 << 30
            while wanted > 0 and (data := await reader.read(min(wanted, 512))):
                wanted -= len(data)
    except TimeoutError:
        pass
    if source.random() < 0.5:
        writer.transport.abort()  # a RST where bytes are unread
    else:
        writer.close()
    report.aborts += 1
    report.by_moment[moment] += 1


async def abort_scripted(fleet: RouterFleet, count: int, seed: int, gone_s: float = GONE_S) -> Aborts:
    """Aborts before scripted engines that answer slowly, fast, late, or with errors."""
    source = random.Random(seed)
    report = Aborts()
    corpus = load().requests
    plays: list[Callable[[], Play]] = [
        Play, lambda: Play(delay=0.002), lambda: Play(before=source.uniform(0, 0.05), delay=0.001),
        lambda: Play(status=500), lambda: Play(die_after=3), lambda: Play(hold=asyncio.Event())]
    for engine in fleet.d:
        engine.choose = lambda _: source.choices(plays, (4, 4, 4, 1, 1, 2))[0]()
    for engine in fleet.p:  # none holds for ever: a prefill leg may take Limits.linger_s longer than a whole answer
        engine.choose = lambda _: source.choices(plays[:-1], (4, 4, 4, 1, 1))[0]()
    loop = asyncio.get_running_loop()
    while report.aborts < count:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(BURST, count - report.aborts)):
                request = source.choice(corpus)
                body = {"model": "tiny", **request.body, "stream": source.random() < 0.7}
                group.create_task(leave(fleet.router.port, source, report, request_bytes(PATHS[request.api], body), 0.06))
        took, now, late = 0.0, loop.time(), ""
        while (left := _left(fleet)) and took < PATIENCE_S:
            await asyncio.sleep(0.005)
            took, now = took + min(loop.time() - now, STALL_S), loop.time()
            late = late or (str(left) if took > gone_s else "")
        report.longest_s = max(report.longest_s, took)
        if late:
            report.left.append(f"after {report.aborts}: {late}, for {took:.2f} s")
        for engine in (*fleet.p, *fleet.d):
            engine.seen.clear()
    return report


def _left(fleet: RouterFleet) -> dict[str, int]:
    found = {"servings": len(fleet.context.servings), "calls": len(fleet.context.pool.calls),
             "connections of clients": len(fleet.router.server.connections),
             "legs": sum(m.in_flight for m in fleet.context.roster.members()),
             "requests at engines": sum(engine.open for engine in (*fleet.p, *fleet.d))}
    return {name: number for name, number in found.items() if number}


async def abort_real(cluster: Cluster, count: int, seed: int, gone_s: float = GONE_S) -> Aborts:
    """Aborts on real engines: their own metrics and the connector's gauges say what is left, and the router's legs."""
    source = random.Random(seed)
    report = Aborts()
    corpus = [one for one in load().requests if not one.body.get("structured_outputs") and not one.body.get("tools")]
    loop = asyncio.get_running_loop()
    await warm_up(cluster, [one for one in corpus if one.name.split(":")[0] in {"short", "question"}])
    while report.aborts < count:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(BURST // 2, count - report.aborts)):
                request = source.choice(corpus)
                body = {"model": "tiny", **request.body, "stream": source.random() < 0.7}
                if request.api == "completions" and source.random() < 0.4:  # several blocks to hand over
                    body["prompt"] = [source.randrange(3, 250) for _ in range(source.choice((200, 700, 1500)))]
                group.create_task(leave(cluster.port, source, report, request_bytes(PATHS[request.api], body), 0.8))
        last, before_s = loop.time(), _kept_waiting_s(cluster)
        left = await asyncio.to_thread(_held, cluster)
        late = ""
        while left and loop.time() < last + gone_s + PATIENCE_S:
            await asyncio.sleep(0.05)
            asked = loop.time()
            left = await asyncio.to_thread(_held, cluster)
            limit_s = gone_s + _kept_waiting_s(cluster) - before_s
            late = late or (json.dumps(left) if left and asked > last + limit_s else "")
        if late or left:
            report.left.append(f"after {report.aborts}: {late or json.dumps(left)}")
        report.longest_s = max(report.longest_s, loop.time() - last)
    return report


async def warm_up(cluster: Cluster, requests: Sequence[Request]) -> None:
    """Ask all of these once, of every engine and through the router.

    An engine compiles what it samples with at the first request that needs it, and stands still for many seconds meanwhile.
    """
    async def ask(port: int, request: Request) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
        try:
            writer.write(request_bytes(PATHS[request.api], {"model": "tiny", **request.body, "stream": True},
                                       headers={"Content-Type": "application/json"}))
            answer = await read_answer(reader, 120.0)
            assert answer.status == 200, (port, request.name, answer)
        finally:
            writer.transport.abort()

    for request in requests:
        for port in (*(one.engine.port for one in cluster.instances), cluster.port):
            await ask(port, request)


def _kept_waiting_s(cluster: Cluster) -> float:
    """Seconds in which some engine was ready to run and had no processor: it could let go of nothing meanwhile."""
    return kept_waiting_s([pid for one in cluster.instances if one.engine.alive() for pid in one.engine.group.pids()])


def _held(cluster: Cluster) -> dict[str, float]:
    found = {f"{one.name} {name}": value for one in cluster.instances if one.engine.alive()
             for name, value in held(one.engine.url).items()}
    instances: tuple[FleetInstance, ...] = cluster.fleet().instances
    return found | {f"{one.instance} legs": float(one.in_flight) for one in instances if one.in_flight}
