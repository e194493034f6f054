"""The kernel that moves rows. Needs Triton; its interpreter runs it on a CPU (``TRITON_INTERPRET=1``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from xpyd_sidecar.memory.device_rows import RowShape

WARPS = 8
_TYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit(do_not_specialize=["work"])  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]  # noqa: PLR0917  (as Triton wants it)
        table, work, tiles: tl.constexpr, words: tl.constexpr, size1: tl.constexpr, size2: tl.constexpr,
        together: tl.constexpr, stride0: tl.constexpr, stride1: tl.constexpr, stride2: tl.constexpr, flat: tl.constexpr,
        out: tl.constexpr, tile: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr):
    """A program takes every nth tile; ``work`` is how many tiles all rows have."""
    for at in range(tl.program_id(0), work, tl.num_programs(0)):
        row = at // tiles
        word = (at % tiles) * tile + tl.arange(0, tile)
        mine = word < words
        cache = tl.load(table + 2 * row).to(tl.pointer_type(kind))
        packed = tl.load(table + 2 * row + 1).to(tl.pointer_type(kind))
        if aligned:
            packed = tl.multiple_of(packed, 16)
            if flat:
                cache = tl.multiple_of(cache, 16)
        if flat:
            there = word
        else:
            outer = word // together
            second = outer // size2
            there = (second // size1) * stride0 + (second % size1) * stride1 + (outer % size2) * stride2 + word % together
        if out:
            tl.store(packed + word, tl.load(cache + there, mask=mine), mask=mine)
        else:
            tl.store(cache + there, tl.load(packed + word, mask=mine), mask=mine)


def launch(table: torch.Tensor, shape: RowShape, *, out: bool, programs: int, tile: int, aligned: bool) -> None:
    """Move all rows of a table ``[rows, 2]`` on the device that has it, in the current stream."""
    tiles = triton.cdiv(shape.words, tile)
    work = len(table) * tiles
    flat = shape.sizes == (1, 1, 1)
    _move[(min(programs, work),)](
        table, work, tiles, shape.words, shape.sizes[1], shape.sizes[2], shape.together, *shape.strides, flat, out, tile,
        _TYPES[shape.width], aligned, num_warps=WARPS)
