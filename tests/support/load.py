"""A mixed load on a router process of its own, before scripted engines: rates, failures, and the router's memory.

    report = await mixed_load(folder, seconds=8.0)
    report.check()

Streams and whole answers, chats, short and long prompts, clients that leave, bad requests, engines that die in mid-stream,
looks at the router's own pages; at half the rate that the same mix reaches when as much as possible is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression
from typing import Any

from aborts import Aborts, leave
from beats import SERVICE, Beater, beat
from cluster import start_sidecar
from judge import judge
from processes import Group, free_port
from recorded import Request, load
from recorded_requests import PATHS
from replay import Replay
from router_fleet import Answer, read_answer, request_bytes
from scripted_engine import Play, ScriptedEngine, Seen

from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.contract.launch import RouterConfig, SidecarConfig

WARM_UP_S = 2.0
LEAST = 500
"""Requests that are sent, however long a slow machine takes: every kind is among them."""
AT_ONCE = 16
ANSWER_S = 60.0
BEAT_S = 0.5
KEPT_S = 5.0
"""What the heartbeats say of the next one: a test that stands still for a moment loses no engine."""
GROWTH_KIB = 4096
"""Allowed growth of the router's memory over the measured time."""
LARGE = "A lease ends. " * 9000


@dataclass
class Report:
    """What came of it."""

    seconds: float = 0.0
    capacity_per_s: float = 0.0
    rate_per_s: float = 0.0
    requests: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    rss_kib: list[tuple[float, int]] = field(default_factory=list)
    """Of the router's process, by seconds since the start."""

    @property
    def growth_kib(self) -> float:
        """What the line through the last two thirds of the samples says of the time they cover."""
        samples = self.rss_kib[len(self.rss_kib) // 3:]
        times, sizes = [at for at, _ in samples], [float(size) for _, size in samples]
        return linear_regression(times, sizes).slope * (times[-1] - times[0])

    def check(self) -> None:
        """The goals: no failure, flat memory."""
        assert not self.failures, self.failures[:5]
        assert self.growth_kib < GROWTH_KIB, (self.growth_kib, self.rss_kib[::max(1, len(self.rss_kib) // 10)])

    def told(self) -> dict[str, Any]:
        """For the results file."""
        return {"seconds": round(self.seconds, 1), "capacity_per_s": round(self.capacity_per_s, 1),
                "rate_per_s": round(self.rate_per_s, 1), "requests": self.requests, "kinds": dict(self.kinds),
                "failures": len(self.failures), "examples": self.failures[:5], "rss_growth_kib": round(self.growth_kib),
                "rss_kib_per_minute": round(self.growth_kib / max(1e-9, self.seconds * 2 / 3) * 60, 1),
                "rss_mb": round(max(size for _, size in self.rss_kib) / 1024, 1)}


class _Mix:
    """One kind of request after the other, at random."""

    def __init__(self, port: int, source: random.Random, report: Report) -> None:
        self._port = port
        self._random = source
        self._report = report
        self._number = 0
        self._requests = load().requests
        self._repeatable = [one for one in self._requests if one.way != "error"]
        self._kinds: dict[str, tuple[int, Callable[[], Awaitable[str]]]] = {
            "stream": (50, self._stream), "killed": (4, self._killed), "whole": (25, self._whole),
            "large": (2, self._large), "leaves": (6, self._leaves), "bad": (5, self._bad), "pages": (8, self._page)}

    async def one(self) -> None:
        """Send one, and judge its answer."""
        kind = self._random.choices(list(self._kinds), [weight for weight, _ in self._kinds.values()])[0]
        try:
            fault = await self._kinds[kind][1]()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, AssertionError) as error:
            fault = repr(error)
        self._report.requests += 1
        self._report.kinds[kind] += 1
        if fault:
            self._report.failures.append(f"{kind}: {fault}")

    async def _ask(self, raw: bytes) -> Answer:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 26)
        try:
            writer.write(raw)
            return await read_answer(reader, ANSWER_S)
        finally:
            writer.transport.abort()

    def _raw(self, request: Request, prefix: str = "s", **more: Any) -> bytes:
        self._number += 1
        return request_bytes(PATHS[request.api], {"model": "tiny", **request.body, **more},
                             headers={"X-Request-Id": f"{prefix}-{self._number}"})

    async def _stream(self, prefix: str = "s") -> str:
        request = self._random.choice(self._repeatable if prefix == "k" else self._requests)
        answer = await self._ask(self._raw(request, prefix, stream=True))
        if answer.status != 200:
            return f"{request.name}: {answer.status} {answer.body[:300].decode()}"
        verdict = judge(request, answer.events, complete=answer.complete)
        return "" if verdict.finished else f"{request.name}: {verdict.fault or answer.body[-300:].decode()}"

    async def _killed(self) -> str:
        return await self._stream("k")

    async def _whole(self) -> str:
        request = self._random.choice(self._requests)
        answer = await self._ask(self._raw(request))
        right = answer.status == 200 and answer.json["choices"] == request.whole["choices"]
        return "" if right else f"{request.name}: {answer.status} {answer.body[:300].decode()}"

    async def _large(self) -> str:
        answer = await self._ask(request_bytes("/v1/completions", {"prompt": LARGE, "max_tokens": 1, "temperature": 0}))
        return "" if answer.status == 200 else f"{answer.status} {answer.body[:300].decode()}"

    async def _leaves(self) -> str:
        await leave(self._port, self._random, Aborts(), self._raw(self._random.choice(self._requests), stream=True), 0.05)
        return ""

    async def _bad(self) -> str:
        raw, status = self._random.choice(((b"{", 400), (b'{"prompt":"x","model":"other"}', 404),
                                           (b'{"prompt":"x","kv_transfer_params":{}}', 400), (b"[]", 400)))
        answer = await self._ask(request_bytes("/v1/completions", raw))
        return "" if answer.status == status else f"{raw!r}: {answer.status}"

    async def _page(self) -> str:
        page = self._random.choice(("/metrics", "/health", "/ready", "/v1/models"))
        answer = await self._ask(request_bytes(page, method="GET"))
        return "" if answer.status == 200 else f"{page}: {answer.status}"


def _chooser(engine: ScriptedEngine, source: random.Random, killed: set[str]) -> Callable[[Seen], Play | None]:
    """Streams of ``killed`` requests end once, at a random place."""

    def choose(seen: Seen) -> Play | None:
        if len(engine.seen) > 1000:
            del engine.seen[:500]
        name = seen.headers.get("x-request-id", "")
        if not name.startswith("k-") or name in killed:
            return None
        if len(killed) > 10000:
            killed.clear()
        killed.add(name)
        return Play(close_after=source.randrange(1, 20))

    return choose


@contextlib.asynccontextmanager
async def running(
    folder: Path, prefills: int = 2, decodes: int = 3, *, api_key_file: str | None = None
) -> AsyncIterator[tuple[int, Group]]:
    """A router process that knows scripted engines; its port."""
    key_file = folder / "key"
    keys.write(key_file, keys.mint())
    port, members, admin = free_port(), free_port(), free_port()
    config = SidecarConfig(
        service=SERVICE, instance=InstanceName("router"), key_file=str(key_file), run_dir=str(folder), log_level="warning",
        router=RouterConfig(host="127.0.0.1", port=port, members_port=members, admin_port=admin,
                            heartbeat_s=BEAT_S, resolve_s=BEAT_S,
                            access_log=False, policy="least_loaded", api_key_file=api_key_file))
    replay, source = Replay(load()), random.Random(5)
    killed: set[str] = set()
    engines = {f"p{i}": Role.PREFILL for i in range(prefills)} | {f"d{i}": Role.DECODE for i in range(decodes)}
    started = {name: await ScriptedEngine(name, replay).start() for name in engines}
    for name, role in engines.items():
        if role is Role.DECODE:
            started[name].choose = _chooser(started[name], source, killed)
    router = start_sidecar(folder, "router", config)
    agents = {name: Beater(members, keys.read(key_file), name.encode()) for name in engines}

    async def beats() -> None:
        number = 0
        while True:
            number += 1
            for name, agent in agents.items():
                await agent.send(beat(name, engines[name], started[name].address, seq=number, interval_s=KEPT_S))
            await asyncio.sleep(BEAT_S)

    beating = asyncio.create_task(beats())
    try:
        await wait_ready(port, router)
        yield port, router
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        router.kill()
        for agent in agents.values():
            agent.close()
        for engine in started.values():
            await engine.stop()


async def wait_ready(port: int, router: Group) -> None:
    """Wait until the router at ``port`` says that it is ready."""
    for _ in range(600):
        assert router.returncode() is None, router.tail()
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_bytes("/ready", method="GET"))
            ready = (await read_answer(reader)).status == 200
            writer.close()
            if ready:
                return
        await asyncio.sleep(0.1)
    raise AssertionError(f"the router is not ready: {router.tail()}")


def rss_kib(pid: int) -> int:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise ProcessLookupError(pid)


async def mixed_load(folder: Path, seconds: float, seed: int = 1) -> Report:
    """Measure what the mix reaches, then half of it for so many seconds."""
    report, source = Report(), random.Random(seed)
    loop = asyncio.get_running_loop()
    async with running(folder) as (port, router):
        warm = Report()
        mix = _Mix(port, source, warm)
        end = loop.time() + WARM_UP_S

        async def saturate() -> None:
            while loop.time() < end:
                await mix.one()

        await asyncio.gather(*(saturate() for _ in range(AT_ONCE)))
        report.capacity_per_s = warm.requests / WARM_UP_S
        report.failures += warm.failures
        report.rate_per_s = report.capacity_per_s / 2
        mix = _Mix(port, source, report)
        began = loop.time()
        tasks: set[asyncio.Task[None]] = set()
        sampled, sent = 0.0, 0
        while (now := loop.time() - began) < seconds or sent < LEAST:
            while sent < now * report.rate_per_s and len(tasks) < AT_ONCE * 4:
                sent += 1
                tasks.add(task := loop.create_task(mix.one()))
                task.add_done_callback(tasks.discard)
            if now >= sampled:
                report.rss_kib.append((now, rss_kib(router.pid)))
                sampled = now + seconds / 120
            await asyncio.sleep(0.005)
        await asyncio.gather(*tasks)
        report.seconds = loop.time() - began
        assert router.returncode() is None, router.tail()
    return report
