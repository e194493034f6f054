r"""Heads of requests that came before: a client's are all alike, but for the length of the body.

    POST /v1/chat/completions HTTP/1.1\r\nHost: …\r\nContent-Length: 1191\r\nAuthorization: …\r\n\r\n{"model": …
    └──────────────────── like ───────────────────┘                 └─┘ └────────── like ──────────┘

Theory: what a parser makes of a head depends on its bytes alone. So one that was parsed, found in order, and differs in the
digits of its length alone need not be parsed again. Parsing costs a call for each header; looking a head up costs two.

Laws
  * A head is kept if each of its headers stands in one line, which is its own: then leaving one line out leaves the others
    what they were.
  * A head that names its request (``ONCE``) will not come again, and is not kept.
  * At most ``MAX_HEADS`` are kept, of at most ``MAX_BYTES`` each.
"""

from __future__ import annotations

import msgspec

MAX_HEADS = 256
MAX_BYTES = 2048
MAX_DIGITS = 9
ONCE = frozenset({b"x-request-id", b"traceparent"})
_LENGTHS = (b"\r\nContent-Length: ", b"\r\ncontent-length: ")
_SIZE = len(_LENGTHS[0])
_END = b"\r\n\r\n"


class KnownHead(msgspec.Struct, frozen=True):
    """What a head says, without the length."""

    method: str
    path: str
    target: bytes
    headers: dict[bytes, bytes]
    """Names in lower case; not to be changed."""


def whole_read(data: bytes) -> tuple[bytes, bytes, bytes] | None:
    """A read as one whole request with a body: its head without the line of the length, the length, and the body.

    None: it is none, or not one that could be known.
    """
    end = data.find(_END, 0, MAX_BYTES)
    at = data.find(_LENGTHS[0], 0, end)
    if at < 0:
        at = data.find(_LENGTHS[1], 0, end)
    if at < 0 or end < 0:
        return None
    stop = data.find(b"\r\n", at + _SIZE)
    length = data[at + _SIZE:stop]
    if not length.isdigit() or len(length) > MAX_DIGITS or len(data) != end + len(_END) + int(length):
        return None
    body = data[end + len(_END):]
    return (data[:at] + data[stop:end], length, body) if body else None


class KnownHeads:
    """Those of a server's clients."""

    def __init__(self) -> None:
        self._known: dict[bytes, KnownHead] = {}
        self.find = self._known.get
        """The head that is like this one."""

    def keep(self, like: bytes, head: KnownHead) -> None:
        """It was parsed and found in order. ``head`` has the length still."""
        headers = {name: value for name, value in head.headers.items() if name != b"content-length"}
        lines = like.split(b"\r\n")
        if not ONCE.isdisjoint(headers) or len(lines) != len(headers) + 1 or any(line[:1] in b" \t" for line in lines):
            return
        if like.count(b"\n") != len(headers) or like.count(b"\r") != len(headers):
            return
        if len(self._known) >= MAX_HEADS:
            self._known.clear()
        self._known[like] = KnownHead(head.method, head.path, head.target, headers)
