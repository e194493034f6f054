"""What an engine has found of the peers that it takes KV from, as its connector tells: ``<run dir>/pairs-<dp rank>.json``.

    refused    prefill engines whose KV it cannot take: routers make no such pair until the entry goes
    links      words on links that are worse than they could be, for people

Written whole by the connector's scheduler side when it changes; read by the agent, which tells routers (``membership``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec

from xpyd_sidecar.contract import run_folder
from xpyd_sidecar.contract.ids import Incarnation, InstanceName

MOST_REFUSED: Final = 48
MOST_LINKS: Final = 4
"""Together less than half of what a beat may have (64 KiB), whatever they say."""
WORDS_MAX: Final = 200
"""Bytes; of the names below, too."""
NAME_MAX: Final = 128
INCARNATION_MAX: Final = 64
MORE: Final = "…"
Words = Annotated[str, msgspec.Meta(max_length=WORDS_MAX)]


class RefusedPeer(msgspec.Struct, frozen=True):
    """A prefill engine whose KV a decode engine cannot take."""

    instance: Annotated[InstanceName, msgspec.Meta(min_length=1, max_length=NAME_MAX)]
    incarnation: Annotated[Incarnation, msgspec.Meta(max_length=INCARNATION_MAX)]
    """Of its start that was met: another start is another engine."""
    reason: Words = ""


RefusedPeers = Annotated[tuple[RefusedPeer, ...], msgspec.Meta(max_length=MOST_REFUSED)]
LinkWords = Annotated[tuple[Words, ...], msgspec.Meta(max_length=MOST_LINKS)]


class PairNotes(msgspec.Struct, frozen=True):
    """Of one data-parallel rank. Fields that are not known are ignored."""

    incarnation: Incarnation
    """Of the engine that has written it: what one of before has found says nothing of this one."""
    refused: RefusedPeers = ()
    links: LinkWords = ()


def cut(words: str, most: int = WORDS_MAX) -> str:
    """Words of any length, as long as they may be: ``most`` bytes."""
    raw = words.encode(errors="replace")
    if len(raw) <= most:
        return raw.decode()
    return raw[:most - len(MORE.encode())].decode(errors="ignore") + MORE


def path_of(run_dir: Path, dp_rank: int) -> Path:
    """Where the notes of one DP rank are."""
    return run_dir / f"pairs-{dp_rank}.json"


def write(run_dir: Path, dp_rank: int, notes: PairNotes) -> None:
    """Write them, so that they are there whole or not at all.

    Raises:
        OSError: they cannot be written.
    """
    run_folder.write(path_of(run_dir, dp_rank), notes)


def read(run_dir: Path, dp_rank: int) -> PairNotes | None:
    """What stands there; None where nobody has said anything.

    Raises:
        ValueError: what stands there is none; names the file and the field.
        OSError: it cannot be read.
    """
    return run_folder.read(path_of(run_dir, dp_rank), PairNotes)
