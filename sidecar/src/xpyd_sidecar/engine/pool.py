"""Host memory that is allocated once and handed out in pieces: pinned where there is CUDA, touched only as far as used.

Fresh memory for every copy costs more than the copy: the kernel maps and clears each page (on CPU a copy of 0.1 to 4 MiB
into fresh memory took three times as long as into memory used before), and CUDA pins it. Places come from a buddy
allocator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from xpyd_sidecar.engine.bounds import Chunk
from xpyd_sidecar.kv.buddy import Buddy, Usage


class Piece(NamedTuple):
    """Part of a pool; the one who took it gives it back."""

    chunk: Chunk
    offset: int


class Arena:
    """One allocation, made when first needed."""

    def __init__(self, make: Callable[[int], Chunk], size: int) -> None:
        self.size = size
        self._make = make
        self._whole: Chunk | None = None

    @property
    def made(self) -> bool:
        """Whether there is memory now."""
        return self._whole is not None

    def drop(self) -> None:
        """Give the memory back; chunks of it that are still held keep it."""
        self._whole = None

    def at(self, offset: int, size: int) -> Chunk:
        """``size`` bytes from ``offset`` on."""
        if self._whole is None:
            self._whole = self._make(self.size)
        whole = self._whole
        tensor = whole.tensor[offset:offset + size] if whole.tensor is not None else None
        return Chunk(tensor, whole.view[offset:offset + size])


class Pool:
    """An arena and what is free of it. Safe across threads."""

    def __init__(self, make: Callable[[int], Chunk], size: int) -> None:
        self._arena = Arena(make, size)
        self._buddy = Buddy(size)
        self._lock = threading.Lock()
        self._spare = False

    def spare(self, *, spare: bool) -> None:
        """Whether nobody has a use for the memory: then it goes back once it is empty, and nothing new is taken from it."""
        with self._lock:
            self._spare = spare
            self._drop_if_spare()

    def _drop_if_spare(self) -> None:
        if self._spare and not self._buddy.usage.used:
            self._arena.drop()

    @property
    def made(self) -> bool:
        """Whether there is memory now."""
        return self._arena.made

    def prepare(self) -> None:
        """Make the memory now, where that would hold up whoever comes first."""
        self._arena.at(0, 0)  # without the lock: a hook that asks meanwhile must not wait

    def take(self, size: int) -> Piece | None:
        """A piece of ``size`` bytes, or None where none is free in one part."""
        with self._lock:
            if self._spare:
                return None
            offset = self._buddy.allocate(size)
            return None if offset is None else Piece(self._arena.at(offset, size), offset)

    def give(self, piece: Piece) -> None:
        """Return a piece."""
        with self._lock:
            self._buddy.free(piece.offset)
            self._drop_if_spare()

    @property
    def usage(self) -> Usage:
        """What is handed out."""
        with self._lock:
            return self._buddy.usage
