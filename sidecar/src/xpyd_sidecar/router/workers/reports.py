"""What a worker tells the owner of its requests: collected, and sent in few frames."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.router.observing.record import Record
from xpyd_sidecar.router.workers import link as li

FLUSH_S = 0.02
"""How long a report waits for more."""
MAX_UNSENT = 16 << 20
"""Bytes that the owner may leave unread before records are dropped."""


class Reports:
    """Collects what the owner must hear of, and sends it in few frames."""

    def __init__(self, loop: asyncio.AbstractEventLoop, link: li.WorkerLink[li.Down]) -> None:
        self._loop = loop
        self._link = link
        self._timer: asyncio.Handle | None = None
        self._open: dict[tuple[InstanceName, Incarnation], int] = {}
        self._changed: set[tuple[InstanceName, Incarnation]] = set()
        self._opened: list[int] = []
        self._closed: list[Record] = []
        self._refused: list[li.Refusal] = []
        self._passed: list[tuple[str, str]] = []
        self._audited: list[li.Audited] = []
        self.levels: Callable[[], tuple[int, int, float, int]] = lambda: (0, 0, 0.0, 0)
        """Requests being served, those that wait, retries left, and requests that are held."""
        self.applied = 0
        self.dropped = 0

    def leg(self, name: InstanceName, incarnation: Incarnation, change: int) -> None:
        """A leg was opened or closed."""
        key = name, incarnation
        self._open[key] = self._open.get(key, 0) + change
        self._changed.add(key)
        self.soon()

    def opened(self, tokens: int) -> None:
        """A request is being served, whose prompt has about so many tokens."""
        self._opened.append(tokens)
        self.soon()

    def closed(self, record: Record) -> None:
        """It ended."""
        if self._room():
            self._closed.append(record)
        self.soon()

    def refused(self, refusal: li.Refusal) -> None:
        """A request was not served."""
        if self._room():
            self._refused.append(refusal)
        self.soon()

    def passed(self, path: str, outcome: str) -> None:
        """A passed request ended."""
        if self._room():
            self._passed.append((path, outcome))
        self.soon()

    def audited(self, one: li.Audited) -> None:
        """An audit ended. There are few."""
        self._audited.append(one)
        self.soon()

    def _room(self) -> bool:
        if self._link.backlog < MAX_UNSENT:
            return True
        self.dropped += 1
        return False

    def soon(self) -> None:
        """Something is to be said."""
        if self._timer is None:
            self._timer = self._loop.call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Say it now; also a sign of life."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        legs = [(name, incarnation, self._open[name, incarnation]) for name, incarnation in self._changed]
        for name, incarnation, count in legs:
            if not count:
                del self._open[name, incarnation]
        self._changed.clear()
        report = li.WorkerReport(self.applied, legs, self._opened, self._closed, self._refused, self._passed,
                                 *self.levels(), self._audited)
        self._audited = []
        self._opened, self._closed, self._refused, self._passed = [], [], [], []
        self._link.send(report)
