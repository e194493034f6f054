"""A passed request on a connection of its own to one engine: bytes both ways, whatever they are.

Belongs here: connecting, sending as fast as the engine takes it, reading one answer. Does not belong here: which engine,
and what the client sees (``passing``).

A connection of its own: a pooled one that the engine had closed could only be found out by an answer that does not come,
and a body that went away while it was read cannot be sent again.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from xpyd_sidecar import resources
from xpyd_sidecar.contract.ids import HostPort, split_host_port
from xpyd_sidecar.proxy.patience import within
from xpyd_sidecar.proxy.upstream import CONNECT_S
from xpyd_sidecar.proxy.wire import Chunks, Head, HeadReader, Malformed, chunk_of
from xpyd_sidecar.routing.moves import Kind
from xpyd_sidecar.routing.reason import Reason

HIGH_WATER = 256 << 10


class Ends(Protocol):
    """Who gets what comes. After ``on_end`` or ``on_failed`` nothing more comes."""

    def on_open(self) -> None:
        """Connected, and the head is sent: send the body."""

    def on_full(self, full: bool) -> None:
        """Whether the engine takes the body slower than it comes."""

    def on_head(self, head: Head) -> None:
        """Status and headers of the answer."""

    def on_part(self, data: bytes, body: bytes) -> None:
        """Part of the answer's body as it goes on (whole chunks, or bytes), and what is in it without any framing."""

    def on_end(self) -> None:
        """The answer is whole."""

    def on_failed(self, kind: Kind, reason: Reason) -> None:
        """It will not be."""


class Tunnel(asyncio.Protocol):
    """One request and its answer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, address: HostPort, head: bytes, ends: Ends, *, framed: bool,
                 bodiless: bool) -> None:
        """``framed``: parts of an answer without a length are given as chunks. ``bodiless``: HEAD, nothing follows."""
        self._loop = loop
        self._address = address
        self._request = head
        self._ends: Ends | None = ends
        self._framed = framed
        self._bodiless = bodiless
        self._transport: asyncio.Transport | None = None
        self._heads = HeadReader()
        self._head: Head | None = None
        self._chunks: Chunks | None = None
        self._left = 0
        self.last_at = loop.time()
        """When bytes last came, or were last asked for."""
        self._task = loop.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            host, port = split_host_port(self._address)
            async with within(CONNECT_S):
                await self._loop.create_connection(lambda: self, host, port)
        except TimeoutError:
            self._fail(Kind.REFUSED, Reason(f"no connection within {CONNECT_S:g} s"))
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and resources.ours(error):
                self._fail(Kind.LACKING, Reason(resources.words(error)))
                return
            self._fail(Kind.REFUSED, Reason("cannot connect", str(error)))

    # ---- the request

    def write(self, data: bytes) -> None:
        """More of the request, framed as its head says."""
        if self._transport is not None:
            self.last_at = self._loop.time()
            self._transport.write(data)

    def pause(self) -> None:
        """Read no more: the client is slower than the engine."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def cancel(self) -> None:
        """Close at once; nothing more is reported."""
        self._ends = None
        self._task.cancel()
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has the methods, not the base class
        self._transport.set_write_buffer_limits(high=HIGH_WATER)
        if self._ends is None:
            self._transport.abort()
            return
        self._transport.write(self._request)
        self._request = b""
        self._ends.on_open()

    def pause_writing(self) -> None:
        """The engine is slow."""
        if self._ends is not None:
            self._ends.on_full(True)

    def resume_writing(self) -> None:
        """It has taken most of it."""
        if self._ends is not None:
            self._ends.on_full(False)

    def data_received(self, data: bytes) -> None:
        """Bytes of the answer."""
        self.last_at = self._loop.time()
        try:
            if self._head is None:
                self._on_head(data)
            else:
                self._on_data(data)
        except Malformed as error:
            self._fail(Kind.BROKEN, Reason("it sent what cannot be read", str(error)))

    def _on_head(self, data: bytes) -> None:
        found = self._heads.feed(data)
        if found is None:
            return
        head, rest = found
        self._head = head
        if head.chunked and not self._bodiless:
            self._chunks = Chunks()
        self._left = 0 if self._bodiless else -1 if head.length is None else head.length
        if self._ends is not None:
            self._ends.on_head(head)
        if self._left == 0 and self._chunks is None:
            self._end()
        elif rest:
            self._on_data(rest)

    def _on_data(self, data: bytes) -> None:
        if self._ends is None:
            return
        if self._chunks is not None:
            found = self._chunks.feed(data)
            if found:
                body = b"".join([payload for _, payload in found])
                self._ends.on_part(b"".join([chunk for chunk, _ in found]) if self._framed else body, body)
            if self._chunks.done:
                self._end()
        elif self._left < 0:
            self._ends.on_part(chunk_of(data) if self._framed else data, data)
        else:
            if len(data) > self._left:
                raise Malformed("bytes after the end of the body")
            self._left -= len(data)
            self._ends.on_part(data, data)
            if not self._left:
                self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine closed, or broke off."""
        self._transport = None
        if self._head is not None and self._chunks is None and self._left < 0 and exc is None:
            self._end()
        else:
            self._fail(Kind.LOST, Reason("it closed the connection", str(exc or "")))

    def _end(self) -> None:
        ends, self._ends = self._ends, None
        if self._transport is not None:
            self._transport.abort()
        if ends is not None:
            ends.on_end()

    def _fail(self, kind: Kind, reason: Reason) -> None:
        ends, self._ends = self._ends, None
        if self._transport is not None:
            self._transport.abort()
        if ends is not None:
            ends.on_failed(kind, reason)
