"""Bytes of a router's memory that each client key has, where there are several keys, so that no one has all. Pure.

Laws
  * A key has at most ``SHARE`` of the budget, from the first byte of a body on until its request has ended; but one body,
    and one request, it may have whatever the size.
  * What is given back is what was taken: nothing is kept of a key that has nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from xpyd_sidecar.router.api.faults import too_many

SHARE = 2
"""A key may have the budget divided by this."""


class KeyShares:
    """What the keys of one process have."""

    def __init__(self, budget: int) -> None:
        """``budget``: bytes of all keys together."""
        self.share = budget // SHARE
        """Bytes that one key may have."""
        self.several: Callable[[], bool] = lambda: False
        """Whether there are several keys."""
        self._had: dict[str, int] = {}

    def name(self, key: str) -> str:
        """What the bytes of a key are counted under from now on; empty: they are not counted."""
        return key if self.several() else ""

    def counted_bytes(self, name: str) -> int:
        """Bytes that are counted under a name."""
        return self._had.get(name, 0)

    def require(self, name: str, more: int, own: int = 0) -> None:
        """A request that has ``own`` bytes, which are counted, is to have ``more``. Raises HttpFault: 429, its key has its
        share.
        """
        if name and (had := self.counted_bytes(name)) > own and had + more > self.share:
            words = f"requests of this key hold {had} bytes of this router's memory, and a key's share is {self.share}"
            raise too_many(words, 1)

    def add(self, name: str, more: int) -> None:
        """So many bytes more, or less where ``more`` is below 0."""
        if not name or not more:
            return
        left = self.counted_bytes(name) + more
        if left > 0:
            self._had[name] = left
        else:
            del self._had[name]
