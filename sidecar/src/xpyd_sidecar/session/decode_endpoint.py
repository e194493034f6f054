"""Decode's connection to one prefill rank: what was asked for, what has come, and that the peer is still there."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Final

from xpyd_sidecar.contract.ids import HostPort, Incarnation, split_host_port
from xpyd_sidecar.errors import AuthError, ChecksumError, Incompatible, PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv import bodies
from xpyd_sidecar.kv.frames import FrameKind, Header
from xpyd_sidecar.kv.keys import Key, Outcome, Recent
from xpyd_sidecar.kv.receiving import Ask
from xpyd_sidecar.kv.stores import Busy
from xpyd_sidecar.session.block_receiver import BlockReceiver
from xpyd_sidecar.session.decode_handshake import DecodeHandshake
from xpyd_sidecar.session.endpoint import Endpoint
from xpyd_sidecar.session.lookup_buffer import RETRY_S
from xpyd_sidecar.session.receiver_events import AskedBlocks, ReceiverContext
from xpyd_sidecar.threads.loop import Loop
from xpyd_sidecar.transport.gates import LoadTarget
from xpyd_sidecar.transport.tcp.placement import PayloadPlace

logger = logging.getLogger(__name__)


class DecodeEndpoint(Endpoint):
    """One connection to a prefill rank."""

    def __init__(self, shared: ReceiverContext, loop: Loop, address: HostPort, incarnation: Incarnation,
                 ended: Callable[[DecodeEndpoint], None]) -> None:
        """Begin to connect; ``ended`` is called once, when the connection has ended.

        Raises:
            OSError, ValueError: the address cannot be used.
        """
        super().__init__(loop, _connecting(address), address, connecting=True)
        self.place = (address, incarnation)
        self.expected: set[Key] = set()
        """Tries that may be pushed ahead, and have not been asked for."""
        self._granted: Recent[Key, None] = Recent()
        """Tries of which blocks may be on their way that were granted room."""
        self._shared = shared
        self._ended = ended
        self._intake = BlockReceiver(shared, address)
        self.asked = self._intake.asked
        """Tries that it owes."""
        self._handshake = DecodeHandshake(shared.me, self, self._intake, incarnation, self._agreed)
        self._later: list[tuple[FrameKind, bodies.Body | None, Key]] = []

    def ask(self, step: Ask, target: LoadTarget | None) -> None:
        """Ask for a transfer, once the link is agreed."""
        self._owes()
        self.asked[step.key] = AskedBlocks(step, target, bytearray(step.slots), step.key in self._granted)
        self.expected.discard(step.key)
        self.tell(FrameKind.READY, step.key, step.ready)
        self.link.start()
        if self._handshake.settled and len(self.asked) == 1 and (first := self._intake.begin(step.key)) is not None:
            self.link.expect(first)

    def expect(self, key: Key) -> None:
        """A try may be pushed ahead."""
        self._owes()
        self.expected.add(key)

    def _owes(self) -> None:
        if not self.asked and not self.expected:
            self.link.last_in = time.monotonic()  # it owed nothing until now, so silence counts from here

    def tell(self, kind: FrameKind, key: Key, body: bodies.Body | None = None) -> None:
        """Send a frame of a transfer, once the link is agreed."""
        if self._handshake.settled:
            self.link.say(kind, body, key)
        else:
            self._later.append((kind, body, key))

    def resume(self) -> None:
        """Memory to receive into is free."""
        self.link.resume()
        if self._intake.taker is not None:
            self._intake.taker.resume()

    def room(self, header: Header) -> PayloadPlace | None:
        """Where a payload goes: blocks of their own or staging for what is wanted, nowhere for what no longer is."""
        if (header.kind is FrameKind.DATA or header.kind is FrameKind.OFFER) and not self._handshake.settled:
            raise ProtocolError(self.link.peer, f"sent {header.kind.name} before the link was agreed")
        return self._intake.room(header) if header.kind is FrameKind.DATA else PayloadPlace.of(header.length)

    def frame(self, header: Header, place: PayloadPlace) -> None:
        """A frame is complete."""
        if header.kind is FrameKind.DATA:
            self._intake.data(header, place)
            return
        super().frame(header, place)

    def _heard(self, header: Header, payload: memoryview) -> None:
        if header.kind is FrameKind.OFFER:
            if self._intake.taker is None:
                raise ProtocolError(self.link.peer, "sent OFFER over a link of TCP alone")
            self._intake.taker.offered(header, bodies.read_body(payload, bodies.Offer))
        elif header.kind is FrameKind.REJECT:
            raise Rejected(self.link.peer, bodies.read_body(payload, bodies.Reason))
        elif header.kind is FrameKind.STORE and self._handshake.settled:
            self._store(header)
        elif header.kind is FrameKind.GONE and self._handshake.settled:
            why = bodies.read_body(payload, bodies.Reason)
            self.expected.discard(header.key)
            self._shared.ahead.forget(header.key)
            gone = self.asked.pop(header.key, None)
            if gone is not None:  # who asked for others has been heard, and so have they
                self._shared.broken(gone.step, why.outcome, f"{self.link.peer}: {why.reason}",
                                    gone.step.ready.for_others or not why.retry)
        elif header.kind in {FrameKind.GROUP, FrameKind.UNGROUP} and (taker := self._intake.taker) is not None:
            taker.grouped(header.kind, bodies.read_body(payload, bodies.Group))
        elif header.kind is not FrameKind.PING:
            self._handshake.said(header.kind, payload)

    def _agreed(self) -> None:
        """The link is agreed: ask for what was ordered meanwhile."""
        later, self._later = self._later, []
        for one in later:
            self.link.say(*one)

    def _store(self, header: Header) -> None:
        try:
            room = self._shared.ahead.store(header)
        except ValueError as error:
            raise ProtocolError(self.link.peer, f"STORE: {error}") from None
        if room:
            self._granted.put(header.key, None)
        kind, body = (FrameKind.ROOM, None) if room else (FrameKind.BUSY, Busy(RETRY_S))
        self.link.say(kind, body, header.key, region=header.region, first=header.first, blocks=header.blocks)

    def closed(self, error: PeerError) -> None:
        """The connection has ended: every try asked of it is broken."""
        self._intake.close()
        self._handshake.close()
        for key in self.expected:
            self._shared.ahead.lost(key)
        self._ended(self)
        asked = [one.step for one in self.asked.values()]
        self.asked.clear()
        outcome = error.outcome if isinstance(error, Rejected) else next(
            (outcome for kind, outcome in OUTCOMES.items() if isinstance(error, kind)), Outcome.PEER_LOST)
        final = outcome not in {Outcome.PEER_LOST, Outcome.INCARNATION}
        if asked or not isinstance(error, PeerGone):
            logger.warning("xpyd: data link to prefill ended: %s", error)
        for step in asked:
            self._shared.broken(step, outcome, str(error), final)

    def tick(self, now: float, timeout: float) -> None:
        """Time passes: a source that does not accept, or is silent although it owes something, is given up."""
        reaching = self._handshake.reaching
        if self.link.paused or reaching:
            self.link.last_in = now  # we do not read, so we cannot hear; or it waits for us
        stranger = PeerGone(self.link.peer, f"no connection within {timeout} s")
        self._look(now, timeout, None if self._handshake.settled or reaching else stranger,
                   busy=bool(self.asked or self.expected))


class Rejected(Incompatible):
    """Prefill refuses this rank, with its reason."""

    def __init__(self, peer: str, why: bodies.Reason) -> None:
        super().__init__(peer, why.reason)
        self.outcome = why.outcome


OUTCOMES: Final[Mapping[type[PeerError], Outcome]] = {
    ChecksumError: Outcome.CHECKSUM, AuthError: Outcome.AUTH, ProtocolError: Outcome.PROTOCOL,
    Incompatible: Outcome.INCOMPATIBLE}
"""What the end of a connection means for what was asked of it; the first that fits."""


def _connecting(address: HostPort) -> socket.socket:
    """A socket that has begun to connect.

    Raises:
        OSError, ValueError: the address cannot be used.
    """
    host, port = split_host_port(address)
    family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    code = sock.connect_ex((host, port))
    if code not in {0, errno.EINPROGRESS}:
        sock.close()
        raise OSError(code, os.strerror(code))
    return sock
