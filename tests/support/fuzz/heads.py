"""Requests as they come, through a connection, against httptools alone: what is served is what a parser finds there.

    byte 0      2 also in one read, else also in many · 4, 8 other limits
    the rest    the bytes of one connection, or with a byte 0xff between them of several reads
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Hashable, Sequence
from unittest.mock import patch

import httptools
from paper import served

from xpyd_sidecar.router.http import heads
from xpyd_sidecar.router.http.reply import HttpRequest
from xpyd_sidecar.router.http.server import RequestBounds

MODULES: tuple[str, ...] = ()
"""Nothing of it is compiled: outcomes alone lead on."""
BOUNDS = (RequestBounds(600, 300, 30.0), RequestBounds(64 << 10, 1 << 20, 30.0), RequestBounds(80, 20, 30.0))
BODY = b'{"prompt":"hi"}'
HEAD = b"POST /v1/completions HTTP/1.1\r\n"
LINES = (b"Host: a\r\n", b"content-type: application/json\r\n", b"Content-Length: 15\r\n")
PLAIN = HEAD + b"".join(LINES) + b"\r\n" + BODY
TOKENS = (
    *LINES, b"\r\n", b"\n", b"\r", b"\r\n\r\n", b": ", b":", b" ", b"\t", b"\x00", b"\xe9", b"\xff", PLAIN, BODY, HEAD,
    b"POST ", b"GET ", b"HEAD ", b"CONNECT ", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b" HTTP/1.1\r\n", b" HTTP/1.0\r\n",
    b" HTTP/2\r\n", b"/v1/chat/completions", b"/v1/completions?a=1", b"http://h/v1/completions",
    b"Content-Length: 0\r\n", b"Content-Length: 015\r\n", b"Content-Length: +15\r\n", b"Content-Length: 15, 15\r\n",
    b"Content-Length : 15\r\n", b"Content-Length: 9999999999\r\n", b"Transfer-Encoding: chunked\r\n",
    b"transfer-encoding: identity\r\n", b"Transfer-Encoding : chunked\r\n", b"f\r\n" + BODY + b"\r\n", b"0\r\n\r\n",
    b"Expect: 100-continue\r\n", b"Connection: close\r\n", b"Connection: keep-alive\r\n", b"Connection: Upgrade\r\n",
    b"Upgrade: h2c\r\n", b"HTTP2-Settings: a\r\n", b"Keep-Alive: 5\r\n", b"TE: trailers\r\n", b"Trailer: a\r\n",
    b"Proxy-Connection: close\r\n", b"Authorization: Bearer k\r\n", b"X-Request-Id: r-1\r\n",
    b"traceparent: 00-a-b-01\r\n", b" folded: 1\r\n", b"X-A: b \r\n", b"X-A:\r\n", b"X-" + b"n" * 62 + b": 1\r\n",
    b"X-" + b"n" * 63 + b": 1\r\n", b"X-Long: " + b"l" * 500 + b"\r\n",
)


class Parsed:
    """What a bare parser finds: the requests that are whole, before the first fault or upgrade."""

    def __init__(self, data: bytes) -> None:
        self.requests: list[tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]] = []
        """Method, target, headers (trailers, too), body."""
        self._parser: httptools.HttpRequestParser = httptools.HttpRequestParser(self)
        self.on_message_begin()
        with contextlib.suppress(httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url = self._body = b""
        self._headers: list[tuple[bytes, bytes]] = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if not self._parser.should_upgrade():  # it stops there, and reads no body
            self.requests.append((self._parser.get_method(), self._url, self._headers, self._body))


def agree(data: bytes, found: Sequence[HttpRequest], most: int) -> None:
    """Hold the requests that a connection served of ``data`` against a bare parser, and against the rules of framing.

    ``most``: bytes of a body that is not refused.
    """
    expected = [one for one in Parsed(data).requests if len(one[3]) <= most]
    for request, (method, url, headers, body) in zip(found, expected, strict=False):
        names = [name for name, _ in headers]
        assert request.method.encode() == method, data
        assert url.endswith(request.target) or request.target == b"/", data
        assert request.body == body, data
        assert request.headers.items() <= set(headers), data
        assert names.count(b"host") <= 1, data
        assert not (b"transfer-encoding" in names and b"content-length" in names), data
        for name, value in request.headers.items():
            assert value == next(one for known, one in headers if known == name), data
    if b"upgrade" not in data.lower():
        assert len(found) <= len(expected), data


def check(data: bytes) -> Hashable:
    """A connection finds what a bare parser finds, as far as it takes it, and the same in any reads."""
    flags, raw = data[0] if data else 0, data[1:]
    reads = [part for part in raw.split(b"\xff") if part]
    bounds = BOUNDS[flags >> 2 & 3] if flags & 12 != 12 else BOUNDS[0]
    others = [b"".join(reads)] if flags & 2 else [part[at:at + 7] for part in reads for at in range(0, len(part), 7)]
    with patch.object(heads, "fresh", lambda: "fresh"), patch.object(uuid, "uuid4", lambda: uuid.UUID(int=1)):
        found, told, state = _loop().run_until_complete(served(reads, bounds))
        again, _, _ = _loop().run_until_complete(served(others, bounds)) if reads else ([], [], ())
    agree(b"".join(reads), found, bounds.body_bytes)
    answers = [one[9:12] for one in told if isinstance(one, bytes) and one.startswith(b"HTTP/1.1 ")]
    if b"431" not in answers:  # the bound of a head counts bytes of reads where its headers are not whole yet
        short = min(len(found), len(again))
        assert found[:short] == again[:short], (reads, others)
    return min(len(found), 3), tuple(answers[:3]), state


def seeds() -> list[bytes]:
    """Plain requests, alone and several."""
    chat = PLAIN.replace(b"completions", b"chat/completions")
    chunked = HEAD + b"Host: a\r\nTransfer-Encoding: chunked\r\n\r\nf\r\n" + BODY + b"\r\n0\r\n\r\n"
    longer = PLAIN.replace(b"Host", b"X-Request-Id: r\r\nConnection: keep-alive\r\nhost")
    return [bytes([flags]) + raw for flags in (0, 1, 2, 4, 8)
            for raw in (PLAIN, chat, PLAIN + b"\xff" + chat, chunked, longer)]


_made: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    if not _made:
        _made.append(asyncio.new_event_loop())
    return _made[0]
