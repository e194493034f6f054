"""The kernels that move rows and make sums. They need Triton, whose interpreter runs them on CPUs (TRITON_INTERPRET=1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from xpyd_sidecar.memory.device_rows import RowShape

WARPS = 8
SUM_WARPS = 4
SUM_TILE = 1024
"""Words that a program takes in at once."""
# Tables lie anywhere in one copy: were their alignment looked at, another kernel would be compiled while engines serve.
_TYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit(do_not_specialize=["work"], do_not_specialize_on_alignment=["table"])  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]  # noqa: PLR0917  (as Triton wants it)
        table, work, tiles: tl.constexpr, words: tl.constexpr, size1: tl.constexpr, size2: tl.constexpr,
        together: tl.constexpr, stride0: tl.constexpr, stride1: tl.constexpr, stride2: tl.constexpr, flat: tl.constexpr,
        head: tl.constexpr, out: tl.constexpr, tile: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr):
    """A program takes every nth tile; ``work`` is how many tiles all rows have; ``head``: words of one head."""
    for at in range(tl.program_id(0), work, tl.num_programs(0)):
        row = at // tiles
        word = (at % tiles) * tile + tl.arange(0, tile)
        mine = word < words
        cache = tl.load(table + 3 * row).to(tl.pointer_type(kind))
        packed = tl.load(table + 3 * row + 1).to(tl.pointer_type(kind))
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
        if head < words:
            apart = tl.load(table + 3 * row + 2)
            here = (word // head) * apart + word % head
        else:
            here = word
        if out:
            tl.store(packed + here, tl.load(cache + there, mask=mine), mask=mine)
        else:
            tl.store(cache + there, tl.load(packed + here, mask=mine), mask=mine)


def launch(table: torch.Tensor, shape: RowShape, *, heads: int, out: bool, programs: int, tile: int, aligned: bool) -> None:
    """Move all rows of a table ``[rows, 3]`` on the device that has it, in the current stream."""
    tiles = triton.cdiv(shape.words, tile)
    work = len(table) * tiles
    flat = shape.sizes == (1, 1, 1)
    _move[(min(programs, work),)](
        table, work, tiles, shape.words, shape.sizes[1], shape.sizes[2], shape.together, *shape.strides, flat,
        shape.words // heads, out, tile, _TYPES[shape.width], aligned, num_warps=WARPS)


@triton.jit(do_not_specialize_on_alignment=["table", "sums"])  # type: ignore[untyped-decorator]
def _sum(  # type: ignore[no-untyped-def]
        table, sums, head_bytes: tl.constexpr, whole: tl.constexpr, tile: tl.constexpr):
    """A program makes the sum of one head of one run (``kv.packing``). ``whole``: heads are made of whole words."""
    run, head = tl.program_id(0), tl.program_id(1)
    size = tl.load(table + 3 * run + 1) * head_bytes
    begin = tl.load(table + 3 * run) + head * size
    total = tl.zeros((tile,), tl.uint64)
    for start in range(0, (size + 7) // 8, tile):
        word = start + tl.arange(0, tile)
        if whole:
            value = tl.load(begin.to(tl.pointer_type(tl.uint64)) + word, mask=word < size // 8, other=0)
        else:
            value = tl.zeros((tile,), tl.uint64)
            for byte in tl.static_range(8):
                at = 8 * word + byte
                one = tl.load(begin.to(tl.pointer_type(tl.uint8)) + at, mask=at < size, other=0)
                value += one.to(tl.uint64) << (8 * byte)
        total += (2 * word + 1).to(tl.uint64) * (value ^ (value >> 32))
    tl.store(sums + tl.load(table + 3 * run + 2) + head, tl.sum(total, axis=0).to(tl.int64))


def launch_sums(table: torch.Tensor, sums: torch.Tensor, *, heads: int, head_bytes: int) -> None:
    """Make the sums of all runs of a table ``[runs, 3]``, each at its number in ``sums``, in the current stream."""
    _sum[(len(table), heads)](table, sums, head_bytes, head_bytes % 8 == 0, SUM_TILE, num_warps=SUM_WARPS)
