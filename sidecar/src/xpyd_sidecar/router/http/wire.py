"""HTTP/1.1 on bytes: response heads, chunks, and bodies that are wanted whole."""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from xpyd_sidecar.contract.ids import HostPort

MAX_HEAD = 64 << 10
MAX_CHUNK = 32 << 20
"""Bytes of one chunk."""
HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection",
                        b"te", b"trailer", b"transfer-encoding", b"upgrade"})


MAX_KNOWN = 2048
"""Bytes of a head that is remembered."""
MAX_INTERIM = 16
"""Interim answers (1xx) before an answer."""
_TEXT = rb"[\t\x20-\x7e\x80-\xff]*"
"""What may be in a value (RFC 9110, 5.5): no control characters, so that no line of it can become two."""
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: " + _TEXT + rb")?")
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):(" + _TEXT + rb")")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_SIZE_LINE = re.compile(rb"([0-9a-fA-F]{1,8})(?:[ \t]*|[ \t]*;" + _TEXT + rb")")
"""RFC 9112, 7.1.1: space before an extension alone."""
_BROKEN_LINE = re.compile(rb"(?<!\r)\n|\r(?=[^\n])|\0")
_BODILESS = frozenset({*range(100, 200), 204, 304})
"""Statuses of answers without a body."""


class MalformedMessage(Exception):
    """The peer's bytes are not what HTTP or server-sent events allow; says what."""


class ResponseHead(msgspec.Struct, frozen=True):
    """Status line and headers of a response."""

    status: int
    headers: list[tuple[bytes, bytes]]
    """Names in lower case."""
    keep_alive: bool
    chunked: bool
    length: int | None
    """Content-Length; 0 where the status allows no body."""
    is_event_stream: bool = False
    """Whether the body is server-sent events."""
    _passed: list[bytes] = []
    """What ``passed_on`` made, once it was asked."""

    def get(self, name: bytes) -> bytes:
        """The first value of a header, or empty."""
        return next((value for known, value in self.headers if known == name), b"")

    def end_to_end(self) -> list[tuple[bytes, bytes]]:
        """Headers that a proxy passes on (RFC 9110, 7.6.1), without the length and those that the router writes itself."""
        dropped = HOP_BY_HOP | _connection_tokens(self.headers) | {b"content-length", b"date", b"server", b"x-request-id"}
        return [(name, value) for name, value in self.headers if name not in dropped]

    def passed_on(self) -> bytes:
        """The same as lines of a head."""
        if not self._passed:
            self._passed.append(lines_of(self.end_to_end()))
        return self._passed[0]


def _connection_tokens(headers: list[tuple[bytes, bytes]]) -> set[bytes]:
    values = [value for name, value in headers if name == b"connection"]
    return {token.strip().lower() for value in values for token in value.split(b",")}


def lines_of(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Headers as lines of a head."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def parse_head(raw: bytes) -> ResponseHead:
    """Parse up to and without the empty line. An engine's heads are equal for a second, so they are remembered.

    Judged as strictly as those of clients: what another parser could read in another way is not passed on to one. Raises
    MalformedMessage: not an HTTP/1 response (RFC 9112), or framing that is ambiguous.
    """
    return _known_head(raw) if len(raw) <= MAX_KNOWN else _parse_head(raw)


def _parse_head(raw: bytes) -> ResponseHead:
    line, *entries = raw.split(b"\r\n")
    first = _STATUS_LINE.fullmatch(line)
    if first is None:
        raise MalformedMessage(f"status line {line[:40]!r}")
    headers: list[tuple[bytes, bytes]] = []
    for entry in entries:
        found = _HEADER.fullmatch(entry)
        if found is None:
            raise MalformedMessage(f"header line {entry[:40]!r}")
        headers.append((found[1].lower(), found[2].strip(b" \t")))
    status, newer = int(first[2]), first[1] == b"1"
    length, chunked = _framing(status, headers, newer=newer)
    tokens = _connection_tokens(headers)
    keep = b"close" not in tokens and (newer or b"keep-alive" in tokens)
    kind = next((value for name, value in headers if name == b"content-type"), b"").split(b";", 1)[0].strip().lower()
    return ResponseHead(status, headers, keep, chunked, length, kind == b"text/event-stream")


def _framing(status: int, headers: list[tuple[bytes, bytes]], *, newer: bool) -> tuple[int | None, bool]:
    """``ResponseHead.length`` and ``chunked`` (RFC 9112, 6)."""
    lengths = [value for name, value in headers if name == b"content-length"]
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if len(lengths) > 1 or not all(map(_LENGTH.fullmatch, lengths)):
        raise MalformedMessage(f"Content-Length {lengths!r:.80}")
    if codings and (codings != [b"chunked"] or not newer or status < 200 or status == 204):
        raise MalformedMessage(f"Transfer-Encoding {codings!r:.80} with status {status}")
    if codings and lengths:
        raise MalformedMessage("both Transfer-Encoding and Content-Length")
    if status in _BODILESS:
        return 0, False
    return int(lengths[0]) if lengths else None, bool(codings)


_known_head = lru_cache(maxsize=256)(_parse_head)


class HeadReader:
    """Reads the head of one answer, whatever pieces it comes in, past the interim ones (1xx) before it."""

    __slots__ = ("_buffer", "_interim")

    def __init__(self) -> None:
        self._buffer = b""
        self._interim = 0

    def reset(self) -> None:
        """Begin anew: the next answer."""
        self._buffer = b""
        self._interim = 0

    def feed(self, data: bytes) -> tuple[ResponseHead, bytes] | None:
        """The head, once it is there, and what came behind it. Raises MalformedMessage: see ``parse_head``; or its end is
        missing.
        """
        end = data.find(b"\r\n\r\n")
        if 0 <= end <= MAX_KNOWN and not self._buffer:  # nearly always it is all there
            head = _known_head(data[:end])
            if head.status >= 200:
                self._interim = 0
                return head, data[end + 4:]
        buffer = self._buffer + data if self._buffer else data
        at = 0
        while True:
            end = buffer.find(b"\r\n\r\n", at)
            if (len(buffer) if end < 0 else end) - at > MAX_HEAD:
                raise MalformedMessage(f"a response head of more than {MAX_HEAD} bytes")
            if end < 0:
                self._buffer = buffer[at:]
                if _BROKEN_LINE.search(self._buffer):  # it might have no end, as we understand it
                    raise MalformedMessage(f"a line that ends wrongly in {self._buffer[:40]!r}")
                return None
            head = parse_head(buffer[at:end])
            at = end + 4
            if head.status >= 200:
                self.reset()
                return head, buffer[at:]
            self._interim += 1
            if head.status == 101 or self._interim > MAX_INTERIM:
                what = "a switch of protocols" if head.status == 101 else f"more than {MAX_INTERIM} interim answers"
                raise MalformedMessage(what)


class Chunks:
    """Splits a chunked body into whole chunks. ``done`` once the last chunk and its trailers are in."""

    __slots__ = ("_need", "_parts", "_size", "done")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._need = 0
        self.done = False

    @property
    def pending(self) -> bool:
        """Whether part of a chunk is held."""
        return self._size > 0

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """``(chunk as framed, payload)`` of each chunk that is whole now."""
        if self.done:
            if data:
                raise MalformedMessage("bytes after the end of the body")
            return []
        self._parts.append(data)
        self._size += len(data)
        if self._size < self._need:
            return []
        buffer = data if len(self._parts) == 1 else b"".join(self._parts)
        found: list[tuple[bytes, bytes]] = []
        at = 0
        self._need = 0
        while at < len(buffer):
            end = buffer.find(b"\r\n", at, at + 1024)
            if end < 0:
                if len(buffer) - at > 1024:
                    raise MalformedMessage("chunk size line too long")
                break
            line = _SIZE_LINE.fullmatch(buffer, at, end)
            if line is None:
                raise MalformedMessage(f"chunk size {buffer[at:end][:20]!r}")
            size = int(line[1], 16)
            if size > MAX_CHUNK:
                raise MalformedMessage(f"a chunk of {size} bytes")
            if size == 0:
                last = end if buffer.startswith(b"\r\n", end + 2) else buffer.find(b"\r\n\r\n", end + 2)
                if last < 0:
                    if len(buffer) - at > MAX_HEAD:
                        raise MalformedMessage("trailers too long")
                    break
                self.done = True
                if last + 4 != len(buffer):
                    raise MalformedMessage("bytes after the end of the body")
                at = len(buffer)
                break
            stop = end + 2 + size
            if stop + 2 > len(buffer):
                self._need = stop + 2 - at
                break
            if buffer[stop:stop + 2] != b"\r\n":
                raise MalformedMessage("a chunk does not end where it should")
            found.append((buffer[at:stop + 2], buffer[end + 2:stop]))
            at = stop + 2
        rest = buffer[at:]
        self._parts = [rest] if rest else []
        self._size = len(rest)
        return found


class WholeBody:
    """A body that is wanted whole: by length, in chunks, or until the connection ends."""

    __slots__ = ("_chunks", "_left", "_limit", "_parts", "_size", "done")

    def __init__(self, head: ResponseHead, limit: int) -> None:
        self._chunks = Chunks() if head.chunked else None
        self._left = head.length
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0
        self.done = self._left == 0 and not head.chunked
        if self._left is not None and self._left > limit:
            raise MalformedMessage(f"a body of {self._left} bytes (the limit is {limit})")

    def feed(self, data: bytes) -> None:
        """Take what was read. Raises MalformedMessage."""
        if self.done:
            if data:
                raise MalformedMessage("bytes after the end of the body")
            return
        if self._chunks is not None:
            for _, payload in self._chunks.feed(data):
                self._keep(payload)
            self.done = self._chunks.done
            return
        self._keep(data)
        if self._left is not None:
            if self._size > self._left:
                raise MalformedMessage("bytes after the end of the body")
            self.done = self._size == self._left

    def on_eof(self) -> bool:
        """The connection ended: whether that ends the body properly."""
        if self._chunks is None and self._left is None:
            self.done = True
        return self.done

    def take(self) -> bytes:
        """The body so far."""
        return b"".join(self._parts)

    def _keep(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._limit:
            raise MalformedMessage(f"a body of more than {self._limit} bytes")
        self._parts.append(data)


def chunk_of(payload: bytes) -> bytes:
    """``payload`` as one chunk; the last chunk where it is empty."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


@lru_cache(maxsize=1024)
def before_length(path: bytes, address: HostPort) -> bytes:  # remembered: of engines and paths there are few
    """The head of a POST, up to the number of its body's bytes."""
    return b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\ncontent-length: " % (path, address.encode())


def post_bytes(before: bytes, lines: bytes, body: bytes) -> bytes:
    """A whole POST of JSON. ``before``: as ``before_length`` makes it; ``lines``: of its head, behind the length."""
    return b"%b%d\r\n%b\r\n%b" % (before, len(body), lines, body)


def request_bytes(method: bytes, path: bytes, address: HostPort, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes:
    """A whole HTTP/1.1 request."""
    lines = lines_of(headers)
    if method == b"POST":
        return post_bytes(before_length(path, address), lines, body)
    return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b\r\n%b" % (method, path, address.encode(), lines, body)
