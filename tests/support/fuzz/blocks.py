"""Rows, copies and sums (``_moves.c``): random sizes, places and alignments, against a placement in plain Python.

    byte 0      which way the blocks come (``WAYS``)
    the rest    numbers that it asks for, each from one byte or two; none is left: 0
"""

from __future__ import annotations

import ctypes
import mmap
import random
from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from xpyd_sidecar.kv.packing import sum_of
from xpyd_sidecar.transport import _moves

MODULES = ("xpyd_sidecar.transport._moves",)
TOKENS = tuple(bytes([one, other]) for one in (0, 1, 2, 3, 7, 255) for other in (0, 1, 3, 64, 255))
SIZES = (1, 63, 64, 100, 255, 256, 257, 1024, 1088, 4095, 4096, 4160, 65_535, 65_536, 65_537, 65_600, 70_000, 131_072,
         131_136, 200_000)
BLOB = random.Random(1).randbytes(1 << 20)
MOST = (70_000, 70_000, 5_000, 700_000)
"""Bytes of all rows; large ones are slow."""
FILLER = 0xee
TICKET = 32


class Numbers:
    """An input as numbers."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, limit: int) -> int:
        """The next one, of 0 to limit - 1."""
        many = 1 if limit <= 256 else 2 if limit <= 65536 else 3
        found = int.from_bytes(self._data[self._at:self._at + many], "little")
        self._at += many
        return found % limit

    def one(self, options: Sequence[Any]) -> Any:
        """One of them."""
        return options[self.below(len(options))]


class Piece:
    """Rows, the memory that they are to come to, and what it must look like then."""

    def __init__(self, numbers: Numbers, most: int) -> None:
        self.size: int = min(numbers.one(SIZES) + numbers.one((0, 0, 0, 1, 3, 64)), max(most, 1))
        self.count = 1 + numbers.below(max(1, min(5, most // self.size)))
        self.stride = self.size + numbers.one((0, 0, 1, 63, 64, 4096))
        self.offset = numbers.one((0, 0, 1, 7, 64, 100))
        halves = (-(-self.size // 2), -(-self.size // 3), 1 + numbers.below(self.size))
        self.part = numbers.one((0, self.size, self.size, *halves))
        if self.part and self.size // self.part > 64:  # sums in Python are slow
            self.part = -(-self.size // 64)
        self.payload = _blob(numbers, self.size * self.count)
        room = self.offset + self.stride * 7 + self.size
        self.ids = array("q", random.Random(numbers.below(256)).sample(range(8), self.count))
        self.packed = not numbers.below(5)  # without ids
        if self.packed:
            room, self.stride, self.offset, self.ids = len(self.payload), self.size, 0, array("q", range(self.count))
        # Memory of the C library ends where it ends, which the sanitizer watches; mapped memory lies on a page's start.
        self.mapped = mmap.mmap(-1, room) if numbers.below(2) else None
        self.memory: Any = self.mapped if self.mapped is not None else bytearray(room)
        self.memory[:] = bytes([FILLER]) * room
        self.scatter = _moves.Scatter(self.memory, self.size, self.count, None if self.packed else memoryview(self.ids),
                                      self.stride, self.offset, self.part)

    def check(self) -> None:
        """All is in its place, nothing else is touched, and the sums are right."""
        expected = bytearray(bytes([FILLER]) * len(self.memory))
        for n, block in enumerate(self.ids):
            at = block * self.stride + self.offset
            expected[at:at + self.size] = self.payload[n * self.size:(n + 1) * self.size]
        assert self.memory[:] == expected, (self.size, self.count, self.stride, self.offset)
        assert self.scatter.sums() == _sums(self.payload, self.size, self.part)

    def close(self) -> None:
        """Give the memory back."""
        del self.scatter
        if self.mapped is not None:
            self.mapped.close()


def check(data: bytes) -> Hashable:
    """What the input asks for."""
    numbers = Numbers(data)
    return numbers.one(WAYS)(numbers)


def seeds() -> list[bytes]:
    """Each way, with a few numbers."""
    return [bytes([way]) + random.Random(seed).randbytes(size)
            for way in range(len(WAYS)) for seed, size in ((0, 0), (1, 20), (2, 60), (3, 200))]


def _sums(data: Any, row: int, part: int) -> bytes:
    """Of the parts of packed rows; ``part`` 0: nothing is summed up."""
    return b"".join(sum_of(data[at + start:at + min(start + part, row)]).to_bytes(8, "little")
                    for at in range(0, len(data), row) for start in range(0, row, part)) if part else b""


def _blob(numbers: Numbers, size: int) -> bytes:
    start = numbers.below(1 << 16)
    return BLOB[start:start + size]


def read(numbers: Numbers) -> Hashable:
    """From this process's own memory, as from memory that another has mapped, too, with gaps between the rows."""
    piece = Piece(numbers, numbers.one(MOST))
    step = piece.size + numbers.one((0, 0, 1, 48, 4096))
    rows = [piece.payload[at:at + piece.size].ljust(step, b"g") for at in range(0, len(piece.payload), piece.size)]
    source = ctypes.create_string_buffer(b"".join(rows)[:step * (piece.count - 1) + piece.size],
                                         step * (piece.count - 1) + piece.size)
    ticket = ctypes.create_string_buffer(b"t" * TICKET, TICKET)
    right = numbers.below(4) > 0
    done = piece.scatter.read(ctypes.addressof(source), step, ctypes.addressof(ticket), (b"t" if right else b"u") * TICKET)
    assert done == right
    if right:
        piece.check()
    piece.close()
    return "read", right, step > piece.size


def copy(numbers: Numbers) -> Hashable:
    """From this process's memory, wherever it begins."""
    piece = Piece(numbers, numbers.one(MOST))
    skip = numbers.below(65)
    source = ctypes.create_string_buffer(bytes(skip) + piece.payload, skip + len(piece.payload))
    piece.scatter.copy(ctypes.addressof(source) + skip)
    piece.check()
    piece.close()
    return "copy", skip % 64 == 0


def place(numbers: Numbers) -> Hashable:
    """Blocks in and outside of a memory: what lies outside is refused, and nothing is written before."""
    room, size, count = numbers.below(5000), numbers.below(300), numbers.below(6)
    stride = numbers.one((0, 1, 64, size, size + 1, 1 << 40, (1 << 62) + 1))
    offset = numbers.one((0, 1, 100, 1 << 40, (1 << 63) - 1))
    odd = (0, 1, 2, 3, 5, 17, -1, 1 << 20, 1 << 40, (1 << 63) - 1, -(1 << 63))
    ids = array("q", [numbers.one(odd) for _ in range(count)])
    if not numbers.below(8):
        ids.append(0)
    part = numbers.one((0, size, size, 1, size + 1, 1 << 40))
    fits = size > 0 and 0 < count == len(ids) and part <= size and all(
        one >= 0 and one * stride + offset + size <= room for one in ids)
    memory = bytearray(room)
    try:
        scatter = _moves.Scatter(memory, size, count, ids, stride, offset, part)
    except ValueError:
        assert not fits, (room, size, count, stride, offset, ids)
        return "refused", len(ids) == count
    assert fits, (room, size, count, stride, offset, ids)
    source = ctypes.create_string_buffer(BLOB[:size * count], size * count)
    scatter.copy(ctypes.addressof(source))
    assert scatter.sums() == _sums(source.raw, size, part)
    return "placed"


def sums(numbers: Numbers) -> Hashable:
    """Of packed parts, whole or not."""
    size, count, more = numbers.one(SIZES) + numbers.below(3) - 1, numbers.below(4), numbers.one((0, 0, 0, 1))
    start = numbers.below(65)
    data = memoryview(BLOB)[start:start + size * count + more]
    if size < 1 or len(data) % size:
        try:
            _moves.sums(data, size)
        except ValueError:
            return "no sums"
        raise AssertionError("sums of parts that are not whole")
    assert _moves.sums(data, size) == _sums(data, size, size)
    return "sums"


WAYS: tuple[Callable[[Numbers], Hashable], ...] = (read, copy, place, sums)
