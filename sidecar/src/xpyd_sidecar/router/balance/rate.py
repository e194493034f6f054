"""How often something happens. Pure."""

from __future__ import annotations

import math

RATE_S = 10.0
"""Over what time it is averaged."""


class Rate:
    """Events per second, averaged with exponential weights over ``RATE_S``."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._at = 0.0
        self._since: float | None = None

    def add(self, now: float, count: float = 1.0) -> None:
        """Events happened."""
        if self._since is None:
            self._since = self._at = now
        self._sum = self._sum * math.exp(-(now - self._at) / RATE_S) + count
        self._at = now

    def per_s(self, now: float) -> float:
        """The rate; 0 where nothing happened yet. The weights are those of the time there was, at least a second."""
        if self._since is None:
            return 0.0
        weight = RATE_S * (1 - math.exp(-max(1.0, now - self._since) / RATE_S))
        return self._sum * math.exp(-(now - self._at) / RATE_S) / weight
