"""What of a manifest a rank of decode wants, and in which pieces it is fetched.

    a manifest:  array 3, blocks 4 to 20, 8 heads, runs of 8        wanted: heads 2 and 3 of blocks 10 to 18
    its runs     4..7 | 8..15 | 16..20                              runs with any of these blocks, whole: 8..15, 16..20
    pieces       heads 2 and 3 of 8..15; heads 2 and 3 of 16..20    packed again as arrays of two heads

A piece is of one array, since it goes into one. Its stretches have one length and lie equally far apart, so that it is a
begin, a length, a step and a count, whatever copies it: runs that are not whole are pieces of their own, where not all
heads are wanted. Fetches have several pieces, whose bytes lie one behind the other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xpyd_sidecar.kv.array_layout import ArrayLayout, ArrayPart
from xpyd_sidecar.kv.blocks import overlap
from xpyd_sidecar.kv.extents import round_up
from xpyd_sidecar.kv.manifests import ALIGN, Manifest, PlacedArray, layout
from xpyd_sidecar.kv.packing import PackedArray, PackedRun, Stretch
from xpyd_sidecar.kv.reach import TableSpan


class Piece(NamedTuple):
    """Bytes of one array of a manifest."""

    region: int
    """Of the source."""
    stretches: tuple[Stretch, ...]
    """Where they lie in prefill's store, in the order in which they are fetched: of one length, equally far apart."""
    packed: PackedArray
    """How they lie when they are fetched: whole runs, with the heads that are wanted alone."""
    sums: tuple[int, int, int]
    """Of the manifest's sums, those of this piece: the first, how many for each run, and from one run's to the next's."""

    @property
    def size(self) -> int:
        """Bytes of the piece, all its blocks together."""
        return self.packed.size

    def sums_in(self, every: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The sums of this piece among those of its manifest, in the order of its ``packed``."""
        first, each, step = self.sums
        runs = self.packed.sums // self.packed.heads
        return np.concatenate([every[first + run * step:first + run * step + each] for run in range(runs)])


def sums_in(manifest: Manifest, arrays: Sequence[ArrayLayout]) -> int:
    """How many sums a manifest has.

    Raises:
        ValueError: as of ``layout``.
    """
    return sum(one.packed.sums for one in layout(manifest, arrays))


def pieces(manifest: Manifest, arrays: Sequence[ArrayLayout], parts: Mapping[int, ArrayPart],
           tables: Sequence[TableSpan] | None, most: int) -> list[Piece]:
    """What is wanted of a manifest.

    Args:
        manifest: what prefill has told.
        arrays: of prefill's rank, all.
        parts: what is taken of them, by array.
        tables: the blocks that are wanted; None: these are not known, and all are.
        most: bytes of a piece, if a run has no more.

    Raises:
        ValueError: the manifest names what there cannot be.
    """
    found: list[Piece] = []
    before = 0
    for one in layout(manifest, arrays):
        part = parts.get(one.region)
        if part is not None:
            first, count = manifest.first, manifest.count
            if tables is not None:
                table = tables[part.table]
                first, count = overlap(first, count, table.first, len(table.ids))
            if count:
                found += _pieces(one, part, before, (first, count), most)
        before += one.packed.sums
    return found


def narrow_pieces(manifest: Manifest, arrays: Sequence[ArrayLayout], parts: Mapping[int, ArrayPart],  # noqa: PLR0917  # as ``pieces``
             tables: Sequence[TableSpan], batch: Iterable[Piece], most: int) -> Iterator[Piece]:
    """What is wanted of pieces that were cut before it was known which blocks are. Arguments as of ``pieces``."""
    for piece in batch:
        first, count = wanted_of(piece, parts, tables)
        if count:
            part = {piece.region: parts[piece.region]._replace(table=0)}
            yield from pieces(manifest, arrays, part, [TableSpan(first, (0,) * count)], most)


def wanted_of(piece: Piece, parts: Mapping[int, ArrayPart], tables: Sequence[TableSpan]) -> tuple[int, int]:
    """Which blocks of a piece are wanted: the first, and how many."""
    table = tables[parts[piece.region].table]
    return overlap(piece.packed.first, piece.packed.blocks, table.first, len(table.ids))


class Cut(NamedTuple):
    """A piece of an array that lies at 0. ``sum_at``: as of ``PackedArray.sum_at``."""

    stretches: tuple[Stretch, ...]
    packed: PackedArray
    sum_at: int


def _pieces(one: PlacedArray, part: ArrayPart, before: int, blocks: tuple[int, int], most: int) -> Iterator[Piece]:
    """Of one array; ``before``: sums of the arrays before it."""
    heads = one.packed.heads
    for cut in _cuts(one.packed, (part.head, part.heads), blocks, most):
        stretches = tuple(Stretch(one.offset + at.offset, at.size) for at in cut.stretches)
        yield Piece(one.region, stretches, cut.packed, (before + cut.sum_at, part.heads, heads))


@functools.lru_cache(maxsize=256)
def _cuts(whole: PackedArray, of: tuple[int, int], blocks: tuple[int, int], most: int) -> tuple[Cut, ...]:
    """Of one array: heads ``of`` (the first, how many) of these blocks; kept, since a model's arrays are alike."""
    head, heads = of
    each, found = heads * whole.head_bytes, list[Cut]()
    some: list[PackedRun] = []
    for run in whole.runs(*blocks):
        uneven = heads < whole.heads and some and run.blocks != some[0].blocks
        if some and (uneven or (sum(one.blocks for one in some) + run.blocks) * each > most):
            found.append(_cut(whole, head, heads, some))
            some = []
        some.append(run)
    found.append(_cut(whole, head, heads, some))
    return tuple(found)


def _cut(whole: PackedArray, head: int, heads: int, runs: Sequence[PackedRun]) -> Cut:
    first, count = runs[0].first, sum(run.blocks for run in runs)
    packed = PackedArray(first, count, heads, whole.head_bytes, whole.run)
    return Cut(tuple(whole.stretches(first, count, head, heads)), packed, whole.sum_at(first, head))


def batches(found: Iterable[Piece], most: int) -> Iterator[tuple[Piece, ...]]:
    """Pieces that are fetched together: of so many bytes, at least one."""
    some: list[Piece] = []
    size = 0
    for piece in found:
        if some and size + round_up(piece.size, ALIGN) > most:
            yield tuple(some)
            some, size = [], 0
        some.append(piece)
        size += round_up(piece.size, ALIGN)
    if some:
        yield tuple(some)


class PackedSpan(NamedTuple):
    """Bytes of prefill's store, or of a mapping of it, and where they lie in memory that a fetch fills."""

    offset: int
    size: int
    at: int


def packed_spans(batch: Sequence[Piece]) -> list[PackedSpan]:
    """What a fetch is, where its pieces lie one behind the other (``places``); neighbours on both sides are one."""
    found: list[PackedSpan] = []
    for piece, start in zip(batch, places(batch), strict=False):
        at = start
        for one in piece.stretches:
            last = found[-1] if found else PackedSpan(-ALIGN, 0, 0)
            if (last.offset + round_up(last.size, ALIGN), last.at + round_up(last.size, ALIGN)) == (one.offset, at):
                found[-1] = last._replace(size=one.offset + one.size - last.offset)
            else:
                found.append(PackedSpan(one.offset, one.size, at))
            at += one.size
    return found


def places(batch: Sequence[Piece]) -> list[int]:
    """Where each piece of a fetch begins, one behind the other; the last number is what all take."""
    out = [0]
    for piece in batch:
        out.append(out[-1] + round_up(piece.size, ALIGN))
    return out
