"""A relay between a router and an engine that cuts answers at given bytes; no engine is killed.

    relay = await CuttingRelay(engine.address).start()
    relay.cut["r7"] = 120        the answer to the request of this id ends behind 120 bytes, once
    relay.passed["r7"]           what came of it up to that place, or up to the place where it would have been cut

Connections are kept; requests on one of them follow each other, as the router sends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import re

_ID = re.compile(rb"\r\nx-request-id: ([^\r]+)\r\n", re.IGNORECASE)


class CuttingRelay:
    """Of one engine."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.cut: dict[str, int] = {}
        """Bytes of the answer, head included, by request id: it is cut behind them."""
        self.looked: dict[str, int] = {}
        """The same of answers that are not cut."""
        self.passed: dict[str, bytes] = {}
        """What was passed on until then."""

    async def start(self, host: str = "127.0.0.1") -> CuttingRelay:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        return self

    @property
    def address(self) -> str:
        """Where it listens."""
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Let go of everything."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        out: asyncio.StreamWriter | None = None
        current = [""]
        try:
            back, out = await asyncio.open_connection("127.0.0.1", self._port)
            pumps = {asyncio.create_task(self._requests(reader, out, current)),
                     asyncio.create_task(self._answers(back, writer, current))}
            _, left = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in left:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            for each in (writer, out):
                if each is not None:
                    with contextlib.suppress(RuntimeError):  # the loop has ended
                        each.transport.abort()
            self._tasks.discard(task)

    async def _requests(self, reader: asyncio.StreamReader, out: asyncio.StreamWriter, current: list[str]) -> None:
        while data := await reader.read(1 << 16):
            found = _ID.search(data)
            if found is not None:
                current[0] = found[1].decode()
            out.write(data)
            await out.drain()

    async def _answers(self, back: asyncio.StreamReader, writer: asyncio.StreamWriter, current: list[str]) -> None:
        name, seen = "", b""
        while data := await back.read(1 << 16):
            if current[0] != name:
                name, seen = current[0], b""
            cuts = name in self.cut
            limit = self.cut[name] if cuts else self.looked.get(name)
            if limit is not None:
                seen += data
                if len(seen) > limit:
                    self.passed.setdefault(name, seen[:limit])
                    (self.cut if cuts else self.looked).pop(name, None)
                    if cuts:
                        writer.write(data[:len(data) - (len(seen) - limit)])
                        await writer.drain()
                        return
            writer.write(data)
            await writer.drain()
