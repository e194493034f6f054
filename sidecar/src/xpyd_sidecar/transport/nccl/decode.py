"""Decode's side of the link ``nccl`` (``prefill`` draws it): joins prefill's groups, receives into slots of GPU memory.

A slot holds a piece from POSTED until the engine's thread has copied it into its blocks. The cache itself is never NCCL's
to write: what a dead peer or an aborted kernel leaves behind is in a slot that nobody reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from xpyd_sidecar.errors import ChecksumError, PeerGone, ProtocolError
from xpyd_sidecar.kv import messages
from xpyd_sidecar.kv.frames import Header, Kind
from xpyd_sidecar.kv.groups import Way
from xpyd_sidecar.memory.staging import Chunk, Staging
from xpyd_sidecar.threads.watched import Watched
from xpyd_sidecar.transport.link import LinkContext
from xpyd_sidecar.transport.nccl.driver import Piece
from xpyd_sidecar.transport.nccl.interface import Wanted
from xpyd_sidecar.transport.nccl.prefill import OFFERS_AHEAD, NcclLink
from xpyd_sidecar.transport.nccl.thread import NcclThread, NcclUsage


class OfferedPiece(NamedTuple):
    """An offer that is not answered, or is being received."""

    header: Header
    offer: messages.Offer
    chunk: Chunk | None = None


class NcclTaker:
    """Decode's side."""

    def __init__(self, hub: NcclThread, context: LinkContext, staging: Staging, wanted: Wanted) -> None:
        """``staging``: slots of GPU memory, one for a piece."""
        self.piece = hub.driver.piece
        self._hub = hub
        self._context = context
        self._staging = staging
        self._wanted = wanted
        self._turn: Turn | None = None
        self._last = 0
        """Prefill's number of the last group."""
        self._closed = False
        self._queue: deque[OfferedPiece] = deque()
        """Offers that are not answered."""
        self._given: Piece | None = None
        """Of the oldest one: waits for its turn to be received."""
        self._running: set[Piece] = set()

    def group(self, message: messages.Group) -> None:
        """Prefill makes a group.

        Raises:
            ProtocolError: its number is not a new one.
        """
        if message.number <= self._last:
            raise ProtocolError(self._context.session.peer, f"made group {message.number} after {self._last}")
        if self._turn is not None:
            self._turn.leave("prefill has made another one")
            self._without(f"prefill has made group {message.number}")
        self._last = message.number
        self._turn = Turn(self, self._hub, self._context, message)

    def ungrouped(self, message: messages.Group) -> None:
        """Prefill has left a group."""
        if self._turn is not None and message.number == self._last:
            self._turn.leave(f"prefill: {message.reason}")

    def offered(self, header: Header, offer: messages.Offer) -> None:
        """Prefill has a piece.

        Raises:
            ProtocolError: not what was asked for, or more than may be offered at once.
        """
        if len(self._queue) >= OFFERS_AHEAD or offer.size > self.piece:
            reason = f"offered {offer.size} bytes and {len(self._queue)} pieces before; bounds {self.piece}, {OFFERS_AHEAD}"
            raise ProtocolError(self._context.session.peer, reason)
        self._queue.append(OfferedPiece(header, offer))
        self.pump()

    def resume(self) -> None:
        """A slot is free."""
        self._context.run(self.pump)

    def pump(self) -> None:
        """Answer what can be answered.

        Raises:
            ProtocolError: an offer that is not what was asked for.
        """
        while self._queue and self._given is None and not self._closed:
            header, offer, _ = self._queue[0]
            if not self._wanted.wants(header, offer):
                self._taken(read=True)
            elif self._turn is None or offer.address != self._last:
                self._taken(read=False)
            elif not self._turn.open or (chunk := self._staging.take()) is None:
                return
            else:
                self._queue[0] = OfferedPiece(header, offer, chunk)
                self._given = Piece(offer.size, offer.checksum is not None, slot=chunk.tensor, tag=self._queue[0])
                self._turn.move(self._given)

    def _taken(self, *, read: bool) -> None:
        one = self._queue.popleft()
        self._context.say(Kind.TAKEN, messages.Taken(read), one.header.key)

    def _without(self, reason: str) -> None:
        """The group is gone, and with it what was being received."""
        self._turn, self._given = None, None
        if self._running and not self._closed:
            self._context.fail(PeerGone(self._context.session.peer, f"nccl: {reason}"))

    def close(self) -> None:
        """The session has ended. Slots come back when the group has ended."""
        self._closed = True
        self._queue.clear()
        if self._turn is not None:
            self._turn.leave("the session has ended")

    # --- told by the communicator thread, on the session's thread ---

    def posted(self, piece: Piece) -> None:
        """A piece is being received."""
        self._running.add(piece)
        if piece is self._given:
            self._given = None
            one = self._queue.popleft()
            self._context.say(Kind.POSTED, messages.Taken(read=True), one.header.key)
            self.pump()

    def moved(self, piece: Piece) -> None:
        """A piece has come."""
        self._running.discard(piece)
        one: OfferedPiece = piece.tag
        assert one.chunk is not None
        if self._closed or not piece.intact:
            self._staging.give(one.chunk)
            if not self._closed:
                reason = f"a piece over NCCL with a wrong checksum, or another piece than number {piece.nth}"
                self._context.fail(ChecksumError(self._context.session.peer, reason))
            return
        self._wanted.received(one.header, one.chunk._replace(home=partial(self._staging.give, one.chunk)), piece.size)

    def lost(self, turn: Turn, reason: str) -> None:
        """A group does no more."""
        if turn is self._turn:
            self._without(reason)
            if not self._closed:
                self._context.say(Kind.UNGROUP, messages.Group(self._last, reason=reason))
                self.pump()

    def over(self, given_back: tuple[Piece, ...]) -> None:
        """The GPU has let go of slots."""
        for piece in given_back:
            self._running.discard(piece)
            one: OfferedPiece = piece.tag
            assert one.chunk is not None
            self._staging.give(one.chunk)


class Turn:
    """One group of a session at decode. What is told of it after the next one was begun no longer counts."""

    def __init__(self, taker: NcclTaker, hub: NcclThread, context: LinkContext, message: messages.Group) -> None:
        self.open = False
        self._taker = taker
        self._hub = hub
        self._context = context
        self._number = hub.join(self, Way.RECEIVE, message.uid)

    def move(self, piece: Piece) -> None:
        """Receive a piece."""
        self._hub.move(self._number, piece, self)

    def leave(self, reason: str) -> None:
        """End the group."""
        self._hub.leave(self._number, reason)

    def post(self, call: Callable[[], None]) -> None:
        """Have a call made on the session's I/O thread."""
        self._context.post(partial(self._context.run, call))

    def begun(self, uid: bytes) -> None:
        """Prefill has minted the id."""

    def opened(self) -> None:
        """Both have joined."""
        self.open = True
        self._taker.pump()

    def posted(self, piece: Piece) -> None:
        """A piece is being received."""
        self._taker.posted(piece)

    def moved(self, piece: Piece) -> None:
        """A piece has come."""
        self._taker.moved(piece)

    def lost(self, reason: str, *, busy: bool) -> None:  # the taker knows better: some are only queued
        """The group does no more."""
        self.open = False
        self._taker.lost(self, reason)

    def over(self, given_back: tuple[Piece, ...]) -> None:
        """The GPU has let go of slots."""
        self._taker.over(given_back)


class NcclGrouping:
    """Both sides of every session of this process."""

    def __init__(self, hub: NcclThread, receives: int) -> None:
        """``receives``: slots to receive into."""
        self._hub = hub
        driver = hub.driver
        slots = [Chunk(driver.device.empty(driver.slot_bytes), memoryview(b"")) for _ in range(receives)]
        self._staging = Staging(slots.pop, receives)
        self._bytes = receives * driver.slot_bytes

    def link(self, context: LinkContext, piece: int) -> NcclLink:
        """Prefill's side of a session."""
        return NcclLink(self._hub, context, piece)

    def taker(self, context: LinkContext, wanted: Wanted) -> NcclTaker:
        """Decode's side of a session."""
        return NcclTaker(self._hub, context, self._staging, wanted)

    def on_free(self, call: Callable[[], None] | None) -> None:
        """Call this whenever a slot to receive into is free again."""
        self._staging.on_free(call)

    @property
    def usage(self) -> NcclUsage:
        """What it takes of the GPU now, slots to receive into included."""
        usage = self._hub.usage
        return usage._replace(memory=usage.memory + self._bytes)

    @property
    def thread(self) -> Watched:
        """The communicator thread."""
        return self._hub.thread

    def stop(self) -> None:
        """End every group, and the thread."""
        self._hub.stop()
