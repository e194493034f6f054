"""The host memory of one rank for copies of KV: one allocation, one account of who has how much of it.

    lease   ──▶ bytes, counted from before a copy is made …
    give    ──▶ … until it has left or is dropped; any part of a lease may be given back by itself

Fresh memory for every copy costs more than the copy: the kernel maps and clears each page (on CPU a copy of 0.1 to 4 MiB
into fresh memory took three times as long as into memory used before), and CUDA pins it.

No holder can take the whole (``kv.fair_share``).
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
    """Bytes of a store; the one who took them gives them back."""

    chunk: Chunk
    offset: int
    holder: str = ""

    def part(self, start: int, size: int) -> StoreLease:
        """``size`` bytes of it from ``start`` on, a multiple of the store's unit; given back by itself."""
        return StoreLease(self.chunk.part(start, size), self.offset + start, self.holder)


class CopyStore:
    """The memory and what is free of it. Safe across threads."""

    def __init__(self, make: Callable[[int], Chunk], size: int, *, unit: int = UNIT,
                 emptied: Callable[[], None] = lambda: None, later: Later = at_once) -> None:
        """``make``: memory of a size; ``unit``: what every lease is rounded up to, in bytes.

        ``emptied``: called when the memory was given back, before it is made again. ``later``: where both are called.
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
        """What ``size`` bytes take: parts of a lease begin at such sums."""
        return self._extents.round_up(size)

    def prepare(self) -> None:
        """Make the memory now, at the start; raises what ``make`` does."""
        self._arena.prepare()

    def ready(self) -> bool:
        """Whether there is memory; if not, it is being made."""
        with self._lock:
            return self._arena.ready()

    def spare(self, *, spare: bool) -> None:
        """Whether nobody is meant to have a use for the memory: then it goes back whenever it is empty.

        Who needs some all the same gets it: a prompt whose KV leaves may have begun before, or have come just after.
        """
        with self._lock:
            self._spare = spare
            self._drop_if_spare()

    def _drop_if_spare(self) -> None:
        if self._spare and self._arena.made and not self._extents.used:
            self._arena.drop()
            self._later(self._emptied)

    def lease(self, size: int, holder: str = "") -> StoreLease | None:
        """``size`` bytes in one part, if they are free and within the holder's share; the holder "" has no share.

        None, too, where there is no memory yet: whoever asks does not wait until it is made.
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
        """Take back a lease, or a part of one."""
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
        """How many times ``each`` bytes, one behind the other, could be leased now."""
        with self._lock:
            free = min(self.bound - self._extents.used, self._extents.largest)
            if holder:
                free = min(free, headroom(self._of.get(holder, 0), self.bound - self._extents.used))
            return max(0, free // each)


def offsets(store: CopyStore, sizes: Sequence[int]) -> list[int]:
    """Where parts of such sizes begin in one lease, one behind the other; the last number is what all of them take."""
    out = [0]
    for size in sizes:
        out.append(out[-1] + store.round_up(size))
    return out
