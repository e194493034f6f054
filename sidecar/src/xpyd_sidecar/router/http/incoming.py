"""Requests of one connection as they come in: bytes to whole requests, bounded on the way.

    bytes ──feed──▶ httptools ──▶ line.on_request(request); line.complete() when its last byte is in

The first fault is kept, since exceptions would be wrapped by the parser; nothing is taken after it.

Nearly every request is a plain one: its head fits into one read, no header is repeated, and its body is small and comes in
one piece. It costs a call of the parser for each header and four more; whatever is rare is looked at only where it may be.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

import httptools

from xpyd_sidecar.router.api.faults import HttpFault, bad_request, too_many
from xpyd_sidecar.router.http import auth, heads
from xpyd_sidecar.router.http.body_budget import HELD, SMALL, BodyOwner, HeldBody, Upload
from xpyd_sidecar.router.http.holding import Held
from xpyd_sidecar.router.http.ledger import COST, HeldKind, Holder
from xpyd_sidecar.router.http.places import PlaceHolder
from xpyd_sidecar.router.http.reply import HttpRequest
from xpyd_sidecar.router.http.server import Server

MAX_URL = 8192
FRAMING = 16
"""Bytes that may come for each byte of a body, beyond what a head may have: bounds extensions of chunks, and trailers."""
AT_ONCE = 256 << 10
"""And so many more: what one read may bring."""
DROPPED = 64 << 10
"""Bytes of a refused request's body that are read and thrown away, so that the connection can be kept."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_AUTHORITY = re.compile(rb"^https?://[^/?]*", re.IGNORECASE)


class RequestSink(BodyOwner, Holder, PlaceHolder, Protocol):
    """Who gets the requests."""

    def on_request(self, request: HttpRequest, held: Held, *, close: bool, old: bool) -> None:
        """The next request, its body as the budget has it (0: none); ``close``: the last one; ``old``: of HTTP/1.0."""

    def complete(self) -> None:
        """Its last byte is in."""

    def expects(self) -> None:
        """The client waits for 100 before it sends the body."""

    def throttle(self) -> None:
        """Whether an upload is blocked may have changed."""


def request_id_of(given: bytes | None) -> str:
    """The client's own request id where it is one, else a new one."""
    return given.decode() if given and _REQUEST_ID.fullmatch(given) else heads.fresh()


class IncomingRequests:
    """What has come of the next request."""

    __slots__ = ("_began", "_bodies", "_body", "_bounds", "_declared", "_extra", "_fed", "_head_size", "_headers", "_held",
                 "_hosts", "_in_head", "_judge_head", "_judged", "_known_path", "_line", "_parser", "_raw",
                 "_repeated", "_server", "_shown", "_size", "_unfinished", "_url", "_version", "ended", "fault",
                 "receiving", "refused", "upload", "wanted")

    def __init__(self, server: Server, line: RequestSink) -> None:
        self._server = server
        self._bounds = server.bounds
        self._bodies = server.bodies
        self._judge_head = server.application.judge
        self._line = line
        self._parser: Any = httptools.HttpRequestParser(self)
        self._began = False
        """The request that is being received began in the latest read."""
        self._fed = 0
        """Bytes of that read."""
        self._version = ""
        self._unfinished = 0
        """Bytes of reads that had no end of a head."""
        self._shown: bytes | None = None
        """The Authorization of the latest head that was accepted (empty: it had none); None: none was."""
        self.fault: HttpFault | None = None
        """What is wrong with it: where the next one would begin is not known."""
        self.ended = False
        """Nothing more is taken: the latest request was refused, and more of its body comes than is thrown away."""
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._known_path = ""
        self._headers: dict[bytes, bytes] = {}
        self._head_size = self._extra = self._hosts = self._repeated = 0
        """Bytes of its head in reads after its first; of repeated headers the bytes, those named Host, and the number."""
        self._body: list[bytes] = []
        self._held: HeldBody | None = None
        """Its body, as the budget has it; not one that comes at once."""
        self._size = self._raw = self._declared = 0
        self._in_head = self.receiving = False
        """Its head is not whole; part of it is in."""
        self._judged = self.wanted = self.refused = False
        """Its head was judged; its body is wanted; it was refused and taken so, and its body is thrown away."""
        self.upload: Upload | None = None
        """The body, where it is handed on while it comes."""

    @property
    def allowed_s(self) -> float:
        """How long it may take to come."""
        if self._in_head:
            return min(heads.HEAD_S, self._bounds.receive_s)
        return self._bounds.receive_s + max(self._declared, self._size) / heads.SLOWEST_BODY

    @property
    def missing(self) -> int:
        """Bytes of its body that are announced and have not come."""
        return max(0, self._declared - self._size)

    def drop(self) -> None:
        """Let go of what has come of the request, which will not be whole."""
        self._body.clear()
        self._headers = {}
        self._forget_head()
        self.wanted = False
        if self._held is not None:
            self._bodies.give_back(self._held)

    def feed(self, data: bytes) -> None:
        """Bytes of one or several requests, or of a part of one; ``fault`` says whether they are in order."""
        self._began = False
        self._fed = len(data)
        rest: bytes | None = data
        while rest is not None:  # a turn for each upgrade that is offered
            given, rest = rest, None
            try:
                self._parser.feed_data(given)
            except httptools.HttpParserUpgrade as upgrade:
                if self.fault is None:
                    rest = self._without_upgrade(given[upgrade.args[0]:])
            except httptools.HttpParserError as error:
                self.fault = self.fault or bad_request(f"malformed HTTP: {error}", code="malformed_http")
        if self._in_head:
            self._bound_head(0 if self._began else len(data))
            self._hold_head(len(data))
        elif self._headers and not self._began:
            self._raw += len(data)
            if self._raw > FRAMING * self._size + self._bounds.header_bytes + AT_ONCE:
                words = "the body's framing is larger than its content"
                self.fault = self.fault or bad_request(words, code="malformed_http")

    def _without_upgrade(self, rest: bytes) -> bytes | None:
        """What to parse instead of a request that offers an upgrade, and of ``rest`` behind its head. None: a fault."""
        # Some clients offer HTTP/2 with every request. The parser stops at such a head, without reading the body; a
        # server that does not upgrade ignores the offer (RFC 9110, 7.8). So the request is parsed again without it.
        method = self._parser.get_method()
        if method == b"CONNECT":
            self.fault = HttpFault(405, "CONNECT is not served", code="method_not_allowed", allow="GET, POST")
            return None
        tokens = [token.strip() for token in self._headers.pop(b"connection", b"").split(b",")]
        kept = [token for token in tokens if token.lower() not in {b"upgrade", b"http2-settings"}]
        headers = {name: value for name, value in self._headers.items() if name not in {b"upgrade", b"http2-settings"}}
        if kept:
            headers[b"connection"] = b", ".join(kept)
        lines = b"".join(b"%b: %b\r\n" % header for header in headers.items())
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._url, self._parser.get_http_version().encode(), lines)
        self._parser = httptools.HttpRequestParser(self)
        return head + rest

    # ---- httptools

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if self._headers or self._url:
            self._reset()
        self._in_head = self._began = self.receiving = True

    def on_url(self, url: bytes) -> None:
        """Part of the URL."""
        self._url += url
        if len(self._url) > MAX_URL:
            self.fault = self.fault or HttpFault(414, f"the URL is longer than {MAX_URL} bytes", code="uri_too_long")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One whole header, or a trailer: those are dropped (RFC 9110, 6.5.1), and bounded with the framing."""
        name = name.lower()
        if name not in self._headers and self._in_head:
            self._headers[name] = value
        elif self._in_head:
            self._hosts += name == b"host"
            self._repeated += 1
            self._extra += len(name) + len(value) + 4

    def on_headers_complete(self) -> None:
        """The head is in: check what can be checked before the body."""
        self._in_head = False
        self._forget_head()
        headers, version = self._headers, self._parser.get_http_version()
        self._version = version
        coding = headers.get(b"transfer-encoding")
        usual = version == "1.1" and coding is None and not self._hosts and b"host" in headers
        if not usual and version not in {"1.0", "1.1"}:
            self.fault = self.fault or HttpFault(505, f"HTTP/{version} is not served", code="http_version")
        if not self._began or self._fed > heads.UNKNOWN_HEAD or self._fed > self._bounds.header_bytes:
            self._bound_head(0)
        elif len(headers) + self._repeated > heads.MAX_HEADERS:
            self.fault = self.fault or heads.too_many_headers()
        if not usual and self.fault is None:
            self.fault = heads.framing_fault(version, self._hosts + (b"host" in headers), coding)
        length = headers.get(b"content-length", b"").strip()
        if length.isdigit():
            self._declared = int(length)
        if self._parser.should_upgrade():
            return  # it will be parsed again without
        if self.fault is None and not self.ended and (self._declared or coding is not None):
            self._judge(coding)
        if b"expect" in headers and self.fault is None and not self.refused:
            expect = headers[b"expect"]
            if expect.lower() != b"100-continue":
                self.fault = HttpFault(417, f"cannot meet Expect: {expect[:40].decode('latin-1')}",
                                       code="expectation_failed")
            elif self._version == "1.1":
                self._line.expects()

    def _judge(self, coding: bytes | None) -> None:
        path, method = self._path(), self._parser.get_method().decode("latin-1")
        self._known_path, self._judged = path, True
        try:
            wanted = self._judge_head(method, path, self._headers)
            self._claim()
            if self._declared > self._bounds.body_bytes:
                raise heads.too_large_body(self._bounds.body_bytes)
            if wanted and (coding is not None or self._declared > SMALL):
                self._held = self._begin(None if coding is not None else self._declared)
        except HttpFault as fault:
            # A client that waits for 100 may send its body or not: only an end tells them apart.
            self.ended = self._declared > DROPPED or b"expect" in self._headers
            self.refused = True
            self._take(path, b"", 0, fault)
            return
        self.wanted = wanted
        if wanted:
            self._server.places.wake(self._line)
        if wanted and path in self._server.streamed and method == "POST":
            self._held = self._held or self._begin(self._declared)
            self.upload = Upload(None if coding is not None else self._declared, self._line.throttle)
            self._take(path, b"", self._held)

    def on_body(self, body: bytes) -> None:
        """Part of the body, without chunk framing."""
        self._size += len(body)
        if self.refused:
            self.ended = self.ended or self._size > DROPPED
        elif self._size > self._bounds.body_bytes:
            self.fault = self.fault or heads.too_large_body(self._bounds.body_bytes)
            self._body.clear()
        elif self.wanted and self.fault is None:
            self._keep(body)

    def _begin(self, length: int | None) -> HeldBody:
        """Have room for a body. ``length``: None where it comes in chunks. Raises HttpFault: there is none."""
        key = self._server.application.connection_key(self._headers) or ""
        body, slow = self._bodies.begin(self._line, length, self._server.loop.time(), key)
        for one in slow:
            one.owner.end_body(heads.too_slow_for_the_room())
        if body is None:
            raise heads.no_room()
        return body

    def _keep(self, body: bytes) -> None:
        if self._held is None and (self._size < self._declared or not self._bodies.at_once(self._size)):
            self._held = self._begin(self._declared)
        held, streamed = self._held, self.upload is not None
        if held is not None:  # few bytes are here at a time of what is handed on
            try:
                ended = self._bodies.grow(held, len(body), self._server.loop.time(), kept=not streamed or held.size < HELD)
            except HttpFault as fault:
                self.fault = fault
                self._body.clear()
                return
            for one in ended:
                if one is held:
                    self.fault = heads.no_room()
                    self._body.clear()
                    return
                one.owner.end_body(heads.too_slow_for_the_room())
        if self.upload is not None:
            self.upload.feed(body)
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """A whole request is in."""
        if self.fault is not None or self.ended or self._parser.should_upgrade():
            return
        self._line.complete()  # first: who takes the body may answer at once
        if self._held is not None:
            self._bodies.complete(self._held)
        if self.upload is not None:
            self.upload.finish()
        elif not self.refused:
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._take(self._known_path or self._path(), body, self._held or len(body))
        self._reset()

    def _path(self) -> str:
        # A server must take the absolute form too (RFC 9112, 3.2.2).
        url = self._url
        if url[:1] != b"/":
            url = _AUTHORITY.sub(b"", url, count=1) or b"/"
        return url.split(b"?", 1)[0].decode("latin-1")

    def _take(self, path: str, body: bytes, held: Held, refusal: HttpFault | None = None) -> None:
        target, method = self._url, self._parser.get_method().decode("latin-1")
        if target[:1] != b"/":
            _, mark, query = target.partition(b"?")
            target = path.encode("latin-1") + mark + query
        headers = self._headers
        if not self._judged:
            try:
                self._claim()
            except HttpFault as fault:
                refusal = fault
        given = headers.get(b"x-request-id")
        request_id = heads.fresh() if given is None else request_id_of(given)
        judged = self._judged and refusal is None
        headers.pop(b"content-length", None)
        request = HttpRequest(method, path, headers, body, request_id, target, self.upload, judged, refusal)
        close = self.ended or not self._parser.should_keep_alive()
        self._line.on_request(request, held, close=close, old=self._version == "1.0")

    def _bound_head(self, more: int) -> None:
        # What the parser holds of a header that is not whole yet is not seen; but everything read since the request's
        # first read belongs to its head, so one of the two counts bounds it. A head of one small read needs none.
        self._head_size += more
        most = min(heads.UNKNOWN_HEAD, self._bounds.header_bytes)
        if len(self._headers) + self._repeated > heads.MAX_HEADERS:
            self.fault = self.fault or heads.too_many_headers()
        if self._larger(most) and self.fault is None:
            if most < self._bounds.header_bytes and self._known:
                most = self._bounds.header_bytes
            if self._larger(most):
                self.fault = heads.too_large_head(most)

    def _hold_head(self, more: int) -> None:
        """Enter what has come of a head that is not whole; the oldest heads go where there is no room."""
        self._unfinished += more
        if self.fault is not None:
            return
        ledger = self._server.ledger
        for one in ledger.hold(HeldKind.HEADS, self._line, COST * self._unfinished, self._server.loop.time()):
            if one is self._line:
                self.fault = heads.too_slow_for_the_room()
            else:
                one.cut(HeldKind.HEADS)

    def _forget_head(self) -> None:
        if self._unfinished:
            self._unfinished = 0
            self._server.ledger.drop(HeldKind.HEADS, self._line)

    def _claim(self) -> None:
        """The head was accepted, so it is no stranger's connection. Raises HttpFault: 429, its key has its share."""
        shown = auth.shown_key(self._headers)
        if shown == self._shown or (whose := self._server.application.connection_key(self._headers)) is None:
            return
        if not self._server.places.claim(self._line, whose):
            raise too_many(f"this key has {self._server.places.per_key} connections open, which is its share", 1)
        self._shown = shown

    @property
    def _known(self) -> bool:
        """Whether an earlier head, or what has come of this one, shows a key, where there are keys."""
        return self._shown is not None or self._server.application.connection_key(self._headers) is not None

    def _larger(self, most: int) -> bool:
        return self._head_size > most or ((self._fed > most or not self._began) and self._known_size() > most)

    def _known_size(self) -> int:
        known = self._headers.items()
        return self._extra + sum([len(name) + len(value) + 4 for name, value in known])
