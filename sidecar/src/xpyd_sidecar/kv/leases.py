"""Deadlines as values.

A lease ends at a moment of the owner's monotonic clock, in seconds; what crosses the wire is how long it has left, so that
clocks need not agree.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Lease(NamedTuple):
    """Something that may be waited for until ``until``."""

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

    It moves when this side looks at what has come. What passed since the look before counts up to a quarter of the silence
    that is too long: in a longer gap this side was held up (a forward of a minute, a stopped process, a clock that jumped),
    and what has come is not looked at yet. So the first look after a gap never finds a silence that was short before it.
    """

    def __init__(self, seconds: float) -> None:
        """``seconds``: of the silence that is too long."""
        self._most = seconds / LOOKS
        self._listened = 0.0
        self._looked: float | None = None

    def advance(self, now: float) -> float:
        """Count the time since the call before. Returns the seconds in which this side has listened.

        ``now``: of the monotonic clock, at which what has come is looked at.
        """
        if self._looked is not None:
            self._listened += min(max(0.0, now - self._looked), self._most)
        self._looked = now
        return self._listened
