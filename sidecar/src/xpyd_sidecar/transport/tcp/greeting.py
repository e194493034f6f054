"""How a stripe begins, decode's end: it names itself, passes over what prefill says to strangers, and hears its answer."""

from __future__ import annotations

import hmac
import os
import selectors
import socket
from collections.abc import Callable

from xpyd_sidecar.errors import AuthError, PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv.wire import PREFIX_BYTES, FrameKind, Wire, WireError, prefix_of
from xpyd_sidecar.threads.loop import Loop
from xpyd_sidecar.transport.tcp.sockets import tune


class StripeGreeting:
    """The greeting of one connection; used on a loop's thread."""

    def __init__(self, loop: Loop, sock: socket.socket, peer: str, words: tuple[bytes, bytes],
                 over: Callable[[socket.socket | PeerError], None]) -> None:
        """Begin.

        Args:
            loop: that watches the socket meanwhile.
            sock: that has begun to connect.
            peer: name and address, for messages.
            words: this end's name, and what prefill answers.
            over: called once, with the greeted socket or with why there is none (then it is closed); not after ``close``.
        """
        self._loop = loop
        self._sock = sock
        self._peer = peer
        name, self._expected = words
        self._hello = memoryview(Wire().frame(FrameKind.NAME, name))
        """What is still to be said."""
        self._heard = bytearray()
        self._over = over
        self._open = True
        tune(sock)
        loop.watch(sock, selectors.EVENT_WRITE, self._ready)

    def close(self) -> None:
        """End the greeting: the connection is not wanted any more."""
        if self._open:
            self._leave()
            self._sock.close()

    def _leave(self) -> None:
        self._open = False
        self._loop.watch(self._sock, 0, self._ready)

    def _ready(self, _: int) -> None:
        try:
            done = self._say() if self._hello else self._hear()
        except BlockingIOError:
            return
        except PeerError as error:
            self._fail(error)
        except WireError as error:
            self._fail(ProtocolError(self._peer, f"a stripe: {error}"))
        except OSError as error:
            self._fail(PeerGone(self._peer, f"a stripe: {error.strerror or error}"))
        else:
            if done:
                self._leave()
                self._over(self._sock)

    def _fail(self, error: PeerError) -> None:
        self.close()
        self._over(error)

    def _say(self) -> bool:
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        self._hello = self._hello[self._sock.send(self._hello):]
        if not self._hello:
            self._loop.watch(self._sock, selectors.EVENT_READ, self._ready)
        return False

    def _hear(self) -> bool:
        """Whether all of prefill's words have come, and they are its.

        Raises:
            AuthError, ProtocolError: they are not.
            PeerGone: no more come.
            WireError: they are no frame.
        """
        data = self._sock.recv(self._missing())
        if not data:
            raise PeerGone(self._peer, "closed a stripe before it had answered")
        self._heard += data
        if self._missing():
            return False
        if not hmac.compare_digest(bytes(self._heard[-len(self._expected):]), self._expected):
            raise AuthError(self._peer, "does not know the name of a stripe")
        return True

    def _missing(self) -> int:
        """Bytes that are still to come, as far as is known; never more than belong to the greeting."""
        if len(self._heard) < PREFIX_BYTES:
            return PREFIX_BYTES - len(self._heard)
        kind, length = prefix_of(self._heard)
        if kind is not FrameKind.CHALLENGE:
            raise ProtocolError(self._peer, f"sent {kind.name} on a stripe")
        return PREFIX_BYTES + length + len(self._expected) - len(self._heard)
