"""Frames over TCP: the connection of a session, and the link that puts blocks into it.

A connection never waits. It writes what the socket takes and keeps the rest queued; it reads a header, asks its owner where
the payload goes, and reads on as bytes come. An owner without room pauses it: the kernel's buffers fill, and the peer's
writes stop (back-pressure), which delays that peer alone.

A payload may be received right where it belongs, in many pieces. Where that is the cache of a running engine, each read
from the socket happens inside the gate of its load; once that is closed, the rest of the frame is read and forgotten.
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
from functools import partial
from typing import Final, NamedTuple, Protocol

from xpyd_sidecar.engine.gates import Gate
from xpyd_sidecar.engine.links import moves
from xpyd_sidecar.engine.links.base import Blocks, Session
from xpyd_sidecar.engine.links.moves import Scatter
from xpyd_sidecar.engine.loop import Loop
from xpyd_sidecar.errors import ChecksumError, PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv import frames
from xpyd_sidecar.kv.blocks import runs
from xpyd_sidecar.kv.frames import HEADER_BYTES, Header, Kind
from xpyd_sidecar.kv.keys import Key

SOCKET_BUFFER: Final = 1 << 20
IO_AT_ONCE: Final = 4 << 20
"""Bytes moved for one connection before the others have their turn."""
ALONE_AT_ONCE: Final = 128 << 20
"""The same where no other one is ready: each time that this thread takes the interpreter up again costs it its caches. A
call ends when another one is.
"""
START_BYTES: Final = 1 << 20
"""Of a large frame that are written at once, while others are made; small ones leave together."""
VIEWS_AT_ONCE: Final = 64
FOLLOW_MAX: Final = 63
"""Frames that are received in one call with the one before them."""
PATIENCE_MS: Final = 2
"""How long a call may wait for its socket where no other one is ready."""
LOW_WATER: Final = 256 << 10
_WASTE: Final = memoryview(bytearray(256 << 10))
"""Where bytes go that nobody wants; never read."""
_numbers = itertools.count(1)


class Place(NamedTuple):
    """Where the payload of a frame goes. ``gate``: each write happens inside of it; ``body``: the bytes, of small ones.

    ``after``: the frames that are expected next, so many at most; their places are inside the same gate.
    """

    scatter: Scatter | None
    gate: Gate | None = None
    body: memoryview = memoryview(b"")
    after: Callable[[int], list[Expected]] | None = None

    @classmethod
    def of(cls, length: int) -> Place:
        """Memory of its own."""
        body = memoryview(bytearray(length))
        return cls(packed(body, 1, cover=False), None, body) if length else NOWHERE

    def total(self) -> int:
        """The payload sum of what has come, if it was summed up."""
        return frames.total(self.scatter.sums()) if self.scatter is not None else 0


class Expected(NamedTuple):
    """A frame that may come: what its header begins with (``frames.known``); that header, without the sum; its place."""

    head: bytes
    header: Header
    place: Place


NOWHERE: Final = Place(None)


def packed(memory: memoryview, blocks: int, *, cover: bool) -> Scatter:
    """Blocks one after the other."""
    return Scatter(memory, len(memory) // max(1, blocks), blocks, None, 0, 0, cover)


class Late(partial[bytes]):
    """A header whose sum is made when its turn comes: what was read for it is then still in a cache when it leaves."""


class Owner(Protocol):
    """What a connection asks and tells."""

    def room(self, connection: Connection, header: Header) -> Place | None:
        """Where the payload of a frame goes; None pauses the connection."""

    def frame(self, connection: Connection, header: Header, place: Place) -> None:
        """A frame is complete, and is where ``room`` said; in NOWHERE if the gate was closed meanwhile.

        May raise PeerError, which ends the connection.
        """

    def closed(self, connection: Connection, error: PeerError) -> None:
        """The connection has ended; nothing more will come from it."""


class Connection:
    """One socket, watched by a loop; used on that loop's thread only."""

    def __init__(self, loop: Loop, sock: socket.socket, peer: str, owner: Owner, *, connecting: bool = False) -> None:
        self.number = next(_numbers)
        self.peer = peer
        self.last_in = self.last_out = time.monotonic()
        self.connecting = connecting
        self.beside = not connecting and _beside(sock)
        """Whether the peer is on this host: a turn then keeps away from the processor that it works on."""
        self._loop = loop
        self._sock = sock
        self._owner = owner
        self._out: deque[tuple[memoryview | Callable[[], bytes], Callable[[], None] | None]] = deque()
        self._raw = bytearray(HEADER_BYTES)
        self._raw_view = memoryview(self._raw)
        self._header: Header | None = None
        self._place = NOWHERE
        self._missing = 0
        """Bytes of the frame's payload that have not come."""
        self._got = 0
        """Bytes of the next header."""
        self._follow: list[Expected] = []
        """Frames that are expected after this one, and their places."""
        self._trust = 1
        """How many are worth expecting: more where they have come, one where others have."""
        self._spent = 0
        self._low = 1
        self._watched = 0
        self._late = False
        self._inside = False
        """Whether the loop has called this connection, which then looks itself what is to be written."""
        self.paused = False
        self.open = True
        tune(sock)
        self._watch()

    def queue(self, header: bytes | Callable[[], bytes], payload: memoryview | bytes,
              sent: Callable[[], None] | None = None) -> None:
        """Send a frame after those queued before; ``sent`` is called once, when it has left or never will."""
        if not self.open:
            if sent is not None:
                sent()
            return
        idle = not self._out
        self._out.append((header if callable(header) else memoryview(header), None if len(payload) else sent))
        if len(payload):
            self._out.append((memoryview(payload), sent))
        if idle and len(payload) >= LOW_WATER:
            self.start()
        if idle and not self._inside:
            self._watch()

    def start(self) -> None:
        """Write the first of what is queued at once: the peer has something to do while more is made.

        A failure is met again by the loop: so it never closes the connection inside its owner's call.
        """
        if self._out and not self.connecting:
            with contextlib.suppress(OSError):
                self._sent(self._sock.sendmsg([self._view(at)[:START_BYTES] for at in range(min(2, len(self._out)))]))
                self.last_out = time.monotonic()
            if not self._inside:
                self._watch()

    def expect(self, begin: Callable[[int], list[Expected]]) -> None:
        """Frames were asked for, and begin so: their places are made while the peer makes them ready."""
        if moves.COMPILED and self._header is None and not self._got and not self._follow and self.open:
            self._follow = begin(self._trust)

    def flush(self) -> None:
        """Write now what the socket takes: last words before ``close``."""
        with contextlib.suppress(OSError):
            while self._out:
                self._sent(self._sock.sendmsg([self._view(0)]))

    @property
    def writing(self) -> bool:
        """Whether bytes wait to leave."""
        return bool(self._out)

    def silent(self, now: float, timeout: float) -> bool:
        """Whether nothing was heard for ``timeout`` seconds, found at two calls in a row (one per tick).

        Between two ticks the loop reads what has arrived: so a loop that was itself held up blames nobody for it.
        """
        if self._low > 1 and now - self.last_in > timeout / 2 and self.open:
            self._want(1)  # a slow peer's few bytes are heard, too
        late, self._late = self._late, now - self.last_in > timeout
        return late and self._late

    def resume(self) -> None:
        """Ask for room again."""
        if self.paused and self.open:
            self.paused = False
            self.last_in = time.monotonic()
            self._turn(self._room)
            self._watch()

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
            if self._watched != reading | writing:
                self._watched = reading | writing
                self._loop.watch(self._sock, self._watched, self._ready)

    def _ready(self, events: int) -> None:
        if self.connecting:
            code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self.close(PeerGone(self.peer, f"cannot connect: {os.strerror(code)}"))
                return
            self.connecting = False
            self.beside = _beside(self._sock)
            self.last_in = time.monotonic()
        self._inside = True
        try:
            if events & selectors.EVENT_WRITE:
                self._turn(self._write)
            idle = not self._out
            if events & selectors.EVENT_READ and self.open:
                self._turn(self._read)
            if idle and self._out:  # what was read has been answered
                self._turn(self._write)
        finally:
            self._inside = False
            moves.come_home()
        self._watch()

    def _turn(self, action: Callable[[], None]) -> None:
        try:
            action()
        except PeerError as error:
            self.close(error)
        except frames.HeaderError as error:
            self.close(ChecksumError(self.peer, str(error)))
        except frames.FrameError as error:
            self.close(ProtocolError(self.peer, str(error)))
        except OSError as error:
            self.close(PeerGone(self.peer, str(error)))

    def _write(self) -> None:
        try:
            moved = 0
            most = ALONE_AT_ONCE if self._loop.alone else IO_AT_ONCE
            while self._out and moved < most:
                views: list[memoryview] = []
                size = 0
                once = most if moved else IO_AT_ONCE  # the first leave before the headers of all are made
                while size < once and len(views) < min(VIEWS_AT_ONCE, len(self._out)):
                    if views and isinstance(self._out[len(views)][0], Late):
                        break
                    views.append(self._view(len(views)))
                    size += len(views[-1])
                sent = moves.send(self._sock.fileno(), views, PATIENCE_MS if self._loop.alone else 0,
                                  self._loop.watch_fd, self.beside)
                self.last_out = time.monotonic()
                moved += sent
                self._sent(sent)
                if sent < size:
                    return  # the socket is full: asking again would only say so
        except BlockingIOError:
            return
        except OSError as error:
            self.close(PeerGone(self.peer, str(error)))

    def _view(self, at: int) -> memoryview:
        view, sent = self._out[at]
        if callable(view):
            view = memoryview(view())
            self._out[at] = view, sent
        return view

    def _sent(self, size: int) -> None:
        while size:
            view, sent = self._view(0), self._out[0][1]
            if size < len(view):
                self._out[0] = (view[size:], sent)
                return
            size -= len(view)
            self._out.popleft()
            if sent is not None:
                sent()

    def spend(self, size: int) -> None:
        """The owner has moved bytes for this connection itself: they count where connections take turns."""
        self._spent += size

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            moved = 0
            most = ALONE_AT_ONCE if self._loop.alone else IO_AT_ONCE
            while moved + self._spent < most and self.open and not self.paused:
                got, heads = self._receive()
                if not got:
                    raise PeerGone(self.peer, "closed the connection")
                self.last_in = time.monotonic()
                moved += got
                for at in range(0, len(heads), HEADER_BYTES):
                    got -= self._missing + HEADER_BYTES
                    self._next(heads[at:at + HEADER_BYTES])
                drained = self._header is not None and got < self._missing
                self._arrived(got)
                if drained and moves.COMPILED:
                    break  # the socket is empty: asking again would only say so
        self._spent = 0

    def _receive(self) -> tuple[int, bytes]:
        """Read once: the rest of a payload, and the beginning of the next header with it.

        Where that header is the expected one, its payload, too, and so on: the headers of such frames are returned.
        """
        place = self._place
        if self._header is None:
            if not self._follow or self._got or not self._loop.alone:
                return self._sock.recv_into(self._raw_view[self._got:]), b""
            place = self._follow[0].place
        gate = place.gate
        if gate is not None and not gate.enter():
            self._place, self._follow = NOWHERE, []
            place, gate = NOWHERE, None
        try:
            if place.scatter is None:
                rest = _WASTE[:self._missing] if self._header is not None else self._raw_view
                return self._sock.recv_into(rest), b""
            patience = PATIENCE_MS if self._loop.alone else 0
            if patience and moves.COMPILED and not self._follow and place.after is not None:
                self._follow = place.after(self._trust)
            follow = tuple(part for one in self._follow for part in (one.head, one.place.scatter)) if patience else ()
            receive = place.scatter.receive if self._header is not None else moves.receive
            got, heads = receive(self._sock.fileno(), self._raw_view, patience, self._low, follow, self._loop.watch_fd,
                                 self.beside)
            self._low = place.scatter.low
            return got, heads
        finally:
            if gate is not None:
                gate.leave()

    def _arrived(self, size: int) -> None:
        if self._header is None:
            self._got += size
            if self._got == HEADER_BYTES:
                self._begin()
            return
        if size < self._missing:
            self._missing -= size
            if self._missing < 2 * LOW_WATER:
                self._want(1)
            return
        header, place = self._header, self._place
        self._header, self._place = None, NOWHERE
        self._got, self._missing = size - self._missing, 0
        self._owner.frame(self, header, place)
        if self._got == HEADER_BYTES and self.open:
            self._begin()

    def _next(self, raw: bytes) -> None:
        """A frame is complete, if there was one, and the expected one has begun."""
        if self._header is not None:
            self._owner.frame(self, self._header, self._place)
        one = self._follow.pop(0)
        self._header, self._place = frames.confirmed(one.header, raw), one.place
        self._missing = self._header.length
        if not self._follow:
            self._trust = min(2 * self._trust, FOLLOW_MAX)

    def _begin(self) -> None:
        self._header = frames.decode(self._raw)
        if self._follow and not self._raw.startswith(self._follow.pop(0).head):
            self._follow = []
            if self._header.kind is Kind.DATA:
                self._trust = 1
        self._room()

    def _room(self) -> None:
        assert self._header is not None
        place = self._owner.room(self, self._header)
        if place is None:
            self.paused = True
            return
        self._place, self._missing, self._got = place, self._header.length, 0
        if not self._missing:
            self._arrived(0)
        elif self._missing > 2 * LOW_WATER:
            self._want(LOW_WATER)

    def _want(self, size: int) -> None:
        """Be woken for no less than so many bytes: for each waking this thread must get the interpreter."""
        if size != self._low:
            self._low = size
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)


class TcpLink:
    """Blocks as DATA frames of the session itself."""

    name = "tcp"
    busy = False
    """What is queued is the session's own."""

    def taken(self, session: Session, *, read: bool) -> None:
        """Nothing is ever on offer."""
        raise ProtocolError(session.peer, f"sent TAKEN (read: {read}) where nothing is on offer")

    def close(self) -> None:
        """Nothing waits here."""

    def put(self, session: Session, key: Key, blocks: Blocks, sent: Callable[[], None], *, cover: bool,
            most: int = frames.FRAME_BYTES) -> None:
        """Cut blocks into frames and queue them; the last one to leave frees the data."""
        cuts = list(runs(blocks.first, blocks.blocks, len(blocks.data) // blocks.blocks, most))
        for at, (first, count) in enumerate(cuts):
            part = blocks.part(first, count)
            late = cover and (blocks.sums is None or not blocks.sums.made)
            head = (Late if late else partial)(_header, key, part, cover=cover)
            session.queue(head, part.data, sent if at == len(cuts) - 1 else None)


def _header(key: Key, part: Blocks, *, cover: bool) -> bytes:
    return frames.encode(Kind.DATA, key, part.data, region=part.region, first=part.first, blocks=part.blocks, cover=cover,
                         known=part.total() if cover else None)


def _beside(sock: socket.socket) -> bool:
    """Whether both ends have one address. Pods of one node do not; they find it out at the handshake."""
    try:
        ours, theirs = sock.getsockname(), sock.getpeername()
    except OSError:  # closed again: met by the next read
        return False
    return bool(ours and theirs and ours[0] == theirs[0])


def tune(sock: socket.socket) -> None:
    """Set a socket up for large frames."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
    with contextlib.suppress(OSError):  # not connected yet, or a kernel without reno: only slower on loopback
        if sock.getpeername()[0] in {"127.0.0.1", "::1"}:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")

