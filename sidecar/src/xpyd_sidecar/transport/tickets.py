"""Tickets: by which a decode that reads prefill's store by itself knows that a copy was still there when it had read it.

    prefill                                          decode
    a ticket of 32 random bytes ──(WELCOME)───────▶
    MANIFEST (where, how many) ───────────────────▶  reads the bytes, then the ticket: while it is there, they were, too
    the copy is freed            ◀─────── TAKEN

A copy stays where it is until TAKEN or the end of its try, and the ticket is wiped before what was not taken is freed.
So a decode that was stopped in the middle, and whose peer has given it up since, never takes other bytes for these.
"""

from __future__ import annotations

import secrets
from collections import deque
from typing import Final

from xpyd_sidecar.kv.reads import TICKET_BYTES

SESSIONS: Final = 4096
"""In which the store of one process is read."""
NOTHING: Final = bytes(TICKET_BYTES)


class Tickets:
    """The tickets of all sessions of one kind, in memory that decode can read. Used on the publisher's I/O thread."""

    def __init__(self, memory: memoryview) -> None:
        """``memory``: of ``SESSIONS`` tickets."""
        self._memory = memory
        self._free = deque(range(SESSIONS))

    def take(self) -> int | None:
        """A new ticket; its number, if there is room for one."""
        if not self._free:
            return None
        cell = self._free.popleft()
        self._write(cell, secrets.token_bytes(TICKET_BYTES))
        return cell

    def give(self, cell: int) -> None:
        """Wipe one. The next one in its place is another."""
        self._write(cell, NOTHING)
        self._free.append(cell)

    def descriptor(self, cell: int) -> tuple[int, bytes]:
        """Where it lies in this memory, and what it is."""
        at = cell * TICKET_BYTES
        return at, bytes(self._memory[at:at + TICKET_BYTES])

    def _write(self, cell: int, ticket: bytes) -> None:
        self._memory[cell * TICKET_BYTES:(cell + 1) * TICKET_BYTES] = ticket
