"""The requests of one worker: its roster follows the owner's, and what they find out goes to the owner."""

from __future__ import annotations

import asyncio

from xpyd_sidecar.contract.ids import InstanceName
from xpyd_sidecar.contract.launch import SidecarConfig
from xpyd_sidecar.router.fleet import replica as rep
from xpyd_sidecar.router.fleet import roster as ro
from xpyd_sidecar.router.fleet.target import EngineTarget
from xpyd_sidecar.router.fleet.watch import FleetWatch
from xpyd_sidecar.router.observing.fast_record import StraightRecord
from xpyd_sidecar.router.observing.observer import RouterObserver
from xpyd_sidecar.router.observing.record import Record
from xpyd_sidecar.router.serving.context import RequestContext
from xpyd_sidecar.router.workers import link as li
from xpyd_sidecar.router.workers.poison_sharing import WorkerPoison
from xpyd_sidecar.router.workers.reports import Reports


class RosterFollower(FleetWatch):
    """Keeps a replica: the owner's events in, verdicts of the data path out. Never probes."""

    link: li.WorkerLink[li.Down]

    def suspect(self, target: EngineTarget, reason: str) -> None:
        """A connection was refused: suspend it here at once."""
        event = rep.RefusedAt(self._loop.time(), target.instance, target.incarnation, reason)
        rep.follow(self.roster, event)
        self.link.send(li.LegVerdict(event))

    def doubt(self, target: EngineTarget) -> None:
        """Let the owner ask whether it lives."""
        self.link.send(li.LegVerdict(rep.Doubt(self._loop.time(), target.instance, target.incarnation)))

    def tick(self) -> None:
        """Time is the owner's."""


class WorkerObserver(RouterObserver):
    """Tells the owner, too, what happens."""

    reports: Reports

    def opened(self, tokens: int) -> None:
        """A request is being served."""
        self.reports.opened(tokens)
        super().opened(tokens)

    def refused(self, api: str, request_id: str, outcome: str, status: int, detail: str) -> None:
        """A request that would have generated was not served."""
        super().refused(api, request_id, outcome, status, detail)
        self.reports.refused(li.Refusal(api, request_id, outcome, status, detail))

    def passed(self, path: str, outcome: str) -> None:
        """A request whose answer passes through ended so."""
        super().passed(path, outcome)
        self.reports.passed(path, outcome)

    def audited(self, prefill: InstanceName, decode: InstanceName, result: str, difference: float) -> None:
        """An audit ended so, or was left out."""
        super().audited(prefill, decode, result, difference)
        self.reports.audited((prefill, decode, result, difference))

    def ended(self, record: Record) -> None:
        """What is known of a request that ended."""
        super().ended(record)
        self.reports.closed(record)

    def ended_straight(self, records: list[StraightRecord]) -> None:
        """What is known of several that went their straight course."""
        super().ended_straight(records)
        for record in records:
            self.reports.closed(record.record())


class WorkerContext(RequestContext):
    """What the requests of one worker share."""

    def __init__(self, config: SidecarConfig, link: li.WorkerLink[li.Down], started: float) -> None:
        self.reports = Reports(asyncio.get_running_loop(), link)
        self.reports.levels = self._levels
        super().__init__(config)
        router = self.config
        self.started = started
        follower = RosterFollower(self.roster, self.servings.lost, self.observer)
        follower.link = link
        self.watch = follower
        self.shared = self.poison = WorkerPoison(self.loop, self.roster, link.send)
        self.roster.begin(started, router.heartbeat_s + router.resolve_s, beside_engine=router.beside_engine)

    def _make_observer(self) -> RouterObserver:
        observer = WorkerObserver(self.roster, self.loop, access_log=self.config.access_log)
        observer.reports = self.reports
        return observer

    def _levels(self) -> tuple[int, int, float, int]:
        return self.observer.metrics.in_flight, len(self.line), self.budget.left(self.loop.time()), len(self.poison)

    def leg_opened(self, target: EngineTarget) -> ro.FleetMember | None:
        """Count a leg."""
        member = super().leg_opened(target)
        if member is not None:
            self.reports.leg(target.instance, target.incarnation, 1)
        return member

    def leg_closed(self, member: ro.FleetMember) -> None:
        """The leg ended."""
        super().leg_closed(member)
        self.reports.leg(member.name, member.incarnation, -1)
