"""Connections to engines: pooled, raw, one request at a time on each.

Belongs here: opening, reusing and closing connections. Does not belong here: reading an answer (``leg``), what it means.

A connection that the engine closed while it lay idle is found out when the next request gets no byte of an answer: the
request is then sent once more on a fresh connection (the engine never saw it, or it would have begun to answer or
still hold the connection). So idle connections are kept until the engine closes them (uvicorn after 5 s), ``IDLE_S`` at
most: where requests come seldom, each would otherwise open connections.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

from xpyd_sidecar import resources
from xpyd_sidecar.contract.ids import HostPort, split_host_port
from xpyd_sidecar.proxy.events import EventStream
from xpyd_sidecar.proxy.fast import Outlet
from xpyd_sidecar.proxy.leg import Connection
from xpyd_sidecar.proxy.patience import within
from xpyd_sidecar.proxy.wire import Head
from xpyd_sidecar.routing.moves import Kind
from xpyd_sidecar.routing.reason import Reason

logger = logging.getLogger(__name__)

CONNECT_S = 5.0
LACKING_S = 0.25
LACKING_TRIES = 16
"""How often a connection is tried, and how long after one another, that this process has no file, port or memory for."""
IDLE_S = 60.0
IDLE_MAX = 512
"""Idle connections kept per address."""


class Sink(Protocol):
    """Who gets what comes of a call. After ``on_whole``, ``on_end`` or ``on_failed`` nothing more comes."""

    def on_events(self, call: Call, data: bytes) -> None:
        """Part of an answer that may be relayed (``call.head`` is set); empty where that is all of it."""

    def on_comments(self, call: Call, data: bytes) -> None:
        """The same of a stream without any event yet: comments alone."""

    def on_end(self, call: Call) -> None:
        """The answer that was relayed is whole; an event stream ended with [DONE]."""

    def on_whole(self, call: Call, body: bytes) -> None:
        """The whole answer."""

    def on_failed(self, call: Call, kind: Kind, reason: Reason) -> None:
        """No whole answer will come."""


class Sender(Protocol):
    """Who sends the body of a request while it comes. It cannot be sent twice, so the call has a connection of its own."""

    sent: bool
    """All of it was."""

    def on_open(self, call: Call) -> None:
        """The head is sent: ``write`` the body."""

    def on_full(self, full: bool) -> None:
        """Whether the engine takes the body slower than it comes."""


class Call:
    """One request to an engine."""

    __slots__ = ("_asked_at", "_connecting", "_connection", "_paused", "_pool", "address", "again", "body", "ends",
                 "events", "head", "patient", "relay", "request", "rest", "sink", "tag")

    def __init__(self, pool: Pool, address: HostPort, request: bytes, sink: Sink, *, events: EventStream | None,
                 tag: int) -> None:
        self._pool = pool
        self.request = request
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._paused = False
        self.address = address
        self.sink = sink
        self.events = events
        """What reads an answer that is relayed as it comes; without it, and what it does not take, is collected."""
        self.body: Sender | None = None
        """Who sends the body, where it is not part of ``request``."""
        self.tag = tag
        self.head: Head | None = None
        self.relay: Callable[[bytes], None] | None = None
        """Who takes what comes from now on, without the sink."""
        self.rest = b""
        """What came with the end of a stream that is relayed, for ``on_end``: the answer's end goes with it."""
        self.patient = False
        """The client has part of the answer: where this process has no file for a connection, it waits for one."""
        self.ends = False
        """The stream's first events came with its proper end: ``on_end`` follows at once."""
        self.again = False
        """It was sent before, on a connection that broke: the engine may know of it."""
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

    def taken_over(self, connection: Connection, asked_at: float) -> None:
        """The request was sent on a connection before this call was made; what comes there is this call's from now on."""
        self._asked_at = asked_at
        self._connection = connection
        self._pool.calls.add(self)

    def begin(self, connection: Connection) -> None:
        """Send the request on a connection."""
        self._connection = connection
        connection.serve(self, self.request)
        if self._paused:
            connection.pause()
        if self.body is not None:
            self.body.on_open(self)

    def write(self, data: bytes) -> None:
        """More of the body; nothing once the answer is over."""
        if self._connection is not None:
            self._connection.write(data)

    def connect(self) -> None:
        """Open a connection of its own."""
        self._connecting = self._pool.loop.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            async with within(CONNECT_S):
                connection = await self._connected()
        except TimeoutError:
            self._connecting = None
            self.end_failed(Kind.REFUSED, Reason(f"no connection within {CONNECT_S:g} s"))
        except (OSError, ValueError) as error:
            self._connecting = None
            if isinstance(error, OSError) and resources.ours(error):
                self._pool.lacks.add(error)
                self.end_failed(Kind.LACKING, Reason(resources.words(error)))
            else:
                self.end_failed(Kind.REFUSED, Reason("cannot connect", str(error)))
        else:
            self._connecting = None
            self.begin(connection)

    async def _connected(self) -> Connection:
        host, port = split_host_port(self.address)
        tries = LACKING_TRIES if self.patient else 1
        while True:
            self._pool.make_room()
            try:
                _, connection = await self._pool.loop.create_connection(
                    lambda: Connection(self._pool, self.address), host, port)
            except OSError as error:
                tries -= 1
                if not tries or not resources.ours(error):
                    raise
                self._pool.lacks.add(error)
                await asyncio.sleep(LACKING_S)
            else:
                return connection

    def end_failed(self, kind: Kind, reason: Reason) -> None:
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
        """The answer that was relayed came to its proper end."""
        self._connection = None
        self._pool.calls.discard(self)
        self.sink.on_end(self)

    def once_more(self) -> None:
        """The pooled connection was dead: use a fresh one, never another of the pool. One that is fresh was not ``reused``,
        so a request is sent twice at most.
        """
        self.again = True
        self._connection = None
        self.connect()


class Pool:
    """All connections to engines."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.calls: set[Call] = set()
        self.connections: set[Connection] = set()
        self._idle: dict[HostPort, deque[Connection]] = {}
        self.most = math.inf
        """Connections beyond which idle ones are closed before another is opened."""
        self.lacks = resources.Complaint("no connection to an engine")

    def call(self, address: HostPort, request: bytes, sink: Sink, *, events: EventStream | None = None,
             tag: int = 0) -> Call:
        """Send a request (complete bytes). The sink never hears of it before this has returned."""
        call = self.hold(address, sink, events=events, tag=tag)
        self.send(call, request)
        return call

    def hold(self, address: HostPort, sink: Sink, *, events: EventStream | None = None, tag: int = 0) -> Call:
        """A call whose request is made later: ``send`` it, or cancel the call."""
        call = Call(self, address, b"", sink, events=events, tag=tag)
        self.calls.add(call)
        return call

    def send(self, call: Call, request: bytes) -> None:
        """Send the request of a call that was held."""
        call.ask(request, self.loop.time())
        connection = self.idle(call.address) if call.body is None else None
        if connection is None:
            call.connect()
        else:
            call.begin(connection)

    def idle(self, address: HostPort) -> Connection | None:
        """A connection that lies idle, for one request; give it back with ``release``. None: there is none."""
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if connection.open:
                connection.reused = True
                return connection
        return None

    def make_room(self) -> None:
        """Before a connection is opened: close those that have been idle for longest, where there are as many as may be."""
        while len(self.connections) >= self.most:
            oldest = min((idle for idle in self._idle.values() if idle), key=lambda idle: idle[0].idle_since, default=None)
            if oldest is None:
                return
            connection = oldest.popleft()
            self.connections.discard(connection)
            connection.drop()

    def release(self, connection: Connection, address: HostPort) -> None:
        """A connection whose answer is complete."""
        idle = self._idle.get(address)
        if idle is None:
            idle = self._idle[address] = deque()
        if connection.open and len(idle) < IDLE_MAX:
            connection.lie_idle()
            idle.append(connection)
        else:
            connection.drop()

    def forget(self, connection: Connection, address: HostPort) -> None:
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
def before_length(path: bytes, address: HostPort) -> bytes:  # remembered: of engines and paths there are few
    """The head of a POST, up to the number of its body's bytes."""
    return b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\ncontent-length: " % (path, address.encode())


def request_bytes(method: bytes, path: bytes, address: HostPort, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes:
    """A whole HTTP/1.1 request."""
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    if method == b"POST":
        return b"%b%d\r\n%b\r\n%b" % (before_length(path, address), len(body), lines, body)
    return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b\r\n%b" % (method, path, address.encode(), lines, body)
