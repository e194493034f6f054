"""How many retries are allowed: a share of recent requests, beyond a small floor.

Without a budget, retries multiply the load just when engines have too much of it. A retry is allowed while

    retries(window) + 1  ≤  FLOOR_PER_S · window  +  share · requests(window)

over the last ``WINDOW_S`` seconds. The shape is that of Finagle's ``RetryBudget`` (window of 10 s, share of 20 %, a floor
for routers with little traffic); counts per second in a ring keep it exact to a second and free of drift.

Ask it where an engine that lives said no (5xx, 429, an aborted request, silence). A leg that ended because its instance is
gone (connection refused or broken, incarnation lost) needs no budget: each death gives at most one retry to each request
that was there, and ``Limits`` bounds the legs of a request. Taking those from the budget would lose streams that could have
been saved when one of two decode instances dies.
"""

from __future__ import annotations

import math

WINDOW_S = 10
FLOOR_PER_S = 3.0
"""Retries per second that are always allowed."""


class RetryBudget:
    """One router's budget. ``share``: from 0 (the floor alone) to 1 (every recent request may be retried once)."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._requests = [0] * WINDOW_S
        self._retries = [0] * WINDOW_S
        self._second = 0
        """The newest second that is counted."""
        self._requests_sum = 0
        self._retries_sum = 0

    def on_request(self, now: float) -> None:
        """A request came. ``now``: seconds of a monotonic clock, as in every other call."""
        if now >= self._second + 1:
            self._turn(now)
        self._requests[self._second % WINDOW_S] += 1
        self._requests_sum += 1

    def may_retry(self, now: float) -> bool:
        """Whether a retry may be made now; if so it is taken from the budget."""
        if self.left(now) < 1:
            return False
        self._retries[self._second % WINDOW_S] += 1
        self._retries_sum += 1
        return True

    def left(self, now: float) -> int:
        """Retries that may be made now."""
        self._turn(now)
        return max(0, math.floor(FLOOR_PER_S * WINDOW_S + self._share * self._requests_sum) - self._retries_sum)

    def _turn(self, now: float) -> None:
        second = math.floor(now)
        if second <= self._second:  # also a clock that went back a little: it counts for the newest second
            return
        for passed in range(self._second + 1, min(second, self._second + WINDOW_S) + 1):
            slot = passed % WINDOW_S
            self._requests_sum -= self._requests[slot]
            self._retries_sum -= self._retries[slot]
            self._requests[slot] = self._retries[slot] = 0
        self._second = second
