"""A router under load, before scripted engines that beat: what the dashboard's tests and its picture look at.

    async with stage(prefills=2, decodes=3) as s:
        await s.load(rate=20, seconds=5)
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

from made_streams import MadeReplay, made_line
from router_fleet import KEY, RouterFleet, fleet, request_bytes
from scripted_engine import Play, ScriptedEngine

from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.membership import Drafts, Load

TOKEN = keys.admin_token(KEY)


class Stage:
    """Engines that beat by themselves, and clients."""

    def __init__(self, made: RouterFleet, draw: random.Random) -> None:
        self.fleet = made
        self.silent: set[str] = set()
        """Engines that beat no more."""
        self.kept: dict[str, float] = {}
        """KV that an engine holds beside that of its open requests."""
        self.drafts: dict[str, Drafts] = {}
        """Of engines that speculate."""
        self._draw = draw

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.fleet.router.admin_port}/dashboard"

    async def beats(self) -> None:
        """Every engine tells its load, again and again."""
        while True:
            for engine in (*self.fleet.p, *self.fleet.d):
                if engine.name not in self.silent:
                    self.beat(engine)
            await asyncio.sleep(0.4)

    def beat(self, engine: ScriptedEngine, **fields: Any) -> None:
        running = min(engine.open, 16)
        usage = min(0.97, self.kept.get(engine.name, 0.05) + 0.02 * engine.open)
        load = Load(running=running, waiting=engine.open - running, kv_usage=usage, transfers=engine.open,
                    drafts=self.drafts.get(engine.name))
        self.fleet.beat(engine, **{"interval_s": 60.0, "load": load, **fields})

    async def load(self, rate: float, seconds: float, **fields: Any) -> None:
        """Streams that come at random, so many a second on average, until all have ended."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        async with asyncio.TaskGroup() as asking:
            while loop.time() < end:
                asking.create_task(self._ask(fields))
                await asyncio.sleep(self._draw.expovariate(rate))

    async def _ask(self, fields: dict[str, Any]) -> None:
        body = {"model": "tiny", "prompt": "text", "max_tokens": self._draw.randrange(16, 40), "temperature": 0,
                "stream": True, **fields}
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # broken streams are part of the load
            await self.fleet.raw(request_bytes("/v1/completions", body), timeout_s=60.0)


@contextlib.asynccontextmanager
async def stage(prefills: int = 2, decodes: int = 3, seed: int = 1, **settings: Any) -> AsyncIterator[Stage]:
    """Start it; it is quick to answer, and answers take about a second."""
    draw = random.Random(seed)
    async with fleet(prefills, decodes, MadeReplay(made_line("completions", draw)), **settings) as made:
        made_stage = Stage(made, draw)
        for number, engine in enumerate(made.p):
            engine.default = Play(before=0.05 + 0.03 * number)
        for number, engine in enumerate(made.d):
            engine.default = Play(before=0.09 + 0.02 * number, delay=0.02 + 0.008 * number)
        beating = asyncio.create_task(made_stage.beats())
        try:
            yield made_stage
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
