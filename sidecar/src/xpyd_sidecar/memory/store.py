"""The host memory of one rank for copies of KV: one allocation, leased in parts, with a count of each holder's bytes.

    lease   ──▶ bytes, counted from before a copy is made …
    give    ──▶ … until it has left or is dropped; any part of a lease may be given back by itself

Fresh memory for every copy costs more than the copy: the kernel maps and clears each page (on CPU a copy of 0.1 to 4 MiB
into fresh memory took three times as long as into memory used before), and CUDA pins it.

No holder can lease all of the memory: ``kv.fair_share`` bounds its part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from xpyd_sidecar.kv.extents import Extents
from xpyd_sidecar.kv.fair_share import headroom, is_fair
from xpyd_sidecar.memory.allocation import Allocation, Later, at_once
from xpyd_sidecar.memory.chunk import Chunk

UNIT: Final = 256
"""What every lease begins at a multiple of, so that copies are aligned for whatever copies them."""


class StoreLease(NamedTuple):
    """Bytes leased from a ``CopyStore``, until they are given back (``CopyStore.give``).

    ``chunk``: the bytes. ``offset``: where they begin in the store's memory. ``holder``: whose share they count to.
    """

    chunk: Chunk
    offset: int
    holder: str = ""

    def part(self, start: int, size: int) -> StoreLease:
        """The ``size`` bytes of this lease from ``start`` (whole units) on, as a lease that can be given back by itself."""
        return StoreLease(self.chunk.part(start, size), self.offset + start, self.holder)


class CopyStore:
    """Leases bytes of one allocation of host memory, for copies of KV. Safe across threads."""

    def __init__(self, make: Callable[[int], Chunk], size: int, *, unit: int = UNIT,
                 emptied: Callable[[], None] = lambda: None, later: Later = at_once) -> None:
        """Begin without memory: ``prepare`` makes it, or the first call of ``ready`` or ``lease`` has it made.

        Args:
            make: returns memory of so many bytes.
            size: bytes of all the memory, rounded down to whole units.
            unit: bytes; every lease is rounded up to whole units.
            emptied: called after the memory was given back, before it is made again.
            later: has ``emptied`` called, and ``make`` outside of ``prepare``: in order, where waiting is allowed.
        """
        self._emptied = emptied
        self._later = later
        self._extents = Extents(size, unit)
        self._arena = Allocation(make, self._extents.size, later)
        self._lock = threading.Lock()
        self._of: dict[str, int] = {}
        self._spare = False
        self.bound = self._extents.size
        """Bytes."""

    @property
    def used_bytes(self) -> int:
        """Bytes that are leased, rounding included."""
        return self._extents.used

    @property
    def made(self) -> bool:
        """Whether there is memory now."""
        return self._arena.made

    def round_up(self, size: int) -> int:
        """Bytes that a lease of ``size`` bytes takes: whole units."""
        return self._extents.round_up(size)

    def prepare(self) -> None:
        """Make the memory now, on this thread, where there is none; raises what ``make`` raises."""
        self._arena.prepare()

    def ready(self) -> bool:
        """Whether there is memory; if not, it is being made, or that failed less than ``allocation.LACK_S`` ago."""
        with self._lock:
            return self._arena.ready()

    def spare(self, *, spare: bool) -> None:
        """Set whether the memory is of no use, as on a decode engine: then it is given back whenever nothing is leased.

        ``lease`` still has it made again: a prompt whose KV is to be sent may have begun just before or come just after.
        """
        with self._lock:
            self._spare = spare
            self._drop_if_spare()

    def _drop_if_spare(self) -> None:
        if self._spare and self._arena.made and not self._extents.used:
            self._arena.drop()
            self._later(self._emptied)

    def lease(self, size: int, holder: str = "") -> StoreLease | None:
        """Lease ``size`` bytes in one piece, if they are free and within the holder's fair share; "" has no limit.

        Returns None if they are not, and where there is no memory yet: the call does not wait until it is made.
        """
        with self._lock:
            if not self._arena.ready():
                return None
            want = self._extents.round_up(size)
            left = self.bound - self._extents.used - want
            mine = self._of.get(holder, 0) + want
            if left < 0 or (holder and not is_fair(mine, left)):
                return None
            offset = self._extents.take(size)
            if offset is None:
                return None
            if holder:
                self._of[holder] = mine
            return StoreLease(self._arena.chunk_at(offset, size), offset, holder)

    def give(self, lease: StoreLease) -> None:
        """Take back a lease, or a part of one. Raises ValueError when any of its bytes are free already."""
        self._give(lease.offset, len(lease.chunk.view), lease.holder)

    def _give(self, offset: int, size: int, holder: str) -> None:
        with self._lock:
            self._extents.give(offset, size)
            if holder:
                self._of[holder] -= self._extents.round_up(size)
                if not self._of[holder]:
                    del self._of[holder]
            self._drop_if_spare()

    def most_units(self, each: int, holder: str = "") -> int:
        """How many times ``each`` bytes (whole units), back to back, ``holder`` could lease in one piece now."""
        with self._lock:
            free = min(self.bound - self._extents.used, self._extents.largest)
            if holder:
                free = min(free, headroom(self._of.get(holder, 0), self.bound - self._extents.used))
            return max(0, free // each)


def offsets(store: CopyStore, sizes: Sequence[int]) -> list[int]:
    """Where parts of these sizes begin in one lease, back to back, in bytes; one number more is the size of that lease."""
    out = [0]
    for size in sizes:
        out.append(out[-1] + store.round_up(size))
    return out
