"""The link ``shm``, prefill's side: copies lie in memory that decode maps.

    prefill                                              decode
    memfd: name | tickets | copies …   ──(mailbox)────▶  maps it for reading, and sees the name in it
    MANIFEST(offset among the copies)  ───────────────▶  copies bytes out, then looks at the ticket
    the copy is freed                  ◀─────── TAKEN

Only copies that wait to be fetched lie there, never the cache. The memory is sealed: it never shrinks, so nothing that
prefill does makes a read fail; and nobody writes into it but by the mapping that was made before it was sealed, whatever
descriptor somebody else has. Its pages are made when they are first written, and count as prefill's. A store that is given
up is a memory that is given up: its sessions end, so that decode lets go of it, and the next store is another memory.
"""

from __future__ import annotations

import fcntl
import hmac
import mmap
import os
import secrets
import weakref
from pathlib import Path
from typing import Final

from xpyd_sidecar.errors import PeerGone, ProtocolError
from xpyd_sidecar.kv.reads import TICKET_BYTES
from xpyd_sidecar.kv.session_bodies import NO_HOST_LINK, NOT_ONE_HOST, Able, LinkChoice, LinkWelcome, SharedStore
from xpyd_sidecar.kv.wire import FrameKind
from xpyd_sidecar.process import resources
from xpyd_sidecar.transport.links import ServeLink, Session
from xpyd_sidecar.transport.shm.mailbox import MailboxSender, mark
from xpyd_sidecar.transport.tickets import SESSIONS, Tickets

LABEL: Final = "xpyd-copies"
NAME_BYTES: Final = 32
TICKETS_AT: Final = mmap.PAGESIZE
HEAD_BYTES: Final = TICKETS_AT + SESSIONS * TICKET_BYTES
"""Before the copies."""
SIZE_MAX: Final = 1 << 46
FUTURE_WRITE: Final = 0x10
"""F_SEAL_FUTURE_WRITE (Linux 5.1), which Python does not name."""
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | FUTURE_WRITE | fcntl.F_SEAL_SEAL


class SharedCopies:
    """The memory of one store. ``copies``: what is left of it for them; ``fd``: by which it is only read."""

    def __init__(self, size: int) -> None:
        """Make it, with ``size`` bytes for copies.

        Raises:
            OSError: this system makes none, or cannot keep others from writing into it.
        """
        writable = os.memfd_create(LABEL, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            self.size = HEAD_BYTES + size
            os.ftruncate(writable, self.size)
            memory = memoryview(mmap.mmap(writable, self.size))
            fcntl.fcntl(writable, fcntl.F_ADD_SEALS, SEALS)
            self.fd = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self.fd)
        finally:
            os.close(writable)
        self.name = secrets.token_bytes(NAME_BYTES)
        memory[:NAME_BYTES] = self.name
        self.copies = memory[HEAD_BYTES:]
        self.tickets = Tickets(memory[TICKETS_AT:HEAD_BYTES])


class ShmServer:
    """What a rank has for this link. ``copies``: of its store; None while it has none."""

    def __init__(self, host: str, folder: Path | None, *, insists: bool) -> None:
        """``host``: what this one is called; ``folder``: where mailboxes are; ``insists``: there is no other link."""
        self.copies: SharedCopies | None = None
        self._host = host
        self._folder = folder
        self._insists = insists

    def serve(self, session: Session, able: Able) -> tuple[ServeLink, LinkWelcome] | str:
        """A session's link on this side, and what decode is told of it; or why there is none.

        Raises:
            PeerGone: decode has left, or something is lacking for a moment where there is no other link.
        """
        if not able.host:
            return NO_HOST_LINK
        if able.host != self._host:
            return NOT_ONE_HOST
        copies = self.copies  # another one may take its place, on another thread
        if copies is None:
            return "shm: prefill has no memory to share"
        if (cell := copies.tickets.take()) is None:
            return "shm: too many sessions are open at prefill"
        try:
            sender = MailboxSender(able.mailbox, self._folder)
        except (OSError, ValueError) as error:
            copies.tickets.give(cell)
            return f"shm: {error}" if isinstance(error, ValueError) else self.mailbox_error(session, error)
        link = ShmServeLink(self, session, copies, cell, sender)
        return link, LinkWelcome(shared=link.descriptor())

    def mailbox_error(self, session: Session, error: OSError) -> str:
        """Why nothing could be sent to decode's mailbox. Raises as ``serve``."""
        passing = resources.is_own_lack(error) or isinstance(error, BlockingIOError)  # strangers can fill it for a while
        if passing and self._insists:
            raise PeerGone(session.peer, f"cannot be sent the memory now: {error}") from None
        return f"shm: decode's mailbox: {error.strerror}"


class ShmServeLink(ServeLink):
    """Prefill's side of the shared-memory link, of one session."""

    name = "shm"

    def __init__(self, server: ShmServer, session: Session, copies: SharedCopies, cell: int, sender: MailboxSender) -> None:
        """``cell``: number of its ticket; ``sender``: to decode's mailbox."""
        self._server = server
        self._session = session
        self._copies = copies
        self._cell = cell
        self._sender = sender
        self._closed = False

    def descriptor(self) -> SharedStore:
        """What decode needs to read copies in this session."""
        at, ticket = self._copies.tickets.descriptor(self._cell)
        return SharedStore(self._copies.name, self._copies.size, TICKETS_AT + at, ticket, mark(self._sender.secret))

    def hand_over(self, secret: bytes) -> None:
        """Send decode the descriptor, as it has told what its mailbox holds; then say so, or why it could not be.

        Raises:
            ProtocolError: it does not hold that.
            PeerGone: as of ``ShmServer.serve``.
        """
        if not hmac.compare_digest(secret, self._sender.secret):
            raise ProtocolError(self._session.peer, "does not know what was sent to its mailbox")
        reason = ""
        try:
            self._sender.send(self._copies.name, self._copies.fd)
        except OSError as error:
            reason = self._server.mailbox_error(self._session, error)
        self._sender.close()
        self._session.send(FrameKind.SHARED, LinkChoice("shm", reason))

    def close(self) -> None:
        """End the link: wipe the ticket of the session."""
        if not self._closed:
            self._closed = True
            self._sender.close()
            self._copies.tickets.give(self._cell)
