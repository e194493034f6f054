"""Small files by which processes beside each other tell what they are at: written whole or not at all, as JSON of a struct.

A reader sees the old file or the new one, never half. What stands in them is said by ``record``, ``duty``, ``assignment``
and ``group``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import msgspec

FileT = TypeVar("FileT")
"""What stands in one of these files."""


def put(path: Path, raw: bytes) -> None:
    """Write a file.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    temporary.write_bytes(raw)
    os.replace(temporary, path)


def write(path: Path, value: msgspec.Struct) -> None:
    """Write a struct.

    Raises:
        OSError: it cannot be written.
    """
    put(path, msgspec.json.encode(value))


def read(path: Path, kind: type[FileT]) -> FileT | None:
    """What stands there; None where there is no file.

    Raises:
        ValueError: what stands there is none; names the file and the field.
        OSError: it cannot be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
