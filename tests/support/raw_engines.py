"""Engines that keep their connections and are plain sockets: what each does with a request is a function of the test's.

    async with standing((Role.DECODE, whole)) as (fleet, [engine]):
        answer = await fleet.complete()
        engine.asked[-1].connection, engine.asked[-1].nth      on which connection it came, as which of its requests

``GET /health`` is answered with 200 and not remembered. Those of ``socket_engines`` end a connection with its first answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from router_fleet import RouterFleet, fleet
from socket_engines import joined

from xpyd_sidecar.contract.ids import Role

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Request:
    """One request that came to an engine."""

    def __init__(self, body: dict[str, Any], connection: int, nth: int, writer: asyncio.StreamWriter) -> None:
        self.body, self.connection, self.nth, self.writer = body, connection, nth, writer
        self.gone = asyncio.Event()
        """The router has closed the connection, or its side of it."""

    @property
    def attempt(self) -> int | None:
        """Of the leg; None where it came without one."""
        number: int | None = (self.body.get("kv_transfer_params") or {}).get("attempt")
        return number

    async def say(self, data: bytes) -> None:
        """Write bytes."""
        self.writer.write(data)
        await self.writer.drain()

    def hang_up(self) -> None:
        """Close the connection."""
        self.writer.transport.abort()

    def shut(self) -> None:
        """Send the end of the connection, and read on."""
        self.writer.write_eof()


Serve = Callable[[Request], Awaitable[None]]


class Engine:
    """Reads whole requests, on any number of connections."""

    def __init__(self, name: str, role: Role, serve: Serve) -> None:
        self.name, self.role, self.serve = name, role, serve
        self.asked: list[Request] = []
        self.connections = 0
        self.tasks: set[asyncio.Task[None]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection."""
        self.connections += 1
        number, nth = self.connections, 0
        last: Request | None = None
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                    if head.startswith("get /health "):
                        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                        continue
                    size = int(head.partition("content-length: ")[2].partition("\r\n")[0])
                    body = json.loads(await reader.readexactly(size))
                    if "x-request-id: xpyd-canary-" in head:  # of the router's own, which no test is about
                        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                        continue
                    nth += 1
                    last = Request(body, number, nth, writer)
                    self.asked.append(last)
                    task = asyncio.create_task(self._serve(last))
                    self.tasks.add(task)
                    task.add_done_callback(self.tasks.discard)
        finally:
            if last is not None:
                last.gone.set()
            writer.transport.abort()

    async def _serve(self, request: Request) -> None:
        with contextlib.suppress(ConnectionError):
            await self.serve(request)


@contextlib.asynccontextmanager
async def standing(*serves: tuple[Role, Serve], **settings: Any) -> AsyncIterator[tuple[RouterFleet, list[Engine]]]:
    """A router before such engines."""
    async with fleet(0, 0, **settings) as f, contextlib.AsyncExitStack() as stack:
        engines = []
        for number, (role, serve) in enumerate(serves):
            engine = Engine(f"{role.value[0]}{number}", role, serve)
            stack.callback((await joined(f, engine.name, role, number, engine.accept)).close)
            engines.append(engine)
        try:
            yield f, engines
        finally:
            for task in [task for engine in engines for task in engine.tasks]:
                task.cancel()


async def whole(request: Request) -> None:
    """Answer in one piece."""
    body = json.dumps({"id": "r", "object": "text_completion", "created": 1, "model": "tiny", "choices": [
        {"index": 0, "text": "t0 ", "logprobs": None, "finish_reason": "length", "stop_reason": None}]}).encode()
    await request.say(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


async def streamed(request: Request) -> None:
    """Answer with a stream of one token."""
    event = json.dumps({"id": "r", "object": "text_completion", "created": 1, "model": "tiny", "choices": [
        {"index": 0, "text": "t0 ", "logprobs": None, "finish_reason": "length", "stop_reason": None}]}).encode()
    parts = [b"data: %b\n\n" % data for data in (event, b"[DONE]")]
    await request.say(STREAM + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n")
