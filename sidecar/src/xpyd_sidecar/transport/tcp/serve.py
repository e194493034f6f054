"""The link ``tcp``, prefill's side: copies that may be asked for, and sessions whose stripes ask for them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol

from xpyd_sidecar.errors import PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.session_bodies import Able, LinkWelcome
from xpyd_sidecar.threads.loop import Loop
from xpyd_sidecar.transport import gates
from xpyd_sidecar.transport.links import ServeLink, Session
from xpyd_sidecar.transport.tcp.pool import StripePool
from xpyd_sidecar.transport.tcp.sockets import complain, tune


class CopyBytes(Protocol):
    """Bytes of a copy, for as long as somebody holds them."""

    offset: int
    """In the store."""
    view: memoryview

    def hold(self) -> None:
        """Count a sender of these bytes, which are not freed before ``let_go``."""

    def let_go(self) -> None:
        """One who holds them needs them no more."""


class TcpServer:
    """What a rank has for this link."""

    def __init__(self, loop: Loop, timeout_s: float, copy: Callable[[Key, int], CopyBytes | None]) -> None:
        """Begin.

        Args:
            loop: whose thread uses it.
            timeout_s: for so long a stripe may move no byte that is owed.
            copy: of a try, by the number of its manifest; None: it is not there (any more).
        """
        self.copy = copy
        self._pool = StripePool(loop, timeout_s) if gates.COMPILED else None

    def add(self, key: Key, number: int, copy: CopyBytes) -> None:
        """The copy that this manifest is told of may be asked for."""
        if self._pool is not None:
            self._pool.add(key, number, copy.view, copy.offset)

    def take(self, key: Key, number: int, copy: CopyBytes) -> None:
        """Serve a copy no more; a stripe that sends of it holds it until that has ended."""
        if self._pool is not None:
            copy.hold()
            self._pool.take(key, number, copy.let_go)

    def serve(self, session: Session, able: Able) -> tuple[ServeLink, LinkWelcome] | str:
        """A session's link on this side."""
        del able
        link = self.link(session)
        return link if isinstance(link, str) else (link, LinkWelcome())

    def link(self, session: Session) -> TcpServeLink | str:
        """What answers a session's stripes, or why it can have none here.

        Raises:
            PeerGone: there is no room for them now.
        """
        if self._pool is None:
            return gates.REASON
        stripes = self._pool.promise()
        if not stripes:
            raise PeerGone(session.peer, "tcp: too many data connections at prefill")
        return TcpServeLink(session, self._pool, stripes)


class TcpServeLink(ServeLink):
    """Prefill's side of the TCP link, of one session."""

    name = "tcp"

    def __init__(self, session: Session, pool: StripePool, stripes: int) -> None:
        """``stripes``: that the pool has promised."""
        self.peer = session.peer
        self.stripes = stripes
        self._session = session
        self._pool = pool
        self._number: int | None = None
        self._attached: set[int] = set()
        self._closed = False

    def attach(self, sock: socket.socket, number: int, answer: bytes, keys: bytes) -> None:
        """Take over a connection, as ``ServeLink`` has it. A second one of a number ends alone: its name may be said
        again.
        """
        if self._closed or number in self._attached or number >= self.stripes:
            sock.close()
            return
        self._attached.add(number)
        complain()
        try:
            tune(sock)
            if sock.send(answer) != len(answer):
                raise ConnectionResetError("takes no answer")
            if self._number is None:
                self._number = self._pool.open(self)
            self._pool.attach(self._number, sock, keys, serves=True)
        except (OSError, ValueError, PeerError) as error:
            sock.close()
            raise PeerGone(self.peer, f"a stripe: {error}") from None

    def on_order_ended(self, number: int, *, here: bool) -> None:
        """Never called here: prefill has no orders (``StripeOwner``)."""
        raise ProtocolError(self.peer, f"order {number} of nobody")

    def stripe_ended(self, error: PeerError) -> None:
        """A stripe has ended, as ``StripeOwner`` has it."""
        self._session.close(error)

    def close(self) -> None:
        """The session has ended: nothing of the store is read for it any more, but in a turn that is under way."""
        if self._closed:
            return
        self._closed = True
        if self._number is not None:
            self._pool.end(self._number)
        self._pool.give(self.stripes)
