"""What a worker tells the owner of its requests: collected, and sent in few frames."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.router.observing.record import Record
from xpyd_sidecar.router.workers import link as li

_T = TypeVar("_T")
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
        self._report = li.WorkerReport()
        self.levels: Callable[[], li.Levels] = li.Levels
        self.applied = 0

    def leg(self, name: InstanceName, incarnation: Incarnation, change: int) -> None:
        """A leg was opened or closed."""
        key = name, incarnation
        self._open[key] = self._open.get(key, 0) + change
        self._changed.add(key)
        self.soon()

    def opened(self, tokens: int) -> None:
        """A request is being served, whose prompt has about so many tokens."""
        self._report.opened.append(tokens)
        self.soon()

    def closed(self, record: Record) -> None:
        """It ended."""
        self._add(self._report.closed, record)

    def refused(self, api: str, request_id: str, outcome: str, status: int, detail: str) -> None:
        """A request was not served."""
        self._add(self._report.refused, (api, request_id, outcome, status, detail))

    def passed(self, path: str, outcome: str) -> None:
        """A passed request ended."""
        self._add(self._report.passed, (path, outcome))

    def _add(self, those: list[_T], one: _T) -> None:
        if self._link.backlog < MAX_UNSENT:
            those.append(one)
        self.soon()

    def soon(self) -> None:
        """Something is to be said."""
        if self._timer is None:
            self._timer = self._loop.call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Say it now; also a sign of life."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        report, self._report = self._report, li.WorkerReport()
        report.applied, report.levels = self.applied, self.levels()
        for key in self._changed:
            report.legs.append((*key, self._open[key]))
            if not self._open[key]:
                del self._open[key]
        self._changed.clear()
        self._link.send(report)
