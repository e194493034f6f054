"""Decode's side of the link ``nixl`` (``prefill`` draws it): reads what prefill offers into slots, and hands it over.

A slot holds a piece from its OFFER until its blocks are in their places. The cache itself is never NIXL's to write: a read
that cannot be stopped ends in a slot, and slots outlive the agent that fills them.

Offers are answered in their order. An offer that nobody wants is answered when its turn comes, and never read; one that is
no longer wanted when it has come is dropped.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from xpyd_sidecar.errors import PeerGone, ProtocolError
from xpyd_sidecar.kv import bodies
from xpyd_sidecar.kv.reads import TICKET_BYTES
from xpyd_sidecar.transport.link import OfferedPiece, PieceOwner, PieceTaker, Session
from xpyd_sidecar.transport.moves import Scatter
from xpyd_sidecar.transport.moves_plain import address_of
from xpyd_sidecar.transport.nixl.thread import NixlThread

PLACED_AT_ONCE: Final = 4
"""Pieces that are put to their places before other connections of the thread have their turn."""

Told = Callable[[str, bool], None]
"""How an attempt to reach prefill's memory has ended: why it cannot be read (empty: it can), and whether that is only that
prefill has not answered in time."""


class NixlTaker(PieceTaker):
    """Decode's side of a session."""

    name = "nixl"

    def __init__(self, hub: NixlThread, session: Session, wanted: PieceOwner, memory: bodies.NixlMemory, told: Told, *,
                 piece: int, pieces: int) -> None:
        """Begin to reach prefill's memory; ``told`` is called once with how that has ended, or never if this is closed."""
        super().__init__(session, wanted, piece, pieces)
        self._hub = hub
        self._memory = memory
        self._told: Told | None = told
        self._slots = memoryview(mmap.mmap(-1, pieces * piece + TICKET_BYTES))
        self._base = address_of(self._slots)
        self._free = deque(range(pieces))
        self._again = False
        self._number = hub.join(self, memory, self._slots)
        if not self._number:
            self.post(partial(self.lost, "too many sessions are open", late=False))

    def _begin(self, one: OfferedPiece) -> None:
        """Read it at once, if it is wanted, into a slot: there are as many as offers may wait."""
        memory, offer = self._memory, one.offer
        if not memory.base <= offer.address <= memory.base + memory.size - offer.size:
            reason = f"offered {offer.size} bytes at {offer.address:#x}, outside of its memory"
            raise ProtocolError(self.session.peer, reason)
        if self._wanted.wants(one.header, offer, self.piece):
            one.slot, one.come = self._free.popleft(), False
            self._hub.read(self._number, one.slot * self.piece, offer.address, offer.size)

    def _pump(self) -> None:
        """Put what has come to its place, and answer. Raises what ``PieceOwner.place`` does."""
        for _ in range(PLACED_AT_ONCE):
            if self._closed or not self._offers or not self._offers[0].come:
                return
            one = self._offers[0]
            if one.slot is not None:
                if not self._wanted.place(one.header, one.offer, partial(self._bring, one.slot)):
                    return  # ``resume`` goes on
                self._free.append(one.slot)
            self._taken()
        if not self._again:
            self._again = True
            self.post(self._go_on)

    def _bring(self, slot: int, into: Scatter) -> str:
        into.copy(self._base + slot * self.piece)
        return self.name

    def _go_on(self) -> None:
        self._again = False
        self._pump()

    def close(self) -> None:
        """The session has ended. What is still being read ends with its agent, and the slots after that."""
        if not self._closed:
            self._closed = True
            self._told = None
            self._offers.clear()
            self._hub.leave(self._number)

    # --- told by the thread for NIXL, on the session's thread ---

    def opened(self) -> None:
        """Prefill's memory can be read."""
        told, self._told = self._told, None
        if told is not None:
            told("", False)

    def come(self, pieces: int) -> None:
        """So many more pieces are in their slots."""
        for one in self._offers:
            if not pieces:
                break
            if not one.come:
                one.come = True
                pieces -= 1
        self._pump()

    def lost(self, reason: str, *, late: bool) -> None:
        """Nothing more is read."""
        if self._closed:
            return
        told, self._told = self._told, None
        if told is not None:
            told(f"nixl: {reason}", late)
        else:
            self.session.close(PeerGone(self.session.peer, f"nixl: {reason}"))
