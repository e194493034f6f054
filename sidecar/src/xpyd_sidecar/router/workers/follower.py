"""The requests of one worker: its roster follows the owner's, and what they find out goes to the owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.contract.launch import SidecarConfig
from xpyd_sidecar.router.fleet.member import EngineTarget, FleetMember
from xpyd_sidecar.router.fleet.watch import FleetWatch
from xpyd_sidecar.router.serving.context import RequestContext
from xpyd_sidecar.router.workers import link as li
from xpyd_sidecar.router.workers.poison_sharing import WorkerPoison

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
        self.fill: Callable[[li.WorkerReport], None] = lambda _: None
        """Who says in a report how much there is of something now."""
        self.applied = 0

    def leg(self, name: InstanceName, incarnation: Incarnation, change: int) -> None:
        """A leg was opened or closed."""
        key = name, incarnation
        self._open[key] = self._open.get(key, 0) + change
        self._changed.add(key)
        self.soon()

    def tell(self, what: str, *of: object) -> None:
        """The observer heard of something (``RouterObserver.told``); dropped while the owner does not read."""
        if what == "opened" or self._link.backlog < MAX_UNSENT:
            getattr(self._report, what).append(of)
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
        report.applied = self.applied
        self.fill(report)
        for key in self._changed:
            report.legs.append((*key, self._open[key]))
            if not self._open[key]:
                del self._open[key]
        self._changed.clear()
        self._link.send(report)


class RosterFollower(FleetWatch):
    """Keeps a replica, which follows the owner's roster; verdicts of the data path go there. Never probes."""

    link: li.WorkerLink[li.Down]

    def suspect(self, target: EngineTarget, reason: str) -> None:
        """A connection was refused: suspend it here at once."""
        instance, incarnation = target.instance, target.incarnation
        member = self.roster.find(instance, incarnation)
        if member is not None:
            self.roster.on_refused(self._loop.time(), instance, incarnation, reason)
            member.suspected = True
        self.link.send(li.LegVerdict(instance, incarnation, reason))

    def doubt(self, target: EngineTarget) -> None:
        """Let the owner ask whether it lives."""
        self.link.send(li.LegVerdict(target.instance, target.incarnation))

    def tick(self) -> None:
        """Time is the owner's."""


class WorkerContext(RequestContext):
    """What the requests of one worker share."""

    def __init__(self, config: SidecarConfig, link: li.WorkerLink[li.Down], started: float) -> None:
        super().__init__(config)
        router = self.config
        self.reports = Reports(self.loop, link)
        self.reports.fill = self._fill
        self.observer.told = self.reports.tell
        self.started = started
        follower = RosterFollower(self.roster, self.servings.lost, self.observer.changed, self.observer.probed)
        follower.link = link
        self.watch = follower
        self.shared = self.poison = WorkerPoison(self.loop, self.roster, link.send)
        self.roster.begin(started, router.heartbeat_s + router.resolve_s, beside_engine=router.beside_engine)

    def _fill(self, report: li.WorkerReport) -> None:
        report.in_flight, report.queued, report.held = self.observer.metrics.in_flight, len(self.line), len(self.poison)
        report.retries_left = self.budget.left(self.loop.time())

    def leg_opened(self, target: EngineTarget) -> FleetMember | None:
        """Count a leg."""
        member = super().leg_opened(target)
        if member is not None:
            self.reports.leg(target.instance, target.incarnation, 1)
        return member

    def leg_closed(self, member: FleetMember) -> None:
        """The leg ended."""
        super().leg_closed(member)
        self.reports.leg(member.name, member.incarnation, -1)
