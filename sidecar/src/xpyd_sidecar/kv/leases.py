"""Deadlines as values, and the clock by which the silence of a peer is measured.

A lease ends at a moment of the owner's monotonic clock, in seconds; what crosses the wire is how long it has left, so that
clocks need not agree.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Lease(NamedTuple):
    """A deadline: something is waited for until ``until``, in seconds of the owner's clock."""

    until: float

    @classmethod
    def start(cls, now: float, seconds: float) -> Lease:
        """A lease that ends ``seconds`` after ``now``."""
        return cls(now + seconds)

    def is_over(self, now: float) -> bool:
        """Whether the lease has run out at ``now``."""
        return now >= self.until

    def seconds_left(self, now: float) -> float:
        """Seconds from ``now`` to the end of the lease, never negative."""
        return max(0.0, self.until - now)

    def shorten(self, now: float, seconds: float) -> Lease:
        """Return a lease that ends when this one does, but at most ``seconds`` from ``now``."""
        return Lease(min(self.until, now + seconds))


LOOKS: Final = 4
"""Looks that must find nothing before a silence is too long, however far apart they are."""


class ListeningClock:
    """A clock of the time in which this side has listened, by which the silence of a peer is measured.

    It advances when this side reads what has come. The time since the read before counts up to a quarter (1 / ``LOOKS``) of
    the silence that is too long: in a longer gap this side itself was held up (a forward of a minute, a stopped process, a
    clock that jumped), and has not read what came meanwhile. So no gap alone makes a silence too long.
    """

    def __init__(self, seconds: float) -> None:
        """Begin at 0. ``seconds``: how long a silence of the peer is too long."""
        self._most = seconds / LOOKS
        self._listened = 0.0
        self._looked: float | None = None

    def advance(self, now: float) -> float:
        """Count the time since the call before. Returns the seconds in which this side has listened so far.

        ``now``: seconds of the monotonic clock, when what has come is read.
        """
        if self._looked is not None:
            self._listened += min(max(0.0, now - self._looked), self._most)
        self._looked = now
        return self._listened
