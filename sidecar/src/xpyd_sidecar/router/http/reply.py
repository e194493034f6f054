"""A request that is whole, and the answer to it."""

from __future__ import annotations

from http import HTTPStatus
from typing import Protocol

import msgspec

from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.http.body_budget import Upload
from xpyd_sidecar.router.http.holding import RequestHolding
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
    """Names in lower case; of repeated ones the first. Not the length; not to be changed."""
    body: bytes
    request_id: str
    """The client's X-Request-Id if it is a plain word, else a new one."""
    target: bytes = b""
    """Path and query, as the client wrote them."""
    upload: Upload | None = None
    """The body where it is handed on while it comes; ``body`` is empty then."""
    judged: bool = False
    """Its head was judged before its body came, and is in order."""
    refusal: HttpFault | None = None
    """What was found then instead. Its body is not here."""


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

    def connection_key(self, headers: dict[bytes, bytes]) -> str | None:
        """The key whose connection brings this head; empty: everybody's; None: it shows no key, and needs one."""


class ReplyServer(Protocol):
    """What a reply needs of the server whose answer it is."""

    draining: bool
    turned_away: bool
    """Either: this answer is its connection's last."""
    date: bytes
    """Now, as HTTP writes it."""

    def source(self, connection: ReplyConnection) -> str:
        """The address at the other end of a connection; empty where it is of many, or not known."""


class ReplyConnection(Protocol):
    """What a reply needs of the connection it goes to."""

    @property
    def server(self) -> ReplyServer:
        """Whose it is."""

    @property
    def outlet(self) -> Outlet:
        """Where to write: a reply, and between its ``begin`` and its end what needs no reply's help."""

    @property
    def private(self) -> bool:
        """Whether nobody else reads it: TLS, or a client on this host."""

    def on_reply_end(self, *, close: bool) -> None:
        """The answer is written. ``close``: the connection ends with it."""

    def reset(self) -> None:
        """Close at once, so that the client sees a failure."""

    def hand_over(self, handler: RequestHandler, other: RequestHandler) -> None:
        """Another one goes on with what a handler has begun, or would have."""

    @property
    def holding(self) -> RequestHolding:
        """What the request that is being answered holds of the router's memory."""


class Reply(msgspec.Struct, eq=False):
    """The answer to one request. One head, ever: ``send_whole``, or ``begin`` … ``end`` or ``fail``."""

    connection: ReplyConnection
    request_id: str
    close: bool = False
    """The connection ends with it."""
    old: bool = False
    """To a request of HTTP/1.0."""
    head_only: bool = False
    added: bytes = b""
    """Lines for its head, beside those that it is given."""
    started: bool = False
    done: bool = False
    status: int = 0
    _held: list[bytes] = []
    """What leaves next."""
    _sized: bool = False
    _sent: int = 0

    @property
    def private(self) -> bool:
        """Whether nobody but the client reads the connection."""
        return self.connection.private

    @property
    def sent_bytes(self) -> int:
        """Bytes of the body that were sent, framing included."""
        return self._sent if self.done else self._sent + self.connection.outlet.relayed

    @property
    def framed(self) -> bool:
        """Whether ``write`` takes whole HTTP chunks; if not (HTTP/1.0), their payload."""
        return not self.old

    def send_whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Send a complete answer."""
        length = None if status == NO_CONTENT else len(body)
        self.begin(status, lines_of(headers), b"" if self.head_only else body, length=length, ends=True)
        self._finish()

    def fault(self, fault: HttpFault) -> None:
        """Send an error as a complete answer."""
        self.send_whole(fault.status, fault.headers(), fault.body())

    def begin(self, status: int, lines: bytes, first: bytes, *, length: int | None = None, ends: bool = False) -> None:
        """The head of an answer that comes in parts, and its first part. ``lines``: of the head.

        ``length``: of all parts, where it is known. ``ends``: the end follows at once, and all of it leaves with that.
        """
        assert not self.started, "a second response head"
        self.started = True
        self.status = status
        if length is not None:
            self._sized = True
            framing = b"content-length: %d\r\n" % length
        elif status == NO_CONTENT:
            framing = b""
        elif self.old:
            self.close = True
            framing = b""
        else:
            framing = b"transfer-encoding: chunked\r\n"
        server, outlet = self.connection.server, self.connection.outlet
        if server.draining or server.turned_away:
            self.close = True
        keep = b"connection: close\r\n" if self.close else b"connection: keep-alive\r\n" if self.old else b""
        begun = [
            _STATUS_LINES.get(status) or b"HTTP/1.1 %d Status\r\n" % status,
            lines, self.added, framing, keep, b"x-request-id: ", self.request_id.encode(), b"\r\ndate: ", server.date,
            b"\r\n\r\n", first]
        outlet.relayed = 0
        self._sent += len(first)
        if ends:
            self._held = begun
        else:
            outlet.write(b"".join(begun))

    def write(self, data: bytes) -> None:
        """A part."""
        self._sent += len(data)
        self.connection.outlet.write(data)

    def hold(self, data: bytes) -> None:
        """The last part, which goes with the end."""
        self._sent += len(data)
        self._held.append(data)

    def end(self) -> None:
        """The last part has been written."""
        if not self.old and not self._sized and not self.head_only:
            self._held.append(b"0\r\n\r\n")
        self._finish()

    def fail(self, event: bytes) -> None:
        """End an answer that has begun with an error event, and close: a second head is never sent."""
        self._held.append(event if self.old else chunk_of(event) + b"0\r\n\r\n")
        self.close = True
        self._finish()

    def cut(self) -> None:
        """End an answer that has begun and will not be whole: its framing tells the client; where it has none, a reset."""
        self.close = True
        if self.old and not self._sized:
            self.connection.reset()
        self._finish()

    def _finish(self) -> None:
        assert not self.done, "a second end"
        self.done = True
        connection = self.connection
        outlet = connection.outlet
        if self._held:
            outlet.write(b"".join(self._held))
        self._sent += outlet.relayed
        connection.on_reply_end(close=self.close)
