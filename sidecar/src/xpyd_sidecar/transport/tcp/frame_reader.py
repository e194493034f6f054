"""Frames that come by one socket: a header is read, its owner says where the payload goes, and bytes are read as they come.

A payload may be received right where it belongs, in many pieces. Where that is the cache of a running engine, each read
from the socket happens inside the gate of its load; once that is closed, the rest of the frame is read and forgotten.

Frames that are expected are received in one call with the one before them, as long as they begin as expected.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Final, Protocol

from xpyd_sidecar.errors import PeerError
from xpyd_sidecar.kv import frames
from xpyd_sidecar.kv.frames import HEADER_BYTES, FrameKind, Header
from xpyd_sidecar.threads.loop import Loop
from xpyd_sidecar.transport import moves
from xpyd_sidecar.transport.tcp.fairness import bytes_at_once, patience_ms
from xpyd_sidecar.transport.tcp.placement import NOWHERE, Expected, PayloadPlace

FOLLOW_MAX: Final = 63
"""Frames that are received in one call with the one before them."""
LOW_WATER: Final = 256 << 10
"""Bytes of a large frame for which the thread is woken."""
_WASTE: Final = memoryview(bytearray(256 << 10))
"""Where bytes go that nobody wants; never read."""


class FrameOwner(Protocol):
    """Whose frames they are. What it raises ends the connection."""

    def room(self, header: Header) -> PayloadPlace | None:
        """Where the payload of a frame goes; None pauses the connection."""

    def frame(self, header: Header, place: PayloadPlace) -> None:
        """A frame is complete, and is where ``room`` said; in NOWHERE if the gate was closed meanwhile."""

    def closed(self, error: PeerError) -> None:
        """The connection has ended; nothing more will come from it."""


class FrameReader:
    """What one connection has read of the frame that comes; used on its loop's thread only."""

    def __init__(self, loop: Loop, sock: socket.socket, owner: FrameOwner) -> None:
        self.open = True
        self.paused = False
        """There was no room for the frame that begins: nothing is read until ``ask`` finds some."""
        self._loop = loop
        self._sock = sock
        self._owner = owner
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

    def expect(self, begin: Callable[[int], list[Expected]]) -> None:
        """Frames were asked for, and begin so: their places are made while the peer makes them ready."""
        if moves.COMPILED and self._header is None and not self._got and not self._follow:
            self._follow = begin(self._trust)

    def spend(self, size: int) -> None:
        """Bytes were moved for this connection by others: they count where connections take turns."""
        self._spent += size

    def hear_all(self) -> None:
        """Be woken for a slow peer's few bytes, too."""
        self._want(1)

    def read(self, beside: bool) -> int:
        """One turn: bytes read, 0 where there are none. ``beside``: the peer is on this host.

        Raises:
            PeerError: what the owner raises.
            frames.FrameError: what came is no frame.
            OSError: the connection is broken, or the peer has closed it.
        """
        moved = 0
        most = bytes_at_once(self._loop)
        with contextlib.suppress(BlockingIOError):
            while moved + self._spent < most and self.open and not self.paused:
                got, heads = self._receive(beside)
                if not got:
                    raise ConnectionError("closed the connection")
                moved += got
                for at in range(0, len(heads), HEADER_BYTES):
                    got -= self._missing + HEADER_BYTES
                    self._next(heads[at:at + HEADER_BYTES])
                drained = self._header is not None and got < self._missing
                self._arrived(got)
                if drained and moves.COMPILED:
                    break  # the socket is empty: asking again would only say so
        self._spent = 0
        return moved

    def ask(self) -> None:
        """Ask where the payload of the frame that has begun goes. Raises as ``read`` does."""
        assert self._header is not None
        place = self._owner.room(self._header)
        self.paused = place is None
        if place is None:
            return
        self._place, self._missing, self._got = place, self._header.length, 0
        if not self._missing:
            self._arrived(0)
        elif self._missing > 2 * LOW_WATER:
            self._want(LOW_WATER)

    def _receive(self, beside: bool) -> tuple[int, bytes]:
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
            patience = patience_ms(self._loop)
            if patience and moves.COMPILED and not self._follow and place.after is not None:
                self._follow = place.after(self._trust)
            follow = tuple(part for one in self._follow for part in (one.head, one.place.scatter)) if patience else ()
            receive = place.scatter.receive if self._header is not None else moves.receive
            got, heads = receive(self._sock.fileno(), self._raw_view, patience, self._low, follow, self._loop.watch_fd,
                                 beside)
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
        self._owner.frame(header, place)
        if self._got == HEADER_BYTES and self.open:
            self._begin()

    def _next(self, raw: bytes) -> None:
        """A frame is complete, if there was one, and the expected one has begun."""
        if self._header is not None:
            self._owner.frame(self._header, self._place)
        one = self._follow.pop(0)
        self._header, self._place = frames.confirmed(one.header, raw), one.place
        self._missing = self._header.length
        if not self._follow:
            self._trust = min(2 * self._trust, FOLLOW_MAX)

    def _begin(self) -> None:
        self._header = frames.decode(self._raw)
        if self._follow and not self._raw.startswith(self._follow.pop(0).head):
            self._follow = []
            if self._header.kind is FrameKind.DATA:
                self._trust = 1
        self.ask()

    def _want(self, size: int) -> None:
        """Be woken for no less than so many bytes: for each waking this thread must get the interpreter."""
        if size != self._low:
            self._low = size
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
