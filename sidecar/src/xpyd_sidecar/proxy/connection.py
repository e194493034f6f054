"""One client connection: HTTP/1.1 in, answers out, in order.

    bytes ──▶ parser ──▶ queue (pipelining) ──▶ application.handle(request, reply) ──▶ bytes
                                 one request of a connection is answered at a time

Belongs here: parsing (httptools), pipelining, limits and deadlines of one client. Does not belong here: listening
(``server``), what a path means (``admin``).

A client that makes an HTTP error is told so, once, and the connection is closed after it: where its next request would
begin is not known then.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections import deque
from typing import Any, Protocol, cast

import httptools
import msgspec

from xpyd_sidecar.proxy import ids, intake, rules
from xpyd_sidecar.proxy.fast import Outlet
from xpyd_sidecar.proxy.leg import descriptor_of
from xpyd_sidecar.proxy.reply import Application, Handler, HttpRequest, Reply
from xpyd_sidecar.proxy.upload import Upload
from xpyd_sidecar.routing.faults import Fault, bad_request, unavailable

logger = logging.getLogger(__name__)

MAX_QUEUED = 16
"""Pipelined requests held while one is answered; reading stops beyond it, or beyond MAX_QUEUED_BYTES."""
MAX_QUEUED_BYTES = 1 << 20
MAX_URL = 8192
IDLE_S = 75.0
"""How long a connection may lie idle between requests."""
IDLE_LEAVING_S = 1.0
"""The same for a connection without any request yet when the server has stopped listening: one may be on its way."""
UNREAD_S = 60.0
"""How long a client may leave bytes unread before it counts as gone."""
LINGER_S = 3.0
"""How long a closed connection may take to send its last bytes and to see the client's end."""
SLOWEST_BODY = 100_000
"""Bytes a second that a large body must come with, beyond the time that every request has."""
FRAMING = 16
"""Bytes that may come for each byte of a body, beyond what a head may have: bounds extensions of chunks, and trailers."""
HIGH_WATER = 256 << 10
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_AUTHORITY = re.compile(rb"^https?://[^/?]*", re.IGNORECASE)


class Bounds(msgspec.Struct, frozen=True):
    """Limits of one request."""

    header_bytes: int
    body_bytes: int
    receive_s: float
    """Time a client has to send a request."""


class Home(Protocol):
    """What a connection needs of the server it belongs to."""

    application: Application
    bounds: Bounds
    streamed: frozenset[str]
    """Paths whose bodies are handed on while they come."""
    loop: asyncio.AbstractEventLoop
    connections: set[Connection]
    draining: bool
    leaving: bool
    turned_away: bool
    date: bytes

    @property
    def full(self) -> bool:
        """Whether there are more connections than allowed."""

    def refused(self, fault: Fault) -> None:
        """A connection was refused before there was a whole request."""


class Connection(asyncio.Protocol):
    """One client connection."""

    __slots__ = ("_began", "_blocked_at", "_body", "_busy", "_closing", "_continue", "_deaf", "_declared",
                 "_due", "_fault", "_handler", "_head_size", "_headers", "_hosts", "_in_head",
                 "_known_path", "_known_size", "_parser", "_paused", "_queue", "_queued_bytes", "_raw", "_served", "_since",
                 "_size", "_transport", "_upload", "_url", "outlet", "server")

    def __init__(self, server: Home) -> None:
        self.server = server
        self._transport: asyncio.Transport | None = None
        self.outlet = Outlet()
        """What is written to a client that is gone goes nowhere."""
        self._parser: Any = httptools.HttpRequestParser(self)
        self._queue: deque[tuple[HttpRequest, bool, bool] | Fault] = deque()
        self._queued_bytes = 0
        self._handler: Handler | None = None
        self._busy = False
        self._served = False
        self._due = False
        """It was idle for too long at the latest look."""
        self._closing = False
        self._paused = False
        self._fault: Fault | None = None
        self._began = False
        """The request that is being received began in the latest read."""
        self._deaf = False
        """Nothing more is read: what was being received was refused."""
        self._continue = False
        self._blocked_at = 0.0
        self._since = server.loop.time()
        """When the request that is being received began, or the connection fell idle."""
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._known_path = ""
        self._headers: dict[bytes, bytes] = {}
        self._head_size = self._known_size = 0
        self._body: list[bytes] = []
        self._size = self._raw = 0
        self._declared = 0
        self._hosts = 0
        self._in_head = False
        self._upload: Upload | None = None

    # ---- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has the methods, not the base class
        self._transport.set_write_buffer_limits(high=HIGH_WATER)
        self.outlet.open(transport, descriptor_of(transport))
        self.server.connections.add(self)
        if self.server.full:
            self._refuse(unavailable("too many connections are open"))

    def data_received(self, data: bytes) -> None:
        """Bytes of one or several requests, or of a part of one."""
        self._due = False
        if self._closing or self._deaf:
            return
        if not (self._in_head or self._headers):
            self._since = self.server.loop.time()
            if not self._busy and not self._queue and self._take(data):
                return
        self._began = False
        self._feed(data)
        if self._in_head:
            self._bound_head(0 if self._began else len(data))
        elif self._headers and not self._began:
            self._bound_framing(len(data))
        if self._fault is not None:
            self._give_up(self._fault)
        self._next()

    def _take(self, data: bytes) -> bool:
        """Serve a read that is one plain request; False: nothing was done.

        The parser stands between two requests and never hears of it. What came before was answered, and this connection
        goes on, so nothing of it says how this request is to be read.
        """
        bounds = self.server.bounds
        found = intake.take(data, bounds.header_bytes, bounds.body_bytes)
        if found is None:
            return False
        path, target, headers, body = found
        given = headers.get(b"x-request-id")
        request_id = given.decode() if given is not None and _REQUEST_ID.fullmatch(given) else ids.fresh()
        request = HttpRequest("POST", path, headers, body, request_id, target, None)
        try:
            handler = self.server.application.enter(request, self)
        except Exception:  # noqa: BLE001 (it is logged there)
            self._busy = True
            self._failed(Reply(self, request_id, close=True, old=False, head_only=False))  # something may have been sent
            return True
        if handler is None:
            self._serve(request, close=False, old=False)
            return True
        self._busy = True
        self._handler = handler
        if self._blocked_at:
            handler.on_pause()
        return True

    def _give_up(self, fault: Fault) -> None:
        """Nothing more is read; the client is told in its turn, by whoever takes the body where somebody does."""
        self._deaf = True
        upload, self._upload = self._upload, None
        if upload is None:
            self._queue.append(fault)
        else:
            upload.fail(fault)

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._fault is None:
                self._feed_without_upgrade(data[upgrade.args[0]:])
        except httptools.HttpParserError as error:
            self._fault = self._fault or bad_request(f"malformed HTTP: {error}", code="malformed_http")

    def _feed_without_upgrade(self, rest: bytes) -> None:
        # Some clients offer HTTP/2 with every request. The parser stops at such a head, without reading the body; a
        # server that does not upgrade ignores the offer (RFC 9110, 7.8). So the request is parsed again without it.
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._fault = Fault(405, "CONNECT is not served", code="method_not_allowed", allow="GET, POST")
            return
        tokens = [token.strip() for token in self._headers.pop(b"connection", b"").split(b",")]
        kept = [token for token in tokens if token.lower() not in {b"upgrade", b"http2-settings"}]
        headers = {name: value for name, value in self._headers.items() if name not in {b"upgrade", b"http2-settings"}}
        if kept:
            headers[b"connection"] = b", ".join(kept)
        lines = b"".join(b"%b: %b\r\n" % header for header in headers.items())
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._url, self._parser.get_http_version().encode(), lines)
        self._parser = httptools.HttpRequestParser(self)
        self._feed(head + rest)

    def eof_received(self) -> None:
        """A client that closed its sending side counts as gone: its answer would go nowhere."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, whoever closed it."""
        if exc is not None:
            logger.debug("client connection lost: %s", exc)
        self.server.connections.discard(self)
        self._closing = True
        self._transport = None
        self.outlet.shut()
        self._queue.clear()
        handler, self._handler = self._handler, None
        if handler is not None:
            handler.on_client_gone()

    def pause_writing(self) -> None:
        """The client does not take its answer as fast as it comes."""
        self._blocked_at = self.server.loop.time()
        if self._handler is not None:
            self._handler.on_pause()

    def resume_writing(self) -> None:
        """The client has taken most of it."""
        self._blocked_at = 0.0
        if self._handler is not None:
            self._handler.on_resume()

    # ---- httptools; a fault is kept, since exceptions would be wrapped by the parser

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if self._headers or self._url:
            self._reset()
        self._in_head = self._began = True

    def on_url(self, url: bytes) -> None:
        """Part of the URL."""
        self._url += url
        if len(self._url) > MAX_URL:
            self._fault = self._fault or Fault(414, f"the URL is longer than {MAX_URL} bytes", code="uri_too_long")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One whole header, or a trailer: those are dropped (RFC 9110, 6.5.1), and bounded with the framing."""
        if not self._in_head:
            return
        name = name.lower()
        if name == b"host":
            self._hosts += 1
        self._headers.setdefault(name, value)
        self._known_size += len(name) + len(value) + 4

    def on_headers_complete(self) -> None:
        """The head is in: check what can be checked before the body."""
        self._in_head = False
        version = self._parser.get_http_version()
        if version not in {"1.0", "1.1"}:
            self._fault = self._fault or Fault(505, f"HTTP/{version} is not served", code="http_version")
        self._bound_head(0)
        coding = self._headers.get(b"transfer-encoding")
        if self._fault is None:
            self._fault = rules.framing_fault(version, self._hosts, coding)
        length = self._headers.get(b"content-length", b"0").strip()
        self._declared = int(length) if length.isdigit() else 0
        if self._declared > self.server.bounds.body_bytes:
            self._fault = self._fault or rules.too_large_body(self.server.bounds.body_bytes)
        expect = self._headers.get(b"expect")
        if expect is not None and self._fault is None:
            if expect.lower() != b"100-continue":
                self._fault = Fault(417, f"cannot meet Expect: {expect[:40].decode('latin-1')}", code="expectation_failed")
            elif version == "1.1":
                self._continue = True
                self._tell_continue()
        if self._fault is None and (self._declared or coding is not None) and not self._parser.should_upgrade():
            path = self._known_path = self._path()
            if path in self.server.streamed and self._parser.get_method() == b"POST":
                self._upload = Upload(None if coding is not None else self._declared, self._throttle)
                self._enqueue(path, b"")

    def on_body(self, body: bytes) -> None:
        """Part of the body, without chunk framing."""
        self._size += len(body)
        if self._size > self.server.bounds.body_bytes:
            self._fault = self._fault or rules.too_large_body(self.server.bounds.body_bytes)
            self._body.clear()
        elif self._fault is None and self._upload is not None:
            self._upload.feed(body)
        elif self._fault is None:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """A whole request is in."""
        if self._fault is not None or self._parser.should_upgrade():
            return
        self._continue = False
        if self._upload is not None:
            self._upload.finish()
        else:
            self._enqueue(self._known_path or self._path(), self._body[0] if len(self._body) == 1 else b"".join(self._body))
        self._reset()
        self._since = self.server.loop.time()

    def _path(self) -> str:
        # A server must take the absolute form too (RFC 9112, 3.2.2).
        url = self._url
        if url[:1] != b"/":
            url = _AUTHORITY.sub(b"", url, count=1) or b"/"
        return url.split(b"?", 1)[0].decode("latin-1")

    def _enqueue(self, path: str, body: bytes) -> None:
        given = self._headers.get(b"x-request-id", b"")
        request_id = given.decode() if given and _REQUEST_ID.fullmatch(given) else ids.fresh()
        target = self._url
        if target[:1] != b"/":
            _, mark, query = target.partition(b"?")
            target = path.encode("latin-1") + mark + query
        request = HttpRequest(self._parser.get_method().decode("latin-1"), path, self._headers, body, request_id, target,
                              self._upload)
        old = self._parser.get_http_version() == "1.0"
        self._queue.append((request, not self._parser.should_keep_alive(), old))
        self._queued_bytes += len(body)

    def _bound_framing(self, more: int) -> None:
        self._raw += more
        if self._raw > FRAMING * self._size + self.server.bounds.header_bytes + HIGH_WATER:
            self._fault = self._fault or bad_request("the body's framing is larger than its content", code="malformed_http")

    def _bound_head(self, more: int) -> None:
        # What the parser holds of a header that is not whole yet is not seen; but everything read since the request's
        # first read belongs to its head, so one of the two counts bounds it.
        self._head_size += more
        if max(self._head_size, self._known_size) > self.server.bounds.header_bytes:
            self._fault = self._fault or rules.too_large_head(self.server.bounds.header_bytes)

    # ---- answering

    @property
    def receiving(self) -> bool:
        """Whether part of a request is in."""
        return self._in_head or bool(self._headers)

    @property
    def draining(self) -> bool:
        """Whether the server stops or turns clients away, so that the next answer is the last."""
        return self.server.draining or self.server.turned_away

    @property
    def date(self) -> bytes:
        """Now, as HTTP writes it."""
        return self.server.date

    def hand_over(self, handler: Handler, other: Handler) -> None:
        """Another one goes on with what a handler has begun."""
        if self._handler is handler:
            self._handler = other

    def finished(self, *, close: bool) -> None:
        """The answer to the current request is written."""
        self._handler = None
        self._busy = False
        self._served = True
        self._since = self.server.loop.time()
        if self._upload is not None and not self._queue:
            self._deaf = True  # it was answered before its body was whole
        if close or (self._deaf and not self._queue):
            self._close()
            return
        if self._continue:
            self._tell_continue()
        if self._queue or self._paused:
            self.server.loop.call_soon(self._next)

    def _next(self) -> None:
        while self._queue and not self._busy and not self._closing:
            entry = self._queue.popleft()
            if isinstance(entry, Fault):
                self._refuse(entry)
                return
            request, close, old = entry
            self._queued_bytes -= len(request.body)
            if request.upload is not None:
                self._tell_continue()
            self._serve(request, close=close, old=old)
        self._throttle()

    def _serve(self, request: HttpRequest, *, close: bool, old: bool) -> None:
        self._busy = True
        reply = Reply(self, request.request_id, close=close, old=old, head_only=request.method == "HEAD")
        try:
            handler = self.server.application.handle(request, reply)
        except Fault as fault:
            reply.fault(fault)
        except Exception:  # noqa: BLE001 (it is logged there)
            self._failed(reply)
        else:
            self._handler = None if reply.done else handler
            if self._handler is not None and self._blocked_at:
                self._handler.on_pause()

    def _failed(self, reply: Reply) -> None:
        # In an exception's handler: a bug costs one request, and is told once.
        logger.exception("a request failed inside the router", extra={"request": reply.request_id})
        if reply.started:
            self._close()
        else:
            reply.fault(Fault(500, "the router failed; its log says why", kind="internal_error", code="internal"))

    def _tell_continue(self) -> None:
        if self._continue and not self._busy and not self._queue:
            self._continue = False
            self.outlet.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _throttle(self) -> None:
        if self._transport is None or self._closing:
            return
        full = (len(self._queue) > MAX_QUEUED or (len(self._queue) > 0 and self._queued_bytes > MAX_QUEUED_BYTES)
                or (self._upload is not None and self._upload.blocked))
        if full and not self._paused:
            self._transport.pause_reading()
        elif not full and self._paused:
            self._transport.resume_reading()
        self._paused = full

    def _refuse(self, fault: Fault) -> None:
        self._busy = True
        self._deaf = True
        Reply(self, uuid.uuid4().hex, close=True, old=False, head_only=False).fault(fault)
        self.server.refused(fault)

    def _close(self) -> None:
        if self._closing or self._transport is None:
            return
        self._closing = True
        self._since = self.server.loop.time()
        self.outlet.shut()
        if self._deaf and self._transport.can_write_eof():
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
        if self._blocked_at and now - max(self._blocked_at, awake) > UNREAD_S:
            logger.info("a client left its answer unread", extra={"seconds": UNREAD_S})
            self.abort()
        elif self._closing:
            if now - since > LINGER_S:
                self.abort()
        elif self._upload is not None:
            self._sweep_upload(self._upload, now, since)
        elif self._busy:
            return
        elif self.receiving:
            if now - since > self._allowed_s():
                self._fault = rules.too_slow(self._allowed_s())
                self._refuse(self._fault)
        elif now - since > self._idle_s():
            self._close_idle()

    def _sweep_upload(self, upload: Upload, now: float, since: float) -> None:
        if upload.blocked:
            self._since = now  # it is not the client who is slow
        elif now - since > self._allowed_s():
            self._give_up(rules.too_slow(self._allowed_s()))
            self._next()

    def _allowed_s(self) -> float:
        return self.server.bounds.receive_s + max(self._declared, self._size) / SLOWEST_BODY

    def _idle_s(self) -> float:
        return IDLE_LEAVING_S if self.server.leaving else IDLE_S

    def leave(self) -> None:
        """The server ends: a connection that lies idle after an answer is closed, a busy one after its answer."""
        if self._served and not self._busy and not self._queue and not self.receiving:
            self._close_idle()

    def _close_idle(self) -> None:
        # At the second look: a loop that lags may run its timers before it reads, and a request may be waiting there.
        if self._due:
            self._close()
        self._due = True

    def abort(self) -> None:
        """Close now; what is written until the loop says so goes nowhere."""
        transport, self._transport = self._transport, None
        self.outlet.shut()
        if transport is not None:
            transport.abort()
