"""Where fetched bytes go on a host: right into blocks of the cache, or into memory from which they are placed later.

    fetched for blocks    ─▶ the blocks, inside the gate of their load                (a device: a range of its ring)
    fetched before        ─▶ the lookup buffer  ─ once there are blocks ─▶ the blocks

Blocks are written only inside the gate of their load (``gates``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from xpyd_sidecar.kv.array_layout import ArrayPart
from xpyd_sidecar.kv.blocks import overlap
from xpyd_sidecar.kv.buffer import BufferPlace
from xpyd_sidecar.kv.selection import Piece, places
from xpyd_sidecar.memory.addresses import address_of
from xpyd_sidecar.memory.allocation import Allocation
from xpyd_sidecar.memory.buffer_memory import BufferMemory
from xpyd_sidecar.memory.marks import CopyMark
from xpyd_sidecar.transport import moves
from xpyd_sidecar.transport.gates import Gate
from xpyd_sidecar.transport.moves import Scatter


class CacheArray(NamedTuple):
    """The bytes of one array of blocks, block after block, in host memory."""

    view: memoryview
    block_bytes: int
    head_bytes: int


class LoadTarget(NamedTuple):
    """Where the blocks of one source of a try belong."""

    gate: Gate
    tables: Sequence[tuple[int, array[int]]]
    """The index of the first block, and the blocks, 64-bit."""
    parts: Mapping[int, ArrayPart]
    """By array of the source."""
    moment: CopyMark | None = None
    """On a device: from when on the blocks may be written."""


Placed = Callable[["NDArray[np.uint64] | None"], None]
"""What is called when pieces are in their blocks, with their sums; None: the load is over, and nothing was written."""


class Landing(Protocol):
    """The memory of one rank that fetched bytes come into. Used on the receiver's I/O thread."""

    buffers: BufferMemory
    """Of the lookup buffer."""
    host_ring: Allocation | None
    """Host memory as large as the ring of a device, for links that cannot write into that; None: the ring is the host's."""

    def start(self, post: Callable[[Callable[[], None]], None]) -> None:
        """Begin. ``post``: has a call made on the thread."""

    def blocks(self, target: LoadTarget, batch: Sequence[Piece]) -> list[Scatter]:
        """The places of pieces in their blocks; they are written inside the target's gate alone."""

    def host_places(self, batch: Sequence[Piece], at: int | BufferPlace) -> list[Scatter]:
        """Places of pieces in host memory outside of the cache; a row is what lies together in prefill's store."""

    def expect(self, target: LoadTarget, batch: Sequence[Piece], at: int) -> None:
        """A link is about to read pieces into a range of the device's ring."""

    def place(self, target: LoadTarget, batch: Sequence[Piece], at: int | BufferPlace, placed: Placed) -> None:
        """Copy pieces from there into their blocks, and then call ``placed``: now, or later on this thread."""


class HostLanding:
    """Where fetched pieces go on a rank whose cache is in host memory."""

    def __init__(self, caches: Sequence[CacheArray], buffers: BufferMemory, *, cover: bool) -> None:
        """``caches``: by array; ``buffers``: of the lookup buffer; ``cover``: sums are wanted."""
        self._caches = tuple(caches)
        self.buffers = buffers
        self.host_ring: Allocation | None = None
        self._cover = cover

    def start(self, post: Callable[[Callable[[], None]], None]) -> None:
        """Nothing: what is called here is done when it returns."""

    def blocks(self, target: LoadTarget, batch: Sequence[Piece]) -> list[Scatter]:
        """The places of pieces in their blocks; they are written inside the target's gate alone."""
        return [self._rows(target, piece, piece.packed.first, piece.packed.blocks) for piece in batch]

    def host_places(self, batch: Sequence[Piece], at: int | BufferPlace) -> list[Scatter]:
        """Places of pieces outside of the cache, one behind the other; a row is what lies together in prefill's store."""
        view = self._memory(at)
        return [rows_in(view[start:start + piece.size], len(piece.stretches))
                for piece, start in zip(batch, places(batch), strict=False)]

    def expect(self, target: LoadTarget, batch: Sequence[Piece], at: int) -> None:
        """Nothing is expected: only a device has a ring (``Landing``)."""

    def place(self, target: LoadTarget, batch: Sequence[Piece], at: int | BufferPlace, placed: Placed) -> None:
        """Copy pieces into their blocks at once, as ``Landing`` has it."""
        view = self._memory(at)
        if not target.gate.enter():
            placed(None)
            return
        try:
            made = [self._place(target, piece, view[start:start + piece.size])
                    for piece, start in zip(batch, places(batch), strict=False)]
        finally:
            target.gate.leave()
        placed(np.frombuffer(b"".join(made), np.uint64))

    def _place(self, target: LoadTarget, piece: Piece, view: memoryview) -> bytes:
        """Copy a piece into its blocks; its sums. What was fetched ahead may have blocks that decode has by itself."""
        packed = piece.packed
        begin, table = target.tables[target.parts[piece.region].table]
        first, count = overlap(packed.first, packed.blocks, begin, len(table))
        start, end = ((block - packed.first) * packed.block_bytes for block in (first, first + count))
        rows = self._rows(target, piece, first, count)
        rows.copy(address_of(view) + start)
        if not self._cover:
            return b""
        return moves.sums(view[:start], packed.head_bytes) + rows.sums() + moves.sums(view[end:], packed.head_bytes)

    def _memory(self, at: int | BufferPlace) -> memoryview:
        assert isinstance(at, BufferPlace), "only a device has a ring"
        return self.buffers.chunk_at(at.tier, at.offset, at.size).view

    def _rows(self, target: LoadTarget, piece: Piece, first: int, count: int) -> Scatter:
        """The places of so many blocks of a piece."""
        part = target.parts[piece.region]
        cache, packed = self._caches[part.into], piece.packed
        begin, table = target.tables[part.table]
        at = first - begin
        return Scatter(cache.view, packed.block_bytes, count, memoryview(table)[at:at + count], cache.block_bytes,
                       part.at * cache.head_bytes, packed.head_bytes if self._cover else 0)


def rows_in(view: memoryview, rows: int) -> Scatter:
    """So many rows, one behind the other."""
    return Scatter(view, len(view) // rows, rows, None, 0, 0, 0)


def sums_of(rows: Sequence[Scatter]) -> NDArray[np.uint64]:
    """The sums of what has come, piece by piece."""
    return np.frombuffer(b"".join(one.sums() for one in rows), np.uint64)


