"""Deadlines as values.

A lease ends at a moment of the owner's monotonic clock, in seconds; what crosses the wire is how long it has left, so that
clocks need not agree.
"""

from __future__ import annotations

from typing import NamedTuple


class Lease(NamedTuple):
    """Something that may be waited for until ``until``."""

    until: float

    @classmethod
    def of(cls, now: float, seconds: float) -> Lease:
        """A lease of ``seconds`` from now."""
        return cls(now + seconds)

    def over(self, now: float) -> bool:
        """Whether it has run out."""
        return now >= self.until

    def left(self, now: float) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.until - now)

    def shortened(self, now: float, seconds: float) -> Lease:
        """The same lease, ending at most ``seconds`` from now."""
        return Lease(min(self.until, now + seconds))
