"""What one process of a router knows of itself: connections, and how late its loop is.

A router of one process has one, as ``worker="0"``. With several, each worker says its own once a second, and the owner of
the membership socket, which is ``0`` then, shows all of them: what lags or is full is one process, so nothing is summed.
"""

from __future__ import annotations

import os
from bisect import bisect_left

import msgspec

LAGS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper ends of buckets, in seconds."""


class Vitals(msgspec.Struct, tag=True):
    """Of one process. Counts are since its start."""

    pid: int = msgspec.field(default_factory=os.getpid)
    connections: int = 0
    """Open ones of clients."""
    refused: dict[str, int] = msgspec.field(default_factory=dict)
    """Connections that ended without a whole request, by the code of the fault."""
    body_bytes: int = 0
    """Of requests, that are held."""
    accept_errors: int = 0
    """How often nobody could be accepted, for a lack of the process's own."""
    lags: list[float] = msgspec.field(default_factory=lambda: [0.0] * (len(LAGS) + 2))
    """How late timers of the loop were: counts by bucket, those beyond the last one, and the sum."""

    def lagged(self, seconds: float) -> None:
        """A timer was so late."""
        late = max(0.0, seconds)
        self.lags[bisect_left(LAGS, late)] += 1
        self.lags[-1] += late
