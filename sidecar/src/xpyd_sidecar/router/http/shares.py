"""How many bytes of a router's memory the requests of each client key hold, so that none of several keys takes all. Pure.

Laws
  * A key holds at most the budget divided by ``SHARE``, from the first byte of a body on until its request has ended. A key
    that holds nothing but one body or one request is not limited, whatever the size of that one.
  * What is given back is what was taken: no entry is kept for a key that holds nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from xpyd_sidecar.router.api.faults import too_many

SHARE = 2
"""A key may have the budget divided by this."""


class KeyShares:
    """The bytes that the requests of each client key hold in one router process."""

    def __init__(self, budget: int) -> None:
        """``budget``: bytes that all keys together may hold."""
        self.share = budget // SHARE
        """Bytes that one key may have."""
        self.several: Callable[[], bool] = lambda: False
        """Whether there are several keys."""
        self._had: dict[str, int] = {}

    def name(self, key: str) -> str:
        """The name to count a key's new bytes under: the key where there are several keys, else empty (not counted)."""
        return key if self.several() else ""

    def counted_bytes(self, name: str) -> int:
        """Bytes that are counted under a name now; 0 for an unknown one."""
        return self._had.get(name, 0)

    def require(self, name: str, more: int, own: int = 0) -> None:
        """Check that a request may hold ``more`` bytes; ``own``: bytes of it that are counted already. Counts nothing.
        Raises HttpFault (429) when other requests of its key hold bytes and the key would exceed its share.
        """
        if name and (had := self.counted_bytes(name)) > own and had + more > self.share:
            words = f"requests of this key hold {had} bytes of this router's memory, and a key's share is {self.share}"
            raise too_many(words, 1)

    def add(self, name: str, more: int) -> None:
        """Count ``more`` bytes under a name, or give bytes back where ``more`` is below 0. An empty name counts nothing."""
        if not name or not more:
            return
        left = self.counted_bytes(name) + more
        if left > 0:
            self._had[name] = left
        else:
            del self._had[name]
