"""The link ``shm``, decode's side (``prefill`` draws it): maps prefill's memory and copies out of it what is offered.

Offers are answered in their order, each as soon as there is room for it. Decode maps for reading only, and only what cannot
shrink below what it maps: nothing that the peer does makes a read fail. A mapping keeps the memory when prefill has ended;
then the connection's end says so.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from functools import partial
from typing import Final

from xpyd_sidecar.errors import PeerGone, ProtocolError
from xpyd_sidecar.kv import bodies
from xpyd_sidecar.kv.reads import TICKET_BYTES
from xpyd_sidecar.transport.link import OfferedPiece, PieceOwner, PieceTaker, Session
from xpyd_sidecar.transport.moves import Scatter
from xpyd_sidecar.transport.moves_plain import address_of
from xpyd_sidecar.transport.shm.prefill import HEAD_BYTES, NAME_BYTES, SIZE_MAX, TICKETS_AT

OFFERS_MOST: Final = 64
"""That wait for room. Prefill has far fewer on offer (``prefill.OFFERS_AHEAD``)."""
THREADS: Final = 2
"""That copy one piece, where it is worth it."""


class Mapping:
    """Prefill's memory, mapped to be read. ``base``: where it lies here."""

    def __init__(self, fd: int | None, shown: bodies.ShmMemory) -> None:
        """Map it. ``fd``: its descriptor, which is closed; None: none has come.

        Raises:
            OSError: it cannot be mapped.
            ValueError: it is not what prefill says, or could shrink.
        """
        try:
            self._memory = _mapped(fd, shown)
        finally:
            if fd is not None:
                os.close(fd)
        self.base = address_of(memoryview(self._memory))

    def close(self) -> None:
        """Let go of it; again: nothing."""
        self._memory.close()


def _mapped(fd: int | None, shown: bodies.ShmMemory) -> mmap.mmap:
    if len(shown.name) != NAME_BYTES or not HEAD_BYTES < shown.size < SIZE_MAX:
        raise ValueError("prefill names no memory")
    if len(shown.ticket) != TICKET_BYTES or not TICKETS_AT <= shown.ticket_at <= HEAD_BYTES - TICKET_BYTES:
        raise ValueError("prefill names no ticket")
    if fd is None:
        raise ValueError("the descriptor of prefill's memory has not come")
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size != shown.size:
        raise ValueError(f"a file of {found.st_size} bytes, not {shown.size}")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("a file that may shrink")
    memory = mmap.mmap(fd, shown.size, prot=mmap.PROT_READ)
    if memory[:NAME_BYTES] != shown.name:
        memory.close()
        raise ValueError("another memory")
    return memory


class ShmTaker(PieceTaker):
    """Decode's side of a session."""

    name = "shm"

    def __init__(self, session: Session, wanted: PieceOwner, mapping: Mapping, shown: bodies.ShmMemory) -> None:
        super().__init__(session, wanted, 0, OFFERS_MOST)
        self._mapping = mapping
        self._shown = shown

    def _begin(self, one: OfferedPiece) -> None:
        offer = one.offer
        if not HEAD_BYTES <= offer.address <= self._shown.size - offer.size:
            reason = f"offered {offer.size} bytes at {offer.address} of a memory of {self._shown.size}"
            raise ProtocolError(self.session.peer, reason)

    def _pump(self) -> None:
        while self._offers:
            one = self._offers[0]
            if self._wanted.wants(one.header, one.offer, self.piece):
                if not self._wanted.place(one.header, one.offer, partial(self._bring, one.offer)):
                    return  # ``resume`` goes on
                self.session.spend(one.offer.size)
            self._taken()

    def _bring(self, offer: bodies.Offer, into: Scatter) -> str:
        base, shown = self._mapping.base, self._shown
        if not into.read(base + offer.address, base + shown.ticket_at, shown.ticket, THREADS):
            raise PeerGone(self.session.peer, "has given this session up")
        return self.name

    def close(self) -> None:
        """The session has ended."""
        self._offers.clear()
        self._mapping.close()
