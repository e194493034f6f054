"""One connection to an engine, and the answer that is read on it."""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from xpyd_sidecar.contract.ids import HostPort
from xpyd_sidecar.router.http.wire import HeadReader, Malformed, WholeBody
from xpyd_sidecar.router.relay.fast import Outlet, UpstreamReceiver
from xpyd_sidecar.router.relay.loop import adopt, descriptor_of, release
from xpyd_sidecar.router.stream.events import EventStream
from xpyd_sidecar.router.stream.failures import FailureKind, FailureReason
from xpyd_sidecar.router.upstream.call import UpstreamCall

MAX_ANSWER = 256 << 20
"""Bytes of an answer that is not streamed."""


class Keeper(Protocol):
    """Who keeps connections while nobody uses them (``pool.EnginePool``)."""

    loop: asyncio.AbstractEventLoop
    connections: set[EngineConnection]

    def release(self, connection: EngineConnection, address: HostPort) -> None:
        """Its answer is complete."""

    def forget(self, connection: EngineConnection, address: HostPort) -> None:
        """It is closed."""


class Borrower(Protocol):
    """Whose answer comes on a connection, where that needs no call (``fast_path.FastPath``)."""

    def heard(self, connection: EngineConnection, data: bytes) -> bytes | None:
        """Bytes came; what is returned is for the call that the connection was handed to meanwhile."""

    def unfold(self) -> object:
        """The connection is gone: ``hand_over`` its answer to a call, now."""


class EngineConnection(UpstreamReceiver, asyncio.Protocol):
    """One connection to an engine."""

    __slots__ = ("_address", "_body", "_call", "_heads", "_lane", "_outlet", "_paused", "_pool", "_seen",
                 "_stream", "_time", "_transport", "idle_since", "open", "reused")

    def __init__(self, pool: Keeper, address: HostPort) -> None:
        self._pool = pool
        self._time = pool.loop.time
        self._address = address
        self._transport: asyncio.Transport | None = None
        self.open = False
        """Nobody has ended it, as far as is known."""
        self._outlet = Outlet()
        self.last_at = 0.0
        self._call: UpstreamCall | None = None
        self._lane: Borrower | None = None
        """Whose answer it is, where that needs no call."""
        self._heads = HeadReader()
        self._stream: EventStream | None = None
        self._body: WholeBody | None = None
        self.reused = False
        """It was in the pool before."""
        self._seen = False
        self._paused = False
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has the methods, not the base class
        self._outlet.open(transport, descriptor_of(transport))
        adopt(self._pool.loop, self, self._transport, self._outlet.fd)
        self.open = True
        self._pool.connections.add(self)

    def serve(self, call: UpstreamCall, request: bytes) -> None:
        """Send a request; its answer goes to the call."""
        assert self._transport is not None
        self._call = call
        self._heads.reset()
        self._stream = self._body = None
        self._seen = False
        self._outlet.write(request)

    def lend(self, lane: Borrower, request: bytes) -> None:
        """Send a request; its answer goes to the lane, until ``take_back`` or ``hand_over``."""
        self._lane = lane
        self._seen = False
        self._outlet.write(request)

    def take_back(self) -> None:
        """The lane has its whole answer: others may use the connection."""
        self._lane = None
        self.relay_no_more()
        self._pool.release(self, self._address)

    def hand_over(self, call: UpstreamCall, stream: EventStream | None) -> None:
        """The answer goes to a call from now on. ``stream``: what reads it, once its head is there (``call.head``)."""
        self._lane = None
        self._call = call
        self._heads.reset()
        self._stream, self._body = stream, None

    def relay_to(self, outlet: Outlet) -> None:
        """Simple events of the stream go straight there."""
        if self._stream is not None:
            self.relay(self._stream, outlet)

    def drop(self) -> None:
        """Close at once; nothing is reported."""
        self._call = self._lane = None
        self.open = False
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
        """Bytes that no shortcut took."""
        lane = self._lane
        if lane is not None:
            self._seen = True
            self.last_at = self._time()
            left = lane.heard(self, data)
            if left is None:
                return
            data = left
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
            self._malformed(call, error)

    def go_on(self, out: bytes) -> None:
        """After ``hand_over``: what the stream gave of the latest read, which may have ended it."""
        assert self._call is not None
        assert self._stream is not None
        self._on_out(self._call, self._stream, out)

    def break_off(self, error: Malformed) -> None:
        """After ``hand_over``: the stream could not read what came."""
        assert self._call is not None
        self._malformed(self._call, error)

    def _malformed(self, call: UpstreamCall, error: Malformed) -> None:
        self._call = None
        self.drop()
        call.end_failed(FailureKind.BROKEN, FailureReason("it sent what cannot be read", str(error)))

    def _on_out(self, call: UpstreamCall, stream: EventStream, out: bytes) -> None:
        whole = stream.done and stream.ended and not stream.failure
        if out or (whole and call.relay is None and stream.begins(out)):  # one that passes through may be empty
            if call.relay is None and not stream.begins(out):
                call.sink.on_comments(call, out)
            elif call.relay is None:
                call.ends = whole
                call.sink.on_events(call, out)
            elif whole:
                call.rest = out
            else:
                call.relay(out)
            if self._call is not call:
                return  # cancelled by what it caused
        if stream.failure:
            self.drop()
            call.end_failed(stream.kind, stream.reason)
        elif stream.done:
            self._finish(call)

    def _on_body(self, call: UpstreamCall, body: WholeBody, data: bytes) -> None:
        body.feed(data)
        if body.done:
            self._finish(call)

    def _on_head(self, call: UpstreamCall, data: bytes) -> None:
        self._seen = True
        found = self._heads.feed(data)
        if found is None:
            return
        head, rest = found
        call.head = head
        stream = call.events
        if stream is not None and stream.takes(head):
            self._stream = stream
            if rest:
                self._on_out(call, stream, stream.feed(rest))
            return
        self._body = WholeBody(head, MAX_ANSWER)
        self._on_body(call, self._body, rest)

    def _finish(self, call: UpstreamCall) -> None:
        stream, body = self._stream, self._body
        self._call = None
        self.relay_no_more()
        assert call.head is not None
        if call.head.keep_alive and (call.body is None or call.body.sent):
            self._pool.release(self, self._address)
        else:
            self.drop()
        if body is not None:
            call.end_whole(body.take())
        elif stream is not None and stream.ended:
            call.end_stream()
        else:
            call.end_failed(FailureKind.LOST, FailureReason("the stream ended without [DONE]"))

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
        release(self._pool.loop, self)
        self._transport = None
        if self._lane is not None:
            self._lane.unfold()
        self.relay_no_more()
        self._outlet.shut()
        call, self._call = self._call, None
        if call is None:
            return
        if not self._seen and self.reused:
            call.once_more()
        elif self._body is not None and self._body.on_eof():
            call.end_whole(self._body.take())
        elif self._stream is not None and self._stream.ended:
            call.end_stream()
        else:
            call.end_failed(FailureKind.LOST, FailureReason("it closed the connection", str(exc or "")))

    def lie_idle(self) -> None:
        """It is given to the pool."""
        if self._paused:
            self.resume()
        self.idle_since = self._time()
