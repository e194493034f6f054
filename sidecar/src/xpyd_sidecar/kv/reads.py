"""Reads of a peer's memory by a library that cannot cancel them: which may be believed, and when what they fill is free.

One machine for one session of decode's. It serves the thread that reads (``transport.nixl.thread``), and knows pieces by
the order in which they were begun, and nothing else of them.

Laws
1. What was read counts only when prefill's ticket of this session was read after it, and was the right one. Prefill wipes
   the ticket before it uses the memory for something else: a read that is done says only that bytes have come.
2. One read of the ticket at a time. It speaks for the pieces that were done before it was begun, and for no others.
3. Pieces are handed over in the order in which they were begun.
4. A read that was begun is never given up by itself: what it fills is free when it is done, or when the whole session has
   ended and with it everything that could still write (``transport.nixl.driver``).
5. While something is under way, something must be done within ``silence_s``; then the session is lost.
6. Nothing is handed over once the session is lost.

    begin ──▶ reading ──done──▶ read ──(the next ticket)──▶ proven ──(those before it, too)──▶ handed over
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from xpyd_sidecar.kv import bodies

TICKET_BYTES: Final = 32
METADATA_MAX: Final = 32 << 10
"""Of NIXL's description of a process: some hundred bytes, and as much more for each network device and each region."""


class Prove(NamedTuple):
    """Read the ticket; answer ``proven``."""


class HandOver(NamedTuple):
    """So many more pieces, in the order of ``begin``, are what prefill has offered."""

    pieces: int


class SessionLost(NamedTuple):
    """The session does no more."""

    reason: str


Step = Prove | HandOver | SessionLost


class Reads:
    """Of one session."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._first = 0
        """Number of the oldest piece that is not handed over."""
        self._next = 0
        self._read: deque[bool] = deque()
        """Whether each of them is done, from the oldest on."""
        self._good: set[int] = set()
        """Those that the ticket has spoken for, and that wait for an older one."""
        self._spoken: tuple[int, ...] | None = None
        """What the read of the ticket that is under way speaks for."""
        self._moved_at = 0.0
        self._lost = False

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return not self._lost and bool(self._read)

    def begin(self, now: float) -> int:
        """A piece is being read; its number."""
        if not self._read:
            self._moved_at = now
        self._read.append(False)
        self._next += 1
        return self._next - 1

    def done(self, number: int, now: float) -> list[Step]:
        """All bytes of a piece have come."""
        if self._lost:
            return []
        self._moved_at = now
        self._read[number - self._first] = True
        return self._prove()

    def proven(self, right: bool, now: float) -> list[Step]:
        """The ticket was read."""
        if self._lost:
            return []
        if not right:
            return self.lost("has given this session up")
        assert self._spoken is not None
        self._moved_at = now
        self._good.update(self._spoken)
        self._spoken = None
        pieces = 0
        while self._first in self._good:
            self._good.remove(self._first)
            self._read.popleft()
            self._first += 1
            pieces += 1
        return [*([HandOver(pieces)] if pieces else []), *self._prove()]

    def lost(self, reason: str) -> list[Step]:
        """It cannot be read any more; again: nothing."""
        if self._lost:
            return []
        self._lost = True
        return [SessionLost(reason)]

    def tick(self, now: float) -> list[Step]:
        """Time passes."""
        if self.busy and now - self._moved_at > self._silence_s:
            return self.lost(f"nothing of its memory has come for {self._silence_s} s")
        return []

    def _prove(self) -> list[Step]:
        if self._spoken is not None:
            return []
        ready = tuple(self._first + at for at, done in enumerate(self._read) if done and self._first + at not in self._good)
        if not ready:
            return []
        self._spoken = ready
        return [Prove()]


def unusable(memory: bodies.NixlMemory) -> str:
    """Why prefill's word on its memory is not used; empty: it may be."""
    if not 0 < len(memory.metadata) <= METADATA_MAX:
        return f"NIXL's description has {len(memory.metadata)} bytes, not 1 to {METADATA_MAX}"
    if len(memory.ticket) != TICKET_BYTES or not any(memory.ticket) or not 0 < len(memory.agent) <= 64:
        return "no agent's name and ticket"
    top = 1 << 64
    if not 0 < memory.base < memory.base + memory.size < top or not 0 < memory.ticket_at < top - TICKET_BYTES:
        return "no memory's place and size"
    return ""
