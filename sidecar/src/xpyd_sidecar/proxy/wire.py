"""HTTP/1.1 on bytes: response heads, chunks, and bodies that are wanted whole.

Belongs here: parsing, without sockets and without waiting. Does not belong here: what an answer means for a request
(``serving``), streams that are relayed (``events``).
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

MAX_HEAD = 64 << 10
MAX_CHUNK = 32 << 20
"""Bytes of one chunk."""
HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection",
                        b"te", b"trailer", b"transfer-encoding", b"upgrade"})


MAX_KNOWN = 2048
"""Bytes of a head that is remembered."""


class Malformed(Exception):
    """The peer's bytes are not what HTTP or server-sent events allow; says what."""


class Head(msgspec.Struct, frozen=True):
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
        named = {token.strip().lower() for token in self.get(b"connection").split(b",")}
        dropped = HOP_BY_HOP | named | {b"content-length", b"date", b"server", b"x-request-id"}
        return [(name, value) for name, value in self.headers if name not in dropped]

    def passed_on(self) -> bytes:
        """The same as lines of a head."""
        if not self._passed:
            self._passed.append(lines_of(self.end_to_end()))
        return self._passed[0]


def lines_of(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Headers as lines of a head."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def parse_head(raw: bytes) -> Head:
    """Parse up to and without the empty line. An engine's heads are equal for a second, so they are remembered.

    Raises:
        Malformed: not an HTTP/1 response, or framing that is ambiguous.
    """
    return _known_head(raw) if len(raw) <= MAX_KNOWN else _parse_head(raw)


def _parse_head(raw: bytes) -> Head:
    line, _, rest = raw.partition(b"\r\n")
    if not line.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")) or not line[9:12].isdigit() or line[12:13] not in {b"", b" "}:
        raise Malformed(f"status line {line[:40]!r}")
    headers: list[tuple[bytes, bytes]] = []
    for entry in rest.split(b"\r\n") if rest else ():
        name, colon, value = entry.partition(b":")
        if not colon or not name or name[-1:].isspace() or name[:1].isspace():
            raise Malformed(f"header line {entry[:40]!r}")
        headers.append((name.lower(), value.strip()))
    status = int(line[9:12])
    lengths = {value for name, value in headers if name == b"content-length"}
    if len(lengths) > 1 or not all(value.isdigit() for value in lengths):
        raise Malformed(f"Content-Length {lengths!r}")
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and codings != [b"chunked"]:
        raise Malformed(f"Transfer-Encoding {codings!r}")
    tokens = b",".join(value.lower() for name, value in headers if name == b"connection")
    keep = b"close" not in tokens and (line.startswith(b"HTTP/1.1") or b"keep-alive" in tokens)
    length = int(lengths.pop()) if lengths else None
    if status in {204, 304} or status < 200:
        length = 0
    kind = next((value for name, value in headers if name == b"content-type"), b"").split(b";", 1)[0].strip().lower()
    return Head(status, headers, keep, bool(codings), None if codings else length, kind == b"text/event-stream")


_known_head = lru_cache(maxsize=256)(_parse_head)


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
                raise Malformed("bytes after the end of the body")
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
                    raise Malformed("chunk size line too long")
                break
            digits = buffer[at:end].split(b";", 1)[0].rstrip(b" \t")  # RFC 9112, 7.1.1: space before an extension alone
            if not digits or len(digits) > 8 or not all(c in b"0123456789abcdefABCDEF" for c in digits):
                raise Malformed(f"chunk size {digits[:20]!r}")
            size = int(digits, 16)
            if size > MAX_CHUNK:
                raise Malformed(f"a chunk of {size} bytes")
            if size == 0:
                last = end if buffer.startswith(b"\r\n", end + 2) else buffer.find(b"\r\n\r\n", end + 2)
                if last < 0:
                    if len(buffer) - at > MAX_HEAD:
                        raise Malformed("trailers too long")
                    break
                self.done = True
                if last + 4 != len(buffer):
                    raise Malformed("bytes after the end of the body")
                at = len(buffer)
                break
            stop = end + 2 + size
            if stop + 2 > len(buffer):
                self._need = stop + 2 - at
                break
            if buffer[stop:stop + 2] != b"\r\n":
                raise Malformed("a chunk does not end where it should")
            found.append((buffer[at:stop + 2], buffer[end + 2:stop]))
            at = stop + 2
        rest = buffer[at:]
        self._parts = [rest] if rest else []
        self._size = len(rest)
        return found


class WholeBody:
    """A body that is wanted whole: by length, in chunks, or until the connection ends."""

    __slots__ = ("_chunks", "_left", "_limit", "_parts", "_size", "done")

    def __init__(self, head: Head, limit: int) -> None:
        self._chunks = Chunks() if head.chunked else None
        self._left = head.length
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0
        self.done = self._left == 0 and not head.chunked
        if self._left is not None and self._left > limit:
            raise Malformed(f"a body of {self._left} bytes (the limit is {limit})")

    def feed(self, data: bytes) -> None:
        """Take what was read. Raises Malformed."""
        if self.done:
            if data:
                raise Malformed("bytes after the end of the body")
            return
        if self._chunks is not None:
            for _, payload in self._chunks.feed(data):
                self._keep(payload)
            self.done = self._chunks.done
            return
        self._keep(data)
        if self._left is not None:
            if self._size > self._left:
                raise Malformed("bytes after the end of the body")
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
            raise Malformed(f"a body of more than {self._limit} bytes")
        self._parts.append(data)


def chunk_of(payload: bytes) -> bytes:
    """``payload`` as one chunk; the last chunk where it is empty."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)
