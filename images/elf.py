"""What a compiled file says of itself: for which processor it is, and which libraries it loads.

An image is made without running anything of it, so this is how a build notices what would not start. ELF's own
documentation is the System V ABI, chapters 4 and 5; only 64-bit little-endian files are read.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from images.platforms import Platform
from images.tools import ImageError
from images.tree import Tree

MAGIC = b"\x7fELF\x02\x01"
LOAD, DYNAMIC = 1, 2
END, NEEDED, STRINGS = 0, 1, 5
SEGMENT = struct.Struct("<IIQQQQQQ")
ENTRY = struct.Struct("<qQ")


class Elf(NamedTuple):
    """One compiled file."""

    machine: int
    needed: tuple[str, ...]
    """Names of libraries, as in ``libc.so.6``."""


def read(data: bytes) -> Elf | None:
    """What a file says, or None where it is no such file.

    Raises:
        ValueError: it is one, and broken.
    """
    if data[:6] != MAGIC:
        return None
    try:
        (machine,) = struct.unpack_from("<H", data, 18)
        (start,) = struct.unpack_from("<Q", data, 32)
        size, count = struct.unpack_from("<HH", data, 54)
        segments = [SEGMENT.unpack_from(data, start + number * size) for number in range(count)]
        return Elf(machine, tuple(_needed(data, segments)))
    except (struct.error, ValueError, StopIteration) as error:
        raise ValueError(f"a broken ELF file: {str(error) or 'an address outside of it'}") from None


def _needed(data: bytes, segments: Sequence[tuple[int, ...]]) -> list[str]:
    dynamic = next(((offset, length) for kind, _, offset, _, _, length, *_ in segments if kind == DYNAMIC), None)
    if dynamic is None:
        return []
    if dynamic[0] + dynamic[1] > len(data):
        raise ValueError("it ends too early")
    names, strings = [], None
    for tag, value in ENTRY.iter_unpack(data[dynamic[0]:dynamic[0] + dynamic[1] // ENTRY.size * ENTRY.size]):
        if tag == END:
            break
        if tag == NEEDED:
            names.append(value)
        elif tag == STRINGS:
            strings = value
    if strings is None:
        return []
    where = next(strings - address + offset for kind, _, offset, address, _, length, *_ in segments
                 if kind == LOAD and address <= strings < address + length)
    return [data[where + name:data.index(b"\0", where + name)].decode() for name in names]


def check(tree: Tree, platform: Platform, below: Tree | None = None) -> int:
    """Look at everything that is compiled in a tree, which lies over another one; how many files these are.

    Raises:
        ImageError: one is broken, for another processor, or needs a library that is in neither tree.
    """
    libraries = {path.rpartition("/")[2] for files in (tree, below or Tree()) for path, _ in files}
    wrong, seen = [], 0
    for path, node in tree:
        try:
            found = read(node.data or b"")
        except ValueError as error:
            wrong.append(f"{path} is {error}")
            continue
        if found is None:
            continue
        seen += 1
        if found.machine != platform.elf:
            wrong.append(f"{path} is for processors of kind {found.machine}, not {platform.elf}")
        wrong += [f"{path} needs {name}" for name in found.needed if name.rpartition("/")[2] not in libraries]
    if wrong:
        raise ImageError(f"the image for {platform.name} would not work: {'; '.join(wrong[:5])}")
    return seen
