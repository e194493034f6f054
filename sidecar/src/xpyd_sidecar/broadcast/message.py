"""How a message of several buffers lies in a chunk. Pure.

    0       4      8         16              8 + 8k
    +-------+------+---------+-----+---------+-------+--------+-------+--------+
    | count | side | bytes 0 | ... | bytes k | (pad) | part 0 | (pad) | part 1 | ...
    +-------+------+---------+-----+---------+-------+--------+-------+--------+

Native byte order; it never leaves the host. Parts begin at multiples of 64 bytes, so that they can be viewed as arrays of
any type. ``side`` is 0, or the number of the side segment in which the parts lie, from its offset 0 on.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from xpyd_sidecar.broadcast.layout import LINE

PARTS_MAX: Final = 1024
HEAD_OF_ONE: Final = LINE
"""Bytes before the part of a message that has one."""
_HEAD = struct.Struct("=II")
_ONE = struct.Struct("=IIQ")


class Places(NamedTuple):
    """Where the parts of one message lie."""

    offsets: tuple[int, ...]
    """From the beginning of the chunk or side segment, bytes."""
    end: int
    """Bytes that it takes there."""


class Head(NamedTuple):
    """What a chunk says about its message."""

    side: int
    lengths: tuple[int, ...]
    """Bytes of each part."""


def head_bytes(count: int) -> int:
    """Bytes before the first part, in the chunk."""
    return align(_HEAD.size + 8 * count)


def align(size: int) -> int:
    """The next multiple of 64."""
    return (size + LINE - 1) & -LINE


def places(lengths: Sequence[int], start: int) -> Places:
    """Where parts of these lengths lie, the first one at ``start``."""
    offsets = []
    for length in lengths:
        start = align(start)
        offsets.append(start)
        start += length
    return Places(tuple(offsets), start)


def write_head(chunk: memoryview, at: int, side: int, lengths: tuple[int, ...]) -> None:
    """Write the head at offset ``at``."""
    if len(lengths) == 1:
        _ONE.pack_into(chunk, at, 1, side, lengths[0])
        return
    _HEAD.pack_into(chunk, at, len(lengths), side)
    struct.pack_into(f"={len(lengths)}Q", chunk, at + _HEAD.size, *lengths)


def read_head(chunk: memoryview, at: int) -> Head:
    """Read the head at offset ``at``.

    Raises:
        ValueError: it cannot be one: more than ``PARTS_MAX`` parts.
    """
    count, side, first = _ONE.unpack_from(chunk, at)
    if count == 1:
        return Head(side, (first,))
    if count > PARTS_MAX:
        raise ValueError(f"a message of {count} parts, at most {PARTS_MAX}")
    return Head(side, struct.unpack_from(f"={count}Q", chunk, at + _HEAD.size))
