"""The stages of the benchmark."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import client
import msgspec
import steps
from client import Contender, Crowd, Nixl, Seen, Url, prompt_of
from cluster import Cluster
from engines import Engine
from figures import handover, last_kv, milliseconds, ratios, spread
from make_model import ensure_wide
from processes import ProcessFailed, free_port
from raw import Link

from xpyd_operator.cli import timeline
from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.contract.timeline import HEADER, PATH, Traces

LENGTHS = (256, 1024, 2048)
REFERENCE = 1024
OUT = 32
RUNNING = 8
BLOCK, TOKEN_BYTES = 256 << 10, 16 << 10
"""Of the model's KV: a block of one layer, and a token of all."""
ARGS = ("--max-model-len", "4096")
Rounds = dict[int, list[Seen]]
After = Callable[[str, int], Awaitable[None]]


class Bench:
    """What all stages share."""

    def __init__(self, folder: Path, rounds: int, stack: ExitStack) -> None:
        self.folder = folder
        self.rounds = rounds
        self.stack = stack
        self.draw = random.Random(0)
        self.model = ensure_wide()

    def plain(self, name: str, *args: str, **more: Any) -> Engine:
        """An engine without our connector, started."""
        engine = Engine(name, self.folder, connector=False, model=self.model, args=(*ARGS, *args), **more)
        return self.stack.enter_context(engine)

    def cluster(self, name: str) -> Cluster:
        """A router and 1P1D, started."""
        (self.folder / name).mkdir()
        return self.stack.enter_context(Cluster(self.folder / name, engine_args=ARGS, model=self.model))

    async def in_turns(self, contenders: Mapping[str, Contender], rounds: int, session: aiohttp.ClientSession,
                       after: After | None = None) -> dict[str, Rounds]:
        """Every contender once per length and round; ``after(name, length)`` follows each request."""
        found: dict[str, Rounds] = {name: {length: [] for length in LENGTHS} for name in contenders}
        for number in range(rounds + 1):
            for length in LENGTHS:
                for name in self.draw.sample(sorted(contenders), len(contenders)):
                    seen = await contenders[name].ask(session, prompt_of(length, self.draw), OUT)
                    if number:  # the first connects
                        found[name][length].append(seen)
                        if after is not None:
                            await after(name, length)
        return found

    async def reference(self, contenders: Mapping[str, Contender], requests: int, each_s: float,
                        session: aiohttp.ClientSession) -> dict[str, list[Seen]]:
        """1,024 tokens in, 200 out, at random times that are the same for all."""
        times, at = [], 0.0
        for _ in range(requests):
            times.append(at)
            at += self.draw.expovariate(1 / each_s)
        return {name: await client.workload(one, session, times, [prompt_of(REFERENCE, self.draw) for _ in times], 200)
                for name, one in contenders.items()}


def by_length(found: dict[str, Rounds]) -> dict[str, Any]:
    """Milliseconds by contender and length."""
    return {name: {str(length): {"ttft_ms": milliseconds([one.ttft for one in seen]),
                                 "tpot_ms": milliseconds([one.tpot for one in seen])}
                   for length, seen in rounds.items()} for name, rounds in found.items()}


def against(found: dict[str, Rounds], one: str, other: str) -> dict[str, Any]:
    """Ratios by length."""
    return {str(length): {"ttft": ratios([s.ttft for s in found[one][length]], [s.ttft for s in found[other][length]]),
                          "tpot": ratios([s.tpot for s in found[one][length]], [s.tpot for s in found[other][length]])}
            for length in found[one]}


class Traced:
    """Asks the router for the timeline of the last request."""

    def __init__(self, cluster: Cluster, session: aiohttp.ClientSession) -> None:
        self._url = cluster.url + PATH
        self._headers = {"Authorization": f"Bearer {keys.admin_token(keys.read(cluster.key_file))}", HEADER: "last 1"}
        self._session = session
        self.seconds: dict[int, list[float]] = {}
        self.last_kv: dict[int, list[float]] = {}
        self.traces: dict[int, Traces] = {}

    async def look(self, length: int) -> None:
        """Take the hand-over of the last request."""
        await asyncio.sleep(0.1)  # what decode notes of its first step comes with a later one
        async with self._session.get(self._url, headers=self._headers) as answer:
            traces = msgspec.json.decode(await answer.read(), type=Traces)
        [line] = traces.found
        ours = any(event.note == f"{length} tokens" for event in line.events)  # else one of those that run beside it
        if ours and (seconds := handover(line.events)) is not None:
            self.seconds.setdefault(length, []).append(seconds)
            self.last_kv.setdefault(length, []).append(last_kv(line.events) or 0.0)
            self.traces[length] = traces


async def stage_one(bench: Bench, *, second: bool) -> dict[str, Any]:
    """One engine, two, and 1P1D."""
    single = bench.plain("s0")
    other = bench.plain("s1") if second else None
    cluster = bench.cluster("1p1d")
    for engine in (single, other):
        if engine is not None:
            engine.wait_ready()
    cluster.wait_ready()
    contenders: dict[str, Contender] = {"single": Url(single.url), "1p1d": Url(cluster.url)}
    if other is not None:
        contenders["two_plain"] = Url(single.url, other.url)
    out: dict[str, Any] = {}
    async with client.session() as session:
        traced, busy = Traced(cluster, session), Traced(cluster, session)
        with ExitStack() as stack:
            links = {length: stack.enter_context(Link(length * TOKEN_BYTES, BLOCK)) for length in LENGTHS
                     if length >= REFERENCE}
            raw: dict[int, list[float]] = {length: [] for length in links}

            async def after(name: str, length: int) -> None:
                if name == "1p1d":
                    await traced.look(length)
                    if length in raw:
                        raw[length].append(await asyncio.to_thread(links[length].seconds))

            idle = await bench.in_turns(contenders, bench.rounds, session, after)
        print(timeline.text(traced.traces[REFERENCE], 120), flush=True)
        out["idle"] = by_length(idle)
        out["idle_vs_single"] = {name: against(idle, name, "single") for name in contenders if name != "single"}
        out["handover_idle"] = {str(length): hand(traced, length, raw[length]) for length in raw}
        running: dict[str, Rounds] = {name: {REFERENCE: []} for name in contenders}
        for _ in range(max(2, bench.rounds // 4)):
            for name in bench.draw.sample(sorted(contenders), len(contenders)):
                async with Crowd(contenders[name], session, RUNNING, bench.draw):
                    for _ in range(2):
                        running[name][REFERENCE].append(
                            await contenders[name].ask(session, prompt_of(REFERENCE, bench.draw), OUT))
                        if name == "1p1d":
                            await busy.look(REFERENCE)
        out["running_8"] = by_length(running)
        out["running_8_vs_single"] = {name: against(running, name, "single") for name in contenders if name != "single"}
        out["handover_running_8"] = hand(busy, REFERENCE, raw[REFERENCE])
        work = await bench.reference(contenders, bench.rounds, 3.0, session)
        out["reference_workload"] = workload(work)
    prefill, decode = cluster.prefill[0].engine, cluster.decode[0].engine
    out["prefill_steps"] = steps.measure(prefill, decode, single, bench.rounds, bench.draw)
    for engine in (single, other):
        if engine is not None:
            engine.kill()
    cluster.kill()
    out["trace"] = msgspec.to_builtins(traced.traces[REFERENCE])
    return out


def hand(traced: Traced, length: int, raw: Sequence[float]) -> dict[str, Any]:
    """Hand-overs beside the link alone."""
    if not traced.seconds.get(length):
        return {"handover_ms": None}
    alone = statistics.median(raw)
    whole, late = traced.seconds[length], traced.last_kv[length]
    return {"handover_ms": milliseconds(whole), "last_kv_to_decode_ms": milliseconds(late),
            "transfer_ms": milliseconds(raw),
            "ratio": spread([one / alone for one in whole]), "last_kv_ratio": spread([one / alone for one in late])}


def workload(found: dict[str, list[Seen]]) -> dict[str, Any]:
    """Medians and the slowest tenth."""
    return {name: {"ttft_ms": milliseconds([one.ttft for one in seen]), "tpot_ms": milliseconds([one.tpot for one in seen]),
                   "ttft_p90_ms": round(1000 * statistics.quantiles([one.ttft for one in seen], n=10)[-1], 1)}
            for name, seen in found.items()}


async def stage_two(bench: Bench) -> dict[str, Any]:
    """1P3D; one of its decode engines, asked directly, stands for one engine."""
    cluster = bench.cluster("1p3d")
    for _ in range(2):
        cluster.add(Role.DECODE).start()
    cluster.wait_ready()
    contenders: dict[str, Contender] = {"1p3d": Url(cluster.url), "one_of_it": Url(cluster.decode[-1].engine.url)}
    async with client.session() as session:
        idle = await bench.in_turns(contenders, max(2, bench.rounds // 2), session)
        work = await bench.reference(contenders, bench.rounds, 3.0, session)
    cluster.kill()
    return {"idle": by_length(idle), "idle_vs_one": against(idle, "1p3d", "one_of_it"),
            "reference_workload": workload(work)}


async def stage_three(bench: Bench, site: Path) -> dict[str, Any]:
    """The pair of vLLM's NixlConnector; says why where it does not run."""
    if not (site / "nixl").is_dir():
        return {"absent": f"nixl is not installed in {site} (make bench-kv installs it)"}
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
            idle = await bench.in_turns(contenders, max(2, bench.rounds // 2), session)
    except (ProcessFailed, RuntimeError, aiohttp.ClientError, TimeoutError) as error:
        tails = {engine.name: engine.tail()[-1500:] for engine in pair}
        return {"absent": f"{type(error).__name__}: {error}"[-1500:], "logs": tails}
    finally:
        for engine in (single, *pair):
            engine.kill()
    return {"idle": by_length(idle), "idle_vs_single": {"nixl": against(idle, "nixl", "single")}}
