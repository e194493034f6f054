"""What the requests of one process share: the instances, the connections, the bounds, and who is told of how they end.

    admission ──▶ Serving ──▶ RequestContext: roster, picker, pool, budget, poison, queue, observer
"""

from __future__ import annotations

import asyncio
import math
import random
import secrets
from collections.abc import Callable
from time import time

from xpyd_sidecar.contract.demand import RouterDemand
from xpyd_sidecar.contract.ids import Incarnation, InstanceName, Role, State
from xpyd_sidecar.contract.launch import SidecarConfig
from xpyd_sidecar.contract.membership import Heartbeat, Up
from xpyd_sidecar.contract.tenants import Tenant
from xpyd_sidecar.errors import OurFault
from xpyd_sidecar.router.api.failover_modes import SamplingTerms
from xpyd_sidecar.router.api.priority import OWN, SHARED, PriorityBand
from xpyd_sidecar.router.api.prompt import PromptLengths, cut_seed
from xpyd_sidecar.router.api.spending import AnswerLengths
from xpyd_sidecar.router.balance import policies
from xpyd_sidecar.router.balance.demand import SharedDemand
from xpyd_sidecar.router.balance.limits import ConcurrencyLimits, RetryBudget
from xpyd_sidecar.router.balance.picker import Picker
from xpyd_sidecar.router.balance.quotas import Quotas
from xpyd_sidecar.router.fleet.expected import ExpectedInstances
from xpyd_sidecar.router.fleet.member import EngineTarget
from xpyd_sidecar.router.fleet.roster import Roster
from xpyd_sidecar.router.fleet.standby import Standby
from xpyd_sidecar.router.fleet.watch import FleetWatch
from xpyd_sidecar.router.http.auth import ClientKeys
from xpyd_sidecar.router.observing.observer import RouterObserver, tracing_of
from xpyd_sidecar.router.serving.audits import Audits
from xpyd_sidecar.router.serving.hold import Hold
from xpyd_sidecar.router.serving.instructions import RequestLimits
from xpyd_sidecar.router.serving.outlier_watch import OutlierWatch
from xpyd_sidecar.router.serving.profiles import Profiles
from xpyd_sidecar.router.serving.pulls import Pulls
from xpyd_sidecar.router.serving.quarantine import Poison
from xpyd_sidecar.router.serving.waiting import AdmissionQueue, InFlight, InFlightRequest
from xpyd_sidecar.router.upstream.pool import CancelNotices, EnginePool

NAMES_MAX = 1024
"""Names of models that a router remembers."""


class RequestContext:
    """What the requests of one process share."""

    def __init__(self, config: SidecarConfig) -> None:
        if config.router is None:
            raise OurFault("a router without a router section")
        router = config.router
        self.loop = asyncio.get_running_loop()
        self.config = router
        self.service = config.service
        self.name = config.instance
        self.via = b"1.1 xpyd-%b" % secrets.token_hex(8).encode()
        """What this process is called in headers Via: who meets its own name there has sent the request itself."""
        self.started = self.loop.time()
        self._awake = -math.inf
        self.several: Callable[[], bool] = lambda: False
        """Whether there are several client keys."""
        self.clients = ClientKeys(None)
        """Who may ask."""
        self.quotas = Quotas()
        self.demand = SharedDemand(config.instance, self.quotas)
        self.salt_key = b""
        """Of the service: what keeps prefixes of tenants apart is made with it."""
        self.cut_seed = 0
        """What names of prefixes begin with in this service."""
        self.draining = False
        """The router stops, or sends clients elsewhere."""
        self.servings = InFlight()
        self.roster = Roster(config.service, started=self.started, settle_s=router.heartbeat_s + router.resolve_s,
                                missed_beats=router.missed_beats, beside_engine=router.beside_engine)
        policy = policies.make(router.policy, router.policy_options, random.Random(secrets.randbits(64)).random)
        self.lengths, self.answers = PromptLengths(), AnswerLengths()
        self.rooms = ConcurrencyLimits(router.max_per_instance)
        self.picker = Picker(self.roster, policy, room=self.rooms, rest_tokens=router.skip_prefill_rest)
        self.limits = RequestLimits(request_s=router.request_timeout_s, pair_s=router.pair_timeout_s,
                                    load_s=router.load_limit_s, on_no_prefill=router.on_no_prefill)
        self._terms = SamplingTerms(router.failover == "continue")
        self.profiles = Profiles(goes_on=router.failover != "error", speaks=router.first_token == "prefill",  # noqa: S105
                                 terms=self.terms)
        self.roster.on_change = self._changed
        self.budget = RetryBudget(router.retry_budget)
        self.pool = EnginePool(self.loop)
        self.cancel_notices = CancelNotices(self.loop, self.pool)
        self.pulls = Pulls(self.pool, self.cancel_notices, lambda result: self.observer.metrics.count("pulls", result))
        self.line = AdmissionQueue(self.loop, router.queue_size, router.queue_timeout_s)
        self.standby = Standby(enabled=router.wakes)
        self.hold = Hold(self.loop, ExpectedInstances(self.roster, self.standby), hold_s=router.hold_s,
                         budget=router.budget_bytes, missing=self._missing, why_not=self._why_not)
        self.used = self.started
        """When the last request that generates was let in, or ended; before the first one, when the router began."""
        self.generating = 0
        """Those of them that are being served."""
        self._names: set[str] = set()
        """Models that instances have told, those that have gone included."""
        self.poison: Poison = Poison(self.loop, self.roster)
        self.tracing = tracing_of(router.otlp_endpoint, config.service, config.instance)
        self.observer = RouterObserver(self.roster, self.loop, access_log=router.access_log)
        self.observer.metrics.retries_left = lambda: self.budget.remaining_retries(self.loop.time())
        self.observer.metrics.poison = self.poison.counts
        self.observer.metrics.labels = self.poison.labels
        self.observer.metrics.queued = lambda: len(self.line) + len(self.hold)
        self.observer.metrics.held = self.hold.__len__
        self.observer.metrics.time = self.loop.time
        if self.picker.holdings is not None:
            self.observer.cached = self.picker.holdings.count
        self.audits = Audits(self.pool, self.cancel_notices, self.roster, router.audit, calm=self._calm,
                             tell=self.observer.on_audited) if router.audit else None
        self.watch = FleetWatch(self.roster, self.servings.on_lost, self.observer.on_changed, self.observer.on_probed)
        self.outliers = OutlierWatch(config.instance, self.roster, self.watch, self.pool, hung=self._hung,
                                     stalled=self._stalled,
                                     note=lambda result: self.observer.metrics.count("canaries", result.value))
        self.watch.on_leaving = self.servings.on_leaving
        self.watch.on_verdict = self.poison.on_verdict

    def terms(self) -> SamplingTerms:
        """On which streams go on elsewhere now; the same object until what decode engines tell has changed."""
        told = self.roster.engine_defaults()
        if told is not self._terms.told:
            self._terms = SamplingTerms(self._terms.sampled, told)
        return self._terms

    # ---- what may be served

    def models(self) -> list[str]:
        """Served model names: the configured one, and those that instances beat."""
        found = list(self.roster.names().listed)
        if self.config.model and self.config.model not in found:
            found.insert(0, self.config.model)
        return found

    def serves(self, model: str) -> bool:
        """Whether there is such a model; also one of any name, as long as nobody has told its names."""
        return model in self.roster.names().all or model == self.config.model or not self.names_told

    @property
    def names_told(self) -> bool:
        """Whether an instance has told which names it answers to, adapters among them: one that starts has not."""
        return any(one.also or (one.model and one.state is not State.STARTING) for one in self.roster.members())

    def has_room(self, *, alone: bool) -> bool:
        """Whether one more request could be served now, with prefill or without."""
        return len(self.servings) < self.config.max_in_flight and self.picker.has_room(alone=alone)

    def on_message(self, message: Up) -> int | None:
        """A heartbeat or a goodbye: as ``FleetWatch``'s, and what it says of other routers' tenants."""
        in_flight = self.watch.on_message(message)
        if isinstance(message, Heartbeat) and message.demands and len(self.quotas):
            self.demand.take_words(message.demands, self.loop.time(), time())
        return in_flight

    def demand_words(self) -> RouterDemand | None:
        """What other routers are told of tenants; None: there are none."""
        return self.demand.own_words(time()) if len(self.quotas) else None

    def band(self, tenant: Tenant | None = None) -> PriorityBand:
        """The priorities that clients may have; a tenant's own, where there are tenants."""
        if tenant is not None:
            return PriorityBand(tenant.priority.least, tenant.priority.most)
        return SHARED if self.several() else OWN

    def serve_clients(self, clients: ClientKeys, salt_key: bytes) -> None:
        """Whose requests are taken from now on. ``salt_key``: of the service."""
        self.clients, self.salt_key, self.cut_seed = clients, salt_key, cut_seed(salt_key)
        self.several = lambda: len(clients.keys) > 1
        clients.changed = lambda: self.quotas.take_over(clients.tenants, self.loop.time())
        clients.changed()

    def _missing(self, alone: bool) -> Role | None:
        """The role of which nobody can be picked for a request; None: it can be served."""
        return self.picker.missing(alone=alone or self.config.on_no_prefill == "decode")

    def _why_not(self, role: Role) -> str:
        return self.standby.why_not(self.loop.time()) or self.roster.why_not(role)

    def knows(self, model: str | None) -> bool:
        """Whether instances serve such a model, as far as was ever told; None: whichever they serve."""
        return model is None or model == self.config.model or model in self._names or self.names_told

    def idle_s(self) -> float:
        """For how many seconds no request that generates was here; 0: one is."""
        busy = self.generating or self.line.waits or self.hold.wakers
        return 0.0 if busy else max(0.0, self.loop.time() - self.used)

    def _changed(self) -> None:
        if self.standby.enabled and len(self._names) < NAMES_MAX:
            self._names.update(self.roster.names().listed)
        self.profiles.invalidate()
        self.hold.on_fleet_change()

    def on_closed(self, one: InFlightRequest) -> None:
        """A request is over."""
        if one in self.servings:
            self.servings.discard(one)
            if one.generating:
                self.generating -= 1
                self.used = self.loop.time()
        if self.audits is not None:
            self.audits.on_over(one)
        if self.line.waits:
            self.line.schedule()

    def _calm(self) -> bool:
        """Whether there is room for what nobody waits for."""
        return not (self.draining or self.line.waits or self.poison.alert)

    # ---- legs

    def leg_opened(self, target: EngineTarget) -> None:
        """Count a leg on its instance, until ``leg_closed``."""
        target.member.in_flight += 1

    def leg_closed(self, target: EngineTarget) -> None:
        """The leg ended."""
        member = target.member
        member.in_flight -= 1
        member.ended += 1
        if self.line.waits:
            self.line.schedule()
        if self.poison.held:
            self.poison.schedule()

    # ---- time

    def _stalled(self, instance: InstanceName, incarnation: Incarnation) -> None:
        self.servings.on_stalled(instance, incarnation)
        self.poison.on_stalled(instance, incarnation)

    def _hung(self) -> None:
        self.servings.sweep(self.loop.time(), self._awake)

    def sweep(self, awake: float = -math.inf) -> None:
        """Called every second. ``awake``: when this process last came back from standing still."""
        now, self._awake = self.loop.time(), awake
        self.watch.tick()
        self.rooms.adjust(now, self.roster.members())
        self.line.schedule()
        self.hold.sweep(now)
        self.pool.sweep()
        self.poison.tick()
        if self.audits is not None:
            self.audits.tick()
        if len(self.quotas):
            self.demand.share(now, time())
        self.observer.tick()
        for member in self.roster.members():
            member.work_since = math.inf
        self.servings.sweep(now, awake)
        self.outliers.tick()

    def abort(self, reason: str) -> None:
        """Cut off what still waits or runs."""
        self.hold.close(reason)
        self.line.end(reason)
        self.pulls.abort(reason)
        if self.audits is not None:
            self.audits.abort()
        self.servings.abort(reason)

    async def close(self) -> None:
        """Let go of every connection."""
        self.observer.tell()
        self.outliers.close()
        await self.watch.close()
        self.pool.close()
        if self.tracing is not None:
            await self.tracing.close()
