"""One request to an engine: on which connection it was sent, and who hears what comes of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

from xpyd_sidecar.contract.ids import HostPort
from xpyd_sidecar.router.http.wire import ResponseHead
from xpyd_sidecar.router.relay.fast import Outlet
from xpyd_sidecar.router.stream.events import EventStream
from xpyd_sidecar.router.stream.failures import FailureKind, FailureReason


class Sink(Protocol):
    """Who gets what comes of a call. After ``on_whole``, ``on_end`` or ``on_failed`` nothing more comes."""

    def on_events(self, call: UpstreamCall, data: bytes) -> None:
        """Part of an answer that may be relayed (``call.head`` is set); empty where that is all of it."""

    def on_comments(self, call: UpstreamCall, data: bytes) -> None:
        """The same of a stream without any event yet: comments alone."""

    def on_end(self, call: UpstreamCall) -> None:
        """The answer that was relayed is whole; an event stream ended with [DONE]."""

    def on_whole(self, call: UpstreamCall, body: bytes) -> None:
        """The whole answer."""

    def on_failed(self, call: UpstreamCall, kind: FailureKind, reason: FailureReason) -> None:
        """No whole answer will come."""


class BodySender(Protocol):
    """Who sends the body of a request while it comes. It cannot be sent twice, so the call has a connection of its own."""

    sent: bool
    """All of it was."""

    def on_open(self, call: UpstreamCall) -> None:
        """The head is sent: ``write`` the body."""

    def on_full(self, full: bool) -> None:
        """Whether the engine takes the body slower than it comes."""


class Carrier(Protocol):
    """A connection that carries a request and its answer (``engine_connection.EngineConnection``)."""

    last_at: float
    """When bytes last came."""

    def serve(self, call: UpstreamCall, request: bytes) -> None:
        """Send a request; its answer goes to the call."""

    def write(self, data: bytes) -> None:
        """More of the body of the request."""

    def relay_to(self, outlet: Outlet) -> None:
        """Simple events of the stream go straight there."""

    def pause(self) -> None:
        """Stop reading."""

    def resume(self) -> None:
        """Read on."""

    def drop(self) -> None:
        """Close at once; nothing is reported."""


class Calls(Protocol):
    """Who keeps the calls that are open, and connects them (``pool.EnginePool``)."""

    calls: set[UpstreamCall]

    def connect(self, call: UpstreamCall) -> asyncio.Task[None]:
        """Open a connection for a call. It hears ``connected`` or ``end_failed``, unless the task is cancelled."""


class UpstreamCall:
    """One request to an engine."""

    __slots__ = ("_asked_at", "_connecting", "_connection", "_paused", "_pool", "address", "again", "body", "ends",
                 "events", "head", "patient", "relay", "request", "rest", "sink", "tag")

    def __init__(self, pool: Calls, address: HostPort, request: bytes, sink: Sink, *, events: EventStream | None,
                 tag: int) -> None:
        self._pool = pool
        self.request = request
        self._connection: Carrier | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._paused = False
        self.address = address
        self.sink = sink
        self.events = events
        """What reads an answer that is relayed as it comes; without it, and what it does not take, is collected."""
        self.body: BodySender | None = None
        """Who sends the body, where it is not part of ``request``."""
        self.tag = tag
        self.head: ResponseHead | None = None
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

    def taken_over(self, connection: Carrier, asked_at: float) -> None:
        """The request was sent on a connection before this call was made; what comes there is this call's from now on."""
        self._asked_at = asked_at
        self._connection = connection
        self._pool.calls.add(self)

    def begin(self, connection: Carrier) -> None:
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
        """Have a connection of its own opened."""
        self._connecting = self._pool.connect(self)

    def connected(self, connection: Carrier) -> None:
        """It is open."""
        self._connecting = None
        self.begin(connection)

    def end_failed(self, kind: FailureKind, reason: FailureReason) -> None:
        """No whole answer."""
        self._connecting = self._connection = None
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
