"""Prefill's end of a session with one decode rank: the handshake, what travels over which link, liveness.

Belongs here: who the peer is, and frames before they mean something. Does not belong here: what is asked and told of a
transfer (``sender``); decode's end (``decode_handshake``, ``decode_endpoint``).
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeVar

from xpyd_sidecar.contract.ids import Incarnation
from xpyd_sidecar.errors import AuthError, Incompatible, PeerError, ProtocolError
from xpyd_sidecar.kv import bodies, proofs
from xpyd_sidecar.kv.frames import FrameKind, Header
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.session.endpoint import IDLE_S, Endpoint, LocalRank
from xpyd_sidecar.session.prefill_link_choice import PrefillLinkChoice
from xpyd_sidecar.threads.loop import Loop
from xpyd_sidecar.transport.tcp.placement import PayloadPlace

T = TypeVar("T")


class PrefillEndpoint(Endpoint):
    """One connection from a decode rank."""

    idle_s = 2 * IDLE_S

    def __init__(self, me: LocalRank, loop: Loop, sock: socket.socket, address: str, *,
                 asked: Callable[[PrefillEndpoint, Header, memoryview], None],
                 lost: Callable[[PrefillEndpoint, PeerError], None]) -> None:
        """``asked``: takes frames of a peer that was let in, and may raise what ``_heard`` may; ``lost``: it has ended."""
        super().__init__(loop, sock, address)
        self._me = me
        self._asked = asked
        self._lost = lost
        self._nonce = secrets.token_bytes(proofs.NONCE_BYTES)
        self.life = Incarnation("")
        """Of the decode rank, once it has shown that it holds the key."""
        self._accepted = False
        self.way = PrefillLinkChoice(me, self.link)
        self.link.say(FrameKind.CHALLENGE, bodies.Challenge(self._nonce, me.incarnation))

    def room(self, header: Header) -> PayloadPlace | None:
        """Where a payload goes."""
        if header.kind is FrameKind.DATA:
            raise ProtocolError(self.link.peer, "sent DATA where prefill listens")
        return PayloadPlace.of(header.length)

    def _heard(self, header: Header, payload: memoryview) -> None:
        if self._accepted:
            self._asked(self, header, payload)
        elif header.kind is FrameKind.HELLO:
            self._greet(bodies.read_body(payload, bodies.DataHello))
        else:
            raise ProtocolError(self.link.peer, f"sent {header.kind.name} before HELLO")

    def choose(self, step: Callable[[], T]) -> T:
        """A step of the choice of a link; where none works, decode is told why."""
        try:
            return step()
        except Incompatible as error:
            self._refuse(Outcome.INCOMPATIBLE, error)

    def closed(self, error: PeerError) -> None:
        """The connection has ended."""
        self.way.close()
        self._lost(self, error)

    def tick(self, now: float, *, busy: bool, timeout: float) -> None:
        """Time passes: a peer that does not greet, or is silent although it has work here, is given up."""
        stranger = AuthError(self.link.peer, f"did not greet within {timeout} s")
        self._look(now, timeout, None if self._accepted else stranger, busy=busy)

    def _greet(self, hello: bodies.DataHello) -> None:
        me = self._me
        terms = proofs.Terms(self._nonce, hello.nonce, me.incarnation, hello.incarnation)
        if not proofs.holds(me.key, "decode", terms, hello.proof):
            self._refuse(Outcome.AUTH, AuthError(self.link.peer, "does not hold the service key"))
        self.link.peer = f"{hello.instance} ({self.link.peer})"
        if hello.expects != me.incarnation:
            reason = f"incarnation {hello.expects} is gone, {me.incarnation} is here"
            self._refuse(Outcome.INCARNATION, Incompatible(self.link.peer, reason))
        reason = self.choose(partial(self.way.welcome, hello))
        self._accepted, self.life = True, hello.incarnation
        self.link.beside |= self.way.shared is not None
        proof, way = proofs.prove(me.key, "prefill", terms), self.way
        self.link.say(FrameKind.WELCOME, bodies.DataWelcome(proof, way.shared, reason, way.gpu, way.memory))

    def _refuse(self, outcome: Outcome, error: PeerError) -> NoReturn:
        """Tell decode why it is not served, as last words."""
        self.link.say(FrameKind.REJECT, bodies.Reason(outcome, error.reason))
        self.link.flush()
        raise error
