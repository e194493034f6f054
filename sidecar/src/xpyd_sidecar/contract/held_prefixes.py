"""Which prefixes that routers have named are in an engine's prefix cache: ``<run dir>/held-<dp rank>.bin``.

    core ──prompts, their cuts──▶ connector ──file, once a second──▶ agent ──what changed──▶ routers

A key is what routers call a prefix (``prefix_cuts``). Nothing else of a prompt stands here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from xpyd_sidecar.contract import run_folder
from xpyd_sidecar.contract.ids import Incarnation

MOST: Final = 8192
"""Keys of one rank: those of some 200 long prompts."""
KEY_BYTES: Final = 8
_KEY: Final = struct.Struct(">Q")
_DECODER: Final = msgspec.msgpack.Decoder[tuple[Incarnation, bytes, bytes]](tuple[Incarnation, bytes, bytes])


class HeldPrefixes(NamedTuple):
    """Keys of prefixes, by what the engine knows of them."""

    held: frozenset[int] = frozenset()
    """In its cache."""
    absent: frozenset[int] = frozenset()
    """It was asked for them lately, and they are not there: evicted, or never computed."""


def pack(keys: Iterable[int]) -> bytes:
    """Keys one after the other, 8 bytes each, big-endian."""
    return b"".join(map(_KEY.pack, keys))


def unpack(raw: bytes) -> list[int]:
    """The keys that ``pack`` wrote.

    Raises:
        ValueError: its length is that of no keys.
    """
    if len(raw) % KEY_BYTES:
        raise ValueError(f"{len(raw)} bytes are no keys of {KEY_BYTES}")
    return [key for (key,) in _KEY.iter_unpack(raw)]


def path_of(run_dir: Path, dp_rank: int) -> Path:
    """Where it stands."""
    return run_dir / f"held-{dp_rank}.bin"


def write(run_dir: Path, dp_rank: int, incarnation: Incarnation, prefixes: HeldPrefixes) -> None:
    """Write it, so that it is there whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    raw = msgspec.msgpack.encode((incarnation, pack(prefixes.held), pack(prefixes.absent)))
    run_folder.put(path_of(run_dir, dp_rank), raw)


def read(run_dir: Path, dp_rank: int) -> tuple[Incarnation, HeldPrefixes] | None:
    """Whose it is and what stands there; None where nobody has said anything.

    Raises:
        ValueError: what stands there is none; names the file.
        OSError: it cannot be read.
    """
    path = path_of(run_dir, dp_rank)
    try:
        incarnation, held, absent = _DECODER.decode(path.read_bytes())
        return incarnation, HeldPrefixes(frozenset(unpack(held)), frozenset(unpack(absent)))
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
