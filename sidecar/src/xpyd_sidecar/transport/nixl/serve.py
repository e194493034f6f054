"""The link ``nixl``, prefill's side: its store is registered once, and each decode reads it by itself.

    prefill                                               decode
    WELCOME(NIXL's metadata, a ticket's place) ────────▶  its agent reads the ticket
                                    ◀──────── LINK nixl
    MANIFEST(offset in the store) ─────────────────────▶  reads the bytes, and the ticket after them
    the copy is freed               ◀──────── TAKEN       copies them to their places, inside the gate

Everything but the bytes travels over the session. What may be believed of what was read is in ``transport.tickets``.
"""

from __future__ import annotations

import itertools
from typing import Final

from xpyd_sidecar.kv.reads import METADATA_MAX, TICKET_BYTES
from xpyd_sidecar.kv.session_bodies import NO_NIXL, Able, LinkWelcome, NixlMemory
from xpyd_sidecar.kv.wire import Frame
from xpyd_sidecar.memory.addresses import address_of
from xpyd_sidecar.memory.chunk import Chunk
from xpyd_sidecar.transport.links import ServeLink, Session
from xpyd_sidecar.transport.nixl.thread import NixlThread
from xpyd_sidecar.transport.tickets import SESSIONS, Tickets

START_S: Final = 60.0
"""The first agent of a process, and registering memory that must be locked, page by page."""
LAST_SERVED_S: Final = 30.0
"""For reads that were under way when their session ended: who was stopped meanwhile has all of them to answer."""


class NixlServer:
    """What a rank has for this link."""

    def __init__(self, hub: NixlThread, memory: Chunk, *, timeout_s: float) -> None:
        """``memory``: of the store; kept for as long as this process can be read from, whoever drops the store.

        Raises:
            Exception: NIXL's own, which have no common root; TimeoutError; ValueError.
        """
        self.hub = hub
        self.timeout_s = timeout_s
        self.memory = memory
        self._cells = memoryview(bytearray(SESSIONS * TICKET_BYTES))
        self.tickets = Tickets(self._cells)
        self._base, self._cells_at = address_of(memory.view), address_of(self._cells)
        self._numbers = itertools.count()
        regions = [(self._base, len(memory.view)), (self._cells_at, len(self._cells))]
        self._agent, self._metadata = hub.register(regions, START_S)
        if not 0 < len(self._metadata) <= METADATA_MAX:
            raise ValueError(f"NIXL describes this process in {len(self._metadata)} bytes, over {METADATA_MAX}")

    def serve(self, session: Session, able: Able) -> tuple[ServeLink, LinkWelcome] | str:
        """A session's link on this side, and what decode is told of it; or why there is none."""
        del session
        if not able.nixl:
            return NO_NIXL
        if (cell := self.tickets.take()) is None:
            return "nixl: too many sessions are open at prefill"
        number = next(self._numbers)
        self.hub.serve(number, self.timeout_s)
        return NixlServeLink(self, number, cell), LinkWelcome(nixl=self.descriptor(cell))

    def descriptor(self, cell: int) -> NixlMemory:
        """What decode needs to read the store in a session. ``cell``: number of its ticket."""
        at, ticket = self.tickets.descriptor(cell)
        return NixlMemory(self._agent, self._metadata, self.hub.version, self._base, len(self.memory.view),
                          self._cells_at + at, ticket)


class NixlServeLink(ServeLink):
    """Prefill's side of the NIXL link, of one session."""

    name = "nixl"

    def __init__(self, server: NixlServer, number: int, cell: int) -> None:
        """``cell``: number of its ticket."""
        self._server = server
        self._number = number
        self._cell = cell
        self._read = False
        self._closed = False

    def on_told(self) -> None:
        """Decode reads from now on."""
        self._read = True
        self._server.hub.linger(self._server.timeout_s)

    def on_frame(self, frame: Frame) -> bool:
        """No frame is for this link, and each says that decode may go on reading (``ServeLink``)."""
        self._server.hub.linger(self._server.timeout_s)
        return False

    def close(self) -> None:
        """Wipe the ticket. Decode may be reading still: it waits for the end of that, and drops it."""
        if self._closed:
            return
        self._closed = True
        self._server.tickets.give(self._cell)
        self._server.hub.serve_no_more(self._number)
        if self._read:
            self._server.hub.linger(LAST_SERVED_S)
