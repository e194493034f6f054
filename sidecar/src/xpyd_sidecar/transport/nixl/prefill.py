"""Blocks that decode reads out of prefill's memory over NIXL: RDMA between hosts. Prefill's side.

    prefill                                               decode
    the store of copies, registered once
    WELCOME(NIXL's metadata, a ticket's place) ────────▶  an agent for this session reads the ticket
                                    ◀──────── LINK nixl
    OFFER(address, size, checksum) ────────────────────▶  reads the piece into a slot, and the ticket after it
    the copy is freed               ◀──────── TAKEN       copies the slot to its place, inside the gate

Everything but the bytes travels over the session: what is offered, that it was taken, that either side is there. What may
be believed of what was read is in ``transport.tickets``.
"""

from __future__ import annotations

from typing import Final

from xpyd_sidecar.kv import bodies
from xpyd_sidecar.kv.reads import METADATA_MAX, TICKET_BYTES
from xpyd_sidecar.transport.link import PieceOwner, PieceTaker, Session
from xpyd_sidecar.transport.moves_plain import address_of
from xpyd_sidecar.transport.nixl.decode import NixlTaker, Told
from xpyd_sidecar.transport.nixl.thread import NixlThread
from xpyd_sidecar.transport.offers import OfferedBlocks
from xpyd_sidecar.transport.tickets import SESSIONS, TicketLink, Tickets

PIECES: Final = 8
"""That a decode reads at once."""
PIECE_BYTES: Final = 2 << 20
"""Of one, or one block. Chosen by the processor time for each GB on two cores over UCX's TCP, one run for each size."""
START_S: Final = 60.0
"""The first agent of a process, and registering memory that must be locked, page by page."""
LAST_SERVED_S: Final = 30.0
"""For reads that were under way when their session ended: who was stopped meanwhile has all of them to answer."""


class NixlLink(TicketLink):
    """Prefill's side of a session."""

    name = "nixl"

    def __init__(self, session: Session, side: NixlReading, cell: int, theirs: bodies.NixlReader) -> None:
        """``cell``: number of its ticket."""
        super().__init__(session, side.tickets, cell, min(theirs.pieces, PIECES), min(theirs.piece, side.piece))
        self._side = side
        self._served = False

    def shown(self) -> bodies.NixlMemory:
        """What decode needs to read this process's copies in this session."""
        side = self._side
        at, ticket = side.tickets.shown(self.cell)
        return bodies.NixlMemory(side.agent, side.metadata, side.hub.version, side.base, side.size, side.cells_at + at,
                                 ticket)

    def _holds(self, address: int, size: int) -> bool:
        return self._side.holds(address, size)

    def _pump(self) -> None:
        super()._pump()
        self._serve(bool(self.offered))

    def _offer(self, one: OfferedBlocks) -> OfferedBlocks:
        self._tell(one, address_of(one.blocks.data), one.blocks.total())
        return one

    def _serve(self, wanted: bool) -> None:
        if self._served != wanted:
            self._served = wanted
            self._side.hub.offers(1 if wanted else -1)

    def close(self) -> None:
        """Wipe the ticket, then free what was offered."""
        if self._closed:
            return
        if self.offered:  # decode may be reading still: it waits for the end of that, and drops it
            self._side.hub.serve_reads(LAST_SERVED_S)
        self._serve(False)
        super().close()


class NixlReading:
    """Both sides of every session of this process."""

    def __init__(self, hub: NixlThread, piece: int, *, timeout_s: float) -> None:
        """``piece``: bytes of the largest piece; a block is no larger."""
        self.hub = hub
        self.piece = piece
        self._cells = memoryview(bytearray(SESSIONS * TICKET_BYTES))
        self.cells_at = address_of(self._cells)
        self.tickets = Tickets(self._cells)
        self.agent = ""
        self.metadata = b""
        self.base = self.size = 0
        self._memory: memoryview | None = None
        self._timeout_s = timeout_s

    def register(self, memory: memoryview) -> None:
        """Have decode's agents read the memory for copies. It is kept for as long as this process can be read from.

        Raises:
            Exception: NIXL's own, which have no common root; TimeoutError; ValueError.
        """
        self._memory = memory
        self.base, self.size = address_of(memory), len(memory)
        regions = [(self.base, self.size), (self.cells_at, len(self._cells))]
        self.agent, self.metadata = self.hub.register(regions, START_S)
        if not 0 < len(self.metadata) <= METADATA_MAX:
            raise ValueError(f"NIXL describes this process in {len(self.metadata)} bytes, over {METADATA_MAX}")

    def ours(self) -> bodies.NixlReader:
        """What decode says of itself."""
        return bodies.NixlReader(self.hub.version, self.piece, PIECES)

    def holds(self, address: int, size: int) -> bool:
        """Whether bytes of this process can be read by others."""
        return self.base <= address and address + size <= self.base + self.size

    def link(self, session: Session, theirs: bodies.NixlReader) -> NixlLink | None:
        """Prefill's side of a session; None: too many are open."""
        if (cell := self.tickets.take()) is None:
            return None
        self.hub.serve_reads(self._timeout_s)
        return NixlLink(session, self, cell, theirs)

    def taker(self, session: Session, wanted: PieceOwner, memory: bodies.NixlMemory, told: Told) -> PieceTaker:
        """Decode's side of a session."""
        return NixlTaker(self.hub, session, wanted, memory, told, piece=self.piece, pieces=PIECES)
