"""Where blocks lie in a paged cache and in packed memory: the tables of addresses from which ``device_kernel`` moves them.

A block of one array is a row: it has an address in the cache, where it may be strided, and one in packed memory for each of
its heads, which are equally far apart there (``kv.packing``); the words of a head follow each other in logical order. And
where the runs of heads lie that have a sum. Arithmetic alone: nothing is moved here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv.packing import PackedArray

ALIGNED: Final = 16
"""Bytes that a GPU moves by one instruction, where addresses are multiples of it."""
OUTER: Final = 3
"""Strided dimensions that a block may have, besides the words that lie together."""
WIDTHS: Final = (8, 4, 2, 1)
"""Bytes that a word may have."""


class RowShape(NamedTuple):
    """How the words of a row lie in the cache: outer dimensions by ``sizes`` and ``strides``, then ``together`` words."""

    width: int
    """Bytes of a word."""
    sizes: tuple[int, int, int]
    strides: tuple[int, int, int]
    """In words."""
    together: int

    @property
    def words(self) -> int:
        """Number of words of a row."""
        return math.prod(self.sizes) * self.together


class RowView(NamedTuple):
    """Rows of an array: block i begins ``i * stride`` bytes behind the array, and takes ``size`` bytes when packed."""

    stride: int
    size: int
    shape: RowShape


class BlockRows(NamedTuple):
    """Blocks of arrays that look alike, and where each array's are packed. Addresses in bytes."""

    view: RowView
    arrays: Sequence[int]
    packed: Sequence[int]
    """By array: where it begins, from the beginning of the packed memory on."""
    layout: PackedArray
    """How each of them is packed."""
    ids: NDArray[np.int64]
    """The block of the cache for each of its blocks; below 0: none."""


class RowTable(NamedTuple):
    """Rows of one shape, with so many heads."""

    shape: RowShape
    heads: int
    addresses: NDArray[np.int64]
    """``[rows, 3]``: in the cache, packed, and from one head to the next where they are packed, in words."""
    aligned: bool
    """All of them are multiples of ``ALIGNED``."""


class SumTable(NamedTuple):
    """Runs of arrays with so many heads."""

    heads: int
    head_bytes: int
    runs: NDArray[np.int64]
    """``[runs, 3]``: where the run lies, its blocks, and the number of the sum of its first head."""


def view_of(blocks: torch.Tensor) -> RowView:
    """The rows of an array ``[blocks, …]``, strided as it may be.

    Raises:
        ConfigError: the words of a block lie in more than ``OUTER`` strided dimensions.
    """
    each = blocks.element_size()
    dims = _merged(blocks.shape[1:], blocks.stride()[1:])
    together = dims.pop()[0] if dims and dims[-1][1] == 1 else 1
    if len(dims) > OUTER:
        raise ConfigError(f"kv connector: a KV cache of shape {tuple(blocks.shape)} with strides {blocks.stride()} is "
                          f"strided in more than {OUTER} dimensions of a block")
    pitch = blocks.stride(0) * each
    facts = [together * each, pitch, blocks.data_ptr(), *(stride * each for _, stride in dims)]
    width = next(width for width in WIDTHS if not any(fact % width for fact in facts))
    padded = [(1, 0)] * (OUTER - len(dims)) + [(size, stride * each // width) for size, stride in dims]
    sizes, strides = zip(*padded, strict=True)
    shape = RowShape(width, sizes, strides, together * each // width)
    return RowView(pitch, shape.words * width, shape)


def _merged(sizes: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Dimensions (size, stride) without those of size 1, and with neighbours that lie together as one."""
    out: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if out and out[-1][1] == size * stride:
            out[-1] = out[-1][0] * size, stride
        else:
            out.append((size, stride))
    return out


def tables(rows: Sequence[BlockRows], address: int) -> list[RowTable]:
    """One for each view and number of heads. ``address``: where the packed memory begins."""
    alike: dict[tuple[RowView, int], list[BlockRows]] = {}
    for one in rows:
        alike.setdefault((one.view, one.layout.heads), []).append(one)
    return [_table(view, heads, some, address) for (view, heads), some in alike.items()]


def _table(view: RowView, heads: int, rows: Sequence[BlockRows], address: int) -> RowTable:
    parts, aligned = [], not view.stride % ALIGNED and not view.size // heads % ALIGNED
    for one in rows:
        there, apart = _in_runs(one.layout)
        wanted = one.ids >= 0
        there, apart = there[wanted], apart[wanted]
        arrays, packed = np.array(one.arrays, np.int64), np.array(one.packed, np.int64) + address
        part = np.empty((len(arrays), len(there), 3), np.int64)
        part[:, :, 0] = arrays[:, None] + one.ids[wanted] * view.stride
        part[:, :, 1] = packed[:, None] + there
        part[:, :, 2] = apart // view.shape.width
        parts.append(part.reshape(-1, 3))
        aligned = aligned and not any((each % ALIGNED).any() for each in (arrays, packed, there, apart))
    return RowTable(view.shape, heads, np.concatenate(parts), aligned)


def _in_runs(packed: PackedArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each block: where its first head begins in the packed array, and how far its heads are apart there, in bytes."""
    blocks = np.arange(packed.first, packed.first + packed.blocks, dtype=np.int64)
    begin = np.maximum(blocks // packed.run * packed.run, packed.first)
    end = np.minimum((blocks // packed.run + 1) * packed.run, packed.first + packed.blocks)
    there = (begin - packed.first) * packed.block_bytes + (blocks - begin) * packed.head_bytes
    return there, (end - begin) * packed.head_bytes


def sum_tables(packed: Sequence[tuple[PackedArray, int]]) -> list[SumTable]:
    """Where the sums of packed arrays are made of, each with its address; sums are numbered array by array, as listed."""
    alike: dict[PackedArray, list[tuple[int, int]]] = {}
    before = 0
    for one, address in packed:
        alike.setdefault(one, []).append((address, before))
        before += one.sums
    tables: dict[tuple[int, int], list[NDArray[np.int64]]] = {}
    for one, places in alike.items():
        runs = np.array([(run.offset, run.blocks, one.sum_at(run.first, 0)) for run in one.runs(one.first, one.blocks)],
                        np.int64)
        each = np.tile(runs, (len(places), 1, 1))
        each[:, :, 0] += np.array(places, np.int64)[:, :1]
        each[:, :, 2] += np.array(places, np.int64)[:, 1:]
        tables.setdefault((one.heads, one.head_bytes), []).append(each.reshape(-1, 3))
    return [SumTable(heads, head_bytes, np.concatenate(runs)) for (heads, head_bytes), runs in tables.items()]
