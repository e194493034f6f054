"""Decode's side of the link ``nccl`` (``prefill`` draws it): joins prefill's groups, receives into slots of GPU memory.

A slot holds a piece from POSTED until the engine's thread has copied it into its blocks. The cache itself is never NCCL's
to write: what a dead peer or an aborted kernel leaves behind is in a slot that nobody reads.
"""

from __future__ import annotations

from xpyd_sidecar.errors import ChecksumError, PeerGone, ProtocolError
from xpyd_sidecar.kv import bodies
from xpyd_sidecar.kv.frames import FrameKind
from xpyd_sidecar.kv.groups import Way
from xpyd_sidecar.memory.staging import Chunk, Staging
from xpyd_sidecar.transport.link import PieceOwner, PieceTaker, Session
from xpyd_sidecar.transport.nccl.driver import Piece
from xpyd_sidecar.transport.nccl.prefill import OFFERS_AHEAD, NcclLink
from xpyd_sidecar.transport.nccl.thread import NcclThread, NcclUsage


class NcclTaker(PieceTaker):
    """Decode's side of a session."""

    name = "nccl"

    def __init__(self, hub: NcclThread, session: Session, staging: Staging, wanted: PieceOwner) -> None:
        """``staging``: slots of GPU memory, one for a piece."""
        super().__init__(session, wanted, hub.driver.piece, OFFERS_AHEAD)
        self._hub = hub
        self._staging = staging
        self._number = 0
        """Of the group, in this process; 0: there is none. What is told of one before it no longer counts."""
        self._open = False
        self._last = 0
        """Prefill's number of the last group."""
        self._given: Piece | None = None
        """Of the oldest offer: waits for its turn to be received."""
        self._running: set[Piece] = set()

    def grouped(self, kind: FrameKind, message: bodies.Group) -> None:
        """As of ``PieceTaker``."""
        if kind is FrameKind.UNGROUP:
            if self._number and message.number == self._last:
                self._hub.leave(self._number, f"prefill: {message.reason}")
            return
        if message.number <= self._last:
            raise ProtocolError(self.session.peer, f"made group {message.number} after {self._last}")
        if self._number:
            self._hub.leave(self._number, "prefill has made another one")
            self._without(f"prefill has made group {message.number}")
        self._last = message.number
        self._number = self._hub.join(self, Way.RECEIVE, message.uid)

    def _pump(self) -> None:
        """Answer what can be answered. Raises what ``PieceOwner.wants`` does."""
        while self._offers and self._given is None and not self._closed:
            header, offer = self._offers[0].header, self._offers[0].offer
            if not self._wanted.wants(header, offer, self.piece):
                self._taken()
            elif not self._number or offer.address != self._last:
                self._taken(bodies.Taken(read=False))
            elif not self._open or (chunk := self._staging.take()) is None:
                return
            else:
                self._given = Piece(offer.size, offer.checksum is not None, slot=chunk.tensor, tag=(header, chunk))
                self._hub.move(self._number, self._given, self)

    def _without(self, reason: str) -> None:
        """The group is gone, and with it what was being received."""
        self._number, self._open, self._given = 0, False, None
        if self._running and not self._closed:
            self.session.close(PeerGone(self.session.peer, f"nccl: {reason}"))

    def close(self) -> None:
        """The session has ended. Slots come back when the group has ended."""
        self._closed = True
        self._offers.clear()
        if self._number:
            self._hub.leave(self._number, "the session has ended")

    # --- told by the communicator thread, on the session's thread ---

    def begun(self, uid: bytes) -> None:
        """Prefill has minted the id."""

    def opened(self, number: int) -> None:
        """Both have joined."""
        if number == self._number:
            self._open = True
            self._pump()

    def posted(self, piece: Piece) -> None:
        """A piece is being received."""
        self._running.add(piece)
        if piece is self._given:
            self._given = None
            self.session.say(FrameKind.POSTED, bodies.Taken(read=True), self._offers.popleft().header.key)
            self._pump()

    def moved(self, piece: Piece) -> None:
        """A piece has come."""
        self._running.discard(piece)
        header, chunk = piece.tag
        if self._closed or not piece.intact:
            self._staging.give(chunk)
            if not self._closed:
                reason = f"a piece over NCCL with a wrong checksum, or another piece than number {piece.nth}"
                self.session.close(ChecksumError(self.session.peer, reason))
            return
        self._wanted.received(header, self._staging.homed(chunk), piece.size)

    def lost(self, number: int, reason: str, *, busy: bool) -> None:  # it knows better: some are only queued
        """A group does no more."""
        if number == self._number:
            self._without(reason)
            if not self._closed:
                self.session.say(FrameKind.UNGROUP, bodies.Group(self._last, reason=reason))
                self._pump()

    def over(self, given_back: tuple[Piece, ...]) -> None:
        """The GPU has let go of slots."""
        for piece in given_back:
            self._running.discard(piece)
            _, chunk = piece.tag
            self._staging.give(chunk)


class NcclGrouping:
    """Both sides of every session of this process."""

    def __init__(self, hub: NcclThread, receives: int) -> None:
        """``receives``: slots to receive into."""
        self.hub = hub
        driver = hub.driver
        slots = [Chunk(driver.device.empty(driver.slot_bytes), memoryview(b"")) for _ in range(receives)]
        self.staging = Staging(slots.__getitem__, receives)
        self._bytes = receives * driver.slot_bytes

    def link(self, session: Session, piece: int) -> NcclLink:
        """Prefill's side of a session."""
        return NcclLink(self.hub, session, piece)

    def taker(self, session: Session, wanted: PieceOwner) -> NcclTaker:
        """Decode's side of a session."""
        return NcclTaker(self.hub, session, self.staging, wanted)

    @property
    def usage(self) -> NcclUsage:
        """What it takes of the GPU now, slots to receive into included."""
        usage = self.hub.usage
        return usage._replace(memory=usage.memory + self._bytes)
