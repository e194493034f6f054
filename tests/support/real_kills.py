"""kill -9 of real engines under streams, and what clients have of them afterwards.

    report = await kill_real(cluster, victims, seed=1)       one after the other; at least one decode engine must be left

Recorded requests are sent without a pause while it lasts. A victim is killed at a random moment while it decodes: its whole
process group, its HTTP server alone (the engine core lives on as an orphan), or its engine core alone.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

from cluster import Cluster, Instance
from fleets import serving
from kills import Report
from recorded import Request, load
from recorded_requests import PATHS
from router_fleet import read_answer, request_bytes

from xpyd_sidecar.contract.ids import State

AT_ONCE = 8
DEATHS = 1
"""Deaths that one request meets: of one that meets two, alone among all, the router must take it that it ends engines."""
ANSWER_S = 240.0
BUSY_S = 240.0
WAYS = ("group", "server", "core")
_NUMBERS = itertools.count(1)


def kill_nine(instance: Instance, way: str) -> None:
    """kill -9 of an engine, or of one of its processes."""
    group = instance.engine.group
    if way == "group":
        instance.engine.kill()
    elif way == "server":
        group.kill_process(group.pid)
    else:
        for pid in group.pids():
            if _is_core(pid):
                group.kill_process(pid)


def _is_core(pid: int) -> bool:
    try:
        return "EngineCore" in Path(f"/proc/{pid}/comm").read_text() + Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
        return False


async def kill_real(cluster: Cluster, victims: Sequence[Instance], seed: int) -> Report:
    """Kill them one after the other under load."""
    source = random.Random(seed)
    requests = [one for one in load().requests if one.way != "error" and not one.body.get("tools")]
    report = Report()
    stop = asyncio.Event()
    met: dict[str, int] = {}
    """Kills while it was open, by request."""
    began = asyncio.get_running_loop().time()

    async def worker(mine: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            name = f"r{seed}-{mine}-{number}"
            met[name] = 0
            await _one(cluster, report, source.choice(requests), name)
            del met[name]

    async with asyncio.TaskGroup() as group:
        for mine in range(AT_ONCE):
            group.create_task(worker(mine))
        try:
            for victim in victims:
                way = source.choice(WAYS)
                await _wait_spared(met)
                while True:  # what it decoded a moment ago may have ended
                    await _wait_busy(cluster, victim, report)
                    await asyncio.sleep(source.uniform(0.0, 0.4))
                    if held := await asyncio.to_thread(_in_flight, cluster, victim):
                        break
                report.killed += held
                await asyncio.to_thread(kill_nine, victim, way)
                report.kills += 1
                report.ways[f"kill -9, {way}"] += 1
                await _wait_spurned(cluster, victim)
                for name in met:  # also of those who came while it was being killed, and may have been sent there
                    met[name] += 1
        finally:
            stop.set()
    report.finished = max(0, report.killed - len(report.unfinished))
    report.seconds = asyncio.get_running_loop().time() - began
    return report


def _in_flight(cluster: Cluster, victim: Instance) -> int:
    return sum(one.in_flight for one in cluster.fleet().instances if one.instance == victim.name)


async def _wait_busy(cluster: Cluster, victim: Instance, report: Report) -> None:
    """Until the victim decodes."""
    loop = asyncio.get_running_loop()
    end = loop.time() + BUSY_S
    while True:
        fleet = await asyncio.to_thread(cluster.fleet)
        if any(one.instance == victim.name and one.in_flight and one.state is State.READY for one in fleet.instances):
            return
        assert loop.time() < end, f"{victim.name} got no request for {BUSY_S} s; {report.unfinished[-3:]}"
        await asyncio.sleep(0.05)


async def _wait_spurned(cluster: Cluster, victim: Instance) -> None:
    """Until nothing more is sent to the victim."""
    loop = asyncio.get_running_loop()
    end = loop.time() + BUSY_S
    while victim.name in serving(await asyncio.to_thread(cluster.fleet)):
        assert loop.time() < end, f"{victim.name} was killed, and is still asked"
        await asyncio.sleep(0.05)


async def _wait_spared(met: dict[str, int]) -> None:
    """Until no open request has met as many deaths as it may."""
    end = asyncio.get_running_loop().time() + ANSWER_S
    while any(deaths >= DEATHS for deaths in met.values()):
        assert asyncio.get_running_loop().time() < end, "a request does not end"
        await asyncio.sleep(0.02)


async def _one(cluster: Cluster, report: Report, request: Request, name: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.port, limit=1 << 26)
    try:
        # Means nothing without a beam search; but so no two requests are equal, of which one would be blamed for the other.
        body = {"model": "tiny", **request.body, "length_penalty": 1 + next(_NUMBERS) / 1e6, "stream": True}
        writer.write(request_bytes(PATHS[request.api], body, headers={"X-Request-Id": name}))
        answer = await read_answer(reader, ANSWER_S)
    finally:
        writer.transport.abort()
    report.requests += 1
    words = f"{name} ({request.name}): "
    finished = report.judged(request, answer, words)
    if not finished:
        report.unfinished.append(words + f"{answer.status} {answer.body[-400:].decode(errors='replace')}")
