"""What the router counts: Prometheus metrics ``xpyd_router_*`` (docs/observability.md).

Label values come from small fixed sets, never from clients, so that the number of series is bounded; only ``instance``
grows with the fleet, and pairs are bounded by ``MAX_PAIRS``. What belongs to requests is counted when they are over.

Counters and histograms are of one thread, and shown through the Prometheus library when somebody scrapes. Its own lock and
look children up for every request, which costs three times as much as all of this. A router counts on one thread, so plain
numbers in dictionaries do.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily as Counters
from prometheus_client.core import GaugeMetricFamily as Gauges
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from xpyd_sidecar import __version__
from xpyd_sidecar.contract.ids import InstanceName
from xpyd_sidecar.contract.intake import Disaggregation
from xpyd_sidecar.router.balance.candidates import backlog
from xpyd_sidecar.router.fleet.member import FleetMember
from xpyd_sidecar.router.observing.batch import Batch, Flow, Pair, place_of, still_here
from xpyd_sidecar.router.observing.record import FAILED

TTFT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0)
TPOT = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)
SECONDS = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
WAITS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
DIFFERENCES = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Of log probabilities."""
RESTS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
LAGS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_DRAFTS = {"drafted": "Tokens that an engine which speculates has drafted since its start, by the latest beat",
           "accepted": "Those of them that it accepted", "generated": "All tokens that such an engine gave out"}
Labels = tuple[str, ...]


def family(kind: type[Counters | Gauges], name: str, words: str, names: Labels, cells: Mapping[Labels, float]) -> Metric:
    """A family of metrics with these cells. ``names``: of their labels."""
    made = kind(name, words, labels=names)
    for labels, value in cells.items():
        made.add_metric(labels, value)
    return made


class TallyTimes:
    """A histogram, mostly of seconds; ``bounds`` are the upper ends of its buckets."""

    def __init__(self, name: str, words: str, bounds: tuple[float, ...], labels: Labels = ()) -> None:
        self.name = name
        self._words = words
        self._bounds = bounds
        self._labels = labels
        self._cells: dict[Labels, list[float]] = {}
        if not labels:
            self._cell(())

    def add_all(self, durations: Sequence[float], labels: Labels = ()) -> None:
        """Count several."""
        if durations:
            cell = self._cells.get(labels) or self._cell(labels)
            for bucket, count in Counter(map(partial(bisect_left, self._bounds), durations)).items():
                cell[bucket] += count  # a bucket's upper end belongs to it
            cell[-1] += sum(durations)

    def _cell(self, labels: Labels) -> list[float]:
        """Counts by bucket, those beyond the last bound, and the sum."""
        cell = self._cells[labels] = [0.0] * (len(self._bounds) + 2)
        return cell

    def family(self) -> Metric:
        """For the library."""
        family = HistogramMetricFamily(self.name, self._words, labels=self._labels)
        for labels, cell in self._cells.items():
            family.add_metric(labels, buckets_of(self._bounds, cell), cell[-1])
        return family


def buckets_of(bounds: tuple[float, ...], cell: Sequence[float]) -> list[tuple[str, float]]:
    """As the library takes them. ``cell``: counts by bucket, those beyond the last bound, and the sum (left out)."""
    return list(zip((*map(str, bounds), "+Inf"), accumulate(cell[:-1]), strict=True))


class Vitals(msgspec.Struct):
    """What the router's process knows of itself. Counts are since its start."""

    connections: int = 0
    """Open ones of clients."""
    refused: dict[str, int] = msgspec.field(default_factory=dict)
    """Connections that ended without a whole request, by the code of the fault."""
    gave_way: int = 0
    """Connections that were closed for another one."""
    held: dict[str, int] = msgspec.field(default_factory=dict)
    """Bytes that are held for clients, by kind."""
    accept_errors: int = 0
    """How often nobody could be accepted, for a lack of the process's own."""
    lags: list[float] = msgspec.field(default_factory=lambda: [0.0] * (len(LAGS) + 2))
    """How late timers of the loop were: counts by bucket, those beyond the last one, and the sum."""

    def count_lag(self, seconds: float) -> None:
        """Count a timer that was so late."""
        late = max(0.0, seconds)
        self.lags[bisect_left(LAGS, late)] += 1
        self.lags[-1] += late


_COUNTED: dict[str, tuple[str, tuple[str, ...]]] = {
    "xpyd_router_requests": ("Generation requests by outcome", ("api", "outcome")),
    "xpyd_router_legs": ("Legs sent to engines by how they ended", ("role", "result")),
    "xpyd_router_probes": ("Health probes of engines by result", ("result",)),
    "xpyd_router_canaries": ("Requests of the router's own to instances that fail or are silent, by result", ("result",)),
    "xpyd_router_roster_changes": ("Changes of the roster by kind", ("change",)),
    "xpyd_router_membership_messages": ("Heartbeats and goodbyes by result", ("result",)),
    "xpyd_router_retries": ("Legs sent beyond the first pair of a request", ()),
    "xpyd_router_skipped_prefill": ("Requests sent to decode alone, by the field or the rule that made it so", ("by",)),
    "xpyd_router_passed_requests": ("Requests passed to one decode instance, by path and outcome", ("path", "outcome")),
    "xpyd_router_prefix_predicted_tokens": ("Of prompts that were prefilled, tokens that the router took to be cached", ()),
    "xpyd_router_prefix_actual_tokens": ("Of the same prompts, tokens that were, as the engines say", ()),
    "xpyd_router_pulls": ("Requests before which KV was moved from decode to prefill, by how that ended", ("result",)),
    "xpyd_router_continued": ("Streams that went on with another decode instance", ()),
    "xpyd_router_tokens": ("Generated tokens relayed to clients, counted by their ids", ()),
    "xpyd_router_relayed_bytes": ("Bytes of answers to generation requests", ()),
    "xpyd_router_tenant_requests": ("Requests of tenants by outcome", ("tenant", "outcome")),
    "xpyd_router_tenant_tokens": (("Tokens of tenants' requests: of prompts, those of them that were cached, generated "
                                   "ones, and what was charged for"), ("tenant", "kind")),
    "xpyd_router_audits": (("Answers with KV from prefill that were chosen to be computed again without it, by what was "
                            "found, or why nothing was"), ("result",))}
"""Counters, by name (without ``_total``): words and labels."""
_TIMED: dict[str, tuple[str, str, tuple[float, ...], tuple[str, ...]]] = {
    "ttft": ("xpyd_router_ttft_seconds", "From a request's arrival to the first event of its stream", TTFT, ("api",)),
    "tpot": ("xpyd_router_tpot_seconds", "(end - first token) / (tokens - 1) of whole streams", TPOT, ("api",)),
    "total": ("xpyd_router_request_seconds", "From a request's arrival to the end of its answer", SECONDS, ("api",)),
    "queue": ("xpyd_router_queue_seconds", "How long a request waited for a place", WAITS, ()),
    "handover": ("xpyd_router_handover_seconds", "From the end of the prefill leg to decode's first event", WAITS, ()),
    "leg": ("xpyd_router_leg_seconds", "From a leg's request to its end", SECONDS, ("role",)),
    "difference": (
        "xpyd_router_audit_difference",
        "How far the log probability of a first token is from the one without KV from prefill",
        DIFFERENCES, ()),
    "rest": ("xpyd_router_skipped_rest_tokens", "Of prompts that went to decode alone because it held nearly all: the rest",
             RESTS, ())}
"""Histograms, by measure: name, words, upper ends of buckets, labels. Of seconds, but for the last two."""


class RouterMetrics(Collector):
    """The metrics of one router."""

    def __init__(self, members: Callable[[], Iterable[FleetMember]], settle: Callable[[], None] = lambda: None) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        self._members = members
        self.in_flight = 0
        """Generation requests that are being served; the observer counts them."""
        self._settle = settle
        self.requests_total = 0
        self.requests_failed = 0
        self._counts: dict[str, dict[Labels, float]] = {
            name: {} if labels else {(): 0.0} for name, (_, labels) in _COUNTED.items()}
        """By name, and by labels in the order in which they were named."""
        self._times = {measure: TallyTimes(name, words, bounds, labels)
                       for measure, (name, words, bounds, labels) in _TIMED.items()}
        self.queued: Callable[[], int] = int
        """Whom to ask how many requests wait."""
        self.held: Callable[[], int] = int
        """Whom to ask how many of those are held until an instance that is expected is there."""
        self.retries_left: Callable[[], float] = int
        """Whom to ask how many retries may be made."""
        self.vitals: Callable[[], Vitals] = Vitals
        """Whom to ask what the process knows of itself."""
        self.time: Callable[[], float] = float
        """The loop's time, by which beats are known."""
        self.poison: Callable[[], tuple[int, int, int, int]] = lambda: (0, 0, 0, 0)
        """Whom to ask of requests that end engines: deaths so far, suspects, refused requests, held ones."""
        self.labels: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Whom to ask of labels of requests that end engines: quarantined ones, refused ones."""
        self.disaggregation: Callable[[], Disaggregation] = Disaggregation
        """Whom to ask whether decode receives prompts."""
        self._pairs: dict[Pair, Flow] = {}
        self._audited: dict[Pair, dict[str, int]] = {}

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Add to the counter ``xpyd_router_{name}``."""
        cells = self._counts[f"xpyd_router_{name}"]
        cells[labels] = cells.get(labels, 0.0) + by

    def count_audit(self, prefill: InstanceName, decode: InstanceName, result: str, difference: float) -> None:
        """An audit of a pair ended so, or was left out. ``difference``: of log probabilities; NaN: none was found."""
        self.count("audits", result)
        if not math.isnan(difference):
            self._times["difference"].add_all((difference,))
            pair = place_of((prefill, decode), self._audited)
            self._audited.setdefault(pair, {"equal": 0, "differs": 0})[result] += 1

    def count_cached_tokens(self, predicted: int, actual: int) -> None:
        """Count tokens of a prompt: those taken to be cached where it was prefilled (``predicted``), those that were."""
        self.count("prefix_predicted_tokens", by=predicted)
        self.count("prefix_actual_tokens", by=actual)

    def count_skipped_rest(self, rest: int) -> None:
        """Count a prompt that goes to decode alone, which holds all but so many tokens."""
        self._times["rest"].add_all((rest,))

    def count_batch(self, batch: Batch) -> None:
        """Count requests that ended."""
        for measure, durations in batch.times.items():
            self._times[measure].add_all(durations, (batch.api,) if measure in {"ttft", "tpot", "total"} else ())
        for (role, result), durations in batch.legs.items():
            self.count("legs", role, result, by=len(durations))
            self._times["leg"].add_all(durations, (role,))
        batch.flow_into(self._pairs)
        for name, number in (("retries", batch.retries), ("continued", batch.continued), ("tokens", batch.tokens),
                             ("relayed_bytes", batch.bytes)):
            self.count(name, by=number)
        for field in batch.skips:
            self.count("skipped_prefill", field)
        for outcome, count in batch.outcomes.items():
            self.count_outcome(batch.api, outcome, count)

    def count_outcome(self, api: str, outcome: str, count: int = 1) -> None:
        """Count requests of an API that ended so."""
        self.count("requests", api, outcome, by=count)
        self.requests_total += count
        if outcome in FAILED:
            self.requests_failed += count

    def text(self) -> bytes:
        """The exposition format."""
        self._settle()
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """For the library, whenever somebody scrapes."""
        yield from [family(Counters, name, *_COUNTED[name], cells) for name, cells in self._counts.items()]
        yield from [one.family() for one in self._times.values()]
        yield Gauges("xpyd_router_in_flight", "Generation requests being served", self.in_flight)
        yield Gauges("xpyd_router_queued", "Requests that wait for a place or an instance", self.queued())
        yield Gauges("xpyd_router_held", "Those of them that wait for an instance", self.held())
        yield Gauges("xpyd_router_retry_budget", "Retries that may be made now", self.retries_left())
        yield family(Gauges, "xpyd_router_build_info", "The version", ("version",), {(__version__,): 1})
        for ask in (self._ask_vitals, self._ask_poison, self._ask_disaggregation, self._ask_pairs, self._ask_instances):
            yield from ask()

    def _ask_pairs(self) -> Iterator[Metric]:
        """Pairs of instances that are gone are shown once more, and then forgotten (``still_here``). Where a pair has
        audits, both results are there, so that shares of them can be asked for.
        """
        pairs, audited, names = self._pairs, self._audited, ("prefill", "decode")
        here = [member.name for member in self._members()]
        self._pairs, self._audited = still_here(pairs, here), still_here(audited, here)
        yield family(Counters, "xpyd_router_pair_handovers", "Requests whose KV went from one to the other", names,
                     {pair: flow.count for pair, flow in pairs.items()})
        yield family(Counters, "xpyd_router_pair_handover_seconds", "Their handovers, added up", names,
                     {pair: flow.seconds for pair, flow in pairs.items()})
        yield family(Counters, "xpyd_router_pair_audits", "Audits of which something was found, by pair",
                     (*names, "result"),
                     {(*pair, result): count for pair, found in audited.items() for result, count in found.items()})

    def _ask_vitals(self) -> Iterator[Metric]:
        vitals = self.vitals()
        yield Gauges("xpyd_router_connections", "Open connections of clients", vitals.connections)
        yield family(Counters, "xpyd_router_connections_refused", "Connections that ended without a whole request",
                     ("code",), {(code,): count for code, count in vitals.refused.items()})
        yield Counters("xpyd_router_connections_gave_way", "Connections that were closed to make room for others",
                       vitals.gave_way)
        yield family(Gauges, "xpyd_router_held_bytes", "Bytes that are held for clients", ("kind",),
                     {(kind,): size for kind, size in vitals.held.items()})
        yield Counters("xpyd_router_accept_errors", "Times that no file or memory was left for a client",
                       vitals.accept_errors)
        yield HistogramMetricFamily("xpyd_router_loop_lag_seconds", "How late a timer of the event loop was",
                                    buckets_of(LAGS, vitals.lags), vitals.lags[-1])

    def _ask_poison(self) -> Iterator[Metric]:
        deaths, suspects, refused, held = self.poison()
        yield Counters("xpyd_router_engine_deaths", "Engines that died by themselves, with requests open", deaths)
        yield Gauges("xpyd_router_poison_suspects", "Requests that several dead engines had in common", suspects)
        yield Gauges("xpyd_router_poison_refused", "Requests that are refused now because engines died of them", refused)
        yield Gauges("xpyd_router_poison_held", "Requests held until it is known whether engines die of them", held)
        quarantined, refused = self.labels()
        yield family(Gauges, "xpyd_router_poison_labels", "What requests have in common that ended engines", ("state",),
                     {("quarantined",): quarantined, ("refused",): refused})

    def _ask_disaggregation(self) -> Iterator[Metric]:
        told = self.disaggregation()
        yield family(Gauges, "xpyd_router_disaggregating", "1: decode receives the prompts that it was to receive; 0: it "
                     "does not; absent while that is not known", ("reason",),
                     {} if told.holds == "Unknown" else {(told.reason,): float(told.holds == "True")})
        yield family(Gauges, "xpyd_router_received_share", "Of the tokens of prompts that decode was to receive", (),
                     {} if told.share is None else {(): told.share})

    def _ask_instances(self) -> Iterator[Metric]:
        members, names = {(m.name, m.role.value): m for m in self._members()}, ("instance", "role")
        states = Counter((m.role.value, m.standing) for m in members.values())
        yield family(Gauges, "xpyd_router_instances", "Known instances", ("role", "state"), dict(sorted(states.items())))
        yield family(Gauges, "xpyd_router_legs_open", "Open legs of this router", names,
                     {labels: m.in_flight for labels, m in members.items()})
        now = self.time()
        yield family(Gauges, "xpyd_router_queued_prompt_tokens",
                     "Tokens of prompts that wait to be computed, about, those that are taken to be cached left out", names,
                     {labels: round(backlog(m, now)) for labels, m in members.items()})
        yield family(Gauges, "xpyd_router_kv_usage", "Share of KV blocks in use, by the latest beat", names,
                     {labels: m.load.kv_usage for labels, m in members.items()})
        for field, words in _DRAFTS.items():  # of engines that speculate, since their start
            yield family(Counters, f"xpyd_router_engine_{field}_tokens", words, names, {
                labels: getattr(m.load.drafts, field) for labels, m in members.items() if m.load.drafts is not None})
