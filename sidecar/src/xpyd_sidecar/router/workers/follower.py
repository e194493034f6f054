"""The requests of one worker: its roster follows the owner's, and what they find out goes to the owner."""

from __future__ import annotations

import asyncio

from xpyd_sidecar.contract.launch import SidecarConfig
from xpyd_sidecar.router.fleet.member import EngineTarget, FleetMember
from xpyd_sidecar.router.fleet.watch import FleetWatch
from xpyd_sidecar.router.serving.context import RequestContext
from xpyd_sidecar.router.workers import link as li
from xpyd_sidecar.router.workers.poison_sharing import WorkerPoison
from xpyd_sidecar.router.workers.sharing import Key

FLUSH_S = 0.02
"""How long a report waits for more."""
MAX_UNSENT = 16 << 20
"""Bytes that the owner may leave unread before records are dropped."""


class Reports:
    """Collects what the owner must hear of, and sends it in few frames."""

    def __init__(self, context: WorkerContext, link: li.WorkerLink[li.Down]) -> None:
        self._context = context
        self._link = link
        self._timer: asyncio.Handle | None = None
        self._legs: dict[Key, int] = {}
        """Open ones as the owner was told."""
        self._report = li.WorkerReport()
        self.applied = 0

    def tell(self, what: str, *of: object) -> None:
        """The observer heard of something (``RouterObserver.told``); dropped while the owner does not read."""
        if what == "opened" or self._link.backlog < MAX_UNSENT:
            getattr(self._report, what).append(of)
        self.soon()

    def soon(self) -> None:
        """Something is to be said."""
        if self._timer is None:
            self._timer = self._context.loop.call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Say it now; also a sign of life."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        context, report = self._context, self._report
        self._report = li.WorkerReport()
        report.applied, report.in_flight = self.applied, context.observer.metrics.in_flight
        report.queued, report.held = len(context.line), len(context.poison)
        report.retries_left = context.budget.left(context.loop.time())
        legs = {(one.name, one.incarnation): one.in_flight for one in context.roster.members() if one.in_flight}
        changed = {key for key, _ in legs.items() ^ self._legs.items()}
        report.legs, self._legs = [(*key, legs.get(key, 0)) for key in changed], legs
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
        self.reports = Reports(self, link)
        self.observer.told = self.reports.tell
        self.started = started
        follower = RosterFollower(self.roster, self.servings.lost, self.observer.changed, self.observer.probed)
        follower.link = link
        self.watch = follower
        self.shared = self.poison = WorkerPoison(self.loop, self.roster, link.send)
        self.roster.begin(started, router.heartbeat_s + router.resolve_s, beside_engine=router.beside_engine)

    def leg_opened(self, target: EngineTarget) -> FleetMember | None:
        """Count a leg."""
        self.reports.soon()
        return super().leg_opened(target)

    def leg_closed(self, member: FleetMember) -> None:
        """The leg ended."""
        self.reports.soon()
        super().leg_closed(member)
