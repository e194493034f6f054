"""A relay between a router and one engine that cuts streams at a byte, and leaves the engine alone.

    relay = await CuttingRelay(engine.port, choose).start()       the router is told of relay.port
    choose(body) -> Cut(at, real=True)                            of the answer to this request; None: it is let through

Both connections of an answer that is cut are ended; the engine sees a client that has gone. Where a cut is not real nothing
is done but to note what would have come before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

MAX_HEAD = 1 << 20


@dataclass
class Cut:
    """Of one answer."""

    at: int
    """Bytes of it, its head included, that are let through."""
    real: bool
    passed: bytearray = field(default_factory=bytearray)
    """Those bytes."""

    @property
    def reached(self) -> bool:
        """Whether the answer has so many bytes."""
        return len(self.passed) == self.at

    @property
    def body(self) -> bytes:
        """Those behind the head."""
        return bytes(self.passed).partition(b"\r\n\r\n")[2]


Choose = Callable[[dict[str, Any]], Cut | None]


class CuttingRelay:
    """Listens on a free port of 127.0.0.1."""

    def __init__(self, port: int, choose: Choose) -> None:
        self._engine = port
        self._choose = choose
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.cuts = 0

    async def start(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=MAX_HEAD)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there: asyncio.StreamWriter | None = None
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            back, there = await asyncio.open_connection("127.0.0.1", self._engine, limit=MAX_HEAD)
            now: list[Cut | None] = [None]
            answers = asyncio.ensure_future(self._answers(back, writer, now))
            asked = asyncio.ensure_future(self._requests(reader, there, now))
            try:
                await asyncio.wait({answers, asked}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in (answers, asked):
                    one.cancel()
                await asyncio.gather(answers, asked, return_exceptions=True)
        for end in (writer, there):
            if end is not None:
                end.transport.abort()
        self._tasks.discard(task)

    async def _requests(self, reader: asyncio.StreamReader, there: asyncio.StreamWriter, now: list[Cut | None]) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
            body = await reader.readexactly(int(length or 0))
            now[0] = self._choose(json.loads(body)) if body else None
            there.write(head + body)
            await there.drain()

    async def _answers(self, back: asyncio.StreamReader, writer: asyncio.StreamWriter, now: list[Cut | None]) -> None:
        while data := await back.read(1 << 16):
            cut = now[0]
            if cut is not None:
                before = data[:cut.at - len(cut.passed)]
                cut.passed += before
                data = before if cut.real else data
            writer.write(data)
            await writer.drain()
            if cut is not None and cut.real and cut.reached:
                self.cuts += 1
                await asyncio.sleep(0.01)  # what was let through arrives before the end does
                return
