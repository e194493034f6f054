"""Links by which decode reads prefill's store of copies, for as long as its session's ticket lies beside it.

    prefill                                          decode
    a ticket of 32 random bytes ──(WELCOME)───────▶
    OFFER(where, size, checksum) ─────────────────▶  reads the piece, then the ticket: while it is there, the piece was, too
    the copy is freed            ◀─────── TAKEN

A copy stays where it is until TAKEN or the end of the session, and the ticket is wiped before what was not taken is freed.
So a decode that was stopped in the middle, and whose peer has given it up since, never takes other bytes for these.

What is not in the store goes over TCP.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable
from typing import Final

from xpyd_sidecar.kv import frames
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.reads import TICKET_BYTES
from xpyd_sidecar.transport.link import Blocks, Session
from xpyd_sidecar.transport.moves_plain import address_of
from xpyd_sidecar.transport.offers import OfferLink
from xpyd_sidecar.transport.tcp.link import TcpLink

logger = logging.getLogger(__name__)

SESSIONS: Final = 4096
"""In which the store of one process is read."""
NOTHING: Final = bytes(TICKET_BYTES)


class Tickets:
    """Of all sessions of one kind, in memory that decode can read. Used on the sender's I/O thread."""

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

    def shown(self, cell: int) -> tuple[int, bytes]:
        """Where it lies in this memory, and what it is."""
        at = cell * TICKET_BYTES
        return at, bytes(self._memory[at:at + TICKET_BYTES])

    def _write(self, cell: int, ticket: bytes) -> None:
        self._memory[cell * TICKET_BYTES:(cell + 1) * TICKET_BYTES] = ticket


class TicketLink(OfferLink):
    """Prefill's side of one session."""

    from_store = True

    def __init__(self, session: Session, tickets: Tickets, cell: int, ahead: int, piece: int = 0) -> None:
        """``cell``: number of its ticket; ``ahead``, ``piece``: as of ``OfferLink``."""
        super().__init__(session, ahead, piece)
        self.cell = cell
        self._tickets = tickets
        self._tcp = TcpLink(session)
        self._outside = False

    def _holds(self, address: int, size: int) -> bool:
        """Whether decode can read bytes of this process."""
        raise NotImplementedError

    def put(self, key: Key, blocks: Blocks, sent: Callable[[], None], *, most: int = frames.FRAME_BYTES) -> None:
        """Offer blocks; over TCP where decode cannot read them."""
        if self._holds(address_of(blocks.data), len(blocks.data)):
            super().put(key, blocks, sent, most=most)
            return
        if not self._outside:
            self._outside = True
            logger.warning("xpyd: some blocks for %s go over tcp: they do not lie in the memory that %s reaches",
                           self.session.peer, self.name)
        self._tcp.put(key, blocks, sent, most=most)

    def close(self) -> None:
        """Wipe the ticket, then free what was offered."""
        if not self._closed:
            self._tickets.give(self.cell)
            super().close()
