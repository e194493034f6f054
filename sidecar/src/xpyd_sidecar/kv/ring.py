"""Ranges of decode's ring: memory that fetched bytes lie in until they are in their blocks. No memory is behind them here.

Laws
1. Ranges that are handed out never overlap, and are given back once.
2. A session has at most an eighth of the ring, or one range where that is larger.
3. A range whose fetch cannot be stopped stays with its session after that has ended, until whoever fetches says that
   nothing writes into it any more; how much that is, is known (``stuck_bytes``).
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
    """Hands out ranges of one rank's ring to its sessions, which have numbers."""

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
        """Bytes of the whole ring."""
        return self._extents.size

    @property
    def session_bytes_max(self) -> int:
        """Most bytes that a session may have; a fetch that can be cut has no more of them."""
        return self._extents.size // SHARE

    @property
    def used_bytes(self) -> int:
        """Bytes that are handed out."""
        return self._extents.used

    @property
    def stuck_bytes(self) -> int:
        """Bytes that sessions which have ended still hold."""
        return sum(self._of[session] for session in self._ended)

    def take(self, session: int, size: int) -> int | None:
        """Hand out ``size`` bytes to a session. Returns where they begin, in bytes; None: there are not so many now.

        Raises:
            ValueError: never will there be so many, or none are asked for.
        """
        want = self._extents.round_up(size)
        if size < 1 or want > self._extents.size:
            raise ValueError(f"ring: {size} bytes, of {self._extents.size}")
        mine = self._of.get(session, 0)
        if mine and mine + want > self.session_bytes_max:
            return None
        at = self._extents.take(size)
        if at is not None:
            self._of[session] = mine + want
        return at

    def give(self, session: int, at: int, size: int) -> None:
        """Take back the range of ``size`` bytes that begins at ``at``.

        Raises:
            ValueError: it is not handed out.
        """
        self._extents.give(at, size)
        self._given(at)
        self._of[session] -= self._extents.round_up(size)
        if not self._of[session]:
            del self._of[session]
            self._ended.discard(session)

    def on_session_ended(self, session: int) -> None:
        """A session has ended: bytes that it still holds count as stuck until they are given back."""
        if session in self._of:
            self._ended.add(session)
