"""The planner in a cluster: asks every router when an interval is over, sets the pools, and says what it did and why.

A role with ``scaling`` is owned by its pool, so a decision of mode auto is one write of the pool's ``spec.replicas``, as
from ``kubectl scale``; what follows is the loop's. Mode observe writes nothing but words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xpyd_operator.api.service import DisaggService
from xpyd_operator.kube.client.cache import Entry
from xpyd_operator.kube.client.events import Events
from xpyd_operator.kube.client.metrics import Metrics
from xpyd_operator.kube.objects.children import Children
from xpyd_operator.kube.podstate.facts import Facts
from xpyd_operator.kube.routers.fleet import Fleets, KeyOf
from xpyd_operator.kube.routers.waking import WakeCaller
from xpyd_operator.kube.scaling.zero import ZeroScaler, ZeroView
from xpyd_operator.plan.counts import Counts
from xpyd_operator.plan.observed import Instance
from xpyd_operator.plan.planner.run import PlannerVerdict, Planning
from xpyd_sidecar.contract.fleet import Fleet
from xpyd_sidecar.contract.ids import Role

ACTED, WOULD = "Planned", "WouldPlan"
"""Reasons of the Events in modes auto and observe."""


class PoolPlanner:
    """Of one service."""

    def __init__(
        self, events: Events, metrics: Metrics, fleets: Fleets, children: Children, *, woken: Callable[[], None]
    ) -> None:
        """``woken``: requests wait and no instance runs: look at it soon."""
        self._events, self._metrics = events, metrics
        self._fleets, self._children = fleets, children
        self._planning = Planning()
        self._zero = ZeroScaler(events, fleets, children, WakeCaller(woken))
        self._seen = ZeroView()

    @property
    def sentence(self) -> str:
        """What was decided last, and why; empty before that, and in mode disabled."""
        return self._planning.sentence

    def observe(self, fleet: Fleet | None, instances: tuple[Instance, ...], routers: Sequence[Facts], now: float) -> None:
        """Take in what a round saw; ``routers`` are those that clients reach."""
        self._seen = ZeroView(fleet, instances, tuple(routers))
        self._planning.observe(fleet, instances, now)

    async def decide(
        self, entry: Entry, service: DisaggService, wanted: tuple[int, int], key_of: KeyOf, *, now: float,
        held_up: str = "", failed: str = "",
    ) -> None:
        """Decide on counts when it is time, and set them if the mode says so; to no instances and back in any mode.
        ``held_up`` and ``failed``: as in ``plan.zero.wake_call``.

        Raises:
            ApiError: a pool could not be written.
        """
        if service.spec.suspend:
            self._planning = Planning()  # what it knows is of another time when the service is resumed
            await self._zero.close()
            return
        if await self._zero.scale(entry, service, Counts(*wanted), self._seen, key_of, now=now,
                                  cold_s=self._planning.cold_start_s, held_up=held_up, failed=failed):
            return
        if not wanted[1] or not self._planning.is_due(service, now):
            return
        router = service.spec.router
        fleets = await self._fleets.fetch_fleets(self._seen.routers, key_of, tls=router.tls.secret is not None)
        verdict = self._planning.conclude(service, fleets, wanted, now)
        if verdict is None:
            return
        self._metrics.on_planned("auto" if verdict.acts else "observe", verdict.kind)
        if verdict.news:
            self._events.emit(entry, "Normal", ACTED if verdict.acts else WOULD, verdict.sentence)
        if verdict.acts:
            await self._set(service, verdict)

    async def close(self) -> None:
        """Wait for no router any more."""
        await self._zero.close()

    async def _set(self, service: DisaggService, verdict: PlannerVerdict) -> None:
        for role, count in ((Role.PREFILL, verdict.prefill), (Role.DECODE, verdict.decode)):
            await self._children.scale(service, role, count)
