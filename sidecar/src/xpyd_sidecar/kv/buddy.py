"""A buddy allocator as arithmetic: offsets in a space of bytes, no memory behind them.

Source of the method: Knuth, The Art of Computer Programming, volume 1, section 2.5, "Buddy system".

    unit = 1, size = 13:      |--------8--------|----4----|-1-|       free at the start: every block lies at a
                              0                 8         12  13      multiple of its own size

Laws
1. Blocks that are handed out never overlap, and lie inside the space.
2. A block is ``unit << order`` bytes at a multiple of its size; its buddy is at ``offset ^ size``. Two free buddies are
   always merged, so with everything given back the free blocks are those of the start.
3. The lowest block that fits is taken first: memory that was never needed is never touched.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple


class Usage(NamedTuple):
    """What an allocator has given out, in bytes."""

    size: int
    used: int
    """In blocks that are handed out."""
    largest: int
    """The largest block that could be had now."""


class Buddy:
    """The allocator. Not safe across threads."""

    def __init__(self, size: int, unit: int = 4096) -> None:
        """``size`` bytes, rounded down to whole units; 0 is an allocator that never has any.

        Raises:
            ValueError: a negative size, or a unit that is no power of two.
        """
        if size < 0 or unit < 1 or unit & (unit - 1):
            raise ValueError(f"buddy: size {size} must be at least 0 and unit {unit} a power of two")
        self.unit = unit
        units = size // unit
        self.size = units * unit
        self._free: list[list[int]] = [[] for _ in range(units.bit_length())]
        self._taken: dict[int, int] = {}
        """By offset of a block: its order."""
        self._used = 0
        offset = 0
        for order in reversed(range(units.bit_length())):
            if units >> order & 1:
                self._free[order].append(offset)
                offset += unit << order

    def allocate(self, size: int) -> int | None:
        """The offset of a block of at least ``size`` bytes, or None where none is free.

        Raises:
            ValueError: ``size`` is below 1.
        """
        if size < 1:
            raise ValueError(f"buddy: cannot allocate {size} bytes")
        want = (-(-size // self.unit) - 1).bit_length()
        order = next((one for one in range(want, len(self._free)) if self._free[one]), None)
        if order is None:
            return None
        offset = self._free[order].pop(0)
        while order > want:  # the upper halves stay free
            order -= 1
            insort(self._free[order], offset + (self.unit << order))
        self._taken[offset] = order
        self._used += self.unit << order
        return offset

    def free(self, offset: int) -> None:
        """Take a block back.

        Raises:
            ValueError: no block is handed out at ``offset``.
        """
        if offset not in self._taken:
            raise ValueError(f"buddy: no block is handed out at {offset}")
        order = self._taken.pop(offset)
        self._used -= self.unit << order
        while order + 1 < len(self._free):
            free, buddy = self._free[order], offset ^ self.unit << order
            at = bisect_left(free, buddy)
            if at == len(free) or free[at] != buddy:
                break
            free.pop(at)
            offset = min(offset, buddy)
            order += 1
        insort(self._free[order], offset)

    @property
    def usage(self) -> Usage:
        """What is given out, and how broken up the rest is."""
        largest = next((self.unit << order for order in reversed(range(len(self._free))) if self._free[order]), 0)
        return Usage(self.size, self._used, largest)
