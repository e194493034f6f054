"""Requests as they come (``_intake.c``) against httptools: what is taken in one call is what a parser finds there.

    byte 0      1, 2 cut the bytes into reads · 4 narrow limits
    the rest    the bytes of one connection, or with a byte 0xff between them of several reads
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Hashable
from unittest.mock import patch

import httptools
from paper import served

from xpyd_sidecar.proxy import ids, intake
from xpyd_sidecar.proxy.incoming import Bounds

MODULES = ("xpyd_sidecar.proxy._intake",)
TAKE = intake.take
BOUNDS = (Bounds(600, 300, 30.0), Bounds(64 << 10, 1 << 20, 30.0), Bounds(80, 20, 30.0))
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
    """What a bare parser finds in bytes that are one request."""

    def __init__(self, data: bytes) -> None:
        self.url = self.body = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = 0
        parser = httptools.HttpRequestParser(self)
        parser.feed_data(data)
        self.method, self.version = parser.get_method(), parser.get_http_version()
        self.goes_on = parser.should_keep_alive() and not parser.should_upgrade()

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete += 1


def check(data: bytes) -> Hashable:
    """A read that is taken is one whole plain request to the parser, too; and a connection does the same without it."""
    flags, raw = data[0] if data else 0, data[1:]
    reads = [part for part in raw.split(b"\xff") if part]
    bounds = BOUNDS[flags >> 2 & 3] if flags & 12 != 12 else BOUNDS[0]
    taken = 0
    for part in reads:
        found = TAKE(part, bounds.header_bytes, bounds.body_bytes)
        if found is not None:
            taken += 1
            _is_one_request(part, found)
    if flags & 1 and reads:
        half = len(reads[0]) // 2
        reads[:1] = [reads[0][:half], reads[0][half:]]
    if flags & 2:
        reads = [b"".join(reads)]
    with patch.object(ids, "fresh", lambda: "fresh"), patch.object(uuid, "uuid4", lambda: uuid.UUID(int=1)):
        found_by_c = _loop().run_until_complete(served(reads, bounds))
        with patch.object(intake, "take", intake._nothing):
            expected = _loop().run_until_complete(served(reads, bounds))
    assert found_by_c == expected, f"with the call {found_by_c}, without {expected}"
    answers = tuple(one[9:12] for one in expected[1] if isinstance(one, bytes) and one.startswith(b"HTTP/1.1 "))
    return min(taken, 3), answers[:3]


def seeds() -> list[bytes]:
    """Plain requests, alone and several."""
    chat = PLAIN.replace(b"completions", b"chat/completions")
    chunked = HEAD + b"Host: a\r\nTransfer-Encoding: chunked\r\n\r\nf\r\n" + BODY + b"\r\n0\r\n\r\n"
    longer = PLAIN.replace(b"Host", b"X-Request-Id: r\r\nConnection: keep-alive\r\nhost")
    return [bytes([flags]) + raw for flags in (0, 1, 2, 4, 8)
            for raw in (PLAIN, chat, PLAIN + b"\xff" + chat, chunked, longer)]


def _is_one_request(part: bytes, found: intake.Plain) -> None:
    path, target, headers, body = found
    parsed = Parsed(part)
    firsts: dict[bytes, bytes] = {}
    for name, value in parsed.headers:
        firsts.setdefault(name, value)
    assert (parsed.complete, parsed.goes_on, parsed.method, parsed.version) == (1, True, b"POST", "1.1"), part
    assert (parsed.url, parsed.url.decode(), firsts, parsed.body) == (target, path, headers, body), part
    names = [name for name, _ in parsed.headers]
    assert (names.count(b"host"), names.count(b"content-length"), names.count(b"transfer-encoding")) == (1, 1, 0), part


_made: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    if not _made:
        _made.append(asyncio.new_event_loop())
    return _made[0]
