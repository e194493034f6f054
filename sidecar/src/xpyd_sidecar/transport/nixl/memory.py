"""Memory that reads fill where whoever orders them has none that is registered: slots, and a cell for each ticket."""

from __future__ import annotations

import mmap

from xpyd_sidecar.kv.reads import TICKET_BYTES
from xpyd_sidecar.memory.addresses import address_of
from xpyd_sidecar.transport.nixl.driver import LandingMemory
from xpyd_sidecar.transport.tickets import SESSIONS


class SlotMemory:
    """One allocation: ``slots``, of so many bytes, then ``cells``. Pages that nothing was read into are not there."""

    def __init__(self, size: int) -> None:
        self._view = memoryview(mmap.mmap(-1, size + SESSIONS * TICKET_BYTES))
        address = address_of(self._view)
        self.slots = LandingMemory(address, size)
        self.whole = LandingMemory(address, len(self._view))
        """What is registered: both."""
        self.cells = LandingMemory(address + size, SESSIONS * TICKET_BYTES)

    def ticket(self, cell: int) -> bytes:
        """What has come into a cell."""
        return bytes(self._cell(cell))

    def wipe(self, cell: int) -> None:
        """Nothing has come into it."""
        self._cell(cell)[:] = bytes(TICKET_BYTES)

    def _cell(self, cell: int) -> memoryview:
        return self._view[self.slots.size + cell * TICKET_BYTES:][:TICKET_BYTES]
