"""Reads which prefixes are in the caches of an engine's ranks, each file only where it has changed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from xpyd_sidecar.contract import held_prefixes
from xpyd_sidecar.contract.held_prefixes import HeldPrefixes
from xpyd_sidecar.contract.ids import Incarnation

_Read = tuple[tuple[int, int], tuple[Incarnation, HeldPrefixes]]


class HeldPrefixFiles:
    """The files of one run folder."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._read: dict[int, _Read] = {}
        """By rank: which file it was, and what stood there."""
        self._merged: tuple[list[_Read], HeldPrefixes] = ([], HeldPrefixes())

    def read(self, ranks: Iterable[int], incarnation: Incarnation) -> HeldPrefixes | None:
        """What the ranks of this life of the engine hold, one or the other of them; None while one of them says nothing.

        Raises:
            ValueError: what stands in a file is none.
            OSError: a file cannot be read.
        """
        found = []
        for rank in ranks:
            one = self._of(rank)
            if one is None or one[1][0] != incarnation:
                return None
            found.append(one)
        if found != self._merged[0]:
            held = frozenset[int]().union(*(one.held for _, (_, one) in found))
            absent = frozenset[int]().union(*(one.absent for _, (_, one) in found))
            self._merged = found, HeldPrefixes(held, absent - held)
        return self._merged[1]

    def _of(self, rank: int) -> _Read | None:
        try:
            stat = held_prefixes.path_of(self._run_dir, rank).stat()
        except FileNotFoundError:
            return None
        which = stat.st_ino, stat.st_mtime_ns
        known = self._read.get(rank)
        if known is not None and known[0] == which:
            return known
        read = held_prefixes.read(self._run_dir, rank)
        if read is None:
            return None
        self._read[rank] = which, read
        return self._read[rank]
