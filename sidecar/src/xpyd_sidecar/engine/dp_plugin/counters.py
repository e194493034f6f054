"""What a rank counts. An engine process has one such object, ``COUNTERS``, since vLLM has one engine core per process."""

from __future__ import annotations

import time
from typing import Final

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.dp.rank import Rank


class Counters:
    """Counts since the last ``take``, of one rank: its core's thread alone calls, but for ``count_granted``."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._granted_at: float | None = None

    def count_granted(self) -> None:
        """An idle rank was granted a step."""
        if self._granted_at is None:
            self._granted_at = time.monotonic()

    def forward(self, rank: Rank) -> None:
        """A forward with tokens begins."""
        self._granted_at = None
        self._note(rank)

    def dummy(self, rank: Rank) -> None:
        """A dummy begins. It is wasted if this rank asked for the step itself and then had no use for it."""
        self._add(metrics.DP_DUMMIES, 1)
        if rank.local <= rank.asked:
            self._add(metrics.DP_WASTED, 1)
        granted_at, self._granted_at = self._granted_at, None
        if granted_at is not None:
            self._add(metrics.DP_WAKES, 1)
            self._add(metrics.DP_WAKE_SECONDS, time.monotonic() - granted_at)
        self._note(rank)

    def take(self) -> dict[str, float]:
        """Increments of counters and values of gauges by name; empty when nothing has changed."""
        out = self._counts | self._gauges
        self._counts, self._gauges = {}, {}
        return out

    def _note(self, rank: Rank) -> None:
        self._gauges[metrics.DP_LOCAL] = rank.local
        self._gauges[metrics.DP_GRANTED] = rank.granted

    def _add(self, name: str, amount: float) -> None:
        self._counts[name] = self._counts.get(name, 0) + amount


COUNTERS: Final = Counters()
"""Of this process."""
