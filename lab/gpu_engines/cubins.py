"""GPU code of other chips, taken out of a library, so that it packs small.

CUDA's compiler embeds in a library, for each chip that it was asked for, machine code (a cubin) or PTX, in fatbins:

    fatbin   magic 0xBA55ED50 (4) · version (2) · bytes of this header (2) · bytes of all entries (8) · entries
    entry    kind (2: a cubin, 1: PTX) (2) · … (2) · bytes of this header (4) · of the code (8) · … · chip at 28 (4) · code

An unwanted entry's code becomes zeros: nothing moves, so the library is loaded as before, and the chip that is there never
asks for it. The layout is NVIDIA's own (``fatbinary_section.h`` has the outer half; the inner one was read off files).
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

MAGIC: Final = struct.pack("<I", 0xBA55ED50)
FATBIN: Final = struct.Struct("<HHQ")
ENTRY: Final = struct.Struct("<HHIQ")
CHIP_AT: Final = 28
CUBIN: Final = 2
LEAST_HEADER, MOST_HEADER = 32, 4096


class Code(NamedTuple):
    """One entry: where its code is in the file, and the chip it is for (90: H100, H200)."""

    start: int
    size: int
    kind: int
    chip: int


def codes(library: bytes | bytearray) -> Iterator[Code]:
    """Every entry of every fatbin of a library."""
    at = library.find(MAGIC)
    while at >= 0:
        version, header, size = FATBIN.unpack_from(library, at + len(MAGIC))
        place, end = at + header, at + header + size
        if version != 1 or end > len(library):  # four bytes that look like the magic
            at = library.find(MAGIC, at + 1)
            continue
        while place + LEAST_HEADER <= end:
            kind, _, skip, length = ENTRY.unpack_from(library, place)
            if not LEAST_HEADER <= skip <= MOST_HEADER or place + skip + length > end:
                break
            yield Code(place + skip, length, kind, struct.unpack_from("<I", library, place + CHIP_AT)[0])
            place += skip + length
        at = library.find(MAGIC, end)


def strip(library: bytes, chips: Collection[int]) -> bytes:
    """The library with machine code for ``chips`` alone.

    Raises:
        ValueError: it has none for them.
    """
    out, kept = bytearray(library), 0
    for code in codes(library):
        if code.kind == CUBIN and code.chip in chips:
            kept += code.size
        else:
            out[code.start:code.start + code.size] = bytes(code.size)
    if not kept:
        raise ValueError(f"the library has no code for {', '.join(map(str, sorted(chips)))}")
    return bytes(out)
