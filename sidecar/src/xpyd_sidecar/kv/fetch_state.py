"""What is known of the tries that a rank takes, and of what is in flight for them (``kv.fetching``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xpyd_sidecar.kv.buffer import BufferedCut, BufferPlace, TryId
from xpyd_sidecar.kv.fetch_steps import FetchPlan
from xpyd_sidecar.kv.manifests import Manifest
from xpyd_sidecar.kv.reach import TableSpan
from xpyd_sidecar.kv.selection import Piece


@dataclass
class BufferedPiece:
    """A piece in the buffer. ``sums``: its own, once prefill has told them."""

    piece: Piece
    owner: TryId
    manifest: int
    """Its number."""
    sums: NDArray[np.uint64] | None = None


@dataclass
class ManifestState:
    """A manifest of an open try in its session."""

    manifest: Manifest
    missing: int
    """Fetches of it that are not answered, or not begun."""
    taken: bool = False
    queued: bool = False
    pressed_s: float = 0.0
    """It is fetched ahead since prefill has pressed it; after so long it may be pressed again, if that comes to nothing."""


@dataclass
class FetchTry:
    """A try, as far as one source is concerned."""

    plan: FetchPlan
    link: int
    tables: tuple[TableSpan, ...] | None = None
    told: dict[int, ManifestState] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    """Manifests whose bytes are here, or not wanted, in whatever session."""
    sums: dict[int, NDArray[np.uint64]] = field(default_factory=dict)
    unproved: dict[int, list[tuple[tuple[Piece, ...], NDArray[np.uint64]]]] = field(default_factory=dict)
    """By manifest: pieces in their places, and their sums, until those of prefill come."""
    buffered: dict[int, list[BufferedPiece]] = field(default_factory=dict)
    """By manifest: what is in the buffer of it."""
    here: set[tuple[int, BufferedCut]] = field(default_factory=set)
    """By manifest: what was fetched and is in its blocks, or about to be, in whatever session. Fetched once more, it could
    be written there after the load has ended well, and nobody would look at its sums."""

    def note_here(self, manifest: int, batch: tuple[Piece, ...]) -> None:
        """These pieces of a manifest are in their blocks, or about to be."""
        self.here.update((manifest, cut_of(piece)) for piece in batch)


class QueuedFetch(NamedTuple):
    """What is to be fetched when there is room. ``ahead``: into places of the buffer, which it has."""

    owner: TryId
    manifest: int
    batch: tuple[Piece, ...]
    ahead: bool = False


@dataclass
class Flight:
    """A fetch. ``at``: as of ``Fetch``."""

    owner: TryId | None
    """None: its try is over, or has another session."""
    link: int
    manifest: int
    batch: tuple[Piece, ...]
    size: int
    at: int | BufferPlace | None
    here: bool = False
    """All of it was fetched."""
    sums: NDArray[np.uint64] | None = None
    """Those that it must have, where they are known otherwise than by its manifest."""


def cut_of(piece: Piece) -> BufferedCut:
    """Which blocks of which array a piece has, as the buffer knows them."""
    return BufferedCut(piece.region, piece.packed.first, piece.packed.blocks, piece.size)


def batch_sums(batch: tuple[Piece, ...], every: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The sums of a fetch's pieces, taken from those of its manifest, piece by piece."""
    return np.concatenate([piece.sums_in(every) for piece in batch])
