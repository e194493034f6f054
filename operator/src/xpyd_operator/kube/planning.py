"""The planner in a cluster: asks every router when an interval is over, sets the pools, and says what it did and why.

A role with ``scaling`` is owned by its pool, so a decision of mode auto is one write of the pool's ``spec.replicas``, as
from ``kubectl scale``; what follows is the loop's. Mode observe writes nothing but words.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from xpyd_operator.api.service import DisaggService
from xpyd_operator.kube.api import Api, ApiError
from xpyd_operator.kube.cache import Entry, WatchCache
from xpyd_operator.kube.children import Children
from xpyd_operator.kube.events import Events
from xpyd_operator.kube.facts import Facts
from xpyd_operator.kube.fleet import Fleets, KeyOf
from xpyd_operator.kube.metrics import Metrics
from xpyd_operator.plan.observed import Instance
from xpyd_operator.plan.planner.run import PlannerVerdict, Planning
from xpyd_sidecar.contract.fleet import Fleet
from xpyd_sidecar.contract.ids import Role

logger = logging.getLogger(__name__)
ACTED, WOULD = "Planned", "WouldPlan"
"""Reasons of the Events in modes auto and observe."""


class PoolPlanner:
    """Of one service."""

    def __init__(
        self, api: Api, cache: WatchCache, *, events: Events, metrics: Metrics, fleets: Fleets, children: Children
    ) -> None:
        self._api, self._cache, self._events, self._metrics = api, cache, events, metrics
        self._fleets, self._children = fleets, children
        self._planning = Planning()
        self._routers: Sequence[Facts] = ()

    @property
    def sentence(self) -> str:
        """What was decided last, and why; empty before that, and in mode disabled."""
        return self._planning.sentence

    def look(self, fleet: Fleet | None, instances: tuple[Instance, ...], routers: Sequence[Facts], now: float) -> None:
        """What a round saw; ``routers`` are those that clients reach."""
        self._routers = routers
        self._planning.look(fleet, instances, now)

    async def tend(
        self, entry: Entry, service: DisaggService, wanted: tuple[int, int], key_of: KeyOf, *, now: float
    ) -> None:
        """Decide when it is time, and act if the mode says so.

        Raises:
            ApiError: a pool could not be written.
        """
        if service.spec.suspend:
            self._planning = Planning()  # what it knows is of another time when the service is resumed
            return
        if not self._planning.is_due(service, now):
            return
        router = service.spec.router
        fleets = await self._fleets.everyone(self._routers, key_of, tls=router.tls.secret is not None)
        verdict = self._planning.conclude(service, fleets, wanted, now)
        if verdict is None:
            return
        self._metrics.planned("auto" if verdict.acts else "observe", verdict.kind)
        if verdict.news:
            self._events.say(entry, "Normal", ACTED if verdict.acts else WOULD, verdict.sentence)
        if verdict.acts:
            await self._set(service, verdict)

    async def _set(self, service: DisaggService, verdict: PlannerVerdict) -> None:
        for role, count in ((Role.PREFILL, verdict.prefill), (Role.DECODE, verdict.decode)):
            pool = self._children.pool(service, role)
            if pool is None or service.spec.role(role).scaling is None:
                continue
            if (pool.body.get("spec") or {}).get("replicas") == count:
                continue
            logger.info("planner sets %s of %s/%s to %d", role, pool.namespace, service.name, count)
            patch = {"metadata": {"uid": pool.uid}, "spec": {"replicas": count}}
            try:
                self._cache.wrote(pool.kind, await self._api.patch(pool.kind, pool.namespace, pool.name, patch))
            except ApiError as error:
                if not (error.missing or error.conflict):  # it has gone, or is another one: the watch brings it
                    raise
