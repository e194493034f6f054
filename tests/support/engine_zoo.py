"""Engines that are bad in their own ways while ``GET /health`` is answered, and traffic before them.

    async with zoo(Kind.HANGS, decodes=2, policy="round_robin") as z:
        await z.run(3.0)            requests at a steady rate, two streams and a whole answer in turn
        z.failures, z.bad.seen, z.cure()

``SIGSTOP`` is of a process of its own (``python engine_zoo.py``), which answers nothing at all while it is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from enum import Enum
from pathlib import Path
from typing import Any

from router_fleet import RouterFleet, fleet
from scripted_engine import Play, ScriptedEngine

from xpyd_sidecar.contract.ids import Role

RATE = 25.0
PATIENCE_S = 20.0
TOKENS = 4


class Kind(Enum):
    """In which way an engine is bad."""

    FAILS = "500 at once"
    HANGS = "hangs after accept"
    PAUSES = "hangs in mid-stream"
    HALVES = "half answers"
    SLOW = "slow by ten"
    STOPPED = "stopped by SIGSTOP"


def play_of(kind: Kind) -> Play:
    """How it answers while it is bad."""
    match kind:
        case Kind.FAILS:
            return Play(status=500)
        case Kind.HANGS:
            return Play(hold=asyncio.Event())
        case Kind.PAUSES:
            return Play(chunks=TOKENS, hold_after=(2, asyncio.Event()), delay=0.005)
        case Kind.HALVES:
            return Play(chunks=TOKENS, die_after=2)
        case Kind.SLOW:
            return Play(chunks=TOKENS, delay=0.05, before=0.05)
        case Kind.STOPPED:
            return Play(chunks=TOKENS)


class StoppedEngine:
    """An engine in a process of its own that can be stopped."""

    name = "d0"

    def __init__(self) -> None:
        self.address = ""
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])})
        assert self._process.stdout is not None
        self.address = (await asyncio.wait_for(self._process.stdout.readline(), 30.0)).decode().strip()

    def send(self, sign: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(sign)

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self.send(signal.SIGCONT)
            self._process.kill()
            await self._process.wait()


class Zoo:
    """A fleet one of whose decode (or prefill) engines is bad from the beginning."""

    def __init__(self, kind: Kind, f: RouterFleet, bad: ScriptedEngine, stopped: StoppedEngine | None) -> None:
        self.kind, self.fleet, self.bad, self.stopped = kind, f, bad, stopped
        self.asked = 0
        self.failures: list[str] = []
        self.ended: list[tuple[float, float]] = []
        """When each that was answered was asked, and how long it took."""
        self._loop = asyncio.get_running_loop()

    @property
    def member(self) -> Any:
        """The bad one, as the router has it."""
        return self.fleet.context.roster.find_by_name(self.bad.name)

    def got(self, since: float) -> int:
        """Legs that the bad one was sent since then (of ``time.perf_counter``), of requests that are over."""
        return sum(leg.instance == self.bad.name and leg.opened > since for record in self.records for leg in record.legs)

    def watch(self) -> None:
        """Remember what becomes of requests."""
        self.records = self.fleet.records()

    def cure(self) -> None:
        """It is well from now on."""
        self.bad.default = Play(chunks=TOKENS)
        if self.stopped is not None:
            self.stopped.send(signal.SIGCONT)

    async def run(self, seconds: float, rate: float = RATE) -> None:
        """Requests, of which each ends well or is a failure."""
        tasks, end = [], self._loop.time() + seconds
        while self._loop.time() < end:
            tasks.append(asyncio.create_task(self._ask(self.asked)))
            self.asked += 1
            await asyncio.sleep(1 / rate)
        await asyncio.gather(*tasks)

    async def _ask(self, number: int) -> None:
        began, stream = self._loop.time(), number % 3 != 0  # out of step with any turn of two
        try:
            answer = await asyncio.wait_for(self.fleet.complete(
                prompt=f"q{number} of the zoo", stream=stream, max_tokens=TOKENS, temperature=0), PATIENCE_S)
        except TimeoutError:
            self.failures.append("no answer")
            return
        whole = answer.complete and answer.status == 200
        if whole and stream:
            whole = answer.events[-1] == "[DONE]" and not any("error" in event for event in answer.events[:-1])
        if whole:
            self.ended.append((began, self._loop.time() - began))
        else:
            self.failures.append(f"{answer.status} {answer.body[:200]!r}")


@contextlib.asynccontextmanager
async def zoo(kind: Kind, *, decodes: int = 2, prefills: int = 1, role: Role = Role.DECODE,
              **settings: Any) -> AsyncIterator[Zoo]:
    """A router, good engines, and a bad one that comes first by name."""
    async with fleet(prefills, decodes, **settings) as f:
        for engine in (*f.p, *f.d):
            engine.default = Play(chunks=TOKENS, delay=0.005)
        bad = (f.d if role is Role.DECODE else f.p)[0]
        bad.default = play_of(kind)
        stopped = StoppedEngine() if kind is Kind.STOPPED else None
        one = Zoo(kind, f, bad, stopped)
        one.watch()
        try:
            if stopped is not None:
                await stopped.start()
                from beats import beat
                f.context.watch.on_message(beat(bad.name, role, stopped.address, seq=2, interval_s=60.0))
                stopped.send(signal.SIGSTOP)
            yield one
        finally:
            if stopped is not None:
                await stopped.stop()


async def _main() -> None:
    engine = await ScriptedEngine("d0").start()
    engine.default = Play(chunks=TOKENS, delay=0.005)
    sys.stdout.write(f"{engine.address}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)  # until whoever began it has gone
    await engine.stop()


if __name__ == "__main__":
    asyncio.run(_main())
