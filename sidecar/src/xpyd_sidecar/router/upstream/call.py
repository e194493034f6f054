"""One request to an engine, the connection that it was sent on, and who hears what comes of it.

    pool ──connected──▶ UpstreamCall ◀──head, events, end── EngineConnection
                             └──▶ Sink
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Protocol, cast

import msgspec

from xpyd_sidecar.contract.ids import HostPort
from xpyd_sidecar.process.accepting import descriptor_of
from xpyd_sidecar.router.api.faults import FailureKind, FailureReason
from xpyd_sidecar.router.http.wire import HeadReader, MalformedMessage, ResponseHead, WholeBody
from xpyd_sidecar.router.relay.fast import Outlet, UpstreamReceiver
from xpyd_sidecar.router.stream.events import EventStream

MAX_ANSWER = 4 << 20
"""Bytes of an answer that is collected: of prefill, of an error, and whole ones that are not large (``LargeAnswer``)."""


class Sink:
    """Who gets what comes of a call. After ``on_whole``, ``on_end`` or ``on_failed`` nothing more comes.

    Who asks for a whole answer hears nothing of streams.
    """

    __slots__ = ()

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


class Keeper(Protocol):
    """Who keeps calls that are open, and connections while nobody uses them (``pool.EnginePool``)."""

    loop: asyncio.AbstractEventLoop
    calls: set[UpstreamCall]
    connections: set[EngineConnection]

    async def connect(self, call: UpstreamCall) -> None:
        """Open a connection for a call: it is served there, or its sink hears how that failed, unless this is cancelled."""

    def release(self, connection: EngineConnection, address: HostPort) -> None:
        """Its answer is complete."""

    def forget(self, connection: EngineConnection, address: HostPort) -> None:
        """It is closed."""


class UpstreamCall(msgspec.Struct, eq=False):
    """One request to an engine."""

    pool: Keeper
    address: HostPort
    sink: Sink
    events: EventStream | None = None
    """What reads an answer that is relayed as it comes; without it, and what it does not take, is collected."""
    tag: int = 0
    make: Callable[[], bytes] = bytes
    """Makes the request, each time that it is sent: nobody keeps it, since it may be as long as the prompt is."""
    body: BodySender | None = None
    """Who sends the body, where it is not part of the request."""
    head: ResponseHead | None = None
    relay: Callable[[bytes], None] | None = None
    """Who takes what comes from now on, without the sink."""
    rest: bytes = b""
    """What came with the end of a stream that is relayed, for ``on_end``: the answer's end goes with it."""
    patient: bool = False
    """The client has part of the answer: where this process has no file for a connection, it waits for one."""
    ends: bool = False
    """The stream's first events came with its proper end: ``on_end`` follows at once."""
    again: bool = False
    """It was sent before, on a connection that broke: the engine may know of it."""
    asked_at: float = math.inf
    """When the request was sent; while it is held nobody is asked, so nobody is silent."""
    connection: EngineConnection | None = None
    connecting: asyncio.Task[None] | None = None
    paused: bool = False

    @property
    def last_at(self) -> float:
        """When bytes last came, or the request was sent."""
        return self.asked_at if self.connection is None else max(self.asked_at, self.connection.last_at)

    @property
    def heard_at(self) -> float:
        """When bytes of its answer last came; minus infinity where none have."""
        return self.connection.last_at if self.connection is not None and self.connection.seen else -math.inf

    def relay_to(self, write: Callable[[bytes], None], outlet: Outlet) -> None:
        """The rest of the stream goes there; what is simple straight to the outlet."""
        self.relay = write
        if self.connection is not None and self.events is not None:
            self.connection.relay(self.events, outlet)

    def cancel(self) -> None:
        """Close the connection; the sink hears nothing more."""
        if self.connecting is not None:
            self.connecting.cancel()
            self.connecting = None
        if self.connection is not None:
            self.connection.drop()
        self.detach()

    def read(self, on: bool) -> None:
        """Read on, or stop: the client is slower than the engine."""
        self.paused = not on
        if self.connection is not None:
            self.connection.read(on)

    def write(self, data: bytes) -> None:
        """More of the body; nothing once the answer is over."""
        if self.connection is not None:
            self.connection.write(data)

    # ---- by pool and connection

    def connect(self) -> None:
        """Have a connection of its own opened."""
        self.connecting = self.pool.loop.create_task(self.pool.connect(self))

    def once_more(self) -> None:
        """The pooled connection was dead: use a fresh one. That was not ``reused``, so a request is sent twice at most."""
        self.again = True
        self.connection = None
        self.connect()

    def detach(self) -> Sink:
        """Nothing more comes of it: let go of its connection and its pool. Returns whom to tell how it ended."""
        self.connection = None
        self.pool.calls.discard(self)
        return self.sink


class EngineConnection(UpstreamReceiver, asyncio.Protocol):
    """One connection to an engine."""

    __slots__ = ("_address", "_body", "_call", "_heads", "_outlet", "_pool", "_stream", "_time", "_transport",
                 "open", "paused", "reused", "seen")

    def __init__(self, pool: Keeper, address: HostPort) -> None:
        self._pool = pool
        self._time = pool.loop.time
        self._address = address
        self._transport: asyncio.Transport | None = None
        self.open = False
        """Nobody has ended it, as far as is known."""
        self._outlet = Outlet()
        self.last_at = self._time()
        self._call: UpstreamCall | None = None
        self._heads = HeadReader()
        self._stream: EventStream | None = None
        self._body: WholeBody | None = None
        self.reused = False
        """It was in the pool before."""
        self.seen = False
        """Bytes of the latest answer have come."""
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has the methods, not the base class
        self._outlet.open(transport, descriptor_of(transport))
        self.open = True
        self._pool.connections.add(self)

    def serve(self, call: UpstreamCall) -> None:
        """Send the call's request; the answer goes to it."""
        call.connection = self
        self._call = call
        self._stream = self._body = None
        self.seen = False
        self._outlet.write(call.make())
        if call.paused:
            self.read(False)
        if call.body is not None:
            call.body.on_open(call)

    def drop(self) -> None:
        """Close at once; nothing is reported."""
        self._call = None
        self.open = False
        self.relay_no_more()
        self._outlet.shut()
        if self._transport is not None:
            self._transport.abort()

    def read(self, on: bool) -> None:
        """Read on, or stop reading."""
        if self.paused is on and self._transport is not None:
            self.paused = not on
            (self._transport.resume_reading if on else self._transport.pause_reading)()

    def on_bytes(self, data: bytes) -> None:
        """Bytes that no shortcut took."""
        call = self._call
        if call is None:
            self.drop()  # bytes that nobody asked for
            return
        self.last_at = self._time()
        stream = self._stream
        try:
            if stream is None and self._body is None:
                self.seen = True
                found = self._heads.feed(data)
                if found is None:
                    return
                head, data = found
                call.head, events = head, call.events
                if events is not None and events.takes(head):
                    stream = self._stream = events
                elif len(data) == head.length:  # nearly always it is all there
                    self._finish(call, data)
                    return
                else:
                    self._body = WholeBody(head, MAX_ANSWER)
            if stream is not None:
                if data:
                    self._relay(call, stream, stream.feed(data))
            elif self._body is not None:
                self._body.feed(data)
                if self._body.done:
                    self._finish(call, self._body.take())
        except MalformedMessage as error:
            self._break_off(error)

    def _break_off(self, error: MalformedMessage) -> None:
        """What came cannot be read."""
        call, self._call = self._call, None
        self.drop()
        if call is not None:
            call.detach().on_failed(call, FailureKind.BROKEN, FailureReason("it sent what cannot be read", str(error)))

    def _relay(self, call: UpstreamCall, stream: EventStream, out: bytes) -> None:
        """What the stream gave of the latest read, which may have ended it."""
        whole = stream.done and stream.ended and not stream.failure
        if call.relay is not None:
            if whole:
                call.rest = out
            elif out:
                call.relay(out)
        elif stream.begins(out):
            if out or whole:  # one that passes through may be empty
                call.ends = whole
                call.sink.on_events(call, out)
        elif out:
            call.sink.on_comments(call, out)
        if self._call is not call:
            return  # cancelled by what it caused
        if stream.failure:
            self.drop()
            call.detach().on_failed(call, stream.kind, stream.reason)
        elif stream.done:
            self._finish(call)

    def _finish(self, call: UpstreamCall, whole: bytes = b"") -> None:
        """``whole``: the answer, where no stream has read it."""
        stream = self._stream
        self._call = None
        self.relay_no_more()
        assert call.head is not None
        if call.head.keep_alive and (call.body is None or call.body.sent):
            self._pool.release(self, self._address)
        else:
            self.drop()
        if stream is None:
            call.detach().on_whole(call, whole)
        elif stream.ended:
            call.detach().on_end(call)
        else:
            call.detach().on_failed(call, FailureKind.LOST, FailureReason("the stream ended without [DONE]"))

    def write(self, data: bytes) -> None:
        """More of the body of the request, which is sent while it comes."""
        self.last_at = self._time()
        self._outlet.write(data)

    def pause_writing(self) -> None:
        """The engine takes what is sent slower than it comes."""
        if self._call is not None and self._call.body is not None:
            self._call.body.on_full(True)

    def resume_writing(self) -> None:
        """It has taken most of it."""
        if self._call is not None and self._call.body is not None:
            self._call.body.on_full(False)

    def eof_received(self) -> None:
        """The engine has closed it; ``connection_lost`` follows."""
        self.open = False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, whoever closed it."""
        self.open = False
        self._pool.forget(self, self._address)
        self._transport = None
        self.relay_no_more()
        self._outlet.shut()
        call, self._call = self._call, None
        if call is None:
            return
        if not self.seen and self.reused:
            call.once_more()
        elif self._body is not None and self._body.on_eof():
            call.detach().on_whole(call, self._body.take())
        elif self._stream is not None and self._stream.ended:
            call.detach().on_end(call)
        else:
            call.detach().on_failed(call, FailureKind.LOST, FailureReason("it closed the connection", str(exc or "")))
