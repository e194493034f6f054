"""The stages of the benchmark."""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import client
import msgspec
import steps
from client import Contender, Crowd, Legs, Nixl, Url, prompt_of
from cluster import Cluster
from engines import Engine
from harness import (
    BLOCK,
    LENGTHS,
    OUT,
    REFERENCE,
    TOKEN_BYTES,
    Bench,
    Parts,
    Rounds,
    Traced,
    against,
    by_length,
    hand,
    workload,
)
from processes import ProcessFailed, free_port, processor_s
from raw import Link

from xpyd_operator.cli import timeline
from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Attempt, InstanceName, Role, TransferId

RUNNING = 8
PARKED_S = 6.0
"""How long a leg that nobody announces KV for is waited for."""
REST_S = 1.3
"""vLLM's workers look for work without a pause for a second after the last."""
OURS_REST_S = 0.1
"""Those with our connector do so for 10 ms."""


def measured_steps(cluster: Cluster, single: Engine, bench: Bench, count: int, rest_s: float) -> dict[str, Any]:
    """Prefill's steps; decode is dead after it. ``rest_s``: after a request of ours."""
    prefill, decode = cluster.prefill[0].engine, cluster.decode[0].engine
    rests = {"leg": rest_s, "plain": rest_s, "control": REST_S}
    return steps.measure(prefill, decode, single, count, bench.draw, rests=rests)


class One:
    """One engine, two, and 1P1D."""

    def __init__(self, bench: Bench, single: Engine, other: Engine | None, cluster: Cluster) -> None:
        self._bench = bench
        self._single = single
        self._cluster = cluster
        self._contenders: dict[str, Contender] = {"single": Url(single.url), "1p1d": Url(cluster.url)}
        if other is not None:
            self._contenders["two_plain"] = Url(single.url, other.url)
        self._raw: dict[int, list[float]] = {length: [] for length in LENGTHS if length >= REFERENCE}

    def _versus(self, found: dict[str, Rounds]) -> dict[str, Any]:
        return {name: against(found, name, "single") for name in found if name != "single"}

    async def idle(self) -> dict[str, Any]:
        """Nothing else runs."""
        bench = self._bench
        async with client.session() as session:
            traced = Traced(self._cluster, session)
            with ExitStack() as stack:
                links = {length: stack.enter_context(Link(length * TOKEN_BYTES, BLOCK)) for length in self._raw}

                async def after(name: str, length: int) -> None:
                    if name != "1p1d":
                        await asyncio.sleep(REST_S)
                        return
                    await traced.look(length)
                    if length in links:
                        self._raw[length].append(await asyncio.to_thread(links[length].seconds))

                found = await bench.in_turns(self._contenders, bench.rounds, session, after)
                two = {name: self._contenders[name] for name in ("single", "1p1d")}
                more = await bench.in_turns(two, 2 * bench.rounds, session, after, lengths=tuple(self._raw))
                for name, rounds in more.items():
                    for length, seen in rounds.items():
                        found[name][length] += seen
        print(timeline.text(traced.traces[REFERENCE], 120), flush=True)
        return {"idle": by_length(found), "idle_vs_single": self._versus(found),
                "handover_idle": {str(length): hand(traced, length, raw) for length, raw in self._raw.items()},
                "trace": msgspec.to_builtins(traced.traces[REFERENCE])}

    async def running(self) -> dict[str, Any]:
        """Eight others decode."""
        bench, contenders = self._bench, self._contenders
        found: dict[str, Rounds] = {name: {REFERENCE: []} for name in contenders}
        async with client.session() as session:
            busy = Traced(self._cluster, session)
            for _ in range(max(2, bench.rounds // 4)):
                for name in bench.draw.sample(sorted(contenders), len(contenders)):
                    async with Crowd(contenders[name], session, RUNNING, bench.draw):
                        for _ in range(2):
                            prompt = prompt_of(REFERENCE, bench.draw)
                            found[name][REFERENCE].append(await contenders[name].ask(session, prompt, OUT))
                            if name == "1p1d":
                                await busy.look(REFERENCE)
        return {"running_8": by_length(found), "running_8_vs_single": self._versus(found),
                "handover_running_8": hand(busy, REFERENCE, self._raw[REFERENCE])}

    async def reference(self) -> dict[str, Any]:
        """The reference workload."""
        async with client.session() as session:
            found = await self._bench.reference(self._contenders, self._bench.rounds, 3.0, session)
        return {"reference_workload": workload(found)}

    async def steps(self) -> dict[str, Any]:
        """Prefill's steps; decode is dead after it."""
        return {"prefill_steps": await asyncio.to_thread(measured_steps, self._cluster, self._single, self._bench,
                                                         5 * self._bench.rounds, OURS_REST_S)}


async def stage_one(bench: Bench, parts: Parts, *, second: bool) -> None:
    """One engine, two, and 1P1D."""
    single = bench.plain("s0")
    other = bench.plain("s1") if second else None
    cluster = bench.cluster("1p1d")
    for engine in (single, other):
        if engine is not None:
            engine.wait_ready()
    cluster.wait_ready()
    one = One(bench, single, other, cluster)
    for name, part in (("idle", one.idle), ("running_8", one.running), ("reference_workload", one.reference),
                       ("prefill_steps", one.steps)):
        await parts.take(name, part)


async def stage_two(bench: Bench, parts: Parts) -> None:
    """1P3D; one of its decode engines, asked directly, stands for one engine."""
    cluster = bench.cluster("1p3d")
    for _ in range(2):
        cluster.add(Role.DECODE).start()
    cluster.wait_ready()
    contenders: dict[str, Contender] = {"1p3d": Url(cluster.url), "one_of_it": Url(cluster.decode[-1].engine.url)}

    async def idle() -> dict[str, Any]:
        async with client.session() as session:
            found = await bench.in_turns(contenders, max(2, bench.rounds // 2), session)
        return {"idle": by_length(found), "idle_vs_one": against(found, "1p3d", "one_of_it")}

    async def reference() -> dict[str, Any]:
        async with client.session() as session:
            return {"reference_workload": workload(await bench.reference(contenders, bench.rounds, 3.0, session))}

    await parts.take("idle", idle)
    await parts.take("reference_workload", reference)


async def stage_own(bench: Bench, parts: Parts) -> None:
    """1P1D where each engine has a processor of its own, beside one engine that has the same one as prefill.

    One asks at a time, with a pause in which everybody falls idle, so that two engines on one processor never both run.
    """
    single, cluster = bench.plain("s3"), bench.cluster("own")
    single.wait_ready()
    cluster.wait_ready()
    prefill_engine, decode_engine = cluster.prefill[0].engine, cluster.decode[0].engine
    for engine, processor in ((single, 0), (prefill_engine, 0), (decode_engine, 1)):
        confine(engine, processor)
    known = decode_engine.record()
    assert known is not None
    peer = legs.Peer(InstanceName(decode_engine.name), known.incarnation, known.control)
    contenders: dict[str, Contender] = {"single": Url(single.url), "1p1d": Url(cluster.url)}
    direct: dict[str, Contender] = {name: Legs(prefill_engine.url, decode_engine.url, peer, late=name == "decode_late")
                                    for name in ("at_once", "decode_late")}

    async def rest(_name: str, _length: int) -> None:
        await asyncio.sleep(REST_S)

    async def idle() -> dict[str, Any]:
        async with client.session() as session:
            found = await bench.in_turns(contenders, bench.rounds, session, rest)
        return {"idle": by_length(found), "idle_vs_single": {"1p1d": against(found, "1p1d", "single")}}

    async def late() -> dict[str, Any]:
        async with client.session() as session:
            found = await bench.in_turns(direct, bench.rounds, session, rest, lengths=(REFERENCE,))
        return {"late": by_length(found), "late_vs_at_once": against(found, "decode_late", "at_once")}

    async def prefill() -> dict[str, Any]:
        return {"prefill_steps": await asyncio.to_thread(measured_steps, cluster, single, bench, 2 * bench.rounds, REST_S)}

    async def parked() -> dict[str, Any]:
        return {"parked_processors": await asyncio.to_thread(parked_processors, decode_engine, bench)}

    await parts.take("idle", idle)
    await parts.take("late", late)
    await parts.take("parked", parked)
    await parts.take("prefill_steps", prefill)


def parked_processors(decode: Engine, bench: Bench) -> float:
    """Processors that a decode engine takes while all it has is a leg that nobody announces KV for."""
    leg = legs.Leg(legs.VERSION, Role.DECODE, TransferId(uuid.uuid4().hex), Attempt(1), PARKED_S)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(decode.complete, prompt_of(REFERENCE, bench.draw), 1, kv_transfer_params=legs.encode(leg))
        time.sleep(1.0)
        used, began = processor_s(decode.group.pids()), time.monotonic()
        time.sleep(PARKED_S - 3.0)
        share = (processor_s(decode.group.pids()) - used) / (time.monotonic() - began)
        waiting.result(60.0)
    return round(share, 3)


def confine(engine: Engine, processor: int) -> None:
    """All threads of an engine stay on one processor."""
    for pid in engine.group.pids():
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {processor})


async def stage_three(bench: Bench, parts: Parts, *, site: Path) -> None:
    """The pair of vLLM's NixlConnector; says why where it does not run."""
    if not (site / "nixl").is_dir():
        parts.out["absent"] = f"nixl is not installed in {site} (python -m lab bench-kv installs it)"
        return
    single = bench.plain("s2")
    config = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"})
    pair = [bench.plain(name, "--kv-transfer-config", config,
                        env={"PYTHONPATH": str(site), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                             "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}) for name in ("nixl-p", "nixl-d")]
    try:
        for engine in (single, *pair):
            engine.wait_ready()
        contenders: dict[str, Contender] = {"single": Url(single.url), "nixl": Nixl(pair[0].url, pair[1].url)}
        async with client.session() as session:
            found = await bench.in_turns(contenders, max(2, bench.rounds // 2), session)
    except (ProcessFailed, RuntimeError, aiohttp.ClientError, TimeoutError) as error:
        parts.out["absent"] = f"{type(error).__name__}: {error}"[-1500:]
        parts.out["logs"] = {engine.name: engine.tail()[-1500:] for engine in pair}
        return
    parts.out |= {"idle": by_length(found), "idle_vs_single": {"nixl": against(found, "nixl", "single")}}
