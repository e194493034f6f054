"""An allocator of ranges as arithmetic: offsets in a space of bytes, no memory behind them.

    unit 1, size 13:      |-------------------------|        free at the start
    take 5, take 2        |aaaaa|bb|----------------|
    give (1, 3)           |a|---|a|bb|--------------|        any part of a range may come back by itself

Laws
1. Ranges that are handed out never overlap, and lie inside the space.
2. Offsets and lengths are multiples of ``unit``: what is asked for is rounded up, and the rounding counts as used.
3. Neighbouring free ranges are always one, so with everything given back all is one range.
4. The lowest range that fits is taken: memory that was never needed is never touched.

Source of the method: Knuth, The Art of Computer Programming, volume 1, section 2.5, "first-fit" with "liberation".
"""

from __future__ import annotations

from bisect import bisect_right


class Extents:
    """The allocator. Not safe across threads."""

    def __init__(self, size: int, unit: int) -> None:
        """``size`` bytes, rounded down to whole units; 0 is an allocator that never has any.

        Raises:
            ValueError: a negative size, or a unit below 1.
        """
        if size < 0 or unit < 1:
            raise ValueError(f"extents: size {size} must be at least 0 and unit {unit} at least 1")
        self.unit = unit
        self.size = size // unit * unit
        self.used = 0
        """Bytes that are handed out, rounding included."""
        self._starts = [0] if self.size else []
        self._ends = [self.size] if self.size else []
        """Of the free ranges, in order."""

    def round_up(self, size: int) -> int:
        """Bytes of the space that ``size`` bytes take: whole units."""
        return round_up(size, self.unit)

    def take(self, size: int) -> int | None:
        """The offset of ``size`` bytes, or None where no free range has so many.

        Raises:
            ValueError: ``size`` is below 1.
        """
        if size < 1:
            raise ValueError(f"extents: cannot hand out {size} bytes")
        want = self.round_up(size)
        free = zip(self._starts, self._ends, strict=True)
        at = next((at for at, (start, end) in enumerate(free) if end - start >= want), None)
        if at is None:
            return None
        start = self._starts[at]
        if self._ends[at] - start == want:
            del self._starts[at], self._ends[at]
        else:
            self._starts[at] = start + want
        self.used += want
        return start

    def give(self, offset: int, size: int) -> None:
        """Take back ``size`` bytes from ``offset`` on, a part of what was handed out.

        Raises:
            ValueError: some of them are free already, are not in the space, or do not begin with a unit.
        """
        end = offset + self.round_up(size)
        at = bisect_right(self._starts, offset)
        before = self._ends[at - 1] if at else 0
        after = self._starts[at] if at < len(self._starts) else self.size
        if size < 1 or offset % self.unit or offset < before or end > after:
            raise ValueError(f"extents: {size} bytes at {offset} are not handed out")
        self.used -= end - offset
        joins_before, joins_after = bool(at) and before == offset, at < len(self._starts) and after == end
        if joins_before and joins_after:
            self._ends[at - 1] = self._ends[at]
            del self._starts[at], self._ends[at]
        elif joins_before:
            self._ends[at - 1] = end
        elif joins_after:
            self._starts[at] = offset
        else:
            self._starts.insert(at, offset)
            self._ends.insert(at, end)

    @property
    def largest(self) -> int:
        """Bytes of the largest free range."""
        return max((end - start for start, end in zip(self._starts, self._ends, strict=True)), default=0)


def round_up(size: int, unit: int) -> int:
    """The least multiple of ``unit`` that is at least ``size``."""
    return -(-size // unit) * unit
