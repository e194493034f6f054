"""Where fetched bytes go on a device: through a ring of its memory, from which one kernel puts them into their blocks.

    another process's store, mapped   ─[copy engine]─▶ a range of the ring ─[kernel]─▶ blocks, sums      (launched together)
    another process's device, by NCCL ───────────▶ a range of the ring ─[kernel]─▶ blocks, sums
    sockets, other links   ─▶ the same range in host memory ─[copy engine]─┘
    the lookup buffer      ─▶ ─[copy engine]─▶ a range of ``THROUGH_BYTES`` beside the ring ─[kernel]─▶ blocks, sums

Used on the receiver's I/O thread, which launches and never waits: a thread of its own (``Completions``) waits for marks and
posts what follows back. The engine's thread has said from when on the blocks may be written (``LoadTarget.moment``).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from xpyd_sidecar.engine.worker.kv_cache import CacheRows, KvCache
from xpyd_sidecar.kv.buffer import BufferPlace
from xpyd_sidecar.kv.extents import Extents
from xpyd_sidecar.kv.selection import PackedSpan, Piece, places
from xpyd_sidecar.memory.allocation import Allocation
from xpyd_sidecar.memory.buffer_memory import BufferMemory
from xpyd_sidecar.memory.completions import Completions
from xpyd_sidecar.memory.device import DeviceCopies, PackedRows
from xpyd_sidecar.memory.launch_memory import MadeSums
from xpyd_sidecar.memory.mapped_store import MappedStore, Registrar
from xpyd_sidecar.memory.marks import NOW, CopyMark
from xpyd_sidecar.memory.store import UNIT
from xpyd_sidecar.transport.landing import LoadTarget, Placed, rows_in
from xpyd_sidecar.transport.moves import Scatter

logger = logging.getLogger(__name__)

THROUGH_BYTES: Final = 64 << 20
"""Device memory that pieces of the lookup buffer pass through, beside the ring."""


class WaitingPlace(NamedTuple):
    """Pieces of the lookup buffer that wait for device memory."""

    target: LoadTarget
    batch: Sequence[Piece]
    at: BufferPlace
    placed: Placed


@dataclass
class ComingRange:
    """Bytes that come into a range of the ring, and go on from there into their blocks."""

    target: LoadTarget
    batch: Sequence[Piece]
    read: bool = False
    """A reader brings them; else a link fills the range by itself."""
    sums: NDArray[np.uint64] | None = None
    """Of what went into the blocks with what was read; None: nothing did."""


class DeviceLanding:
    """Where fetched pieces go on a rank whose cache is on a device."""

    def __init__(self, memory: KvCache, registrar: Registrar, host_ring: Allocation, buffers: BufferMemory, *,
                 through: tuple[int, int], cover: bool) -> None:
        """Take it.

        Args:
            memory: the cache.
            registrar: of stores that are mapped here; it begins with this.
            host_ring: pinned host memory, as large as the ring, for links that cannot write into the device.
            buffers: of the lookup buffer.
            through: where memory for what comes out of the buffer begins behind the device's ring, and its size.
            cover: sums are wanted.
        """
        assert memory.copies is not None
        self.buffers = buffers
        self.completions = Completions("xpyd-arrivals")
        self.registrar = registrar
        self._memory = memory
        self._copies: DeviceCopies = memory.copies
        self.host_ring: Allocation | None = host_ring
        self._host_ring = host_ring
        self._begin = through[0]
        self._through = Extents(through[1], UNIT)
        self._post: Callable[[Callable[[], None]], None] = lambda call: call()
        self._cover = cover
        self._coming: dict[int, ComingRange] = {}
        """Ranges of the ring that a link reads into, by where they begin."""
        self._waiting: deque[WaitingPlace] = deque()

    def start(self, post: Callable[[Callable[[], None]], None]) -> None:
        """Start the landing, as ``Landing`` has it."""
        self._post = post
        self.registrar.start()

    # --- what a link fetches into ---

    def blocks(self, target: LoadTarget, batch: Sequence[Piece]) -> list[Scatter]:
        """Never called here: nobody but a kernel writes into blocks of a device (``Landing``)."""
        raise NotImplementedError("blocks of a device")

    def host_places(self, batch: Sequence[Piece], at: int | BufferPlace) -> list[Scatter]:
        """Places in host memory, as ``Landing`` has them."""
        starts = places(batch)
        if isinstance(at, BufferPlace):
            view = self.buffers.chunk_at(at.tier, at.offset, at.size).view
        else:
            self._coming.pop(at, None)
            view = self._host_ring.chunk_at(at, starts[-1]).view
        return [rows_in(view[start:start + piece.size], len(piece.stretches))
                for piece, start in zip(batch, starts, strict=False)]

    def device(self, at: int, size: int) -> torch.Tensor:
        """A range of the ring on the device, as ``RingMemory`` has it."""
        return self._copies.ring_range(at, size)

    def reader(self, view: memoryview) -> MappedReader:
        """What copies out of a store of this host, which is mapped here."""
        return MappedReader(self, MappedStore(view, self.registrar))

    def expect(self, target: LoadTarget, batch: Sequence[Piece], at: int) -> None:
        """Expect pieces, as ``Landing`` has it."""
        self._coming[at] = ComingRange(target, batch)

    def free(self, at: int) -> None:
        """A range of the ring is nobody's any more."""
        self._coming.pop(at, None)

    def read(self, store: MappedStore, at: int, spans: Sequence[PackedSpan], done: Callable[[], None]) -> None:
        """Copy out of a mapping into a range of the ring, then call ``done``, on any thread; and go on into the blocks.

        Whether prefill vouches for the bytes is known later than they are in the blocks: these are of a load that is under
        way, which is committed when all of it was vouched for and has the right sums.
        """
        sources = []
        for span in spans:
            into = span.at
            for part in store.parts(span.offset, span.size):
                sources.append((part, into))
                into += len(part)
        mark: CopyMark = self._copies.bring(sources)
        coming = self._coming[at]
        coming.read = True
        if coming.target.gate.enter():
            mark, made = self._launch(coming.target, coming.batch, at, mark)
            done = partial(self._came, coming, made, done)
        self.completions.add(mark, done)

    @staticmethod
    def _came(coming: ComingRange, made: MadeSums | None, done: Callable[[], None]) -> None:
        coming.sums = made.read() if made is not None else None
        coming.target.gate.leave()
        done()

    # --- what goes into blocks ---

    def place(self, target: LoadTarget, batch: Sequence[Piece], at: int | BufferPlace, placed: Placed) -> None:
        """Have pieces copied into their blocks later, as ``Landing`` has it."""
        if isinstance(at, BufferPlace):
            self._waiting.append(WaitingPlace(target, batch, at, placed))
            self._place_waiting()
        elif (coming := self._coming.pop(at, None)) is not None and coming.read:
            placed(coming.sums)
        elif target.gate.enter():
            size = places(batch)[-1]
            source = self._host_ring.chunk_at(at, size).tensor if coming is None else None
            self._scatter(target, batch, at, source, placed)
        else:
            placed(None)

    def _place_waiting(self) -> None:
        """Place what came ahead, as far as there is device memory for it to pass through."""
        while self._waiting:
            one = self._waiting[0]
            size = places(one.batch)[-1]
            at = self._through.take(size)
            if at is None:
                return
            self._waiting.popleft()
            if not one.target.gate.enter():
                self._through.give(at, size)
                one.placed(None)
                continue
            source = self.buffers.chunk_at(*one.at).tensor
            self._scatter(one.target, one.batch, self._begin + at, source, partial(self._passed, at, size, one.placed))

    def _passed(self, at: int, size: int, placed: Placed, sums: NDArray[np.uint64] | None) -> None:
        self._through.give(at, size)
        try:
            placed(sums)
        finally:
            self._place_waiting()

    def _scatter(self, target: LoadTarget, batch: Sequence[Piece], at: int, source: torch.Tensor | None,
                 placed: Placed) -> None:
        """Place pieces by a gate that was entered. ``source``: host memory that they come from; None: they are there."""
        mark: CopyMark = NOW
        made = None
        try:
            if source is not None:
                mark = self._copies.bring([(source, at)])
            mark, made = self._launch(target, batch, at, mark)
        except Exception:
            logger.exception("xpyd: KV that has come is not brought to the device")
        self.completions.add(mark, partial(self._post, partial(self._landed, target, made, placed)))

    def _launch(self, target: LoadTarget, batch: Sequence[Piece], at: int,
                brought: CopyMark) -> tuple[CopyMark, MadeSums | None]:
        """Have the device put pieces into their blocks, once that mark and the load's own have passed.

        A launch that fails, for lack of memory or of a compiler, leaves the load without them: it ends at its deadline.
        What was brought is still on its way then.
        """
        try:
            starts = places(batch)
            arrays = [(piece.packed, start) for piece, start in zip(batch, starts, strict=False)] if self._cover else []
            after = [mark for mark in (brought, target.moment) if mark is not None and mark is not NOW]
            packed = PackedRows(self._memory.rows(cache_rows(target, batch)), arrays, starts[-1])
            return self._copies.scatter(packed, at, after)
        except Exception:
            logger.exception("xpyd: KV that has come is not put into its blocks")
            return brought, None

    @staticmethod
    def _landed(target: LoadTarget, made: MadeSums | None, placed: Placed) -> None:
        target.gate.leave()
        placed(made.read() if made is not None else None)


class MappedReader:
    """Copies of one mapped store into the ring (``links.StoreReader``)."""

    def __init__(self, landing: DeviceLanding, store: MappedStore) -> None:
        self._landing = landing
        self._store = store

    def read(self, at: int, spans: Sequence[PackedSpan], done: Callable[[], None]) -> None:
        """Copy from the mapping, as ``StoreReader`` has it."""
        self._landing.read(self._store, at, spans, done)

    def close(self, closed: Callable[[], None]) -> None:
        """Let go of the mapping, as ``StoreReader`` has it."""
        self._store.close(closed)


def cache_rows(target: LoadTarget, batch: Sequence[Piece]) -> list[CacheRows]:
    """Where pieces of a fetch belong in the cache: those with the same blocks and heads together.

    A piece has whole runs: blocks of it that the load has no place for are -1.
    """
    alike: dict[tuple[int, int, int, int], CacheRows] = {}
    for piece, start in zip(batch, places(batch), strict=False):
        part, packed = target.parts[piece.region], piece.packed
        key = part.table, packed.first, packed.blocks, part.at
        rows = alike.get(key)
        if rows is None:
            ids = block_ids(*target.tables[part.table], packed.first, packed.blocks)
            rows = alike[key] = CacheRows([], [], ids, part.at)
        rows.regions.append(part.into)
        rows.packed.append((packed, start))
    return list(alike.values())


def block_ids(begin: int, ids: Sequence[int], first: int, count: int) -> NDArray[np.int64]:
    """The blocks ``first``.. of a table whose ids begin with block ``begin``; -1 where it has none."""
    found = np.full(count, -1, np.int64)
    low, high = max(begin, first), min(begin + len(ids), first + count)
    if low < high:
        found[low - first:high - first] = np.asarray(ids[low - begin:high - begin], np.int64)
    return found
