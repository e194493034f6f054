"""How blocks of an array lie in packed memory, and the sums that are made of them.

Blocks are packed in runs: as many blocks as make ``RUN_BYTES`` of one head, ``RUN_MOST`` at most, that begin at multiples
of that number. Within a run heads come first. Blocks 5 to 10 of an array with two heads, in runs of 4:

    block        5  6  7 | 8  9 10            5, 6, 7 are what is there of run 1, and 8, 9, 10 of run 2
    packed       h0: 5 6 7 | h1: 5 6 7 | h0: 8 9 10 | h1: 8 9 10

So what somebody wants of a run is one stretch of bytes, whichever heads these are, and whole arrays are one stretch, too.
Where a backend packs something of its own inside a block (CPUs), a run is one block, and the bytes are the block's.

Each (run, head) has a sum: Σ (2i + 1) · (w_i ⊕ w_i ≫ 32) modulo 2^64, over its 64-bit little-endian words, i counted from
0, the last word filled up with zeros. Whatever changes in one word changes it, since an odd factor and a shift by half a
word can be undone. Words that change places are seen but for those, 2^n words apart, that differ in their highest n + 1
bits alone and in the same ones half a word below. It can be made in parts, in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

RUN_BYTES: Final = 256 << 10
"""Of one head, that a run has where its blocks are small."""
RUN_MOST: Final = 16
"""Blocks of a run. A decode that lacks the end of a run alone fetches all of it."""
WORD: Final = 8
NO_SUMS: Final[NDArray[np.uint64]] = np.zeros(0, np.uint64)
"""Of what is not summed up."""


def run_blocks(head_bytes: int, *, opaque: bool) -> int:
    """Blocks of a run. ``opaque``: the bytes of a block have no meaning but as a whole, or by heads.

    Raises:
        ValueError: a head without bytes.
    """
    if head_bytes < 1:
        raise ValueError(f"a head of {head_bytes} bytes")
    return 1 if opaque else max(1, min(RUN_MOST, RUN_BYTES // head_bytes))


class PackedRun(NamedTuple):
    """Blocks ``first``.. of one run that are there, and where they begin in the packed array."""

    first: int
    blocks: int
    offset: int


class Stretch(NamedTuple):
    """Bytes of a packed array."""

    offset: int
    size: int


class PackedArray(NamedTuple):
    """Blocks ``first`` to ``first + blocks - 1`` of one array, packed."""

    first: int
    blocks: int
    heads: int
    head_bytes: int
    """Of one block."""
    run: int
    """Blocks, as of ``run_blocks``."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all heads included."""
        return self.heads * self.head_bytes

    @property
    def size(self) -> int:
        """Bytes of all blocks."""
        return self.blocks * self.block_bytes

    @property
    def sums(self) -> int:
        """How many there are: one for each head of each run, runs in order, heads in order within."""
        return self.heads * (self._number(self.first + self.blocks - 1) - self._number(self.first) + 1)

    def runs(self, first: int, count: int) -> Iterator[PackedRun]:
        """The runs that hold any of these blocks, whole as they are here.

        Raises:
            ValueError: they are not all here.
        """
        if count < 1 or first < self.first or first + count > self.first + self.blocks:
            raise ValueError(f"blocks {first} to {first + count - 1}, of {self.first} to {self.first + self.blocks - 1}")
        for number in range(self._number(first), self._number(first + count - 1) + 1):
            begin = max(self.first, number * self.run)
            end = min(self.first + self.blocks, (number + 1) * self.run)
            yield PackedRun(begin, end - begin, (begin - self.first) * self.block_bytes)

    def stretches(self, first: int, count: int, head: int, heads: int) -> Iterator[Stretch]:
        """Where so many heads, from one on, of all runs lie that hold any of these blocks; neighbours are one.

        Raises:
            ValueError: some of them are not here.
        """
        if heads < 1 or head < 0 or head + heads > self.heads:
            raise ValueError(f"heads {head} to {head + heads - 1} of {self.heads}")
        found: Stretch | None = None
        for run in self.runs(first, count):
            each = run.blocks * self.head_bytes
            one = Stretch(run.offset + head * each, heads * each)
            if found is not None and found.offset + found.size == one.offset:
                found = Stretch(found.offset, found.size + one.size)
                continue
            if found is not None:
                yield found
            found = one
        if found is not None:
            yield found

    def place(self, block: int, head: int) -> int:
        """Where one head of one block begins."""
        (run,) = self.runs(block, 1)
        return run.offset + (head * run.blocks + block - run.first) * self.head_bytes

    def sum_at(self, block: int, head: int) -> int:
        """Which of the sums covers one head of one block."""
        return (self._number(block) - self._number(self.first)) * self.heads + head

    def _number(self, block: int) -> int:
        return block // self.run


def words_of(data: Any) -> NDArray[np.uint64]:
    """Bytes as 64-bit words, the last filled up with zeros."""
    raw = np.frombuffer(data, np.uint8)
    if rest := len(raw) % WORD:
        raw = np.concatenate([raw, np.zeros(WORD - rest, np.uint8)])
    return raw.view("<u8")


def sum_of(data: Any, start: int = 0) -> int:
    """The sum of bytes that begin ``start`` bytes behind the begin of their head's run; sums of parts add up.

    Raises:
        ValueError: a part that begins within a word.
    """
    if start % WORD:
        raise ValueError(f"a part that begins {start % WORD} bytes within a word")
    words = words_of(data)
    mixed = words ^ (words >> np.uint64(32))
    factors = np.arange(len(words), dtype=np.uint64) * np.uint64(2) + np.uint64(2 * (start // WORD) + 1)
    return int((mixed * factors).sum(dtype=np.uint64))


def sums_of(data: Any, array: PackedArray) -> NDArray[np.uint64]:
    """The sums of a packed array, in their order."""
    view, found = memoryview(data).cast("B"), []
    for run in array.runs(array.first, array.blocks):
        each = run.blocks * array.head_bytes
        found += [sum_of(view[at:at + each]) for at in range(run.offset, run.offset + array.heads * each, each)]
    return np.array(found, np.uint64)
