"""One client connection: requests are answered in order, one at a time.

    bytes ──▶ rest ──▶ Incoming ──▶ queue (pipelining) ──▶ application.handle(request, reply) ──▶ bytes
              read, not parsed yet       parsed, not answered yet

A client that makes an HTTP error is told so, once, and the connection is closed after it: where its next request would
begin is not known then.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import uuid
from typing import cast

from xpyd_sidecar.process.accepting import descriptor_of, of_this_host
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.http import heads
from xpyd_sidecar.router.http.holding import Held, RequestHolding
from xpyd_sidecar.router.http.incoming import IncomingRequests
from xpyd_sidecar.router.http.ledger import HeldKind
from xpyd_sidecar.router.http.pipeline import ANSWERS, PipelineQueue
from xpyd_sidecar.router.http.reply import HttpRequest, Reply, RequestHandler
from xpyd_sidecar.router.http.server import OpenConnection, Server
from xpyd_sidecar.router.relay.fast import Outlet

logger = logging.getLogger(__name__)

SLICE = 16 << 10
"""Bytes of a read that are parsed at a time, so that the requests of one read are not all made before any is answered."""
HIGH_WATER = 64 << 10
"""Bytes that a client leaves unread before nothing more is written, and before they count in the ledger."""


class ClientConnection(OpenConnection):
    """One client connection. A client that closes its sending side counts as gone: its answer would go nowhere."""

    __slots__ = ("_blocked_at", "_busy", "_closing", "_continue", "_deaf", "_due", "_handler", "_incoming", "_paused",
                 "_queue", "_rest", "_scheduled", "_served", "_since", "_transport", "holding", "outlet", "server")

    def __init__(self, server: Server) -> None:
        self.server = server
        self._transport: asyncio.Transport | None = None
        self.outlet = Outlet()
        """What is written to a client that is gone goes nowhere."""
        self._incoming = IncomingRequests(server, self)
        self._queue = PipelineQueue()
        self._rest = b""
        """What was read and is not parsed yet: it waits for the queue."""
        self._scheduled = False
        """A turn of this connection will come by itself."""
        self.holding = RequestHolding(server.bodies, server.ledger, server.loop.time)
        """Of the request that is being answered."""
        self._handler: RequestHandler | None = None
        self._busy = self._served = False
        self._due = False
        """It was idle for too long at the latest look."""
        self._closing = self._paused = False
        self._deaf = False
        """Nothing more is read: what was being received was refused."""
        self._continue = False
        self._blocked_at = 0.0
        self._since = server.loop.time()
        """When the request that is being received began, or the connection fell idle."""

    @property
    def private(self) -> bool:
        """Whether nobody else reads it: TLS, or a client on this host."""
        return self.server.encrypted or (self._transport is not None and of_this_host(self._transport))

    # ---- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has the methods, not the base class
        self._transport.set_write_buffer_limits(high=HIGH_WATER)
        self.outlet.open(transport, descriptor_of(transport))
        fault = self.server.enter(self, transport.get_extra_info("peername"))
        if fault is not None:
            self._refuse(fault)

    def data_received(self, data: bytes) -> None:
        """Bytes of one or several requests, or of a part of one."""
        self._due = False
        if self._closing or self._deaf:
            return
        self._rest += data
        if not self._scheduled:
            self._turn()

    def _give_up(self, fault: HttpFault) -> None:
        """Nothing more is read; the client is told in its turn, by whoever takes the body where somebody does."""
        self._deaf = True
        self._rest = b""
        upload, self._incoming.upload = self._incoming.upload, None
        self._incoming.drop()
        if upload is None:
            self._queue.append(fault)
        else:
            upload.fail(fault)

    def _end(self) -> None:
        """Nothing more is read of a request that was refused; if that was said already, this is the end."""
        self._deaf = True
        self._rest = b""
        if not self._busy and not self._queue:
            self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, whoever closed it."""
        if exc is not None:
            logger.debug("client connection lost: %s", exc)
        self.server.on_connection_lost(self)
        self._closing = True
        self._transport = None
        self.outlet.shut()
        self._rest = b""
        self.holding.end()
        self.server.ledger.drop(HeldKind.UNREAD, self)
        self._incoming.drop()
        self._queue.give_back(self.server.bodies)
        handler, self._handler = self._handler, None
        if handler is not None:
            handler.on_client_gone()

    def pause_writing(self) -> None:
        """The client does not take its answer as fast as it comes."""
        self._blocked_at = now = self.server.loop.time()
        if self._handler is not None:
            self._handler.on_pause()
        if self._transport is not None:
            for one in self.server.ledger.hold(HeldKind.UNREAD, self, self._transport.get_write_buffer_size(), now):
                one.cut(HeldKind.UNREAD)

    def resume_writing(self) -> None:
        """The client has taken most of it."""
        self._blocked_at = 0.0
        self.server.ledger.drop(HeldKind.UNREAD, self)
        if self._handler is not None:
            self._handler.on_resume()
        else:
            self._go_on()
            self._rest_if_idle()

    # ---- what comes (incoming.RequestSink)

    def end_body(self, fault: HttpFault) -> None:
        """There is no more room, or time, for the body that is being received."""
        self._give_up(fault)
        self._go_on()

    def on_request(self, request: HttpRequest, held: Held, *, close: bool, old: bool) -> None:
        """The next request has come: it waits for its turn."""
        self.server.places.wake(self)
        self._queue.append((request, held, close, old))

    def complete(self) -> None:
        """A whole request is in: nobody waits for 100 any more."""
        self._continue = False
        self._since = self.server.loop.time()

    def expects(self) -> None:
        """100 is due when nothing is answered any more that came before."""
        self._continue = True
        self._tell_continue()

    # ---- answering

    def cut(self, kind: HeldKind) -> None:
        """There is no more room for its head, for the body that comes, or for what it leaves unread."""
        if kind is HeldKind.UNREAD:
            logger.info("a client left its answer unread, and others need the memory")
            self.abort()
        else:
            self.end_body(heads.too_slow_for_the_room())

    def hand_over(self, handler: RequestHandler, other: RequestHandler) -> None:
        """Another one goes on with what a handler has begun."""
        if self._handler is handler:
            self._handler = other
            if self._blocked_at:
                other.on_pause()

    def on_reply_end(self, *, close: bool) -> None:
        """The answer to the current request is written. ``close``: the connection ends with it."""
        self.holding.end()
        self._handler = None
        self._busy = False
        self._served = True
        self._since = self.server.loop.time()
        if self._incoming.upload is not None and not self._queue:
            self._deaf = True  # it was answered before its body was whole
        if close or (self._deaf and not self._queue):
            self._close()
            return
        if self._continue:
            self._tell_continue()
        if self._queue or self._rest or self._paused:
            self._go_on()
        else:
            self._rest_if_idle()

    def _rest_if_idle(self) -> None:
        """The place may be somebody else's where nothing is answered or read here, and nothing comes that is wanted: what
        a client sends beside that keeps no place.
        """
        if not (self._busy or self._queue or self._rest or self._blocked_at or self._incoming.wanted):
            self.server.places.rest(self, self.server.loop.time())

    def _go_on(self) -> None:
        """Have a turn soon, if there is anything to do in it."""
        if not self._scheduled and (self._queue or self._rest or self._paused):
            self._scheduled = True
            self.server.loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Parse what was read, and answer a few of the requests that wait."""
        self._scheduled = False
        for _ in range(ANSWERS):
            if self._rest:
                self._parse()
            if not self._queue or self._busy or self._closing or self._blocked_at:
                break
            entry = self._queue.popleft()
            if isinstance(entry, HttpFault):
                self._refuse(entry)
                return
            request, held, close, old = entry
            self.holding.begin(held)
            if request.upload is not None:
                self._tell_continue()
            self._serve(request, close=close or (self._deaf and not self._queue), old=old)
        else:
            self._go_on()
        if self._queue or self._rest or self._paused or self._incoming.upload is not None:
            self.throttle()
        self._rest_if_idle()

    def _parse(self) -> None:
        incoming = self._incoming
        while self._rest and not self._deaf and not self._full:
            data, self._rest = self._rest, b""
            if len(data) > SLICE and len(data) > (size := max(SLICE, incoming.missing)):
                data, self._rest = data[:size], data[size:]
            began = incoming.receiving
            incoming.feed(data)
            if incoming.receiving and not began:
                self._since = self.server.loop.time()
            if incoming.ended or (incoming.refused and incoming.fault is not None):
                self._end()
            elif incoming.fault is not None:
                self._give_up(incoming.fault)

    @property
    def _full(self) -> bool:
        """Whether so much waits that nothing more is parsed, or read."""
        queue, upload = self._queue, self._incoming.upload
        if not queue and upload is None:
            return False
        if queue and (self._blocked_at or queue.full):
            return True
        return upload is not None and upload.blocked

    def _serve(self, request: HttpRequest, *, close: bool, old: bool) -> None:
        self._busy = True
        handler: RequestHandler | None = None
        reply = Reply(self, request.request_id, close=close, old=old, head_only=request.method == "HEAD")
        try:
            handler = self.server.application.handle(request, reply)
        except HttpFault as fault:
            reply.fault(fault)
        except Exception:  # noqa: BLE001 (it is logged there)
            self._failed(reply)
        if handler is not None and self._busy:  # it was not answered meanwhile
            self._handler = handler
            if self._blocked_at:
                handler.on_pause()

    def _failed(self, reply: Reply) -> None:
        # In an exception's handler: a bug costs one request, and is told once.
        logger.exception("a request failed inside the router", extra={"request": reply.request_id})
        if reply.started:
            self._close()
        else:
            reply.fault(HttpFault(500, "the router failed; its log says why", kind="internal_error", code="internal"))

    def _tell_continue(self) -> None:
        if self._continue and not self._busy and not self._queue:
            self._continue = False
            self.outlet.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def throttle(self) -> None:
        """Read on, or no further, by what waits."""
        if self._transport is None or self._closing:
            return
        full = self._full
        if self._rest and not full:
            self._go_on()
            full = True
        if full != self._paused:
            (self._transport.pause_reading if full else self._transport.resume_reading)()
            self._paused = full

    def _refuse(self, fault: HttpFault) -> None:
        self._incoming.drop()
        self._busy = True
        self._deaf = True
        Reply(self, uuid.uuid4().hex, close=True).fault(fault)
        self.server.count_refusal(fault)

    def _close(self) -> None:
        if self._closing or self._transport is None:
            return
        self._closing = True
        self._since = self.server.loop.time()
        self.outlet.shut()
        if not self._transport.get_write_buffer_size():
            self.server.lingers(self)
        if (self._deaf or self._incoming.refused) and self._transport.can_write_eof():
            # The client may still be sending. Closing now would reset the connection and lose the answer on its way.
            self._transport.write_eof()
            self._transport.resume_reading()
        else:
            self._transport.close()

    # ---- time

    def sweep(self, now: float, awake: float) -> None:
        """Called every second: close what is overdue. ``awake``: this process stood still before, and nobody was slow."""
        if self._transport is None:
            return
        outlet = self.outlet
        if not outlet.direct and outlet.fd >= 0:
            # At the second look: uvloop's count leaves out what it has just been given.
            outlet.direct = not (outlet.buffered or self._transport.get_write_buffer_size())
            outlet.buffered = False
        since = max(self._since, awake)
        if self._blocked_at and now - max(self._blocked_at, awake) > heads.UNREAD_S:
            logger.info("a client left its answer unread", extra={"seconds": heads.UNREAD_S})
            self.abort()
        elif self._closing:
            if now - since > heads.LINGER_S:
                self.abort()
        elif (upload := self._incoming.upload) is not None:
            if upload.blocked:
                self._since = now  # it is not the client who is slow
            elif now - since > self._incoming.allowed_s:
                self.end_body(heads.too_slow(self._incoming.allowed_s))
        elif self._busy or self._queue or self._rest or self._blocked_at:
            return
        elif self._incoming.receiving:
            if now - since <= self._incoming.allowed_s:
                return
            if self._incoming.refused:  # it has its answer
                self._end()
            else:
                self._refuse(heads.too_slow(self._incoming.allowed_s))
        elif now - since > (heads.IDLE_LEAVING_S if self.server.leaving else heads.IDLE_S):
            self._close_idle()

    def leave(self) -> None:
        """The server ends: a connection that lies idle after an answer is closed, a busy one after its answer."""
        if self._served and not self._busy and not self._queue and not self._rest and not self._incoming.receiving:
            self._close_idle()

    def _close_idle(self) -> None:
        # At the second look: a loop that lags may run its timers before it reads, and a request may be waiting there.
        if self._due:
            self._close()
        self._due = True

    def give_way(self) -> None:
        """Another connection needs the place more than this one, on which nothing is answered."""
        self.server.lingers(self)
        if self._closing:
            return
        if self._incoming.receiving and not self._incoming.refused:
            self._incoming.drop()
            self._busy = True
            Reply(self, uuid.uuid4().hex, close=True).fault(heads.gave_way())
        else:
            self._close()

    def reset(self) -> None:
        """Close now, with a reset: who reads until the end must not take what there is for the whole."""
        if self._transport is not None:
            plain = self._transport.get_extra_info("socket")
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()

    def abort(self) -> None:
        """Close now; what is written until the loop says so goes nowhere."""
        transport, self._transport = self._transport, None
        self.outlet.shut()
        if transport is not None:
            transport.abort()
