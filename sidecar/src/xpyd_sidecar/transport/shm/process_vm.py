"""Blocks that the peer reads out of this process's memory: one copy, made in the peer's own threads.

The kernel makes it, or the peer itself where the copies lie in memory that it has mapped (``mapped``).

    prefill                                          decode
    OFFER(address, size, checksum) ───────────────▶  process_vm_readv(blocks, ticket) → where they belong
    copy is freed                  ◀───────────────  TAKEN

A copy stays where it is until TAKEN, or until the session ends. Before it is freed without TAKEN the session's ticket is
wiped. Decode reads the ticket after the blocks (in the same system call, if one brings them): while it is still there the
blocks were, too. So a decode that was stopped in the middle, and whose peer has given it up since, never takes other bytes
for these.

The ticket also tells the peer's memory from that of a stranger with the same process number (containers).

That the ticket can be read does not say that the copies can (memory that is pinned for a GPU may be out of reach): decode
then says so, nothing more is offered, and what was not read goes over another link (``session.prefill_link_choice``).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import secrets
from typing import Final, Literal

from xpyd_sidecar.errors import PeerGone, ProtocolError
from xpyd_sidecar.kv import bodies
from xpyd_sidecar.transport.link import BlockLink, Session, Unreadable
from xpyd_sidecar.transport.moves import Scatter
from xpyd_sidecar.transport.moves_plain import address_of
from xpyd_sidecar.transport.offers import OfferedBlocks, OfferLink
from xpyd_sidecar.transport.shm import mapped
from xpyd_sidecar.transport.shm.mapped import Mapping

logger = logging.getLogger(__name__)

TICKET_BYTES: Final = 32
OFFERS_AHEAD: Final = 8
"""Twice what decode reads in a turn, so that prefill hears of some while it reads the others."""
THREADS: Final = 2
"""That copy one offer on decode's side, where it is worth it."""


class ProcessLink(OfferLink):
    """Prefill's side: offers, and keeps what it has offered."""

    name = "process_vm"

    def __init__(self, session: Session) -> None:
        super().__init__(session, OFFERS_AHEAD)
        self._cell = ctypes.create_string_buffer(secrets.token_bytes(TICKET_BYTES), TICKET_BYTES)
        self._left: list[OfferedBlocks] = []
        """What decode could not read."""

    def near(self) -> bodies.Near:
        """What the peer tries to read."""
        return bodies.Near(os.getpid(), ctypes.addressof(self._cell), self._cell.raw)

    def _pump(self) -> None:
        """Once decode has been unable to read, what waits is for ``leave``."""
        if not self._left:
            super()._pump()

    def _offer(self, one: OfferedBlocks) -> OfferedBlocks:
        at = address_of(one.blocks.data)
        self._tell(one, at, one.blocks.total(), mapped.find(at, len(one.blocks.data)))
        return one

    def _unread(self, one: OfferedBlocks) -> None:
        self._left.append(one)

    def leave(self, link: BlockLink) -> None:
        """What was not read, and what waits, goes over another link. What is still on offer follows when it is answered."""
        left = [*self._left, *self.waiting]
        self._left.clear()
        self.waiting.clear()
        for one in left:
            link.put(one.key, one.blocks, one.done, most=len(one.blocks.data))

    @property
    def owed(self) -> bool:
        """Whether decode has still to answer an offer."""
        return bool(self.offered)

    @property
    def busy(self) -> bool:
        """Whether the peer has still to read."""
        return bool(self._left) or super().busy

    def close(self) -> None:
        """Wipe the ticket, then free what was offered."""
        ctypes.memset(self._cell, 0, TICKET_BYTES)
        self.offered.extend(self._left)
        self._left.clear()
        super().close()


class ProcessReader:
    """Decode's side: reads what is offered."""

    name: Literal["process_vm"] = "process_vm"

    def __init__(self, peer: str, near: bodies.Near) -> None:
        self._peer = peer
        self._near = near
        self._mapping: Mapping | None = None
        self._unmapped = b""
        """Name of the last memory that could not be mapped."""

    def probe(self) -> str:
        """Why the peer's memory cannot be read; empty if it can."""
        near = self._near
        if len(near.ticket) != TICKET_BYTES or near.pid < 1 or not 0 < near.address < 1 << 64:
            return "the peer names no memory"
        try:
            holds = Scatter(bytearray(TICKET_BYTES), TICKET_BYTES, 1, None, 0, 0, False).read(
                near.pid, near.address, near.address, near.ticket, 1, 0)
        except OSError as error:
            return f"process_vm_readv: {error.strerror}"
        return "" if holds else "process_vm_readv: another process has its number"

    def read(self, offer: bodies.Offer, into: Scatter) -> str:
        """Read what is offered to its places; how that was done.

        Raises:
            Unreadable: this memory cannot be read.
            PeerGone: the peer has ended, or has given this session up; what was read is worthless.
            ProtocolError: it does not lie in the memory that is named.
        """
        near, at = self._near, 0
        if offer.within is not None and (base := self._base(offer.within)):
            if not mapped.HEAD_BYTES <= offer.within.offset <= offer.within.size - offer.size:
                raise ProtocolError(self._peer, f"offered {offer.size} bytes at {offer.within.offset} of a memory of "
                                                f"{offer.within.size}")
            at = base + offer.within.offset
        try:
            holds = into.read(near.pid, offer.address, near.address, near.ticket, THREADS, at)
        except OSError as error:
            if error.errno == errno.ESRCH:
                raise PeerGone(self._peer, "its process has ended") from None
            raise Unreadable(f"process_vm_readv: {error.strerror}") from None
        if not holds:
            raise PeerGone(self._peer, "has given this session up")
        return "mapped" if at else self.name

    def _base(self, within: bodies.Within) -> int:
        """Where the peer's memory is mapped; 0: it cannot be."""
        known = self._mapping
        if known is not None and (known.name, known.size) == (within.name, within.size):
            return known.base
        if within.name == self._unmapped:
            return 0
        self.close()
        try:
            self._mapping = Mapping(self._near.pid, within)
        except (OSError, ValueError) as error:
            self._unmapped = within.name
            logger.info("xpyd: copies of %s are read by system calls (not mapped: %s)", self._peer, error)
            return 0
        logger.info("xpyd: copies of %s are mapped", self._peer)
        return self._mapping.base

    def close(self) -> None:
        """Let go of what is mapped."""
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
