"""Whether a router has heard of everybody yet. Pure; times are seconds of one monotonic clock."""

from __future__ import annotations


class Settle:
    """Agents look up the routers' name again and again, so all of them find a router within one such interval of the first
    that did, and beat within one more interval. Until then the router knows only some of them.
    """

    def __init__(self, *, started: float, settle_s: float, beside_engine: bool) -> None:
        """``settle_s``: look-up and beat interval. ``beside_engine``: agents are told of this router after its start."""
        self._started = started
        self._settle_s = settle_s
        self._beside_engine = beside_engine
        self._since: float | None = None
        self._heard = started

    def hear(self, now: float) -> None:
        """A beat was taken."""
        if self._since is None or self._unheard(now):
            self._since = now
        self._heard = now

    def stood_still(self, since: float, now: float) -> None:
        """Nothing ran here between the two times: it was not the agents who were silent."""
        if not self._unheard(since):
            self._heard = now

    def settled(self, now: float) -> bool:
        """Every agent had the time to find this router and to beat once."""
        if not self._beside_engine:
            return self.listened(now)
        return self._since is not None and not self._unheard(now) and now - self._since >= self._settle_s

    def listened(self, now: float) -> bool:
        """Agents that knew this router before its start had the time to come back."""
        return now - self._started >= self._settle_s

    def _unheard(self, now: float) -> bool:
        return now - self._heard >= self._settle_s
