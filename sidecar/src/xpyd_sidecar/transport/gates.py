"""What lets an I/O thread write into blocks of the cache without ever writing into blocks that have been given back.

A gate stands for one try of a load. The engine's thread opens it with the request to the source and closes it in the same
call that makes the load's report, or that a newer try takes its place in. The I/O thread writes only inside:

    engine's thread   open ───────────────────────── close ──▶ report withheld until nobody is inside ──▶ blocks are free
    I/O thread             enter, write, leave, enter, write, leave │ enter: refused

Nobody waits for anybody: ``enter`` and ``close`` hold a lock for a few instructions, the write happens outside of it.
All gates of one receiver are entered by its one I/O thread, and a newer try is asked for by that thread: so bytes of an
older try are in place before the newer one's can come (docs/decisions/0013).
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from xpyd_sidecar.kv.mapping import SourceArray
from xpyd_sidecar.transport.moves import Scatter


class Gate:
    """Open until closed, once. Also a ``memory.marks.CopyMark``: done when closed and nobody is inside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = True
        self._inside = False

    def enter(self) -> bool:
        """Begin to write, if still open; then ``leave`` must follow."""
        with self._lock:
            self._inside = self._open
            return self._inside

    def leave(self) -> None:
        """The write has ended."""
        with self._lock:
            self._inside = False

    def close(self) -> None:
        """No write begins from here on."""
        with self._lock:
            self._open = False

    def done(self) -> bool:
        """Whether nothing is written any more."""
        with self._lock:
            return not self._open and not self._inside


class CacheArray(NamedTuple):
    """The bytes of one array of blocks, block after block, in host memory."""

    view: memoryview
    block_bytes: int


class LoadTarget(NamedTuple):
    """Where the blocks of one source of a try belong.

    ``tables``: by group, the index of the first block, and the blocks, 64-bit; ``groups``: by array of this rank, empty
    where there is one. ``caches``: by array of this rank; None where blocks cannot be written directly. ``units``: by array
    of the source.
    """

    gate: Gate
    tables: Sequence[tuple[int, array[int]]]
    groups: Sequence[int]
    caches: Sequence[CacheArray | None]
    units: Mapping[int, SourceArray]

    def scatter(self, region: int, first: int, count: int, *, cover: bool) -> Scatter | None:
        """The places of blocks ``first``.. of a region; None: take staging memory."""
        unit = self.units[region]
        cache = self.caches[unit.region] if unit.region < len(self.caches) else None
        if cache is None:
            return None
        begin, table = self.tables[self.groups[unit.region] if self.groups else 0]
        at = first - begin
        ids = memoryview(table)[at:at + count]
        if unit.heads:
            return Scatter(cache.view, unit.size, count, ids, cache.block_bytes, unit.offset, cover)
        return Scatter(cache.view, cache.block_bytes, count, ids, cache.block_bytes, 0, cover)
