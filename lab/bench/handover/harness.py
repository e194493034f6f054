"""What the stages share: engines, rounds, traces, and how what was seen is put down."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import client
import msgspec
from client import Contender, Seen, prompt_of
from cluster import Cluster
from engines import Engine
from figures import handover, last_kv, milliseconds, ratios, spread
from make_model import ensure_wide

from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.timeline import HEADER, PATH, Traces

LENGTHS = (256, 1024, 2048)
REFERENCE = 1024
OUT = 32
BLOCK, TOKEN_BYTES = 256 << 10, 16 << 10
"""Of the model's KV: a block of one layer, and a token of all."""
ARGS = ("--max-model-len", "4096")
Rounds = dict[int, list[Seen]]
After = Callable[[str, int], Awaitable[None]]


class Parts:
    """Parts of a stage, one after the other. One that fails is named in the result, and the others are measured."""

    def __init__(self) -> None:
        self.out: dict[str, Any] = {}
        self.failed = False

    async def take(self, name: str, part: Callable[[], Awaitable[dict[str, Any] | None]]) -> None:
        """Measure one, and say what came out."""
        began = time.monotonic()
        try:
            self.out |= await part() or {}
        except Exception as error:  # noqa: BLE001 (it is named in the result, and makes the exit code 1)
            traceback.print_exc()
            self.failed = True
            self.out[f"{name}_failed"] = f"{type(error).__name__}: {error}"[-1500:]
        print(f"  {name}: {time.monotonic() - began:.0f} s", flush=True)


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
                       after: After | None = None, *, lengths: Sequence[int] = LENGTHS) -> dict[str, Rounds]:
        """Every contender once per length and round; ``after(name, length)`` follows each request."""
        found: dict[str, Rounds] = {name: {length: [] for length in lengths} for name in contenders}
        for number in range(rounds + 1):
            for length in lengths:
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
    """Ratios by length, of the rounds that both were in: one that was asked less often was left out of the last ones."""
    out = {}
    for length in found[one]:
        seen = list(zip(found[one][length], found[other][length], strict=False))
        out[str(length)] = {"ttft": ratios([a.ttft for a, _ in seen], [b.ttft for _, b in seen]),
                            "tpot": ratios([a.tpot for a, _ in seen], [b.tpot for _, b in seen])}
    return out


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
