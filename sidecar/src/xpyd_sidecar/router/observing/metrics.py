"""What the router counts: Prometheus metrics ``xpyd_router_*`` (docs/observability.md).

Belongs here: names, labels, buckets. Does not belong here: what a record means (``observing.summary``).

Label values come from small fixed sets, never from clients, so that the number of series is bounded; only ``instance``
grows with the fleet, ``worker`` with the router's processes, and pairs are bounded by ``MAX_PAIRS``. What belongs to
requests is counted when they are over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from xpyd_sidecar import __version__
from xpyd_sidecar.router.fleet.roster import FleetMember
from xpyd_sidecar.router.observing.batch import Batch
from xpyd_sidecar.router.observing.summary import failed
from xpyd_sidecar.router.observing.tally import TallyCounts, TallyTimes, buckets_of
from xpyd_sidecar.router.observing.vitals import LAGS, Vitals

TTFT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0)
TPOT = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)
SECONDS = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
WAITS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
MAX_PAIRS = 256
"""Pairs with series of their own; those beyond it are counted as ``other``."""
OTHER = "other"
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class RouterMetrics:
    """The metrics of one router."""

    def __init__(self, members: Callable[[], Iterable[FleetMember]], settle: Callable[[], None] = lambda: None) -> None:
        self.registry = registry = CollectorRegistry()
        self._pairs = _Pairs(members)
        self.in_flight = 0
        """Generation requests that are being served; the observer counts them."""
        self._settle = settle
        self.requests_total = 0
        self.requests_failed = 0
        self._requests = TallyCounts(registry, "xpyd_router_requests", "Generation requests by outcome", ("api", "outcome"))
        self._legs = TallyCounts(registry, "xpyd_router_legs", "Legs sent to engines by how they ended", ("role", "result"))
        self._probes = TallyCounts(registry, "xpyd_router_probes", "Health probes of engines by result", ("result",))
        self._changes = TallyCounts(registry, "xpyd_router_roster_changes", "Changes of the roster by kind", ("change",))
        self._beats = TallyCounts(registry, "xpyd_router_membership_messages", "Heartbeats and goodbyes by result",
                             ("result",))
        self._retries = TallyCounts(registry, "xpyd_router_retries", "Legs sent beyond the first pair of a request")
        self._skips = TallyCounts(registry, "xpyd_router_skipped_prefill",
                             "Requests sent to decode alone, by the field or the rule that made it so", ("by",))
        self._passed = TallyCounts(registry, "xpyd_router_passed_requests",
                              "Requests passed to one decode instance, by path and outcome", ("path", "outcome"))
        self._continued = TallyCounts(registry, "xpyd_router_continued",
                                      "Streams that went on with another decode instance")
        self._tokens = TallyCounts(registry, "xpyd_router_tokens",
                                   "Generated tokens relayed to clients, counted by their ids")
        self._bytes = TallyCounts(registry, "xpyd_router_relayed_bytes", "Bytes of answers to generation requests")
        self._ttft = TallyTimes(registry, "xpyd_router_ttft_seconds",
                           "From a request's arrival to the first event of its stream", TTFT, ("api",))
        self._tpot = TallyTimes(registry, "xpyd_router_tpot_seconds", "(end - first token) / (tokens - 1) of whole streams",
                           TPOT, ("api",))
        self._seconds = TallyTimes(registry, "xpyd_router_request_seconds",
                              "From a request's arrival to the end of its answer", SECONDS, ("api",))
        self._queue = TallyTimes(registry, "xpyd_router_queue_seconds", "How long a request waited for a place", WAITS)
        self._handover = TallyTimes(registry, "xpyd_router_handover_seconds",
                               "From the end of the prefill leg to decode's first event", WAITS)
        self._leg_seconds = TallyTimes(registry, "xpyd_router_leg_seconds", "From a leg's request to its end", SECONDS,
                                  ("role",))
        Gauge("xpyd_router_in_flight", "Generation requests being served", registry=registry).set_function(
            lambda: self.in_flight)
        self._queued = Gauge("xpyd_router_queued", "Generation requests that wait for a place", registry=registry)
        self._budget = Gauge("xpyd_router_retry_budget", "Retries that may be made now", registry=registry)
        build = Gauge("xpyd_router_build_info", "The version", ["version"], registry=registry)
        build.labels(__version__).set(1)
        self._processes = _Processes()
        registry.register(self._processes)
        self._poison = _Poisons()
        registry.register(self._poison)
        registry.register(self._pairs)
        registry.register(_Instances(members))

    def watch_queue(self, queued: Callable[[], float]) -> None:
        """Whom to ask how many requests wait."""
        self._queued.set_function(queued)

    def watch_budget(self, budget: Callable[[], float]) -> None:
        """Whom to ask how many retries may be made."""
        self._budget.set_function(budget)

    def watch_processes(self, vitals: Callable[[], Mapping[str, Vitals]]) -> None:
        """Whom to ask what each process knows of itself, by the number of the worker."""
        self._processes.vitals = vitals

    def watch_poison(self, counts: Callable[[], tuple[int, int, int, int]]) -> None:
        """Whom to ask of requests that end engines."""
        self._poison.counts = counts

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
        for (prefill, decode), handovers in batch.pairs.items():
            self._pairs.add(prefill, decode, sum(handovers), len(handovers))
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


class _Pairs(Collector):
    """Handovers by pair. P times D series would grow with the square of the fleet, so there is a bound.

    What has no place counts as ``other``. When half of the places are taken, a scrape makes room: pairs of instances that
    are gone are shown once more and then forgotten.
    """

    def __init__(self, members: Callable[[], Iterable[FleetMember]]) -> None:
        self._members = members
        self._counts: dict[tuple[str, str], list[float]] = {}

    def add(self, prefill: str, decode: str, seconds: float, handovers: int = 1) -> None:
        """Count some, which took so many seconds together."""
        pair = (prefill, decode)
        cell = self._counts.get(pair)
        if cell is None:
            if len(self._counts) >= MAX_PAIRS:
                pair = (OTHER, OTHER)
            cell = self._counts.setdefault(pair, [0, 0.0])
        cell[0] += handovers
        cell[1] += seconds

    def collect(self) -> Iterable[Metric]:
        names = ["prefill", "decode"]
        count = CounterMetricFamily("xpyd_router_pair_handovers", "Requests whose KV went from one to the other",
                                    labels=names)
        total = CounterMetricFamily("xpyd_router_pair_handover_seconds", "Their handovers, added up", labels=names)
        for pair, (number, seconds) in self._counts.items():
            count.add_metric(pair, number)
            total.add_metric(pair, seconds)
        if len(self._counts) > MAX_PAIRS // 2:
            here = {OTHER, *(member.name for member in self._members())}
            self._counts = {pair: cell for pair, cell in self._counts.items() if here.issuperset(pair)}
        return [count, total]


class _Processes(Collector):
    """Every process of the router: what it knows of itself, and what the system knows of it (``process_*``)."""

    def __init__(self) -> None:
        self.vitals: Callable[[], Mapping[str, Vitals]] = dict
        self._systems: dict[int, ProcessCollector] = {}
        """By process id."""

    def collect(self) -> Iterable[Metric]:
        connections = GaugeMetricFamily("xpyd_router_connections", "Open connections of clients", labels=["worker"])
        refused = CounterMetricFamily("xpyd_router_connections_refused", "Connections that ended without a whole request",
                                      labels=["worker", "code"])
        bodies = GaugeMetricFamily("xpyd_router_body_bytes", "Bytes of requests' bodies that are held", labels=["worker"])
        errors = CounterMetricFamily("xpyd_router_accept_errors", "Times that no file or memory was left for a client",
                                     labels=["worker"])
        lag = HistogramMetricFamily("xpyd_router_loop_lag_seconds", "How late a timer of the event loop was",
                                    labels=["worker"])
        all_vitals = self.vitals()
        for worker, vitals in all_vitals.items():
            connections.add_metric([worker], vitals.connections)
            bodies.add_metric([worker], vitals.body_bytes)
            errors.add_metric([worker], vitals.accept_errors)
            for code, count in vitals.refused.items():
                refused.add_metric([worker, code], count)
            lag.add_metric([worker], buckets_of(LAGS, vitals.lags), vitals.lags[-1])
        known = {vitals.pid: self._systems.get(vitals.pid) or ProcessCollector(pid=partial(int, vitals.pid), registry=None)
                 for vitals in all_vitals.values()}
        self._systems = known
        shown: dict[str, Metric] = {}
        for worker, vitals in all_vitals.items():
            for family in known[vitals.pid].collect():
                into = shown.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    into.add_sample(sample.name, {"worker": worker}, sample.value)
        return [connections, refused, bodies, errors, lag, *shown.values()]


class _Poisons(Collector):
    """Requests that end engines, read when asked."""

    def __init__(self) -> None:
        self.counts: Callable[[], tuple[int, int, int, int]] = lambda: (0, 0, 0, 0)
        """Deaths so far, suspects, refused requests, held ones."""

    def collect(self) -> Iterable[Metric]:
        deaths, suspects, refused, held = self.counts()
        gauges = (("xpyd_router_poison_suspects", "Requests that several dead engines had in common", suspects),
                  ("xpyd_router_poison_refused", "Requests that are refused now because engines died of them", refused),
                  ("xpyd_router_poison_held", "Requests held until it is known whether engines die of them", held))
        return [
            CounterMetricFamily("xpyd_router_engine_deaths", "Engines that died by themselves, with requests open", deaths),
            *(GaugeMetricFamily(name, words, value) for name, words, value in gauges)]


_DRAFTS = {"drafted": "Tokens that an engine which speculates has drafted since its start, by the latest beat",
           "accepted": "Those of them that it accepted", "generated": "All tokens that such an engine gave out"}


class _Instances(Collector):
    """Instances by state, and open legs and load per instance, read when asked."""

    def __init__(self, members: Callable[[], Iterable[FleetMember]]) -> None:
        self._members = members

    def collect(self) -> Iterable[Metric]:
        states = GaugeMetricFamily("xpyd_router_instances", "Known instances", labels=["role", "state"])
        legs = GaugeMetricFamily("xpyd_router_legs_open", "Open legs of this router", labels=["instance", "role"])
        usage = GaugeMetricFamily("xpyd_router_kv_usage", "Share of KV blocks in use, by the latest beat",
                                  labels=["instance", "role"])
        drafts = {field: CounterMetricFamily(f"xpyd_router_engine_{field}_tokens", words, labels=["instance", "role"])
                  for field, words in _DRAFTS.items()}
        counts: dict[tuple[str, str], int] = {}
        for member in self._members():
            if member.load.drafts is not None:
                for field, family in drafts.items():
                    family.add_metric([member.name, member.role.value], getattr(member.load.drafts, field))
            key = (member.role.value, "suspended" if member.suspended else member.state.value)
            counts[key] = counts.get(key, 0) + 1
            legs.add_metric([member.name, member.role.value], member.in_flight)
            usage.add_metric([member.name, member.role.value], member.load.kv_usage)
        for key, number in sorted(counts.items()):
            states.add_metric(list(key), number)
        return [states, legs, usage, *drafts.values()]
