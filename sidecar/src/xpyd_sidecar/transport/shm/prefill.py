"""The link ``shm``, prefill's side: copies lie in memory that decode maps.

    prefill                                              decode
    memfd: name | tickets | copies …   ──(mailbox)────▶  maps it, and sees the name in it
    OFFER(offset, size, checksum)      ───────────────▶  copies the piece out, then looks at the ticket
    the copy is freed                  ◀─────── TAKEN

Only copies that wait to be sent lie there, never the cache. The memory is sealed: it never shrinks, so nothing that prefill
does makes a read fail. Its pages are made when they are first written, and count as prefill's. It lives as long as its
process; when the store of copies is not needed its pages go back to the system, whoever has them mapped.
"""

from __future__ import annotations

import ctypes
import fcntl
import hmac
import mmap
import os
import secrets
import weakref
from pathlib import Path
from typing import Final

from xpyd_sidecar.errors import ProtocolError
from xpyd_sidecar.kv import bodies
from xpyd_sidecar.kv.reads import TICKET_BYTES
from xpyd_sidecar.transport.link import Session
from xpyd_sidecar.transport.moves_plain import address_of
from xpyd_sidecar.transport.offers import OfferedBlocks
from xpyd_sidecar.transport.shm.mailbox import MailboxSender, mark
from xpyd_sidecar.transport.tickets import SESSIONS, TicketLink, Tickets

LABEL: Final = "xpyd-copies"
NAME_BYTES: Final = 32
TICKETS_AT: Final = mmap.PAGESIZE
HEAD_BYTES: Final = TICKETS_AT + SESSIONS * TICKET_BYTES
SIZE_MAX: Final = 1 << 46
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
OFFERS_AHEAD: Final = 8
"""Twice what decode reads in a turn, so that prefill hears of some while it reads the others."""
_PUNCH: Final = 3
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, of fallocate(2)."""
_libc: Final = ctypes.CDLL(None, use_errno=True)


class SharedCopies:
    """The memory of one rank. ``copies``: what is left of it for copies."""

    def __init__(self, size: int) -> None:
        """Make it, with ``size`` bytes for copies.

        Raises:
            OSError: this system makes none.
        """
        self.fd = os.memfd_create(LABEL, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)
        self.shown_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        """The one that decode gets, by which nothing is written."""
        weakref.finalize(self, os.close, self.shown_fd)
        self.size = HEAD_BYTES + size
        os.ftruncate(self.fd, self.size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        memory = memoryview(mmap.mmap(self.fd, self.size))
        self.name = secrets.token_bytes(NAME_BYTES)
        memory[:NAME_BYTES] = self.name
        self.copies = memory[HEAD_BYTES:]
        self.tickets = Tickets(memory[TICKETS_AT:HEAD_BYTES])
        self._base = address_of(memory)

    def offset(self, address: int, size: int) -> int | None:
        """Where bytes of this process lie among the copies, from the beginning of the memory; None: elsewhere."""
        at = address - self._base
        return at if HEAD_BYTES <= at <= self.size - size else None

    def empty(self) -> None:
        """Give the pages of all copies back. Nothing that is needed may be there.

        Raises:
            OSError: the system does not take them.
        """
        if _libc.fallocate(self.fd, _PUNCH, ctypes.c_long(HEAD_BYTES), ctypes.c_long(self.size - HEAD_BYTES)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def link(self, session: Session, mailbox: str, folder: Path | None) -> SharedMemoryLink:
        """Prefill's side of a session with a decode that has such a mailbox.

        Raises:
            OSError, ValueError: nothing can be sent there, or too many sessions are open.
        """
        cell = self.tickets.take()
        if cell is None:
            raise ValueError("too many sessions are open at prefill")
        try:
            sender = MailboxSender(mailbox, folder)
        except BaseException:
            self.tickets.give(cell)
            raise
        return SharedMemoryLink(session, self, cell, sender)


class SharedMemoryLink(TicketLink):
    """Prefill's side of a session."""

    name = "shm"

    def __init__(self, session: Session, shared: SharedCopies, cell: int, sender: MailboxSender) -> None:
        """``cell``: number of its ticket; ``sender``: to decode's mailbox."""
        super().__init__(session, shared.tickets, cell, OFFERS_AHEAD)
        self._shared = shared
        self._sender = sender

    def shown(self) -> bodies.ShmMemory:
        """What decode needs to read copies in this session."""
        at, ticket = self._shared.tickets.shown(self.cell)
        return bodies.ShmMemory(self._shared.name, self._shared.size, TICKETS_AT + at, ticket, mark(self._sender.secret))

    def hand_over(self, secret: bytes) -> None:
        """Send the descriptor to decode, which has told what its mailbox holds.

        Raises:
            ProtocolError: it does not hold that.
            OSError: it cannot be sent.
        """
        if not hmac.compare_digest(secret, self._sender.secret):
            raise ProtocolError(self.session.peer, "does not know what was sent to its mailbox")
        self._sender.send(self._shared.name, self._shared.shown_fd)
        self._sender.close()

    def close(self) -> None:
        """Wipe the ticket, then free what was offered."""
        self._sender.close()
        super().close()

    def _holds(self, address: int, size: int) -> bool:
        return self._shared.offset(address, size) is not None

    def _offer(self, one: OfferedBlocks) -> OfferedBlocks:
        at = self._shared.offset(address_of(one.blocks.data), len(one.blocks.data))
        assert at is not None  # ``put`` has seen to it
        self._tell(one, at, one.blocks.total())
        return one
