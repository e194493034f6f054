"""Connections to engines: pooled, raw, one request at a time on each.

Belongs here: opening, reusing and closing connections, and reading one answer. Does not belong here: what an answer means.

A connection that the engine closed while it lay idle is found out when the next request gets no byte of an answer: the
request is then sent once more on a fresh connection (the engine never saw it, or it would have begun to answer or
still hold the connection). Idle connections are closed after ``IDLE_S``, before uvicorn's own 5 s.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol, cast

from xpyd_sidecar.contract.ids import HostPort, split_host_port
from xpyd_sidecar.proxy.events import EventStream
from xpyd_sidecar.proxy.fast import Leg, Outlet
from xpyd_sidecar.proxy.wire import MAX_HEAD, Head, Malformed, WholeBody, parse_head
from xpyd_sidecar.routing.moves import Kind

logger = logging.getLogger(__name__)

CONNECT_S = 5.0
IDLE_S = 4.0
IDLE_MAX = 512
"""Idle connections kept per address."""
MAX_ANSWER = 256 << 20
"""Bytes of an answer that is not streamed."""


class Sink(Protocol):
    """Who gets what comes of a call. After ``on_whole``, ``on_end`` or ``on_failed`` nothing more comes."""

    def on_events(self, call: Call, data: bytes) -> None:
        """Part of an event stream that may be relayed (``call.head`` is set); never empty."""

    def on_end(self, call: Call) -> None:
        """The event stream ended with [DONE]."""

    def on_whole(self, call: Call, body: bytes) -> None:
        """The whole answer."""

    def on_failed(self, call: Call, kind: Kind, reason: str) -> None:
        """No whole answer will come."""


class Call:
    """One request to an engine."""

    __slots__ = ("_asked_at", "_connecting", "_connection", "_paused", "_pool", "address", "again", "events", "framed",
                 "head", "relay", "request", "rest", "sink", "streams", "tag")

    def __init__(self, pool: Pool, address: HostPort, request: bytes, sink: Sink, *, streams: bool, framed: bool,
                 events: EventStream | None, tag: int) -> None:
        self._pool = pool
        self.request = request
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._paused = False
        self.address = address
        self.sink = sink
        self.streams = streams
        """Whether an event stream is relayed as it comes; otherwise every answer is collected."""
        self.framed = framed
        self.events = events
        """What reads the event stream, where it is not simply relayed."""
        self.tag = tag
        self.head: Head | None = None
        self.relay: Callable[[bytes], None] | None = None
        """Who takes the events from now on, without the sink."""
        self.rest = b""
        """What came with the end of a stream that is relayed, for ``on_end``: the answer's end goes with it."""
        self.again = False
        self._asked_at = math.inf
        """When the request was sent; while it is held nobody is asked, so nobody is silent."""

    @property
    def last_at(self) -> float:
        """When bytes last came, or the request was sent."""
        return self._asked_at if self._connection is None else max(self._asked_at, self._connection.last_at)

    def relay_to(self, write: Callable[[bytes], None], outlet: Outlet) -> None:
        """The rest of the stream goes there; what is simple straight to the outlet."""
        self.relay = write
        if self._connection is not None:
            self._connection.relay_to(outlet)

    def cancel(self) -> None:
        """Close the connection; the sink hears nothing more."""
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.drop()
        self._pool.calls.discard(self)

    def pause(self) -> None:
        """Stop reading: the client is slower than the engine."""
        self._paused = True
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """Read on."""
        self._paused = False
        if self._connection is not None:
            self._connection.resume()

    # ---- by pool and connection

    def ask(self, request: bytes, now: float) -> None:
        """The request, to be sent now."""
        self.request, self._asked_at = request, now

    def begin(self, connection: _Connection) -> None:
        """Send the request on a connection."""
        self._connection = connection
        connection.serve(self, self.request)
        if self._paused:
            connection.pause()

    def connect(self) -> None:
        """Open a connection of its own."""
        self._connecting = self._pool.loop.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            host, port = split_host_port(self.address)
            async with asyncio.timeout(CONNECT_S):
                _, connection = await self._pool.loop.create_connection(
                    lambda: _Connection(self._pool, self.address), host, port)
        except TimeoutError:
            self._connecting = None
            self.end_failed(Kind.REFUSED, f"no connection to {self.address} within {CONNECT_S:g} s")
        except (OSError, ValueError) as error:
            self._connecting = None
            self.end_failed(Kind.REFUSED, f"cannot connect to {self.address}: {error}")
        else:
            self._connecting = None
            self.begin(connection)

    def end_failed(self, kind: Kind, reason: str) -> None:
        """No whole answer."""
        self._connection = None
        self._pool.calls.discard(self)
        self.sink.on_failed(self, kind, reason)

    def end_whole(self, body: bytes) -> None:
        """A whole answer."""
        self._connection = None
        self._pool.calls.discard(self)
        self.sink.on_whole(self, body)

    def end_stream(self) -> None:
        """[DONE]."""
        self._connection = None
        self._pool.calls.discard(self)
        self.sink.on_end(self)

    def once_more(self) -> None:
        """The pooled connection was dead: use a fresh one."""
        self._connection = None
        self.again = True
        self.connect()


class _Connection(Leg, asyncio.Protocol):
    """One connection to an engine."""

    __slots__ = ("_address", "_body", "_buffer", "_call", "_outlet", "_paused", "_pool", "_reused", "_seen", "_stream",
                 "_time", "_transport", "idle_since")

    def __init__(self, pool: Pool, address: HostPort) -> None:
        self._pool = pool
        self._time = pool.loop.time
        self._address = address
        self._transport: asyncio.Transport | None = None
        self._outlet = Outlet()
        self.last_at = 0.0
        self._call: Call | None = None
        self._buffer = b""
        self._stream: EventStream | None = None
        self._body: WholeBody | None = None
        self._reused = False
        self._seen = False
        self._paused = False
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has the methods, not the base class
        self._outlet.open(transport, descriptor_of(transport))
        self._pool.connections.add(self)

    def serve(self, call: Call, request: bytes) -> None:
        """Send a request; its answer goes to the call."""
        assert self._transport is not None
        self._call = call
        self._buffer = b""
        self._stream = self._body = None
        self._seen = False
        self._outlet.write(request)

    def relay_to(self, outlet: Outlet) -> None:
        """Simple events of the stream go straight there."""
        if self._stream is not None:
            self.relay(self._stream, outlet)

    def drop(self) -> None:
        """Close at once; nothing is reported."""
        self._call = None
        self.relay_no_more()
        self._outlet.shut()
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Stop reading."""
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    def received(self, data: bytes) -> None:
        call = self._call
        if call is None:
            self.drop()  # bytes that nobody asked for
            return
        self.last_at = self._time()
        stream = self._stream
        try:
            if stream is not None:
                out = stream.feed(data)
                if call.relay is not None and out and not stream.done and not stream.failure:
                    call.relay(out)
                else:
                    self._on_out(call, stream, out)
            elif self._body is not None:
                self._on_body(call, self._body, data)
            else:
                self._on_head(call, data)
        except Malformed as error:
            self._call = None
            self.drop()
            call.end_failed(Kind.BROKEN, f"{self._address} sent {error}")

    def _on_out(self, call: Call, stream: EventStream, out: bytes) -> None:
        if out:
            if call.relay is None:
                call.sink.on_events(call, out)
            elif stream.done and stream.ended and not stream.failure:
                call.rest = out
            else:
                call.relay(out)
            if self._call is not call:
                return  # cancelled by what it caused
        if stream.failure:
            self.drop()
            call.end_failed(stream.kind, stream.failure)
        elif stream.done:
            self._finish(call)

    def _on_body(self, call: Call, body: WholeBody, data: bytes) -> None:
        body.feed(data)
        if body.done:
            self._finish(call)

    def _on_head(self, call: Call, data: bytes) -> None:
        self._seen = True
        buffer = self._buffer + data if self._buffer else data
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(buffer) > MAX_HEAD:
                raise Malformed(f"a response head of more than {MAX_HEAD} bytes")
            self._buffer = buffer
            return
        head = parse_head(buffer[:end])
        rest, self._buffer = buffer[end + 4:], b""
        if head.status < 200:  # an interim answer
            if rest:
                self._on_head(call, rest)
            return
        call.head = head
        if call.streams and head.status == 200 and head.is_event_stream:
            if not head.chunked:
                raise Malformed("an event stream that is not chunked")
            self._stream = call.events or EventStream(framed=call.framed)
            if rest:
                self._on_out(call, self._stream, self._stream.feed(rest))
            return
        self._body = WholeBody(head, MAX_ANSWER)
        self._on_body(call, self._body, rest)

    def _finish(self, call: Call) -> None:
        stream, body = self._stream, self._body
        self._call = None
        self.relay_no_more()
        assert call.head is not None
        if call.head.keep_alive:
            self._pool.release(self, self._address)
        else:
            self.drop()
        if body is not None:
            call.end_whole(body.take())
        elif stream is not None and stream.ended:
            call.end_stream()
        else:
            call.end_failed(Kind.LOST, "the stream ended without [DONE]")

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self, self._address)
        self._transport = None
        self.relay_no_more()
        self._outlet.shut()
        call, self._call = self._call, None
        if call is None:
            return
        if not self._seen and self._reused and not call.again:
            call.once_more()
        elif self._body is not None and self._body.on_eof():
            call.end_whole(self._body.take())
        elif self._stream is not None and self._stream.ended:
            call.end_stream()
        else:
            call.end_failed(Kind.LOST, f"{self._address} closed the connection{f': {exc}' if exc else ''}")

    def reuse(self) -> None:
        """It comes from the pool."""
        self._reused = True

    @property
    def usable(self) -> bool:
        """Whether it is still open."""
        return self._transport is not None and not self._transport.is_closing()


def descriptor_of(transport: asyncio.BaseTransport) -> int:
    """The descriptor of a connection whose bytes may be written to it as they are, else -1."""
    if transport.get_extra_info("sslcontext") is not None:
        return -1
    socket = transport.get_extra_info("socket")
    return -1 if socket is None else int(socket.fileno())


class Pool:
    """All connections to engines."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.calls: set[Call] = set()
        self.connections: set[_Connection] = set()
        self._idle: dict[HostPort, deque[_Connection]] = {}

    def call(self, address: HostPort, request: bytes, sink: Sink, *, streams: bool = False, framed: bool = True,
             events: EventStream | None = None, tag: int = 0) -> Call:
        """Send a request (complete bytes). The sink never hears of it before this has returned."""
        call = self.hold(address, sink, streams=streams, framed=framed, events=events, tag=tag)
        self.send(call, request)
        return call

    def hold(self, address: HostPort, sink: Sink, *, streams: bool = False, framed: bool = True,
             events: EventStream | None = None, tag: int = 0) -> Call:
        """A call whose request is made later: ``send`` it, or cancel the call."""
        call = Call(self, address, b"", sink, streams=streams, framed=framed, events=events, tag=tag)
        self.calls.add(call)
        return call

    def send(self, call: Call, request: bytes) -> None:
        """Send the request of a call that was held."""
        call.ask(request, self.loop.time())
        idle = self._idle.get(call.address)
        while idle:
            connection = idle.pop()
            if connection.usable:
                connection.reuse()
                call.begin(connection)
                return
        call.connect()

    def release(self, connection: _Connection, address: HostPort) -> None:
        """A connection whose answer is complete."""
        idle = self._idle.setdefault(address, deque())
        if len(idle) >= IDLE_MAX or not connection.usable:
            connection.drop()
            return
        connection.resume()
        connection.idle_since = self.loop.time()
        idle.append(connection)

    def forget(self, connection: _Connection, address: HostPort) -> None:
        """A connection that is closed."""
        self.connections.discard(connection)
        idle = self._idle.get(address)
        if idle is not None and connection in idle:
            idle.remove(connection)

    def sweep(self) -> None:
        """Close what has been idle for long; call it every second."""
        oldest = self.loop.time() - IDLE_S
        for address in list(self._idle):
            idle = self._idle[address]
            while idle and idle[0].idle_since < oldest:
                idle.popleft().drop()
            if not idle:
                del self._idle[address]

    def close(self) -> None:
        """Close every connection; calls that are open are cancelled."""
        for call in list(self.calls):
            call.cancel()
        for connection in list(self.connections):
            connection.drop()
        self._idle.clear()


@lru_cache(maxsize=1024)
def _before_length(path: bytes, address: HostPort) -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\ncontent-length: " % (path, address.encode())


def request_bytes(method: bytes, path: bytes, address: HostPort, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes:
    """A whole HTTP/1.1 request."""
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    if method == b"POST":
        return b"%b%d\r\n%b\r\n%b" % (_before_length(path, address), len(body), lines, body)
    return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b\r\n%b" % (method, path, address.encode(), lines, body)
