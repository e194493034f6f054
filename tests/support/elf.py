"""What a shared library says of itself (ELF, 64 bits, little-endian), read without other tools.

    found = read(path)
    found.undefined        names of functions that other libraries give it
    found.bind_now         all of them are looked up when it is loaded, not at their first call
    found.relro            the tables of their addresses are read-only from then on

Source of the layout: man 5 elf.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

_SEGMENT, _SECTION, _DYNAMIC, _SYMBOL = (struct.Struct(form) for form in ("<IIQQQQQQ", "<IIQQQQIIQQ", "<qQ", "<IBBHQQ"))
PT_DYNAMIC, PT_GNU_RELRO = 2, 0x6474E552
SHT_DYNSYM = 11
DT_BIND_NOW, DT_FLAGS, DT_FLAGS_1 = 24, 30, 0x6FFFFFFB
DF_BIND_NOW, DF_1_NOW = 8, 1


@dataclass(frozen=True)
class Library:
    """What is read of one."""

    undefined: frozenset[str]
    bind_now: bool
    relro: bool


def read(path: Path) -> Library:
    """Read a library.

    Raises:
        ValueError: it is no 64-bit little-endian ELF file.
    """
    raw = path.read_bytes()
    if raw[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path}: no 64-bit little-endian ELF file")
    segments_at, sections_at = struct.unpack_from("<QQ", raw, 32)
    segment_count, _, section_count = struct.unpack_from("<HHH", raw, 56)
    segments = [_SEGMENT.unpack_from(raw, segments_at + n * _SEGMENT.size) for n in range(segment_count)]
    sections = [_SECTION.unpack_from(raw, sections_at + n * _SECTION.size) for n in range(section_count)]
    tags: dict[int, int] = {}
    for kind, _, offset, _, _, size, _, _ in segments:
        if kind == PT_DYNAMIC:
            tags |= {tag: value for tag, value in _DYNAMIC.iter_unpack(raw[offset:offset + size]) if tag}
    undefined: set[str] = set()
    for _, kind, _, _, offset, size, link, _, _, _ in sections:
        if kind == SHT_DYNSYM:
            names = raw[sections[link][4]:][:sections[link][5]]
            symbols = _SYMBOL.iter_unpack(raw[offset:offset + size])
            undefined |= {names[name:names.index(b"\0", name)].decode()
                          for name, _, _, section, _, _ in symbols if name and not section}
    bind_now = DT_BIND_NOW in tags or bool(tags.get(DT_FLAGS, 0) & DF_BIND_NOW or tags.get(DT_FLAGS_1, 0) & DF_1_NOW)
    return Library(frozenset(undefined), bind_now, any(segment[0] == PT_GNU_RELRO for segment in segments))
