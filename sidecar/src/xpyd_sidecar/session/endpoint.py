"""What both ends of a session between two ranks have in common: who this rank is, frames with a body, and liveness."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.errors import ChecksumError, PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv import bodies, frames, messages
from xpyd_sidecar.kv.frames import NO_TRANSFER, Header, Kind
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.transport.tcp.connection import Connection
from xpyd_sidecar.transport.tcp.placement import PayloadPlace

IDLE_S: Final = 120.0
"""A session that has nothing open is closed after so long; the next transfer begins a new one."""


class LocalRank(NamedTuple):
    """Who this rank is."""

    instance: InstanceName
    incarnation: Incarnation
    rank: int
    key: bytes
    """The service's ``data`` key."""


class Endpoint:
    """One end. Who makes one sets ``link``."""

    link: Connection

    def __init__(self) -> None:
        self._born = time.monotonic()

    def say(self, kind: Kind, key: Key, body: bodies.Body | None = None, *, region: int = 0, first: int = 0,
            blocks: int = 0) -> None:
        """Send a frame other than DATA."""
        payload = bodies.body(body) if body is not None else b""
        self.link.queue(frames.encode(kind, key, payload, region=region, first=first, blocks=blocks), payload)

    def frame(self, connection: Connection, header: Header, place: PayloadPlace) -> None:
        """A frame other than DATA is complete."""
        if not frames.intact(header, place.body):
            raise ChecksumError(connection.peer, f"{header.kind.name} frame with a wrong checksum")
        try:
            self._heard(header, place.body)
        except messages.MessageError as error:
            raise ProtocolError(connection.peer, str(error)) from None

    def _heard(self, header: Header, body: memoryview) -> None:
        """What it says. May raise PeerError or MessageError, which end the connection."""
        raise NotImplementedError

    def _look(self, now: float, timeout: float, stranger: PeerError | None, *, busy: bool) -> None:
        """Time passes. ``stranger``: what is wrong if the peer has not greeted by now, None where it has; ``busy``: it owes
        something. A peer that is late with either is given up, and a session that nobody needs is closed.
        """
        link = self.link
        if stranger is not None:
            if now - self._born > timeout:
                link.close(stranger)
        elif busy:
            if link.silent(now, timeout):
                link.close(PeerGone(link.peer, f"silent for {timeout} s"))
            elif not link.writing and now - link.last_out > timeout / 4:
                self.say(Kind.PING, NO_TRANSFER)
        elif now - max(link.last_in, link.last_out) > IDLE_S:
            link.close(PeerGone(link.peer, "idle"))
