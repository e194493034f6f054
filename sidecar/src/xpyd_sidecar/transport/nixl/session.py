"""A session of decode's that reads over NIXL: what the thread for NIXL keeps of it, and what it tells it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from xpyd_sidecar.kv import bodies
from xpyd_sidecar.kv.reads import TICKET_BYTES, Reads
from xpyd_sidecar.transport.nixl.driver import NixlSource, ReadHandle


class ReadLimits(NamedTuple):
    """Bounds of one process. ``sessions``: that read, at once; ``linger_s``: for reads of a session that has ended."""

    sessions: int = 32
    open_s: float = 2.5
    silence_s: float = 5.0
    linger_s: float = 300.0


class ReadMember(Protocol):
    """Decode's side of a session, called on its own I/O thread."""

    def post(self, call: Callable[[], None]) -> None:
        """Have a call made on that thread."""

    def opened(self) -> None:
        """Prefill's memory can be read."""

    def come(self, pieces: int) -> None:
        """So many more pieces, in the order of ``read``, are in this session's memory."""

    def lost(self, reason: str, *, late: bool) -> None:
        """Nothing more is read. ``late``: the peer has not answered in time."""


@dataclass
class ReadSession:
    """A session that reads. ``slots``: its memory, with room for a ticket at the end; ``until``: how long it
    may open or linger, in seconds in which the thread has looked.
    """

    member: ReadMember
    memory: bodies.NixlMemory
    slots: memoryview
    reads: Reads
    until: float = math.inf
    reader: NixlSource | None = None
    opening: bool = True
    over: bool = False
    ticket: ReadHandle | None = None
    pieces: dict[int, ReadHandle] = field(default_factory=dict)

    @property
    def ticket_at(self) -> int:
        """Where the ticket is read to, in ``slots``."""
        return len(self.slots) - TICKET_BYTES

    @property
    def reading(self) -> bool:
        """Whether anything is under way."""
        return bool(self.pieces or self.ticket)

    def done(self) -> tuple[list[int], bool]:
        """Pieces that have come since it was last asked, and whether the ticket has. Raises what NIXL does."""
        if self.reader is None:
            return [], False
        done = [piece for piece, handle in self.pieces.items() if self.reader.done(handle)]
        for piece in done:
            del self.pieces[piece]
        ticket = self.ticket is not None and self.reader.done(self.ticket)
        if ticket:
            self.ticket = None
        return done, ticket

    def forget(self) -> None:
        """Reads that are under way are of no use any more."""
        self.pieces.clear()
        self.ticket = None
