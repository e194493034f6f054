"""Where blocks lie in a paged cache and in packed memory: the tables of addresses from which ``device_kernel`` moves them.

A block of one array is a row: it has an address in the cache, where it may be strided, and one in packed memory, where its
words follow each other in logical order. Arithmetic alone: nothing is moved here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from xpyd_sidecar.errors import ConfigError

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
        """Of a row."""
        return math.prod(self.sizes) * self.together


class RowView(NamedTuple):
    """Rows of an array: block i begins ``i * stride`` bytes behind the array, and takes ``size`` bytes when packed."""

    stride: int
    size: int
    shape: RowShape


class BlockRows(NamedTuple):
    """Blocks ``ids`` of arrays that look alike, and where each array's are packed. Addresses in bytes."""

    view: RowView
    arrays: Sequence[int]
    packed: Sequence[int]
    """By array: of its first block, from the beginning of the packed memory on; the others follow."""
    ids: NDArray[np.int64]


class PackedRows(NamedTuple):
    """Rows, and the packed memory that all of them are in: so many bytes from an address on."""

    rows: Sequence[BlockRows]
    memory: torch.Tensor
    address: int
    size: int

    def at(self, address: int) -> PlacedRows:
        """The same, packed elsewhere."""
        return self.rows, address


PlacedRows = tuple[Sequence[BlockRows], int]
"""Rows, and where their packed memory begins."""


class RowTable(NamedTuple):
    """Rows of one shape."""

    shape: RowShape
    addresses: NDArray[np.int64]
    """``[rows, 2]``: in the cache and packed."""
    aligned: bool
    """All of them are multiples of ``ALIGNED``."""


def view_of(blocks: torch.Tensor) -> RowView:
    """Of an array ``[blocks, …]``, strided as it may be.

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


def tables(placed: Sequence[PlacedRows]) -> list[RowTable]:
    """One for each view."""
    alike: dict[RowView, list[tuple[BlockRows, int]]] = {}
    for rows, address in placed:
        for one in rows:
            alike.setdefault(one.view, []).append((one, address))
    return [_table(view, some) for view, some in alike.items()]


def _table(view: RowView, rows: Sequence[tuple[BlockRows, int]]) -> RowTable:
    arrays = np.array([at for one, _ in rows for at in one.arrays], np.int64)
    packed = np.array([address + at for one, address in rows for at in one.packed], np.int64)
    ids = np.concatenate([one.ids for one, _ in rows for _ in one.arrays])
    counts = np.array([len(one.ids) for one, _ in rows for _ in one.arrays], np.int64)
    nth = np.arange(len(ids), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    addresses = np.empty((len(ids), 2), np.int64)
    np.add(np.repeat(arrays, counts), ids * view.stride, out=addresses[:, 0])
    np.add(np.repeat(packed, counts), nth * view.size, out=addresses[:, 1])
    aligned = not (view.stride | view.size) % ALIGNED and not ((arrays | packed) % ALIGNED).any()
    return RowTable(view.shape, addresses, aligned)
