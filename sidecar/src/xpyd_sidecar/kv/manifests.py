"""What prefill tells of copies in its store, and what decode says of them: MANIFEST, SUMS, ASK, TAKEN, BUSY, DONE.

A manifest is one lease of the store: ``arrays`` arrays, one behind the other, each with the same blocks, packed as
``kv.packing`` says. Where each begins follows from the geometry that both sides know (``layout``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from xpyd_sidecar.kv.array_layout import ArrayLayout
from xpyd_sidecar.kv.extents import round_up
from xpyd_sidecar.kv.packing import PackedArray

ALIGN: Final = 256
"""Bytes, of which the begin of each array in the store is a multiple."""
SUMS_MOST: Final = (1 << 17) - 8
"""Of one manifest: they are told in one frame (``wire.SUMS_MAX``)."""
SPAN_MAX: Final = 1 << 24
"""Blocks that a prompt may have, and a manifest may name."""


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """Blocks ``first`` to ``first + count - 1`` of arrays ``region`` to ``region + arrays - 1`` lie at ``offset``."""

    number: int
    """Of its try on this rank, from 0 on."""
    region: int
    arrays: int
    first: int
    count: int
    offset: int
    """In prefill's store, in bytes."""


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """Body of ASK: tell this rank of decode what there is of a try."""

    takers: int
    """How many ranks of decode take from this one of prefill's."""
    nothing: bool = False
    """This one wants nothing of it: as if it said TAKEN to all of it, and DONE."""


class ManifestTaken(msgspec.Struct, frozen=True, array_like=True):
    """Body of TAKEN: its bytes are in decode's own memory, or not wanted."""

    number: int


class TryDone(msgspec.Struct, frozen=True, array_like=True):
    """Body of DONE: all that this rank wanted of a try is in place, and right."""

    size: int
    """Bytes that were placed of it; for what is counted, nothing follows from it."""


class Busy(msgspec.Struct, frozen=True, array_like=True):
    """Body of BUSY: decode has no room for a manifest before its blocks are allotted."""

    number: int
    retry_s: float


class Sums(msgspec.Struct, frozen=True, array_like=True):
    """Body of SUMS: those of a manifest, 8 bytes each, little endian: by array, then as ``PackedArray.sums`` says."""

    number: int
    sums: bytes


class PlacedArray(NamedTuple):
    """An array of a manifest, and where it begins in the store."""

    region: int
    packed: PackedArray
    offset: int


def layout(manifest: Manifest, arrays: Sequence[ArrayLayout]) -> list[PlacedArray]:
    """The arrays of a manifest. ``arrays``: all of the rank that tells of it.

    Raises:
        ValueError: it names blocks or arrays that there cannot be, or has more sums than can be told.
    """
    if manifest.arrays < 1 or manifest.region < 0 or manifest.region + manifest.arrays > len(arrays):
        raise ValueError(f"arrays {manifest.region} to {manifest.region + manifest.arrays - 1} of {len(arrays)}")
    if manifest.first < 0 or manifest.count < 1 or manifest.first + manifest.count > SPAN_MAX or manifest.offset < 0:
        raise ValueError(f"blocks {manifest.first} to {manifest.first + manifest.count - 1} at {manifest.offset}")
    found, at, sums = [], manifest.offset, 0
    for region in range(manifest.region, manifest.region + manifest.arrays):
        one = arrays[region]
        packed = PackedArray(manifest.first, manifest.count, one.heads, one.head_bytes, one.run)
        found.append(PlacedArray(region, packed, at))
        at += round_up(packed.size, ALIGN)
        sums += packed.sums
    if sums > SUMS_MOST:
        raise ValueError(f"{manifest.count} blocks with {sums} sums")
    return found


def most_blocks(arrays: Sequence[ArrayLayout]) -> int:
    """How many neighbouring blocks a manifest of these arrays may have for its sums to go into one frame; at least one."""
    edges = sum(2 * one.heads for one in arrays)  # runs of which a manifest has a part
    return max(1, int((SUMS_MOST - edges) // sum(one.heads / one.run for one in arrays)))
