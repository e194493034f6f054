"""Arithmetic on whole blocks.

KV moves in whole blocks only: what is inside a block (order of tokens and dimensions) is the attention kernel's business.
The last block of a prompt may be filled in part; it moves with the last chunk, when it is final.

    prompt of 300 tokens, blocks of 128         |----0----|----1----|--2-|
    chunk 1 computes tokens   0..199            |---------|-----         → block 0 is whole
    chunk 2 computes tokens 200..299                       ----|----|    → blocks 1 and 2 (the tail)
"""

from __future__ import annotations

from collections.abc import Iterator


def blocks_of(tokens: int, block_size: int) -> int:
    """How many blocks ``tokens`` tokens take."""
    return -(-tokens // block_size)


def runs(first: int, count: int, block_bytes: int, most_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut ``count`` blocks from ``first`` on into ``(first, count)`` runs of ``most_bytes`` at most, one block at least."""
    step = max(1, most_bytes // block_bytes)
    for start in range(first, first + count, step):
        yield start, min(step, first + count - start)


def overlap(first: int, count: int, wanted_first: int, wanted_count: int) -> tuple[int, int]:
    """The part of blocks ``[first, first + count)`` inside the wanted ones, as ``(first, count)``; count 0 when none."""
    start = max(first, wanted_first)
    end = min(first + count, wanted_first + wanted_count)
    return start, max(0, end - start)
