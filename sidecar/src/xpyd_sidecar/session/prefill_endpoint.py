"""Prefill's end of a session with one decode rank: the handshake, what travels over which link, liveness.

Belongs here: who the peer is, and frames before they mean something. Does not belong here: what is asked and told of a
transfer (``sender``); decode's end (``decode_handshake``, ``decode_endpoint``).
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable
from functools import partial
from typing import Protocol

from xpyd_sidecar.errors import AuthError, Incompatible, PeerError, ProtocolError
from xpyd_sidecar.kv import bodies, proofs
from xpyd_sidecar.kv.frames import NO_TRANSFER, Header, Kind
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.session.endpoint import Endpoint, LocalRank
from xpyd_sidecar.session.link_choice import LinkOptions
from xpyd_sidecar.session.prefill_link_choice import Arenas, NoLink, PrefillLinkChoice
from xpyd_sidecar.threads.loop import Loop
from xpyd_sidecar.transport.link import LinkContext
from xpyd_sidecar.transport.nccl.interface import Grouping
from xpyd_sidecar.transport.nixl.prefill import NixlReading
from xpyd_sidecar.transport.tcp.connection import Connection
from xpyd_sidecar.transport.tcp.placement import PayloadPlace

logger = logging.getLogger(__name__)


class PrefillSide(Protocol):
    """Whom decode ranks connect to."""

    me: LocalRank
    ways: LinkOptions
    largest_frame: int
    arenas: Arenas
    grouping: Grouping | None
    reading: NixlReading | None

    def asked(self, peer: PrefillEndpoint, header: Header, body: memoryview) -> None:
        """A frame of a peer that was let in. May raise PeerError or MessageError, which end the connection."""

    def lost(self, peer: PrefillEndpoint, error: PeerError) -> None:
        """The connection has ended."""


class PrefillEndpoint(Endpoint):
    """One connection from a decode rank."""

    def __init__(self, host: PrefillSide, loop: Loop, sock: socket.socket, address: str) -> None:
        super().__init__()
        self._host = host
        self._nonce = secrets.token_bytes(proofs.NONCE_BYTES)
        self._accepted = False
        self.link = Connection(loop, sock, address, self)
        grouping, reading, context = host.grouping, host.reading, LinkContext(self.link, loop.post, self.link.close)
        grouped = partial(grouping.link, context) if grouping is not None else None
        shown = partial(reading.link, context) if reading is not None else None
        self.way = PrefillLinkChoice(host.ways, host.largest_frame, host.arenas, grouped, shown)
        self.say(Kind.CHALLENGE, NO_TRANSFER, bodies.Challenge(self._nonce, host.me.incarnation))

    def room(self, connection: Connection, header: Header) -> PayloadPlace | None:
        """Where a payload goes."""
        if header.kind is Kind.DATA:
            raise ProtocolError(connection.peer, "sent DATA where prefill listens")
        return PayloadPlace.of(header.length)

    def _heard(self, header: Header, body: memoryview) -> None:
        if self._accepted:
            self._host.asked(self, header, body)
        elif header.kind is Kind.HELLO:
            self._greet(bodies.read_body(body, bodies.DataHello))
        else:
            raise ProtocolError(self.link.peer, f"sent {header.kind.name} before HELLO")

    def decided(self, choice: bodies.LinkChoice) -> None:
        """Decode has chosen how blocks travel."""
        if not self._show(partial(self.way.decided, choice)):
            logger.info("xpyd: blocks for %s go over %s%s", self.link.peer, self.way.link.name,
                        f" ({choice.reason})" if choice.reason else "")

    def taken(self, taken: bodies.Taken) -> None:
        """Decode is done with the oldest offer, or cannot read it."""
        before = self.way.link
        if not self._show(partial(self.way.taken, self.link, taken)) and self.way.link is not before:
            logger.warning("xpyd: blocks for %s go over %s from now on (%s)", self.link.peer, self.way.link.name, taken.why)

    def _show(self, ask: Callable[[], bodies.Arena | None]) -> bool:
        """Show decode an arena, if it is to see one. Whether it is."""
        try:
            arena = ask()
        except NoLink as error:
            self._reject(Outcome.INCOMPATIBLE, str(error))
            raise Incompatible(self.link.peer, str(error)) from None
        except ValueError as error:
            raise ProtocolError(self.link.peer, str(error)) from None
        if arena is not None:
            self.say(Kind.ARENA, NO_TRANSFER, arena)
        return arena is not None

    def closed(self, _: Connection, error: PeerError) -> None:
        """The connection has ended."""
        self.way.close()
        self._host.lost(self, error)

    def tick(self, now: float, *, busy: bool, timeout: float) -> None:
        """Time passes: a peer that does not greet, or is silent although it has work here, is given up."""
        stranger = AuthError(self.link.peer, f"did not greet within {timeout} s")
        self._look(now, timeout, None if self._accepted else stranger, busy=busy)

    def _greet(self, hello: bodies.DataHello) -> None:
        me = self._host.me
        terms = proofs.Terms(self._nonce, hello.nonce, me.incarnation, hello.incarnation)
        if not proofs.holds(me.key, "decode", terms, hello.proof):
            self._reject(Outcome.AUTH, "wrong service key")
            raise AuthError(self.link.peer, "does not hold the service key")
        self.link.peer = f"{hello.instance} ({self.link.peer})"
        if hello.expects != me.incarnation:
            reason = f"incarnation {hello.expects} is gone, {me.incarnation} is here"
            self._reject(Outcome.INCARNATION, reason)
            raise Incompatible(self.link.peer, reason)
        try:
            near, reason = self.way.welcome(hello.host, hello.gpu, hello.nixl)
        except NoLink as error:
            self._reject(Outcome.INCOMPATIBLE, str(error))
            raise Incompatible(self.link.peer, str(error)) from None
        self._accepted = True
        self.link.beside |= near is not None
        proof = proofs.prove(me.key, "prefill", terms)
        self.say(Kind.WELCOME, NO_TRANSFER, bodies.DataWelcome(proof, near, reason, self.way.gpu, self.way.memory))

    def _reject(self, outcome: Outcome, reason: str) -> None:
        self.say(Kind.REJECT, NO_TRANSFER, bodies.Reason(outcome, reason))
        self.link.flush()
