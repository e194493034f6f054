"""Frames over TCP: the connection of a session, and the link that puts blocks into it.

A connection never waits. It writes what the socket takes and keeps the rest queued; it reads a header, asks its owner where
the payload goes, and reads on as bytes come. An owner without room pauses it: the kernel's buffers fill, and the peer's
writes stop (back-pressure), which delays that peer alone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from xpyd_sidecar.engine.links.base import Blocks, Session
from xpyd_sidecar.engine.loop import Loop
from xpyd_sidecar.errors import PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv import frames
from xpyd_sidecar.kv.blocks import runs
from xpyd_sidecar.kv.frames import HEADER_BYTES, Header, Kind
from xpyd_sidecar.kv.keys import Key

SOCKET_BUFFER: Final = 1 << 20
IO_AT_ONCE: Final = 4 << 20
"""Bytes moved for one connection before the others have their turn."""
VIEWS_AT_ONCE: Final = 64
_numbers = itertools.count(1)


class Owner(Protocol):
    """What a connection asks and tells."""

    def room(self, connection: Connection, header: Header) -> memoryview | None:
        """Where the payload of a frame goes (``header.length`` bytes); None pauses the connection."""

    def frame(self, connection: Connection, header: Header, raw: bytes, payload: memoryview) -> None:
        """A frame is complete. May raise PeerError, which ends the connection."""

    def closed(self, connection: Connection, error: PeerError) -> None:
        """The connection has ended; nothing more will come from it."""


class Connection:
    """One socket, watched by a loop; used on that loop's thread only."""

    def __init__(self, loop: Loop, sock: socket.socket, peer: str, owner: Owner, *, connecting: bool = False) -> None:
        self.number = next(_numbers)
        self.peer = peer
        self.last_in = self.last_out = time.monotonic()
        self.connecting = connecting
        self._loop = loop
        self._sock = sock
        self._owner = owner
        self._out: deque[tuple[memoryview, Callable[[], None] | None]] = deque()
        self._raw = bytearray(HEADER_BYTES)
        self._raw_view = memoryview(self._raw)
        self._of = b""
        self._header: Header | None = None
        self._payload = memoryview(b"")
        self._got = 0
        self._late = False
        self.paused = False
        self.open = True
        tune(sock)
        self._watch()

    def queue(self, header: bytes, payload: memoryview | bytes, sent: Callable[[], None] | None = None) -> None:
        """Send a frame after those queued before; ``sent`` is called once, when it has left or never will."""
        if not self.open:
            if sent is not None:
                sent()
            return
        idle = not self._out
        self._out.append((memoryview(header), None if len(payload) else sent))
        if len(payload):
            self._out.append((memoryview(payload), sent))
        if idle:
            self._watch()  # written by the loop, so that a failure never closes the connection inside its owner's call

    def flush(self) -> None:
        """Write now what the socket takes: last words before ``close``."""
        with contextlib.suppress(OSError):
            while self._out:
                self._left(self._sock.sendmsg([self._out[0][0]]))

    @property
    def writing(self) -> bool:
        """Whether bytes wait to leave."""
        return bool(self._out)

    def silent(self, now: float, timeout: float) -> bool:
        """Whether nothing was heard for ``timeout`` seconds, found at two calls in a row (one per tick).

        Between two ticks the loop reads what has arrived: so a loop that was itself held up blames nobody for it.
        """
        late, self._late = self._late, now - self.last_in > timeout
        return late and self._late

    def resume(self) -> None:
        """Ask for room again."""
        if self.paused and self.open:
            self.paused = False
            self.last_in = time.monotonic()
            self._turn(self._room)

    def close(self, error: PeerError) -> None:
        """End the connection, once."""
        if not self.open:
            return
        self.open = False
        self._loop.watch(self._sock, 0, self._ready)
        self._sock.close()
        pending, self._out = self._out, deque()
        for _, sent in pending:
            if sent is not None:
                sent()
        self._owner.closed(self, error)

    def _watch(self) -> None:
        if self.open:
            reading = 0 if self.paused or self.connecting else selectors.EVENT_READ
            writing = selectors.EVENT_WRITE if self._out or self.connecting else 0
            self._loop.watch(self._sock, reading | writing, self._ready)

    def _ready(self, events: int) -> None:
        if self.connecting:
            code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self.close(PeerGone(self.peer, f"cannot connect: {os.strerror(code)}"))
                return
            self.connecting = False
            self.last_in = time.monotonic()
        if events & selectors.EVENT_WRITE:
            self._turn(self._write)
        if events & selectors.EVENT_READ and self.open:
            self._turn(self._read)
        self._watch()

    def _turn(self, action: Callable[[], None]) -> None:
        try:
            action()
        except PeerError as error:
            self.close(error)
        except frames.FrameError as error:
            self.close(ProtocolError(self.peer, str(error)))
        except OSError as error:
            self.close(PeerGone(self.peer, str(error)))
        self._watch()

    def _write(self) -> None:
        try:
            moved = 0
            while self._out and moved < IO_AT_ONCE:
                views = [view for view, _ in itertools.islice(self._out, VIEWS_AT_ONCE)]
                sent = self._sock.sendmsg(views)
                self.last_out = time.monotonic()
                moved += sent
                self._left(sent)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(PeerGone(self.peer, str(error)))

    def _left(self, size: int) -> None:
        while size:
            view, sent = self._out[0]
            if size < len(view):
                self._out[0] = (view[size:], sent)
                return
            size -= len(view)
            self._out.popleft()
            if sent is not None:
                sent()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            moved = 0
            while moved < IO_AT_ONCE and self.open and not self.paused:
                if self._header is None:
                    got = self._sock.recv_into(self._raw_view[self._got:])
                else:
                    got = self._sock.recvmsg_into([self._payload[self._got:], self._raw_view])[0]
                if not got:
                    raise PeerGone(self.peer, "closed the connection")
                self.last_in = time.monotonic()
                moved += got
                self._arrived(got)

    def _arrived(self, size: int) -> None:
        self._got += size
        if self._header is None:
            if self._got == HEADER_BYTES:
                self._begin()
            return
        if self._got < self._header.length:
            return
        beyond = self._got - self._header.length  # the next header's first bytes came along
        header, payload = self._header, self._payload
        self._header, self._payload, self._got = None, memoryview(b""), beyond
        self._owner.frame(self, header, self._of, payload)
        if beyond == HEADER_BYTES and self.open:
            self._begin()

    def _begin(self) -> None:
        self._header = frames.decode(self._raw)
        self._of = bytes(self._raw)
        self._room()

    def _room(self) -> None:
        assert self._header is not None
        place = self._owner.room(self, self._header)
        if place is None:
            self.paused = True
            return
        self._payload, self._got = place, 0
        if not self._header.length:
            self._arrived(0)


class TcpLink:
    """Blocks as DATA frames of the session itself."""

    name = "tcp"

    def put(self, session: Session, key: Key, blocks: Blocks, sent: Callable[[], None], *, cover: bool) -> None:
        """Cut blocks into frames and queue them; the last one to leave frees the data."""
        each = len(blocks.data) // blocks.blocks
        cuts = list(runs(blocks.first, blocks.blocks, each, frames.FRAME_BYTES))
        for at, (first, count) in enumerate(cuts):
            offset = (first - blocks.first) * each
            payload = blocks.data[offset:offset + count * each]
            header = frames.encode(Kind.DATA, key, payload, region=blocks.region, first=first, blocks=count, cover=cover)
            session.queue(header, payload, sent if at == len(cuts) - 1 else None)


def tune(sock: socket.socket) -> None:
    """Set a socket up for large frames."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
    with contextlib.suppress(OSError):  # not connected yet, or a kernel without reno: only slower on loopback
        if sock.getpeername()[0] in {"127.0.0.1", "::1"}:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")

