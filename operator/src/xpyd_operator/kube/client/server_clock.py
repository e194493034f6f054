"""The API server's clock, as far as its answers tell it: stamps of objects are by that one, and not by this machine's.

    asked at t0, answered at t1, by this machine      server's time minus ours is in (Date - t1, Date + 1 - t0)
    with the header Date, in whole seconds

What answers say is laid over each other. Where they contradict each other (a clock was set, another API server answers that
has another time) the last one counts. While the two clocks may agree, this machine's is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final

SECOND: Final = 1.0
"""How much of the server's time ``Date`` leaves out, at most."""
LONGEST_S: Final = 10.0
"""An answer that took longer says next to nothing."""


class ServerClock:
    """Of one API server, or of several that answer as one. Seconds since 1970."""

    def __init__(self, ours: Callable[[], float]) -> None:
        """``ours``: this machine's."""
        self.ours = ours
        self._least, self._most = float("-inf"), float("inf")

    @property
    def ahead_s(self) -> float:
        """How far the server's is ahead of ours at least (negative: behind); 0 where they may agree."""
        return min(max(0.0, self._least), self._most)

    def time(self) -> float:
        """The server's time, unix seconds."""
        return self.ours() + self.ahead_s

    def on_answer(self, date: str | None, asked: float) -> None:
        """An answer has come just now. ``date``: its header; ``asked``: when by ``ours`` it was asked for. What is no date
        says nothing.
        """
        arrived = self.ours()
        if date is None or not 0.0 <= arrived - asked <= LONGEST_S:
            return
        try:
            found = parsedate_to_datetime(date)
        except (TypeError, ValueError):
            return
        said = (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
        least, most = said - arrived, said + SECOND - asked
        if max(least, self._least) <= min(most, self._most):
            least, most = max(least, self._least), min(most, self._most)
        self._least, self._most = least, most
