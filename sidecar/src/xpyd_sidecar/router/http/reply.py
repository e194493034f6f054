"""A request that is whole, and the answer to it."""

from __future__ import annotations

from http import HTTPStatus
from typing import Protocol

import msgspec

from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.http.body_budget import Upload
from xpyd_sidecar.router.http.wire import chunk_of, lines_of
from xpyd_sidecar.router.relay.fast import Outlet

_STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus}

NO_CONTENT = 204
"""Status of an answer that has no body, and must not say how long it is."""


class HttpRequest(msgspec.Struct, frozen=True):
    """One whole request."""

    method: str
    path: str
    """Without the query."""
    headers: dict[bytes, bytes]
    """Names in lower case; of repeated ones the first."""
    body: bytes
    request_id: str
    """The client's X-Request-Id if it is a plain word, else a new one."""
    target: bytes = b""
    """Path and query, as the client wrote them."""
    upload: Upload | None = None
    """The body where it is handed on while it comes; ``body`` is empty then."""
    judged: bool = False
    """Its head was judged before its body came."""
    refusal: HttpFault | None = None
    """What was found then. Its body is not here."""


class RequestHandler(Protocol):
    """Who answers a request that takes time."""

    def on_client_gone(self) -> None:
        """The connection is closed; what is written from now on goes nowhere."""

    def on_pause(self) -> None:
        """The client is slower than its answer: stop writing soon."""
        return

    def on_resume(self) -> None:
        """Go on."""
        return


class LaterReply(RequestHandler):
    """Handles a request whose answer is one write, later: nothing is to be stopped, and nobody hears of it who has gone."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.gone = False

    def on_client_gone(self) -> None:
        """The answer goes nowhere."""
        self.gone = True


class Application(Protocol):
    """What the server serves."""

    def handle(self, request: HttpRequest, reply: Reply) -> RequestHandler | None:
        """Answer through ``reply``, now (and return None) or later. May raise HttpFault."""

    def judge(self, method: str, path: str, headers: dict[bytes, bytes]) -> bool:
        """Judge the head of a request, before its body comes: whether the body is wanted. Raises HttpFault."""

    def enter(self, request: HttpRequest, client: ReplyConnection) -> RequestHandler | None:
        """Answer later, without a reply. None: nothing was done; ``handle`` it."""


class ReplyConnection(Protocol):
    """What a reply needs of the connection it goes to."""

    @property
    def draining(self) -> bool:
        """Whether the server stops, so that this answer is the connection's last."""

    @property
    def date(self) -> bytes:
        """Now, as HTTP writes it."""

    @property
    def outlet(self) -> Outlet:
        """Where to write."""

    @property
    def private(self) -> bool:
        """Whether nobody else reads it: TLS, or a client on this host."""

    def finished(self, *, close: bool) -> None:
        """The answer is written."""

    def hand_over(self, handler: RequestHandler, other: RequestHandler) -> None:
        """Another one goes on with what a handler has begun."""


class Reply:
    """The answer to one request. One head, ever: ``whole``, or ``begin`` … ``end`` or ``fail``."""

    __slots__ = ("_close", "_connection", "_head_only", "_held", "_old", "_send", "_sent", "_sized", "added", "done",
                 "outlet", "request_id", "started", "status")

    def __init__(self, connection: ReplyConnection, request_id: str, *, close: bool, old: bool, head_only: bool) -> None:
        self._connection = connection
        self.outlet = connection.outlet
        """For what goes to the client without this reply's help, between ``begin`` and the end."""
        self._send = self.outlet.write
        self._held = b""
        self._close = close
        self._old = old
        self._head_only = head_only
        self._sized = False
        self.added = b""
        """Lines for its head, beside those that it is given."""
        self.request_id = request_id
        self.started = False
        self.done = False
        self.status = 0
        self._sent = 0

    @property
    def private(self) -> bool:
        """Whether nobody but the client reads the connection."""
        return self._connection.private

    @property
    def sent(self) -> int:
        """Bytes of the body, framing included."""
        return self._sent if self.done else self._sent + self.outlet.relayed

    @property
    def framed(self) -> bool:
        """Whether ``write`` takes whole HTTP chunks; if not (HTTP/1.0), their payload."""
        return not self._old

    def whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """A complete answer."""
        self.outlet.relayed = 0
        head = self._head(status, headers, b"" if status == NO_CONTENT else b"content-length: %d\r\n" % len(body))
        self._send(head if self._head_only else head + body)
        self._sent += len(body)
        self._finish()

    def fault(self, fault: HttpFault) -> None:
        """An error, whole."""
        self.whole(fault.status, fault.headers(), fault.body())

    def hand_over(self, handler: RequestHandler, other: RequestHandler) -> None:
        """Another one goes on with what a handler has begun, or would have."""
        self._connection.hand_over(handler, other)

    def last(self) -> None:
        """Close the connection after this answer."""
        self._close = True

    def begin(self, status: int, headers: list[tuple[bytes, bytes]] | bytes, first: bytes, *, length: int | None = None,
              ends: bool = False) -> None:
        """The head of an answer that comes in parts, and its first part. ``headers``: also as lines of a head.

        ``length``: of all parts, where it is known. ``ends``: the end follows at once, and all of it leaves with that.
        """
        if length is not None:
            self._sized = True
            framing = b"content-length: %d\r\n" % length
        elif self._old:
            self._close = True
            framing = b""
        else:
            framing = b"transfer-encoding: chunked\r\n"
        self.outlet.relayed = 0
        begun = self._head(status, headers, framing) + first
        if ends:
            self._held = begun
        else:
            self._send(begun)
        self._sent += len(first)

    def write(self, data: bytes) -> None:
        """A part."""
        self._sent += len(data)
        self._send(data)

    def hold(self, data: bytes) -> None:
        """The last part, which goes with the end."""
        self._sent += len(data)
        self._held += data

    def end(self) -> None:
        """The last part has been written."""
        if not self._old and not self._sized and not self._head_only:
            self._held += b"0\r\n\r\n"
        self._finish()

    def fail(self, event: bytes) -> None:
        """End an answer that has begun with an error event, and close: a second head is never sent."""
        self._held += event if self._old else chunk_of(event) + b"0\r\n\r\n"
        self._close = True
        self._finish()

    def cut(self) -> None:
        """End an answer that has begun and will not be whole: its framing tells the client."""
        self._close = True
        self._finish()

    def _head(self, status: int, headers: list[tuple[bytes, bytes]] | bytes, framing: bytes) -> bytes:
        assert not self.started, "a second response head"
        self.started = True
        self.status = status
        self._close = self._close or self._connection.draining
        lines = headers if isinstance(headers, bytes) else lines_of(headers)
        keep = b"connection: close\r\n" if self._close else b"connection: keep-alive\r\n" if self._old else b""
        line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d Status\r\n" % status
        own = b"x-request-id: %b\r\ndate: %b\r\n\r\n" % (self.request_id.encode(), self._connection.date)
        return b"".join((line, lines, self.added, framing, keep, own))

    def _finish(self) -> None:
        assert not self.done, "a second end"
        if self._held:
            self._send(self._held)
        self._sent += self.outlet.relayed
        self.done = True
        self._connection.finished(close=self._close)
