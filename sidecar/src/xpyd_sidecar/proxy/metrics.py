"""What the router counts: Prometheus metrics ``xpyd_router_*`` (docs/observability.md).

Belongs here: names, labels, buckets. Does not belong here: what a record means (``routing.summary``).

Label values come from small fixed sets, never from clients, so that the number of series is bounded; only ``instance``
grows with the fleet, and pairs are bounded by ``MAX_PAIRS``. What belongs to requests is counted when they are over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from xpyd_sidecar import __version__
from xpyd_sidecar.routing import summary
from xpyd_sidecar.routing.record import Record
from xpyd_sidecar.routing.roster import Member

TTFT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0)
TPOT = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)
SECONDS = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
WAITS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
MAX_PAIRS = 256
"""Pairs with series of their own; those beyond it are counted as ``other``."""
OTHER = "other"
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The metrics of one router."""

    def __init__(self, members: Callable[[], Iterable[Member]]) -> None:
        self.registry = registry = CollectorRegistry()
        self._pairs = _Pairs(members)
        self.requests_total = 0
        self.requests_failed = 0
        self._requests = _Counts(Counter(
            "xpyd_router_requests", "Generation requests by outcome", ["api", "outcome"], registry=registry))
        self._legs = _Counts(Counter(
            "xpyd_router_legs", "Legs sent to engines by how they ended", ["role", "result"], registry=registry))
        self._probes = _Counts(Counter(
            "xpyd_router_probes", "Health probes of engines by result", ["result"], registry=registry))
        self._changes = _Counts(Counter(
            "xpyd_router_roster_changes", "Changes of the roster by kind", ["change"], registry=registry))
        self._beats = _Counts(Counter(
            "xpyd_router_membership_messages", "Heartbeats and goodbyes by result", ["result"], registry=registry))
        self._retries = Counter("xpyd_router_retries", "Legs sent beyond the first pair of a request", registry=registry)
        self._continued = Counter("xpyd_router_continued", "Streams that went on with another decode instance",
                                  registry=registry)
        self._tokens = Counter("xpyd_router_tokens", "Generated tokens relayed to clients, counted by their ids",
                               registry=registry)
        self._bytes = Counter("xpyd_router_relayed_bytes", "Bytes of answers to generation requests", registry=registry)
        self._ttft = _Times(Histogram(
            "xpyd_router_ttft_seconds", "From a request's arrival to the first event of its stream", ["api"], buckets=TTFT,
            registry=registry))
        self._tpot = _Times(Histogram(
            "xpyd_router_tpot_seconds", "(end - first token) / (tokens - 1) of whole streams", ["api"], buckets=TPOT,
            registry=registry))
        self._seconds = _Times(Histogram(
            "xpyd_router_request_seconds", "From a request's arrival to the end of its answer", ["api"], buckets=SECONDS,
            registry=registry))
        self._queue = Histogram(
            "xpyd_router_queue_seconds", "How long a request waited for a place", buckets=WAITS, registry=registry)
        self._handover = Histogram(
            "xpyd_router_handover_seconds", "From the end of the prefill leg to decode's first event", buckets=WAITS,
            registry=registry)
        self._leg_seconds = _Times(Histogram(
            "xpyd_router_leg_seconds", "From a leg's request to its end", ["role"], buckets=SECONDS, registry=registry))
        self._in_flight = Gauge("xpyd_router_in_flight", "Generation requests being served", registry=registry)
        self._queued = Gauge("xpyd_router_queued", "Generation requests that wait for a place", registry=registry)
        self._budget = Gauge("xpyd_router_retry_budget", "Retries that may be made now", registry=registry)
        build = Gauge("xpyd_router_build_info", "The version", ["version"], registry=registry)
        build.labels(__version__).set(1)
        registry.register(self._pairs)
        registry.register(_Instances(members))

    def watch_queue(self, queued: Callable[[], float]) -> None:
        """Whom to ask how many requests wait."""
        self._queued.set_function(queued)

    def watch_budget(self, budget: Callable[[], float]) -> None:
        """Whom to ask how many retries may be made."""
        self._budget.set_function(budget)

    def opened(self) -> None:
        """A generation request is being served."""
        self._in_flight.inc()

    def closed(self, record: Record) -> None:
        """It ended."""
        self._in_flight.dec()
        api = record.api
        self._seconds[api,].observe(summary.duration(record))
        self._queue.observe(record.queued_s)
        if (ttft := summary.ttft(record)) is not None:
            self._ttft[api,].observe(ttft)
        if (tpot := summary.tpot(record)) is not None:
            self._tpot[api,].observe(tpot)
        for leg in record.legs:
            self._legs[leg.role.value, leg.result].inc()
            self._leg_seconds[leg.role.value,].observe(leg.ended - leg.opened)
        for handover in summary.handovers(record):
            self._handover.observe(handover.seconds)
            self._pairs.add(handover)
        if record.retries:
            self._retries.inc(record.retries)
        if record.continued:
            self._continued.inc(record.continued)
        if record.tokens > 0:
            self._tokens.inc(record.tokens)
        self._bytes.inc(record.bytes)
        self.counted(api, record.outcome)

    def counted(self, api: str, outcome: str) -> None:
        """A request that ended with ``outcome``."""
        self._requests[api, outcome].inc()
        self.requests_total += 1
        if summary.failed(outcome):
            self.requests_failed += 1

    def message(self, result: str) -> None:
        """A membership message: taken, refused, or undecodable."""
        self._beats[result,].inc()

    def probed(self, result: str) -> None:
        """A health probe ended."""
        self._probes[result,].inc()

    def changed(self, kind: str) -> None:
        """The roster changed."""
        self._changes[kind,].inc()

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


class _Counts(dict[tuple[str, ...], Counter]):
    """Children of a counter by their labels: looking one up in the library costs more than counting."""

    def __init__(self, parent: Counter) -> None:
        super().__init__()
        self._parent = parent

    def __missing__(self, labels: tuple[str, ...]) -> Counter:
        child = self[labels] = self._parent.labels(*labels)
        return child


class _Times(dict[tuple[str, ...], Histogram]):
    """The same of a histogram."""

    def __init__(self, parent: Histogram) -> None:
        super().__init__()
        self._parent = parent

    def __missing__(self, labels: tuple[str, ...]) -> Histogram:
        child = self[labels] = self._parent.labels(*labels)
        return child


class _Pairs(Collector):
    """Handovers by pair. P times D series would grow with the square of the fleet, so there is a bound.

    What has no place counts as ``other``. When half of the places are taken, a scrape makes room: pairs of instances that
    are gone are shown once more and then forgotten.
    """

    def __init__(self, members: Callable[[], Iterable[Member]]) -> None:
        self._members = members
        self._counts: dict[tuple[str, str], list[float]] = {}

    def add(self, handover: summary.Handover) -> None:
        """Count one."""
        pair: tuple[str, str] = (handover.prefill, handover.decode)
        cell = self._counts.get(pair)
        if cell is None:
            if len(self._counts) >= MAX_PAIRS:
                pair = (OTHER, OTHER)
            cell = self._counts.setdefault(pair, [0, 0.0])
        cell[0] += 1
        cell[1] += handover.seconds

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


class _Instances(Collector):
    """Instances by state, and open legs and load per instance, read when asked."""

    def __init__(self, members: Callable[[], Iterable[Member]]) -> None:
        self._members = members

    def collect(self) -> Iterable[Metric]:
        states = GaugeMetricFamily("xpyd_router_instances", "Known instances", labels=["role", "state"])
        legs = GaugeMetricFamily("xpyd_router_legs_open", "Open legs of this router", labels=["instance", "role"])
        usage = GaugeMetricFamily("xpyd_router_kv_usage", "Share of KV blocks in use, by the latest beat",
                                  labels=["instance", "role"])
        counts: dict[tuple[str, str], int] = {}
        for member in self._members():
            key = (member.role.value, "suspended" if member.suspended else member.state.value)
            counts[key] = counts.get(key, 0) + 1
            legs.add_metric([member.name, member.role.value], member.in_flight)
            usage.add_metric([member.name, member.role.value], member.load.kv_usage)
        for key, number in sorted(counts.items()):
            states.add_metric(list(key), number)
        return [states, legs, usage]
