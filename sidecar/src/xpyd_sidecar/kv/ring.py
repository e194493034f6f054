"""Ranges of decode's ring: memory that fetched bytes lie in until they are in their blocks. No memory is behind them here.

Laws
1. Ranges that are handed out never overlap, and are given back once.
2. A session has at most an eighth of the ring, or one range where that is larger.
3. A range whose fetch cannot be stopped stays with its session after that has ended, until whoever fetches says that
   nothing writes into it any more; how much that is, is known (``stuck``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from xpyd_sidecar.kv.extents import Extents

SHARE: Final = 8
"""One part of so many is a session's."""
UNIT: Final = 256
"""Bytes, of which ranges begin at multiples."""


class Ring:
    """Of one rank. Sessions have numbers."""

    def __init__(self, size: int, given: Callable[[int], None] = lambda _: None) -> None:
        """``size``: bytes; 0: nothing is fetched into it. ``given``: told where each range began that is given back."""
        self._given = given
        self._extents = Extents(size, UNIT)
        self._of: dict[int, int] = {}
        """By session: bytes that it has."""
        self._ended: set[int] = set()
        """Sessions that have ended and still have some."""

    @property
    def size(self) -> int:
        """Bytes, of all of it."""
        return self._extents.size

    @property
    def most(self) -> int:
        """Bytes that a session may have, and of which a fetch has no more where it can be cut."""
        return self._extents.size // SHARE

    @property
    def used(self) -> int:
        """Bytes."""
        return self._extents.used

    @property
    def stuck(self) -> int:
        """Bytes of sessions that have ended."""
        return sum(self._of[session] for session in self._ended)

    def take(self, session: int, size: int) -> int | None:
        """Where ``size`` bytes are for a session; None: not now.

        Raises:
            ValueError: never will there be so many, or none are asked for.
        """
        want = self._extents.rounded(size)
        if size < 1 or want > self._extents.size:
            raise ValueError(f"ring: {size} bytes, of {self._extents.size}")
        mine = self._of.get(session, 0)
        if mine and mine + want > self.most:
            return None
        at = self._extents.take(size)
        if at is not None:
            self._of[session] = mine + want
        return at

    def give(self, session: int, at: int, size: int) -> None:
        """Take a range back.

        Raises:
            ValueError: it is not handed out.
        """
        self._extents.give(at, size)
        self._given(at)
        self._of[session] -= self._extents.rounded(size)
        if not self._of[session]:
            del self._of[session]
            self._ended.discard(session)

    def ended(self, session: int) -> None:
        """A session has ended: what it still has is stuck until it is given back."""
        if session in self._of:
            self._ended.add(session)
