"""The control connection of a session: one socket, frames in and out (``kv.wire``), on the thread of a loop.

It never waits: what the socket does not take stays queued, in order. Frames are small; a peer that asks and does not read
is given up before what is queued for it takes much memory.
"""

from __future__ import annotations

import itertools
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

import msgspec

from xpyd_sidecar.errors import AuthError, PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.messages import MessageError
from xpyd_sidecar.kv.session_keys import SealError, Sealing
from xpyd_sidecar.kv.wire import NO_TRY, Frame, FrameKind, Wire, WireError
from xpyd_sidecar.threads.loop import Loop

logger = logging.getLogger(__name__)

READ_BYTES: Final = 256 << 10
"""Of one call, so that sessions take turns."""
QUEUED_MAX: Final = 8 << 20
"""Bytes that wait for a peer to read them: more than all that an honest one can have asked for (SUMS of its manifests)."""
_numbers = itertools.count(1)
_encoder: Final = msgspec.msgpack.Encoder()


class FrameOwner(Protocol):
    """Whose frames they are. What ``frame`` raises ends the connection."""

    def frame(self, frame: Frame) -> None:
        """A frame has come."""

    def on_closed(self, error: PeerError) -> None:
        """The connection has ended, once; nothing more comes of it."""


class ControlConnection:
    """One socket, watched by a loop; used on that loop's thread only, but for ``post``."""

    def __init__(self, loop: Loop, sock: socket.socket, peer: str, owner: FrameOwner, *, connecting: bool = False) -> None:
        self.number = next(_numbers)
        """Names the session; none is used twice."""
        self.peer = peer
        self.open = True
        self.connecting = connecting
        self.last_in = self.last_out = time.monotonic()
        self._loop = loop
        self._sock = sock
        self._owner = owner
        self._wire = Wire()
        self._out = bytearray()
        self._watched = 0
        self._late = False
        self._unproved = False
        """Sealed frames are to come, and none has."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._watch()

    # --- what leaves ---

    def send(self, kind: FrameKind, body: msgspec.Struct | None = None, key: Key = NO_TRY) -> bytes:
        """Send a frame; its body as bytes."""
        encoded = _encoder.encode(body) if body is not None else b""
        if self.open:
            self._out += self._wire.frame(kind, encoded, key)
            self._leave()
        return encoded

    def _leave(self) -> None:
        if len(self._out) > QUEUED_MAX:  # not inside of the owner's call
            self.post(partial(self.close, ProtocolError(self.peer, f"does not read: {len(self._out)} bytes wait for it")))
        self._flush()
        self._watch()

    def seal(self, sealing: Sealing, opening: Sealing) -> None:
        """All that is said from now on is sealed, and all that comes. Who cannot seal the first does not hold the key."""
        self._unproved = True
        self._wire.seal(sealing, opening)

    def _flush(self) -> None:
        """Write what the socket takes. A failure is met again by the loop, and not inside of the owner's call."""
        if self.connecting or not self._out:
            return
        try:
            sent = self._sock.send(self._out)
        except OSError:  # full, or broken
            return
        del self._out[:sent]
        self.last_out = time.monotonic()

    # --- what comes, and the end ---

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

    def post(self, call: Callable[[], None]) -> None:
        """Have a call made on the loop's thread; what it raises ends the connection."""
        self._loop.post(partial(self.run, call))

    def run(self, call: Callable[[], None]) -> None:
        """Make a call; what the peer did wrong, or we, ends the connection."""
        try:
            call()
        except PeerError as error:
            self.close(error)
        except (WireError, MessageError, SealError) as error:
            stranger = self._unproved and isinstance(error, WireError)
            self.close(AuthError(self.peer, "does not hold the service key") if stranger else
                       ProtocolError(self.peer, str(error)))
        except OSError as error:
            self.close(PeerGone(self.peer, error.strerror or str(error)))
        except Exception as error:
            logger.exception("xpyd: the session with %s is ended: a callback failed", self.peer)
            self.close(PeerGone(self.peer, f"{type(error).__name__} on this side"))

    def close(self, error: PeerError) -> None:
        """End it, once; what is queued leaves if the socket takes it now. Where the peer has said why it ends, that counts
        and not what this side takes it for: another connection of the session may show its end first.
        """
        if not self.open:
            return
        self._flush()
        self.open = False
        if isinstance(error, PeerGone):
            error = self._last_words() or error
        self._loop.watch(self._sock, 0, self._ready)
        self._sock.close()
        self._out.clear()
        self._owner.on_closed(error)

    def _last_words(self) -> PeerError | None:
        """A REJECT that has come and is not read."""
        try:
            data = b"" if self.connecting else self._sock.recv(READ_BYTES)
            for frame in self._wire.feed(data) if data else ():
                if frame.kind is FrameKind.REJECT:
                    self._owner.frame(frame)
        except PeerError as said:
            return said
        except (OSError, WireError, SealError, MessageError):  # nothing that could be read: it ends as it would have
            return None
        return None

    def detach(self) -> socket.socket:
        """Give the socket to somebody else: it is no control connection. Nothing more comes of this one.

        Raises:
            ProtocolError: more has come by it, or what was said has not left.
        """
        if self._wire.waiting or self._out:
            raise ProtocolError(self.peer, "said more on a stripe than its name")
        self.open = False
        self._loop.watch(self._sock, 0, self._ready)
        return self._sock

    def _watch(self) -> None:
        if self.open:
            writing = selectors.EVENT_WRITE if self._out or self.connecting else 0
            wanted = writing | (0 if self.connecting else selectors.EVENT_READ)
            if self._watched != wanted:
                self._watched = wanted
                self._loop.watch(self._sock, wanted, self._ready)

    def _ready(self, events: int) -> None:
        if self.connecting:
            code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self.close(PeerGone(self.peer, f"cannot connect: {os.strerror(code)}"))
                return
            self.connecting = False
            self.last_in = time.monotonic()
        if events & selectors.EVENT_READ:
            self.run(self._read)
        if self.open:
            self._flush()
            self._watch()

    def _read(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise PeerGone(self.peer, "closed the connection")
        self.last_in = time.monotonic()
        for frame in self._wire.feed(data):
            self._unproved = False
            self._owner.frame(frame)
            if not self.open:
                return
