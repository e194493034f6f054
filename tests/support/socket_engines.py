"""Engines that are plain sockets, behind a router: what each does with a leg is a function of the test's.

    async with site((Role.PREFILL, well), (Role.DECODE, dead)) as (fleet, [prefill, decode]):
        answer = await fleet.post("/v1/messages", MESSAGE)
        prefill.legs[0].body
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from beats import beat
from router_fleet import RouterFleet, fleet
from scripted_engine import BACKLOG

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import HostPort, Role

MESSAGE = {"model": "tiny", "max_tokens": 9, "stop_sequences": ["x"],
           "messages": [{"role": "user", "content": "Why?" * 40}]}
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b"event: message_start\ndata: {}\n\n"
WHOLE = b"%x\r\n%b\r\n0\r\n\r\n" % (len(EVENT), EVENT)


class Leg:
    """One request that came to an engine."""

    def __init__(self, engine: Engine, head: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.engine, self.head, self.body, self.writer = engine, head, body, writer
        self.gone = asyncio.Event()
        """The router closed the connection."""
        self.over = asyncio.Event()
        """It did, or asked the next thing on it."""

    @property
    def params(self) -> dict[str, Any]:
        params: dict[str, Any] = self.body.get(legs.FIELD) or {}
        return params

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, status: int = 200, body: bytes = b"{}") -> None:
        await self.say(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))

    async def stay(self) -> None:
        """Leave the connection open."""
        await self.over.wait()


Serve = Callable[[Leg], Awaitable[None]]


class Engine:
    """Reads whole requests and does what ``serve`` says; what it is done with ends with its connection."""

    def __init__(self, name: str, role: Role, serve: Serve) -> None:
        self.name, self.role, self.serve = name, role, serve
        self.legs: list[Leg] = []
        self.canaries: list[Leg] = []
        """Requests of the router's own."""
        self.healthy = False
        """It answers probes."""
        self.farewells: list[Leg] = []
        """By which the router takes legs back (``upstream.pool.CancelNotices``)."""
        self.tasks: set[asyncio.Task[Any]] = set()

    async def one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            first = await reader.read(1)
            while first:
                head = (first + await reader.readuntil(b"\r\n\r\n")).decode().lower()
                if head.startswith("get "):  # a probe
                    if self.healthy:
                        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                        await writer.drain()
                    return
                size = int(head.partition("content-length: ")[2].partition("\r\n")[0])
                leg = Leg(self, head, json.loads(await reader.readexactly(size)), writer)
                if leg.body.get("max_tokens") == -1:
                    self.farewells.append(leg)
                    await leg.answer(400)
                    first = await reader.read(1)
                    continue
                (self.canaries if "x-request-id: xpyd-canary-" in head else self.legs).append(leg)
                serving = asyncio.create_task(self._serve(leg))  # type: ignore[arg-type]
                self.tasks.add(serving)
                first = await reader.read(1)
                if not first:
                    leg.gone.set()
                leg.over.set()
                await serving
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    async def _serve(self, leg: Leg) -> None:
        with contextlib.suppress(ConnectionError):
            await self.serve(leg)
        if not leg.over.is_set():
            leg.writer.close()


async def joined(f: RouterFleet, name: str, role: Role, number: int,
                 accept: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> asyncio.Server:
    """An engine that listens and is known to the router; ``number``: none other has it."""
    server = await asyncio.start_server(accept, "127.0.0.1", 0, backlog=BACKLOG)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    f.context.watch.on_message(beat(name, role, address, interval_s=60.0, control=(HostPort(f"127.0.0.1:{number + 1}"),)))
    return server


@contextlib.asynccontextmanager
async def site(*serves: tuple[Role, Serve], **settings: Any) -> AsyncIterator[tuple[RouterFleet, list[Engine]]]:
    async with fleet(0, 0, **settings) as f, contextlib.AsyncExitStack() as stack:
        engines = []
        for number, (role, serve) in enumerate(serves):
            engine = Engine(f"e{number}", role, serve)
            stack.callback((await joined(f, engine.name, role, number, engine.one)).close)
            engines.append(engine)
        try:
            yield f, engines
            await f.wait(lambda: all(not m.in_flight for m in f.context.roster.members()), "every leg is closed")
        finally:
            for task in [task for engine in engines for task in engine.tasks]:
                task.cancel()


async def well(leg: Leg) -> None:
    """Prefill does what it is asked; decode streams."""
    if leg.engine.role is Role.PREFILL:
        await leg.answer()
    else:
        await asyncio.sleep(0.02)
        await leg.say(HEAD + WHOLE)
    await leg.stay()


async def dead(leg: Leg) -> None:
    """Break the connection."""


async def silent(leg: Leg) -> None:
    """Say nothing."""
    await leg.stay()


async def head_only(leg: Leg) -> None:
    """As vLLM does with a stream: 200 at once; a token when there is KV, or when none is waited for."""
    await leg.say(HEAD)
    if leg.params:
        await leg.stay()
    else:
        await leg.say(WHOLE)
        await leg.stay()


P, D = Role.PREFILL, Role.DECODE
