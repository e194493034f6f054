"""The connection of a session: one socket, what leaves by it (``frame_writer``) and what comes (``frame_reader``).

A connection never waits. It writes what the socket takes and keeps the rest queued; it reads a header, asks its owner where
the payload goes, and reads on as bytes come. An owner without room pauses it: the kernel's buffers fill, and the peer's
writes stop (back-pressure), which delays that peer alone.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from xpyd_sidecar.errors import ChecksumError, PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv import frames
from xpyd_sidecar.threads.loop import Loop
from xpyd_sidecar.transport import moves
from xpyd_sidecar.transport.link import Session
from xpyd_sidecar.transport.tcp.frame_reader import LOW_WATER, FrameOwner, FrameReader
from xpyd_sidecar.transport.tcp.frame_writer import FrameWriter
from xpyd_sidecar.transport.tcp.placement import Expected

logger = logging.getLogger(__name__)

SOCKET_BUFFER: Final = 1 << 20
WORDS_MAX: Final = 1 << 17
"""Answers that wait for a peer to read them. One that asks and does not read would take all memory; no honest one has as
many: a word for each copy that is offered to it, and for each of its transfers.
"""
_numbers = itertools.count(1)


class Connection(Session):
    """One socket, watched by a loop; used on that loop's thread only."""

    def __init__(self, loop: Loop, sock: socket.socket, peer: str, owner: FrameOwner, *, connecting: bool = False) -> None:
        self.number = next(_numbers)
        self.peer = peer
        self.last_in = self.last_out = time.monotonic()
        self.connecting = connecting
        self.beside = not connecting and _beside(sock)
        """Whether the peer is on this host: a turn then keeps away from the processor that it works on."""
        self._loop = loop
        self._sock = sock
        self._owner = owner
        self._out = FrameWriter(loop, sock)
        self._in = FrameReader(loop, sock, owner)
        self._watched = 0
        self._late = False
        self._inside = False
        """Whether the loop has called this connection, which then looks itself what is to be written."""
        tune(sock)
        self._watch()

    # --- what leaves ---

    def queue(self, header: bytes | Callable[[], bytes], payload: memoryview | bytes,
              sent: Callable[[], None] | None = None) -> None:
        """Send a frame after those queued before; ``sent`` is called once, when it has left or never will."""
        if not self.open:
            if sent is not None:
                sent()
            return
        idle = not self._out
        self._out.add(header, payload, sent)
        if self._out.words > WORDS_MAX:  # not inside of the owner's call
            self._loop.post(partial(self.close, ProtocolError(self.peer, f"does not read: {WORDS_MAX} frames wait for it")))
        if idle and len(payload) >= LOW_WATER:
            self.start()
        if idle and not self._inside:
            self._watch()

    def start(self) -> None:
        """Write the first of what is queued at once: the peer has something to do while more is made."""
        if self._out and not self.connecting:
            if self._out.start():
                self.last_out = time.monotonic()
            if not self._inside:
                self._watch()

    def flush(self) -> None:
        """Write now what the socket takes: last words before ``close``."""
        self._out.flush()

    @property
    def writing(self) -> bool:
        """Whether bytes wait to leave."""
        return bool(self._out)

    # --- what comes ---

    def expect(self, begin: Callable[[int], list[Expected]]) -> None:
        """Frames were asked for, and begin so: their places are made while the peer makes them ready."""
        if self.open:
            self._in.expect(begin)

    def spend(self, size: int) -> None:
        """The owner has moved bytes for this connection itself: they count where connections take turns."""
        self._in.spend(size)

    @property
    def paused(self) -> bool:
        """Whether the owner had no room for what comes."""
        return self._in.paused

    def resume(self) -> None:
        """Ask for room again."""
        if self.paused and self.open:
            self.last_in = time.monotonic()
            self._turn(self._in.ask)
            self._watch()

    def silent(self, now: float, timeout: float) -> bool:
        """Whether nothing was heard for ``timeout`` seconds, found at two calls in a row (one per tick).

        Between two ticks the loop reads what has arrived: so a loop that was itself held up blames nobody for it.
        """
        if now - self.last_in > timeout / 2 and self.open:
            self._in.hear_all()
        late, self._late = self._late, now - self.last_in > timeout
        return late and self._late

    # --- turns and the end ---

    @property
    def open(self) -> bool:
        """Whether it has not ended."""
        return self._in.open

    @property
    def left(self) -> bool:
        """Whether the peer has closed it, also where not all is read that it has said before."""
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self, error: PeerError) -> None:
        """End the connection, once."""
        if not self.open:
            return
        self._in.open = False
        self._loop.watch(self._sock, 0, self._ready)
        self._sock.close()
        self._out.drop()
        self._owner.closed(error)

    def post(self, call: Callable[[], None]) -> None:
        """Have a call made on the loop's thread."""
        self._loop.post(partial(self.run, call))

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
        except Exception as error:
            logger.exception("xpyd: the data link to %s is closed: a callback failed", self.peer)
            self.mistaken(error)

    def _write(self) -> None:
        if self._out.write(self.beside):
            self.last_out = time.monotonic()

    def _read(self) -> None:
        if self._in.read(self.beside):
            self.last_in = time.monotonic()


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
