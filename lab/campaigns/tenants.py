"""Tenants of four routers for an hour: does each get its tokens, and does a flood by one move another's first token?

    python -m lab campaign-tenants                   an hour: bench/results/campaign_tenants.json
    python -m lab campaign-tenants --minutes 6       a look

Fifty tenants have between 6,000 and 60,000 tokens a minute, want half as much again, and ask routers in shares that
change every five minutes. What their answers say that was used is compared with their tokens of the hour, after two
minutes in which what may be taken at once is taken. One more tenant has no bound, and its times to the first token are
compared between minutes with a flood and minutes without: in every second pair of minutes another tenant asks a hundred
times a second, from a process of its own, and is refused as soon as its tokens are gone.

Routers are processes of this tree; engines work as the simulation's instances do, and their agents carry what routers tell
each other (``lab/bench/drill``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import zmq

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "lab" / "bench" / "drill")]

from model_engine import BEAT_S, Handed, ModelEngine  # noqa: E402 (its folder is not on the path before)
from processes import Group, free_port  # noqa: E402

from xpyd_operator.simulation.engine import EngineModel  # noqa: E402
from xpyd_sidecar.contract import keys, tenants  # noqa: E402
from xpyd_sidecar.contract.ids import HostPort, Role  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "campaign_tenants.json"
SERVICE, MODEL = "tenants", "tiny"
TENANTS, ROUTERS, PREFILLS, DECODES = 50, 4, 2, 4
LEAST, MOST = 6_000, 60_000
"""Tokens a minute."""
WANTED = 1.5
PROMPT, OUTPUT = 1_000, 100
CHANGE_S, WARM_S, PHASE_S = 300.0, 120.0, 120.0
OTHER_HZ, FLOOD_HZ, FLOODER = 5.0, 100.0, 6_000
ENGINE = EngineModel(prefill_start=0.01, prefill_rate=200_000, step_base=0.002, step_per_request=0.00001, max_requests=512,
                     kv_tokens=4_000_000, handover=0.005, kv_bytes=147_456, link=12.5e9, cold_start=1.0)
READY_S, ANSWER_S = 60.0, 120.0
BROKEN = (aiohttp.ClientError, TimeoutError, ValueError)
"""What a request ends with that has no answer."""


class Account:
    """One tenant: its key, its bound, and what it has used."""

    def __init__(self, name: str, per_minute: int | None, draw: random.Random) -> None:
        self.name, self.per_minute = name, per_minute
        self.key = tenants.new_key()
        self.used = self.answered = self.refused = self.failed = 0
        self._draw = draw
        self.shares = [1.0] * ROUTERS

    def change(self) -> None:
        """Its clients go to other routers."""
        self.shares = [self._draw.random() ** 3 + 0.01 for _ in range(ROUTERS)]

    def router(self) -> int:
        """Of its next request."""
        return self._draw.choices(range(ROUTERS), self.shares)[0]

    def entry(self) -> dict[str, Any]:
        """In the document."""
        bound = {} if self.per_minute is None else {"tokensPerMinute": self.per_minute}
        return {"name": self.name, "digests": [tenants.digest_of(self.key)], **bound}


class Fleet:
    """Routers and engines."""

    def __init__(self, folder: Path, accounts: list[Account]) -> None:
        self._folder = folder
        self.key = keys.mint()
        self.clients = folder / "clients.json"
        self.clients.write_text(json.dumps({"tenants": [each.entry() for each in accounts]}))
        self.ports = [free_port() for _ in range(ROUTERS)]
        self._members = [free_port() for _ in range(ROUTERS)]
        self._groups: list[Group] = []
        self._context: zmq.Context[Any] = zmq.Context()
        handed = Handed()
        self._engines = [
            ModelEngine(f"{role}-{at}", role, f"127.77.{number}.{at + 1}", ENGINE, handed, service=SERVICE, served=MODEL,
                        key=self.key)
            for number, (role, count) in enumerate(((Role.PREFILL, PREFILLS), (Role.DECODE, DECODES)))
            for at in range(count)]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Until the block is left."""
        beating: asyncio.Task[None] | None = None
        try:
            for number in range(ROUTERS):
                self._begin(number)
            for engine in self._engines:
                await engine.begin()
            beating = asyncio.create_task(self._beat())
            await self._wait_ready()
            yield
        finally:
            if beating is not None:
                beating.cancel()
                await asyncio.gather(beating, return_exceptions=True)
            for engine in self._engines:
                engine.farewell()
                await engine.die()
            for group in self._groups:
                group.kill()

    def _begin(self, number: int) -> None:
        home = self._folder / f"router-{number}"
        home.mkdir()
        keys.write(home / "key", self.key)
        router = {"host": "127.0.0.1", "port": self.ports[number], "members_port": self._members[number],
                  "admin_port": free_port(), "model": MODEL, "api_key_file": str(self.clients), "access_log": False}
        config = {"service": SERVICE, "instance": f"router-{number}", "key_file": str(home / "key"), "run_dir": str(home),
                  "log_level": "warning", "router": router}
        (home / "config.json").write_text(json.dumps(config))
        self._groups.append(Group([sys.executable, "-m", "xpyd_sidecar", "--config", str(home / "config.json")],
                                  log=home / "log", env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}))

    async def _beat(self) -> None:
        routers = [HostPort(f"127.0.0.1:{port}") for port in self._members]
        while True:
            for engine in self._engines:
                engine.tell(self._context, routers, draining=False)
            await asyncio.sleep(BEAT_S)

    async def _wait_ready(self) -> None:
        end = time.monotonic() + READY_S
        async with aiohttp.ClientSession() as session:
            for group, port in zip(self._groups, self.ports, strict=True):
                while not await _is_ready(session, port):
                    if time.monotonic() > end:
                        raise TimeoutError(group.tail())
                    await asyncio.sleep(0.2)


async def _is_ready(session: aiohttp.ClientSession, port: int) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        async with session.get(f"http://127.0.0.1:{port}/health") as answer:
            return answer.status == 200
    return False


class Load:
    """Clients of all tenants."""

    def __init__(self, fleet: Fleet, accounts: list[Account], other: Account, seed: int) -> None:
        self._fleet, self._accounts, self._other = fleet, accounts, other
        self._draw = random.Random(seed)
        self.counting = self.flooded = False
        self.first_s: dict[bool, list[float]] = {False: [], True: []}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, minutes: float, flood: asyncio.subprocess.Process) -> None:
        """Two minutes, and then so many that count."""
        assert flood.stdin is not None
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0),
                                         timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session:
            loops = [asyncio.create_task(each) for each in (
                self._changing(), self._asking_other(session), *(self._asking(session, one) for one in self._accounts))]
            try:
                await asyncio.sleep(WARM_S)
                self.counting, began = True, time.monotonic()
                while (left := 60 * minutes - (time.monotonic() - began)) > 0:
                    await asyncio.sleep(min(PHASE_S, left))
                    self.flooded = not self.flooded
                    flood.stdin.write(b"on\n" if self.flooded else b"off\n")
                self.counting = False
            finally:
                for task in (*loops, *self._tasks):
                    task.cancel()
                await asyncio.gather(*loops, *self._tasks, return_exceptions=True)
                flood.stdin.close()

    async def _changing(self) -> None:
        while True:
            for each in self._accounts:
                each.change()
            await asyncio.sleep(CHANGE_S)

    async def _asking(self, session: aiohttp.ClientSession, one: Account) -> None:
        assert one.per_minute is not None
        every_s = 60 * (PROMPT + OUTPUT) / (WANTED * one.per_minute)
        while True:
            await asyncio.sleep(self._draw.expovariate(1 / every_s))
            self._begin(self._ask(session, one))

    async def _asking_other(self, session: aiohttp.ClientSession) -> None:
        while True:
            await asyncio.sleep(self._draw.expovariate(OTHER_HZ))
            self._begin(self._ask_first(session))

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _request(self, one: Account, *, stream: bool) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": [self._draw.randrange(10, 900) for _ in range(PROMPT)], "max_tokens": OUTPUT,
                "stream": stream}
        return {"url": f"http://127.0.0.1:{self._fleet.ports[one.router()]}/v1/completions", "json": body,
                "headers": {"Authorization": f"Bearer {one.key}"}}

    async def _ask(self, session: aiohttp.ClientSession, one: Account) -> None:
        counts = self.counting
        try:
            async with session.post(**self._request(one, stream=False)) as answer:
                if answer.status == 200:
                    usage = (await answer.json())["usage"]
                    one.used += usage["total_tokens"] if counts else 0
                    one.answered += counts
                else:
                    one.refused += counts and answer.status == 429
                    one.failed += answer.status != 429
        except BROKEN:
            one.failed += 1

    async def _ask_first(self, session: aiohttp.ClientSession) -> None:
        counts, flooded, began = self.counting, self.flooded, time.perf_counter()
        try:
            async with session.post(**self._request(self._other, stream=True)) as answer:
                self._other.failed += answer.status != 200
                async for line in answer.content:
                    if line.startswith(b"data: "):
                        if counts and flooded == self.flooded:
                            self.first_s[flooded].append(time.perf_counter() - began)
                        break
                await answer.read()
        except BROKEN:
            self._other.failed += 1


async def flood(ports: list[int], key: str) -> None:
    """The process of the flood: ``on`` and ``off`` come by lines."""
    going, statuses = asyncio.Event(), dict[int, int]()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    head = {"Authorization": f"Bearer {key}"}
    body = {"model": MODEL, "prompt": [10] * PROMPT, "max_tokens": OUTPUT}
    tasks: set[asyncio.Task[None]] = set()

    async def ask(session: aiohttp.ClientSession, port: int) -> None:
        status = 0
        with contextlib.suppress(*BROKEN):
            async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body, headers=head) as answer:
                await answer.read()
                status = answer.status
        statuses[status] = statuses.get(status, 0) + 1

    async def send(session: aiohttp.ClientSession) -> None:
        while True:
            await going.wait()
            task = asyncio.create_task(ask(session, random.choice(ports)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(1 / FLOOD_HZ)

    async with aiohttp.ClientSession() as session:
        sending = asyncio.create_task(send(session))
        while line := await reader.readline():
            (going.set if line == b"on\n" else going.clear)()
        sending.cancel()
        await asyncio.gather(sending, *tasks, return_exceptions=True)
    print(json.dumps(statuses), flush=True)


async def run(minutes: float, seed: int) -> dict[str, Any]:
    """All of it; the figures."""
    draw = random.Random(seed)
    accounts = [Account(f"tenant-{at}", round(LEAST * (MOST / LEAST) ** draw.random()), random.Random(seed + at))
                for at in range(TENANTS)]
    other, flooder = Account("other", None, random.Random(seed - 1)), Account("flooder", FLOODER, random.Random(seed - 2))
    with tempfile.TemporaryDirectory(prefix="xpyd-tenants-") as folder:
        fleet = Fleet(Path(folder), [*accounts, other, flooder])
        async with fleet.running():
            process = await asyncio.create_subprocess_exec(
                sys.executable, __file__, "--flood", flooder.key, "--ports", *map(str, fleet.ports),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
            load = Load(fleet, accounts, other, seed)
            await load.run(minutes, process)
            said, _ = await process.communicate()
        secret = fleet.clients.read_text()
    off = {one.name: 100 * (one.used / ((one.per_minute or 1) * minutes) - 1) for one in accounts}
    worst = max(off, key=lambda name: abs(off[name]))
    calm, flooded = (statistics.quantiles(load.first_s[each], n=20)[18] for each in (False, True))
    return {
        "minutes": minutes, "tenants": TENANTS, "routers": ROUTERS, "answered": sum(one.answered for one in accounts),
        "refused": sum(one.refused for one in accounts), "failed": sum(one.failed for one in (*accounts, other)),
        "worst_off_percent": round(abs(off[worst]), 3), "off_percent": [round(value, 2) for value in sorted(off.values())],
        "ttft_p95_ms": round(1000 * calm, 2), "ttft_p95_ms_in_a_flood": round(1000 * flooded, 2),
        "moved_percent": round(100 * (flooded / calm - 1), 2),
        "samples": [len(load.first_s[each]) for each in (False, True)], "flood": json.loads(said),
        "keys_in_the_document": sum(one.key in secret for one in (*accounts, other, flooder))}


def main() -> int:
    """Run it; 1 where a tenant is off by more than 1 %, a flood moves another by 5 % or more, or something fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 30))
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--flood", help=argparse.SUPPRESS)
    parser.add_argument("--ports", type=int, nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.minutes * 60 < 2 * PHASE_S:
        parser.error(f"--minutes: at least {2 * PHASE_S / 60:g}, half of them with the flood")
    if args.flood:
        asyncio.run(flood(args.ports, args.flood))
        return 0
    told = {"seed": args.seed, "load": os.getloadavg()[0]} | asyncio.run(run(args.minutes, args.seed))
    text = json.dumps(told, indent=1) + "\n"
    if args.write:
        RESULTS.write_text(text)
    print(text)
    broken = told["failed"] or told["keys_in_the_document"] or told["flood"].get("0")
    return int(bool(broken) or told["worst_off_percent"] > 1 or told["moved_percent"] >= 5)


if __name__ == "__main__":
    sys.exit(main())
