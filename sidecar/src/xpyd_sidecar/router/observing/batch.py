"""Requests that are over, many at a time, by measure: what metrics, history and totals count; and the totals."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.contract.totals import Totals, add_buckets, buckets_of
from xpyd_sidecar.router.observing.record import FAILED, Record

_T = TypeVar("_T")
Pair = tuple[InstanceName, InstanceName]
"""Prefill and decode."""
MEASURES = ("ttft", "tpot", "total", "queue", "handover")
"""What is measured of requests, in seconds."""
SUMS = ("retries", "continued", "tokens", "bytes")
"""What is added up."""
MAX_PAIRS = 256
OTHER = InstanceName("other")
Measured = tuple[int, int, int]


class Flow(msgspec.Struct):
    """KV that went from one instance to another."""

    count: int = 0
    seconds: float = 0.0
    """Of all handovers together."""


def place_of(pair: Pair, table: Collection[Pair]) -> Pair:
    """Where a pair counts. P times D pairs would grow with the square of the fleet, so there is a bound: what is beyond
    ``MAX_PAIRS`` counts as ``OTHER``.
    """
    return pair if pair in table or len(table) < MAX_PAIRS else (OTHER, OTHER)


def still_here(table: dict[Pair, _T], instances: Collection[InstanceName]) -> dict[Pair, _T]:
    """A table without the pairs of instances that are gone, once half of the places are taken."""
    if len(table) <= MAX_PAIRS // 2:
        return table
    here = {OTHER, *instances}
    return {pair: one for pair, one in table.items() if here.issuperset(pair)}


class Batch:
    """Several requests of one API."""

    def __init__(self, api: str, requests: int) -> None:
        self.api = api
        self.requests = requests
        self.outcomes: dict[str, int] = {}
        self.times: dict[str, list[float]] = {measure: [] for measure in MEASURES}
        """By measure; a request that was served at once waited 0 s."""
        self.legs: dict[tuple[str, str], list[float]] = {}
        """How long they took, by role and result."""
        self.pairs: dict[Pair, list[float]] = {}
        """Hand-overs by prefill and decode."""
        self.served: dict[InstanceName, int] = {}
        """Legs that were answered, by instance."""
        self.tokens = self.bytes = self.retries = self.continued = 0
        self.skips: list[str] = []
        self.measured: list[Measured] = []
        """Tokens of the prompt, its size, and tokens of the answer, where the router followed these."""
        self.failed: list[Record] = []

    def count_buckets(self) -> Batch:
        """Count its times by bucket, once all of them are there. Returns itself."""
        self.times["handover"] = [seconds for those in self.pairs.values() for seconds in those]
        self.buckets = {measure: buckets_of(self.times[measure]) for measure in MEASURES}
        return self

    def flow_into(self, flows: dict[Pair, Flow]) -> None:
        """Count the hand-overs by pair."""
        for pair, handovers in self.pairs.items():
            flow = flows.setdefault(place_of(pair, flows), Flow())
            flow.count += len(handovers)
            flow.seconds += sum(handovers)


def of_records(api: str, records: Sequence[Record]) -> Batch:
    """Of requests that are over."""
    batch = Batch(api, len(records))
    ttfts, tpots, totals = batch.times["ttft"], batch.times["tpot"], batch.times["total"]
    legs: dict[Role, dict[str, list[float]]] = {Role.PREFILL: {}, Role.DECODE: {}}
    prefills, decodes = legs.values()
    outcomes, served, pairs = batch.outcomes, batch.served, batch.pairs
    for record in records:
        total, ttft, tpot = record.measures()
        totals.append(total)
        if ttft is not None:
            ttfts.append(ttft)
        if tpot is not None:
            tpots.append(tpot)
        for prefill, decode, seconds in record.handovers():
            pairs.setdefault((prefill, decode), []).append(seconds)
        outcome, tokens = record.outcome, record.tokens
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        for leg in record.legs:
            times = prefills if leg.role is Role.PREFILL else decodes
            times.setdefault(leg.result, []).append(leg.ended - leg.opened)
            if leg.result == "2xx":
                served[leg.instance] = served.get(leg.instance, 0) + 1
        if outcome == "ok" and record.prompt_tokens >= 0 and tokens >= 0:
            batch.measured.append((record.prompt_tokens, record.prompt_size, tokens))
        if tokens > 0:
            batch.tokens += tokens
        batch.bytes += record.bytes
        batch.retries += record.retries
        batch.continued += record.continued
        if record.skips:
            batch.skips.append(record.skips)
        if outcome in FAILED:
            batch.failed.append(record)
    batch.times["queue"] = [record.queued_s for record in records]
    batch.legs = {(role, result): times for role, those in legs.items() for result, times in those.items()}
    return batch.count_buckets()


class Counting:
    """Counters of one router since its start, for who asks now and then and wants to know what happened in between.

    Prompts are counted twice: by their size when a request comes, so that a change of traffic shows at once, and by their
    tokens when it ends. Requests whose answer's tokens the router does not follow are unmeasured.
    """

    def __init__(self, since: float) -> None:
        self._totals = Totals(since=since)

    def on_opened(self, tokens: int, requests: int = 1) -> None:
        """Requests came, whose prompts have about so many tokens together."""
        self._add(arrivals=requests, arrived_tokens=tokens)

    def on_closed(self, batch: Batch) -> None:
        """Requests are over."""
        prompts, handovers = [prompt for prompt, _, _ in batch.measured], batch.times["handover"]
        self._add(measured=len(prompts), prompt_tokens=sum(prompts),
                  prompt_squares=sum([prompt ** 2 for prompt in prompts]),
                  measured_size=sum([size for _, size, _ in batch.measured]),
                  output_tokens=sum([output for _, _, output in batch.measured]),
                  handovers=len(handovers), handover_s=sum(handovers))
        add_buckets(self._totals.ttft, batch.buckets["ttft"])
        add_buckets(self._totals.tpot, batch.buckets["tpot"])

    def _add(self, **more: float) -> None:
        told = self._totals
        self._totals = replace(told, **{name: getattr(told, name) + value for name, value in more.items()})

    def totals(self) -> Totals:
        """The counters as they are now."""
        told = self._totals
        return replace(told, handover_s=round(told.handover_s, 6), ttft=dict(told.ttft), tpot=dict(told.tpot))
