"""What both ends of a session between two ranks have in common: who this rank is, frames with a body, and liveness."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final, NamedTuple

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.errors import ChecksumError, PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv import frames, messages
from xpyd_sidecar.kv.frames import FRAME_BYTES, FrameKind, Header
from xpyd_sidecar.kv.leases import Listened
from xpyd_sidecar.session.link_choice import LinkOptions
from xpyd_sidecar.threads.loop import Loop
from xpyd_sidecar.transport.nixl.prefill import NixlReading
from xpyd_sidecar.transport.shm.prefill import SharedCopies
from xpyd_sidecar.transport.tcp.connection import Connection
from xpyd_sidecar.transport.tcp.frame_reader import FrameOwner
from xpyd_sidecar.transport.tcp.placement import PayloadPlace

if TYPE_CHECKING:  # it needs torch
    from xpyd_sidecar.transport.nccl.decode import NcclGrouping

IDLE_S: Final = 120.0
"""A session that has nothing open is closed by decode after so long; the next transfer begins a new one. Prefill waits
twice as long: it would close one over which decode asks in that moment.
"""


class LocalRank(NamedTuple):
    """Who this rank is, and how its blocks may travel."""

    instance: InstanceName
    incarnation: Incarnation
    rank: int
    key: bytes
    """The service's ``data`` key."""
    ways: LinkOptions
    peer_timeout_s: float
    largest_frame: int = FRAME_BYTES
    """Bytes of DATA that are sent or taken at once; a block is no larger."""
    grouping: NcclGrouping | None = None
    """Makes links over NCCL, where there is a GPU for it."""
    reading: NixlReading | None = None
    """Makes links over NIXL, where it is there."""
    sharing: SharedCopies | None = None
    """The memory of copies that decodes of this host may map, where there is some."""


class Endpoint(FrameOwner):
    """One end."""

    idle_s = IDLE_S

    def __init__(self, loop: Loop, sock: socket.socket, address: str, *, connecting: bool = False) -> None:
        self.link = Connection(loop, sock, address, self, connecting=connecting)
        self._strange: Listened | None = None
        """Since this end began, as long as the peer has not greeted."""

    def frame(self, header: Header, place: PayloadPlace) -> None:
        """A frame other than DATA is complete."""
        if not frames.intact(header, place.body):
            raise ChecksumError(self.link.peer, f"{header.kind.name} frame with a wrong checksum")
        try:
            self._heard(header, place.body)
        except messages.MessageError as error:
            raise ProtocolError(self.link.peer, str(error)) from None

    def _heard(self, header: Header, payload: memoryview) -> None:
        """What it says. May raise PeerError or MessageError, which end the connection."""
        raise NotImplementedError

    def _look(self, now: float, timeout: float, stranger: PeerError | None, *, busy: bool) -> None:
        """Time passes. ``stranger``: what is wrong if the peer has not greeted by now, None where it has; ``busy``: it owes
        something. A peer that is late with either is given up, and a session that nobody needs is closed.
        """
        link = self.link
        if stranger is not None:
            self._strange = self._strange or Listened(timeout)
            if self._strange.look(now) > timeout:
                link.close(stranger)
        elif busy:
            if link.silent(now, timeout):
                link.close(PeerGone(link.peer, f"silent for {timeout} s"))
            elif not link.writing and now - link.last_out > timeout / 4:
                self.link.say(FrameKind.PING)
        elif now - max(link.last_in, link.last_out) > self.idle_s:
            link.close(PeerGone(link.peer, "idle"))
