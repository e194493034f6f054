"""Small parts of images: Debian packages, wheels, compiled files, written by hand; and `images` itself on the path.

    from image_parts import deb, elf_file, wheel
"""

from __future__ import annotations

import io
import struct
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # tools of the repository, which is not a package

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SEGMENT = struct.Struct("<IIQQQQQQ")
BASE = 0x400000


def tar(files: Mapping[str, bytes | str], mode: int = 0o644, packing: str = "") -> bytes:
    """An archive of files; a string is the target of a symbolic link, a name that ends with ``/`` a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=f"w:{packing}") as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            entry = tarfile.TarInfo(name.rstrip("/"))
            entry.mode, entry.mtime = mode, 1
            if name.endswith("/"):
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            elif isinstance(data, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, data
            else:
                entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data if isinstance(data, bytes) else b""))
    return buffer.getvalue()


def deb(name: str, files: Mapping[str, bytes | str], packing: str = "xz", version: str = "1.0-1") -> bytes:
    """A Debian package."""
    control = f"Package: {name}\nVersion: {version}\nDescription: for a test\n of several lines\n".encode()
    parts = {"debian-binary": b"2.0\n", "control.tar.xz": tar({"./control": control}, packing="xz"),
             f"data.tar.{packing}": tar({f"./{path}": data for path, data in files.items()}, packing=packing)}
    return b"!<arch>\n" + b"".join(
        f"{part:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode() + data + b"\n" * (len(data) % 2)
        for part, data in parts.items())


def wheel(folder: Path, name: str, files: Mapping[str, bytes], *, tag: str = "py3-none-any",
          programs: Sequence[str] = ()) -> Path:
    """A wheel with entry points (``program=module:function``); files named ``….so`` may be executed."""
    path, info = folder / f"{name}-1.0-{tag}.whl", f"{name}-1.0.dist-info"
    points = "".join(f"{point}\n" for point in ("[console_scripts]", *programs))
    every = {**files, f"{info}/METADATA": f"Name: {name}\nVersion: 1.0\n".encode(), f"{info}/RECORD": tag.encode(),
             f"{info}/WHEEL": tag.encode(), **({f"{info}/entry_points.txt": points.encode()} if programs else {})}
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in every.items():
            entry = zipfile.ZipInfo(file)
            entry.external_attr = (0o755 if file.endswith(".so") else 0o644) << 16
            archive.writestr(entry, data)
    return path


def elf_file(machine: int, needed: Sequence[str] = ()) -> bytes:
    """A compiled file that names libraries and holds nothing else."""
    names, places = b"\0", []
    for name in needed:
        places.append(len(names))
        names += name.encode() + b"\0"
    at = HEADER.size + 2 * SEGMENT.size
    entries = [(1, place) for place in places] + [(5, BASE + at), (0, 0), (1, 1 << 20)]  # nothing counts behind the end
    dynamic = b"".join(struct.pack("<qQ", *entry) for entry in entries)
    segments = SEGMENT.pack(1, 4, at, BASE + at, BASE + at, len(names), len(names), 4096) + SEGMENT.pack(
        2, 4, at + len(names), 0, 0, len(dynamic), len(dynamic), 8)
    head = HEADER.pack(b"\x7fELF\x02\x01\x01", 3, machine, 1, 0, HEADER.size, 0, 0, HEADER.size, SEGMENT.size, 2, 0, 0, 0)
    return head + segments + names + dynamic
