"""The memory under the two tiers of decode's lookup buffer: made when the first of it is needed, and given back."""

from __future__ import annotations

from collections.abc import Callable

from xpyd_sidecar.memory.allocation import Allocation, Later, at_once
from xpyd_sidecar.memory.chunk import Chunk


class BufferMemory:
    """The memory of one rank's lookup buffer and host pool. Used on the receiver's I/O thread."""

    def __init__(self, make: Callable[[int], Chunk], sizes: tuple[int, int], later: Later = at_once) -> None:
        """``make``: memory of a size; ``sizes``: bytes of the buffer and of the host pool; ``later``: where it is made."""
        self._tiers = tuple(Allocation(make, size, later) for size in sizes)

    def chunk_at(self, tier: int, offset: int, size: int) -> Chunk:
        """The ``size`` bytes from ``offset`` on, of a tier that is usable."""
        return self._tiers[tier].chunk_at(offset, size)

    def usable(self, tier: int) -> bool:
        """Whether there is memory under a tier. Asked before any is promised: no session is to end for a lack here."""
        return self._tiers[tier].ready()

    def drop(self) -> None:
        """Nothing of it is in use: give it back."""
        for one in self._tiers:
            one.drop()
