"""The running router: roster, connections and open requests, and who does what the roster instructs.

Belongs here: what all requests share, and the turn of the clock. Does not belong here: HTTP paths (``admin``), heartbeats'
socket (``members``), the course of one request (``serving``).
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Mapping
from functools import partial

from xpyd_sidecar import logs
from xpyd_sidecar.contract.ids import Incarnation, InstanceName, TransferId
from xpyd_sidecar.contract.launch import SidecarConfig
from xpyd_sidecar.contract.membership import Up
from xpyd_sidecar.errors import OurFault
from xpyd_sidecar.proxy import generation, ids
from xpyd_sidecar.proxy.access import access, line_of, passed_outcome, tell_straight
from xpyd_sidecar.proxy.admission import admit, key_of
from xpyd_sidecar.proxy.asks import Asks
from xpyd_sidecar.proxy.farewell import Farewells
from xpyd_sidecar.proxy.lane import NO_DEADLINE_S, Lane
from xpyd_sidecar.proxy.observer import Observer, tracing_of
from xpyd_sidecar.proxy.poison import Poison
from xpyd_sidecar.proxy.reply import Handler, HttpRequest, Reply
from xpyd_sidecar.proxy.serving import Serving
from xpyd_sidecar.proxy.upstream import Pool
from xpyd_sidecar.proxy.waiting import Line
from xpyd_sidecar.proxy.watch import Watch
from xpyd_sidecar.routing import policies, prompt
from xpyd_sidecar.routing import roster as ro
from xpyd_sidecar.routing.affinity import Affinity
from xpyd_sidecar.routing.budget import RetryBudget
from xpyd_sidecar.routing.concurrency import Limits as Rooms
from xpyd_sidecar.routing.exchange_inputs import Limits, Picks
from xpyd_sidecar.routing.faults import Fault
from xpyd_sidecar.routing.paths import Route, Way, api_of
from xpyd_sidecar.routing.pick import Pair, Picker, Target
from xpyd_sidecar.routing.reason import Reason
from xpyd_sidecar.routing.record import Record
from xpyd_sidecar.routing.request_hash import hash_of
from xpyd_sidecar.routing.sampled import Terms
from xpyd_sidecar.routing.shapes import FirstPair, Shapes
from xpyd_sidecar.routing.straight_record import StraightRecord

logger = logging.getLogger(__name__)

STALL_S = 10.0
"""Silence on an open leg after which its engine is probed."""
TELL_S = 0.25
MAX_OVER, LONG = 64, 4096
"""Lanes that have ended are told of after so long, when there are so many, or at once where the prompt has so many tokens:
they hold what they were asked.
"""


class Dispatch:
    """State of one router."""

    def __init__(self, config: SidecarConfig) -> None:
        if config.router is None:
            raise OurFault("a router without a router section")
        router = config.router
        self.loop = asyncio.get_running_loop()
        self.config = router
        self.service = config.service
        self.name = config.instance
        self.started = self.loop.time()
        self.roster = ro.Roster(config.service, started=self.started, settle_s=router.heartbeat_s + router.resolve_s,
                                missed_beats=router.missed_beats, beside_engine=router.beside_engine)
        policy = policies.make(router.policy, router.policy_options, secrets.randbits(64))
        self.affinity_header = router.affinity_header.lower().encode()
        self.rooms = Rooms(router.max_per_instance)
        """How much room each instance has."""
        self.picker = Picker(self.roster, Affinity(policy) if self.affinity_header else policy, room=self.rooms,
                             cached_share=router.skip_prefill_cached)
        self.limits = Limits(request_s=router.request_timeout_s, pair_s=router.pair_timeout_s,
                             on_no_prefill=router.on_no_prefill)
        self.first_pair = FirstPair(self.limits.pair_s)
        self._terms = Terms(router.failover == "continue")
        self.shapes = Shapes(goes_on=router.failover != "error", terms=self.terms)
        self.budget = RetryBudget(router.retry_budget)
        self.pool = Pool(self.loop)
        self.farewells = Farewells(self.loop, self.pool)
        self.observer = Observer(self.roster)
        self.observer.before = self.settle
        self.observer.metrics.watch_budget(lambda: self.budget.left(self.loop.time()))
        if self.picker.holdings is not None:
            self.observer.cached = self.picker.holdings.count
        self.tracing = tracing_of(router.otlp_endpoint, config.service, config.instance)
        self.access_log = router.access_log
        self.servings: set[Serving | Lane] = set()
        self._over: list[Lane] = []
        """Lanes that have ended, of which nobody was told yet."""
        self._telling = False
        """They will be, by the time."""
        speaks = router.first_token == "prefill"  # noqa: S105 (a token of an answer)
        self.straight = (not speaks and not router.skip_prefill_cached and self.tracing is None
                          and min(self.limits.request_s, self.limits.pair_s) >= NO_DEADLINE_S)
        """Requests may take the straight course, as far as settings go."""
        self.read = frozenset(generation.HEADERS) | {self.affinity_header}
        """Headers that do not go with it."""
        self.line = Line(self.loop, router.queue_size, router.queue_timeout_s)
        self.observer.watch_queue(self.line.__len__)
        self.poison: Poison = Poison(self.loop, self.roster)
        """Requests that end engines."""
        self.observer.metrics.watch_poison(self.poison)
        self.draining = False
        self.watch = Watch(self.roster, self.lost, self.observer)
        self.watch.on_leaving = self.leaving
        self.watch.on_verdict = self.poison.judged

    def terms(self) -> Terms:
        """On which streams go on elsewhere now; the same object until what decode engines tell has changed."""
        told = self.roster.told()
        if told is not self._terms.told:
            self._terms = Terms(self._terms.sampled, told)
        return self._terms

    # ---- requests

    def open(self, route: Route, request: HttpRequest, reply: Reply) -> Handler:
        """Serve a request that engines answer, at once or when there is room. Raises ``Fault``."""
        return admit(self, route, request, reply)

    def serves(self, model: str | None) -> bool:
        """Whether there is such a model; None: any will do."""
        if model is None or model == self.config.model:
            return True
        served = self.models()
        return not served or model in served

    def enters_at_once(self, model: str | None, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request would be served, and would not have to wait."""
        config = self.config
        if model is not None and model != config.model and not self.serves(model):
            return False
        return self.line.passes("" if config.api_key_file is None else key_of(headers, config)) and self.room(alone=False)

    def room(self, *, alone: bool) -> bool:
        """Whether one more request could be served now, with prefill or without."""
        return len(self.servings) < self.config.max_in_flight and self.picker.room(alone=alone)

    def serve(self, request: HttpRequest, reply: Reply, asks: Asks, picks: Picks, queued_s: float, *,
              picked: Pair | None = None) -> Serving:
        """Begin to serve a request that waited for so long. ``picked``: the first of its picks, where it was made."""
        now, headers = self.loop.time(), request.headers
        passed_on = [(name, headers[name]) for name in asks.passed_on if name in headers]
        serving = Serving(self, reply, asks, TransferId(ids.fresh()), passed_on, picks=picks, began=now)
        record, trace = serving.record, None
        record.queued_s = queued_s
        record.arrived -= queued_s
        record.arrived_unix -= queued_s
        self.servings.add(serving)
        if record.api:
            if self.tracing is not None:
                trace = self.tracing.begin(headers, record)
            record.prompt_size = prompt.tokens(asks.prompt)
            self.opened(record.prompt_size, now)
        else:
            self.budget.on_request(now)
        serving.start(picked, trace)
        return serving

    def opened(self, tokens: int, now: float) -> None:
        """A generation request is being served, whose prompt has about so many tokens. ``now``: of the loop's clock."""
        self.observer.opened(tokens)
        self.budget.on_request(now)

    def refused(self, route: Route, request: HttpRequest, fault: Fault) -> None:
        """A request was refused before anything was sent."""
        self.unserved(route, request, fault.outcome, fault.status, fault.message)

    def unserved(self, route: Route, request: HttpRequest, outcome: str, status: int, detail: str) -> None:
        """A request ended before it was served."""
        told = outcome
        if route.way is Way.PASSED:
            told = passed_outcome(outcome, "")
            self.passed(route.path, told)
        api = api_of(route)
        if api:
            told = outcome
            self.unserved_generation(api, request.request_id, outcome, status, detail)
        if self.access_log:
            which = {"api": api} if api else {"path": route.path}
            access.info("%s", told, extra={"request": request.request_id, **which, "status": status,
                                           "detail": detail[:500]})

    def unserved_generation(self, api: str, request_id: str, outcome: str, status: int, detail: str) -> None:
        """The same of one that would have generated."""
        self.observer.refused(api, request_id, outcome, status, detail)

    def passed(self, path: str, outcome: str) -> None:
        """A request whose answer passes through ended so."""
        self.observer.metrics.passed(path, outcome)

    def closed(self, serving: Serving, record: Record) -> None:
        """A request ended."""
        self.servings.discard(serving)
        if self.line.waits:
            self.line.moved()
        told = record.outcome
        if record.path:
            told = passed_outcome(told, record.ended_as)
            self.passed(record.path, told)
        if record.api:
            told = record.outcome
            self.observer.left()
            self.ended(record)
        if self.access_log:
            logs.tell(access, told, partial(line_of, record))

    def lane_ended(self, lane: Lane) -> None:
        """The same of one that went its straight course. What it leaves to be told waits for ``settle``: done for many at a
        time, with warm caches, it costs a fraction.
        """
        self.servings.discard(lane)
        self.observer.left()
        if self.line.waits:
            self.line.moved()
        over = self._over
        over.append(lane)
        if not self._telling:
            self._telling = True
            self.loop.call_later(TELL_S, self._tell)
        if len(over) >= MAX_OVER or lane.prompt_size >= LONG:
            self.settle()

    def _tell(self) -> None:
        self._telling = False
        self.settle()

    def settle(self) -> None:
        """Tell of the lanes that have ended: to the observer, and to the access log."""
        over, self._over = self._over, []
        if not over:
            return
        if self.poison.watching:
            for lane in over:
                self.poison.whole(hash_of(lane.shape.api, lane.request.fields))
        records = [lane.record() for lane in over]
        self.ended_straight(records)
        if self.access_log:
            tell_straight(records)

    def ended(self, record: Record) -> None:
        """What is known of a request that ended."""
        self.observer.ended(record)

    def ended_straight(self, records: list[StraightRecord]) -> None:
        """The same of several that went their straight course."""
        self.observer.ended_straight(records)

    def models(self) -> list[str]:
        """Served model names: the configured one, and those that instances beat."""
        found = self.roster.models()
        if self.config.model and self.config.model not in found:
            found.insert(0, self.config.model)
        return found

    # ---- legs

    def leg_opened(self, target: Target) -> ro.Member | None:
        """Count a leg on its instance; give the member back with ``leg_closed``."""
        return self.roster.open_leg(target.instance, target.incarnation)

    def leg_closed(self, member: ro.Member) -> None:
        """The leg ended."""
        self.roster.leg_closed(member)
        self.rooms.ended(self.loop.time(), member)
        if self.line.waits:
            self.line.moved()

    def suspect(self, target: Target, reason: str) -> None:
        """A connection was refused."""
        self.watch.suspect(target, reason)

    def doubt(self, target: Target) -> None:
        """An engine failed a request, broke a connection, or is silent."""
        self.watch.doubt(target)

    # ---- the roster

    def on_message(self, message: Up) -> int:
        """A heartbeat or goodbye. Returns how many legs are open on the instance. Raises ``roster.Refused``."""
        return self.watch.on_message(message)

    def lost(self, instance: InstanceName, incarnation: Incarnation, reason: Reason) -> None:
        """The roster says that this incarnation will never answer."""
        for serving in list(self.servings):
            serving.on_lost(instance, incarnation, reason)

    def leaving(self, instance: InstanceName, incarnation: Incarnation, reason: str) -> None:
        """The time of its drain is nearly over: what can go on elsewhere does, while nothing is lost yet."""
        for serving in list(self.servings):
            serving.on_leaving(instance, incarnation, reason)

    # ---- time

    def sweep(self, awake: float = -math.inf) -> None:
        """Called every second. ``awake``: when this process last came back from standing still."""
        now = self.loop.time()
        self.watch.tick()
        self.rooms.look(now, self.roster.members())
        self.line.moved()
        self.pool.sweep()
        self.poison.tick()
        self.observer.turn()
        for serving in list(self.servings):
            serving.sweep(now, awake, STALL_S)

    def abort(self, reason: str) -> None:
        """Cut off what still waits or runs."""
        self.line.end(reason)
        for serving in list(self.servings):
            serving.abort(reason)

    async def close(self) -> None:
        """Let go of every connection."""
        self.settle()
        await self.watch.close()
        self.pool.close()
        if self.tracing is not None:
            await self.tracing.close()
