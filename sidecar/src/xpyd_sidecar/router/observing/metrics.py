"""What the router counts: Prometheus metrics ``xpyd_router_*`` (docs/observability.md).

Label values come from small fixed sets, never from clients, so that the number of series is bounded; only ``instance``
grows with the fleet, ``worker`` with the router's processes, and pairs are bounded by ``MAX_PAIRS``. What belongs to
requests is counted when they are over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily as Counters
from prometheus_client.core import GaugeMetricFamily as Gauges
from prometheus_client.core import HistogramMetricFamily, Metric

from xpyd_sidecar import __version__
from xpyd_sidecar.router.fleet.roster import FleetMember
from xpyd_sidecar.router.observing.audit_metrics import AuditMetrics
from xpyd_sidecar.router.observing.batch import MAX_PAIRS, OTHER, Batch, Flow, Pair, count_pair
from xpyd_sidecar.router.observing.summary import failed
from xpyd_sidecar.router.observing.tally import TallyCounts, TallyTimes, WhenAsked, buckets_of, filled
from xpyd_sidecar.router.observing.vitals import LAGS, Vitals

TTFT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0)
TPOT = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)
SECONDS = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
WAITS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_DRAFTS = {"drafted": "Tokens that an engine which speculates has drafted since its start, by the latest beat",
           "accepted": "Those of them that it accepted", "generated": "All tokens that such an engine gave out"}


class RouterMetrics:
    """The metrics of one router."""

    def __init__(self, members: Callable[[], Iterable[FleetMember]], settle: Callable[[], None] = lambda: None) -> None:
        self.registry = registry = CollectorRegistry()
        counts, times = partial(TallyCounts, registry), partial(TallyTimes, registry)
        self._members = members
        self.in_flight = 0
        """Generation requests that are being served; the observer counts them."""
        self._settle = settle
        self.requests_total = 0
        self.requests_failed = 0
        self._requests = counts("xpyd_router_requests", "Generation requests by outcome", ("api", "outcome"))
        self._legs = counts("xpyd_router_legs", "Legs sent to engines by how they ended", ("role", "result"))
        self._probes = counts("xpyd_router_probes", "Health probes of engines by result", ("result",))
        self._changes = counts("xpyd_router_roster_changes", "Changes of the roster by kind", ("change",))
        self._beats = counts("xpyd_router_membership_messages", "Heartbeats and goodbyes by result", ("result",))
        self._retries = counts("xpyd_router_retries", "Legs sent beyond the first pair of a request")
        self._skips = counts("xpyd_router_skipped_prefill",
                             "Requests sent to decode alone, by the field or the rule that made it so", ("by",))
        self._passed = counts("xpyd_router_passed_requests",
                              "Requests passed to one decode instance, by path and outcome", ("path", "outcome"))
        self._continued = counts("xpyd_router_continued", "Streams that went on with another decode instance")
        self._tokens = counts("xpyd_router_tokens", "Generated tokens relayed to clients, counted by their ids")
        self._bytes = counts("xpyd_router_relayed_bytes", "Bytes of answers to generation requests")
        by_api = partial(times, labels=("api",))
        self._ttft = by_api("xpyd_router_ttft_seconds", "From a request's arrival to the first event of its stream", TTFT)
        self._tpot = by_api("xpyd_router_tpot_seconds", "(end - first token) / (tokens - 1) of whole streams", TPOT)
        self._seconds = by_api("xpyd_router_request_seconds", "From a request's arrival to the end of its answer", SECONDS)
        self._queue = times("xpyd_router_queue_seconds", "How long a request waited for a place", WAITS)
        self._handover = times("xpyd_router_handover_seconds", "From the end of the prefill leg to decode's first event",
                               WAITS)
        self._leg_seconds = times("xpyd_router_leg_seconds", "From a leg's request to its end", SECONDS, ("role",))
        self.queued: Callable[[], int] = int
        """Whom to ask how many requests wait."""
        self.retries_left: Callable[[], float] = int
        """Whom to ask how many retries may be made."""
        self.vitals: Callable[[], Mapping[str, Vitals]] = dict
        """Whom to ask what each process knows of itself, by the number of the worker."""
        self.poison: Callable[[], tuple[int, int, int, int]] = lambda: (0, 0, 0, 0)
        """Whom to ask of requests that end engines: deaths so far, suspects, refused requests, held ones."""
        gauge = partial(Gauge, registry=registry)
        gauge("xpyd_router_in_flight", "Generation requests being served").set_function(lambda: self.in_flight)
        # Whom to ask is said later, so it is looked up when it is asked.
        gauge("xpyd_router_queued", "Generation requests that wait for a place").set_function(lambda: float(self.queued()))
        gauge("xpyd_router_retry_budget", "Retries that may be made now").set_function(lambda: float(self.retries_left()))
        gauge("xpyd_router_build_info", "The version", ["version"]).labels(__version__).set(1)
        self._systems: dict[int, ProcessCollector] = {}
        """What the system knows of each process, by its id."""
        self._pairs: dict[Pair, Flow] = {}
        for ask in (self._ask_processes, self._ask_poison, self._ask_pairs, self._ask_instances):
            registry.register(WhenAsked(ask))
        self.audits = AuditMetrics(registry, members)

    def passed(self, path: str, outcome: str) -> None:
        """A request whose answer passes through ended so. ``path``: of the router's table."""
        self._passed.add((path, outcome))

    def closed(self, batch: Batch) -> None:
        """Requests that ended."""
        api = (batch.api,)
        self._seconds.add_all(batch.seconds, api)
        self._queue.add_all(batch.queue)
        self._queue.add_all([0.0] * (len(batch) - len(batch.queue)))
        self._ttft.add_all(batch.ttft, api)
        self._tpot.add_all(batch.tpot, api)
        for (role, result), durations in batch.legs.items():
            self._legs.add((role, result), len(durations))
            self._leg_seconds.add_all(durations, (role,))
        self._handover.add_all(batch.handover)
        for pair, handovers in batch.pairs.items():
            count_pair(self._pairs, pair, sum(handovers), len(handovers))
        for counts, number in ((self._retries, batch.retries), (self._continued, batch.continued),
                               (self._tokens, batch.tokens), (self._bytes, batch.bytes)):
            if number:
                counts.add(by=number)
        for field in batch.skips:
            self._skips.add((field,))
        for outcome, count in batch.outcomes.items():
            self.counted(batch.api, outcome, count)

    def counted(self, api: str, outcome: str, count: int = 1) -> None:
        """Requests that ended so."""
        self._requests.add((api, outcome), count)
        self.requests_total += count
        if failed(outcome):
            self.requests_failed += count

    def message(self, result: str) -> None:
        """A membership message: taken, refused, or undecodable."""
        self._beats.add((result,))

    def probed(self, result: str) -> None:
        """A health probe ended."""
        self._probes.add((result,))

    def changed(self, kind: str) -> None:
        """The roster changed."""
        self._changes.add((kind,))

    def text(self) -> bytes:
        """The exposition format."""
        self._settle()
        return generate_latest(self.registry)

    # ---- when somebody asks

    def _ask_pairs(self) -> Iterable[Metric]:
        """When half of the places are taken, pairs of instances that are gone are shown once more, and then forgotten."""
        pairs = self._pairs
        if len(pairs) > MAX_PAIRS // 2:
            here = {OTHER, *(member.name for member in self._members())}
            self._pairs = {pair: flow for pair, flow in pairs.items() if here.issuperset(pair)}
        names = ("prefill", "decode")
        count = Counters("xpyd_router_pair_handovers", "Requests whose KV went from one to the other", labels=names)
        total = Counters("xpyd_router_pair_handover_seconds", "Their handovers, added up", labels=names)
        return [filled(count, {pair: flow.count for pair, flow in pairs.items()}),
                filled(total, {pair: flow.seconds for pair, flow in pairs.items()})]

    def _ask_processes(self) -> Iterable[Metric]:
        """Every process of the router: what it knows of itself, and what the system knows of it (``process_*``)."""
        vitals, names = self.vitals(), ("worker",)
        connections = Gauges("xpyd_router_connections", "Open connections of clients", labels=names)
        refused = Counters("xpyd_router_connections_refused", "Connections that ended without a whole request",
                           labels=("worker", "code"))
        bodies = Gauges("xpyd_router_body_bytes", "Bytes of requests' bodies that are held", labels=names)
        errors = Counters("xpyd_router_accept_errors", "Times that no file or memory was left for a client", labels=names)
        lag = HistogramMetricFamily("xpyd_router_loop_lag_seconds", "How late a timer of the event loop was", labels=names)
        self._systems = {one.pid: self._systems.get(one.pid) or ProcessCollector(pid=partial(int, one.pid), registry=None)
                         for one in vitals.values()}
        shown: dict[str, Metric] = {}
        for worker, one in vitals.items():
            connections.add_metric([worker], one.connections)
            bodies.add_metric([worker], one.body_bytes)
            errors.add_metric([worker], one.accept_errors)
            filled(refused, {(worker, code): count for code, count in one.refused.items()})
            lag.add_metric([worker], buckets_of(LAGS, one.lags), one.lags[-1])
            for family in self._systems[one.pid].collect():
                into = shown.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    into.add_sample(sample.name, {"worker": worker}, sample.value)
        return [connections, refused, bodies, errors, lag, *shown.values()]

    def _ask_poison(self) -> Iterable[Metric]:
        deaths, suspects, refused, held = self.poison()
        return [Counters("xpyd_router_engine_deaths", "Engines that died by themselves, with requests open", deaths),
                Gauges("xpyd_router_poison_suspects", "Requests that several dead engines had in common", suspects),
                Gauges("xpyd_router_poison_refused", "Requests that are refused now because engines died of them", refused),
                Gauges("xpyd_router_poison_held", "Requests held until it is known whether engines die of them", held)]

    def _ask_instances(self) -> Iterable[Metric]:
        members, names = list(self._members()), ("instance", "role")
        states = Counter((m.role.value, "suspended" if m.suspended else m.state.value) for m in members)
        legs = Gauges("xpyd_router_legs_open", "Open legs of this router", labels=names)
        usage = Gauges("xpyd_router_kv_usage", "Share of KV blocks in use, by the latest beat", labels=names)
        return [filled(Gauges("xpyd_router_instances", "Known instances", labels=("role", "state")),
                       dict(sorted(states.items()))),
                filled(legs, {(m.name, m.role.value): m.in_flight for m in members}),
                filled(usage, {(m.name, m.role.value): m.load.kv_usage for m in members}), *self._ask_drafts(members)]

    def _ask_drafts(self, members: Iterable[FleetMember]) -> Iterator[Metric]:
        """Of engines that speculate, since their start."""
        drafts = {(m.name, m.role.value): m.load.drafts for m in members if m.load.drafts is not None}
        for field, words in _DRAFTS.items():
            family = Counters(f"xpyd_router_engine_{field}_tokens", words, labels=("instance", "role"))
            yield filled(family, {labels: getattr(each, field) for labels, each in drafts.items()})
