"""Requests that are over, many at a time, by measure: what metrics, history and totals count."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.contract.totals import buckets_of
from xpyd_sidecar.router.observing import summary
from xpyd_sidecar.router.observing.record import Record, StraightRecord

Pair = tuple[InstanceName, InstanceName]
"""Prefill and decode."""
MAX_PAIRS = 256
OTHER = InstanceName("other")
Measured = tuple[int, int, int]
_PREFILLED, _DECODED = (Role.PREFILL.value, "2xx"), (Role.DECODE.value, "2xx")


class Flow(msgspec.Struct):
    """KV that went from one instance to another."""

    count: int = 0
    seconds: float = 0.0
    """Of all handovers together."""


def count_pair(flows: dict[Pair, Flow], pair: Pair, seconds: float, handovers: int) -> None:
    """Count handovers that took so many seconds together. P times D pairs would grow with the square of the fleet, so there
    is a bound: what is beyond ``MAX_PAIRS`` counts as ``OTHER``.
    """
    if pair not in flows and len(flows) >= MAX_PAIRS:
        pair = (OTHER, OTHER)
    flow = flows.setdefault(pair, Flow())
    flow.count += handovers
    flow.seconds += seconds


class Batch:
    """Several requests of one API. Times are seconds."""

    def __init__(self, api: str, seconds: list[float]) -> None:
        self.api = api
        self.seconds = seconds
        self.outcomes: dict[str, int] = {}
        self.queue: list[float] = []
        """How long those waited that were not served at once."""
        self.ttft: list[float] = []
        self.tpot: list[float] = []
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

    def __len__(self) -> int:
        """How many they are."""
        return len(self.seconds)

    def summed(self) -> Batch:
        """With the counts by bucket, once all else is there."""
        self.handover = [seconds for those in self.pairs.values() for seconds in those]
        self.seconds_buckets, self.handover_buckets = buckets_of(self.seconds), buckets_of(self.handover)
        self.ttft_buckets, self.tpot_buckets = buckets_of(self.ttft), buckets_of(self.tpot)
        return self


def of_straight(api: str, those: Sequence[StraightRecord]) -> Batch:
    """Of requests that went their straight course."""
    batch = Batch(api, [one.ended - one.arrived for one in those])
    batch.outcomes["ok"] = len(those)
    batch.ttft = [one.begun - one.arrived for one in those]
    batch.tpot = [max(0.0, one.ended - one.begun) / (one.tokens - 1) for one in those if one.tokens >= 2]
    batch.legs = {_PREFILLED: [one.prefilled - one.opened for one in those],
                  _DECODED: [one.ended - one.opened for one in those]}
    batch.tokens = sum([one.tokens for one in those if one.tokens > 0])
    batch.bytes = sum([one.sent for one in those])
    batch.measured = [(one.prompt_tokens, one.prompt_size, one.tokens) for one in those
                      if one.prompt_tokens >= 0 and one.tokens >= 0]
    for one in those:
        batch.pairs.setdefault((one.prefill, one.decode), []).append(max(0.0, one.begun - one.prefilled))
    for pair, handovers in batch.pairs.items():
        for name in pair:
            batch.served[name] = batch.served.get(name, 0) + len(handovers)
    return batch.summed()


def of_records(api: str, records: Sequence[Record]) -> Batch:
    """Of any requests."""
    told = [summary.of(record) for record in records]
    batch = Batch(api, [each.seconds for each in told])
    batch.queue = [record.queued_s for record in records if record.queued_s]
    batch.ttft = [each.ttft for each in told if each.ttft is not None]
    batch.tpot = [each.tpot for each in told if each.tpot is not None]
    for handover in [handover for each in told for handover in each.handovers]:
        batch.pairs.setdefault((handover.prefill, handover.decode), []).append(handover.seconds)
    for record in records:
        outcome = record.outcome
        batch.outcomes[outcome] = batch.outcomes.get(outcome, 0) + 1
        for leg in record.legs:
            batch.legs.setdefault((leg.role.value, leg.result), []).append(leg.ended - leg.opened)
            if leg.result == "2xx":
                batch.served[leg.instance] = batch.served.get(leg.instance, 0) + 1
        if outcome == "ok" and record.prompt_tokens >= 0 and record.tokens >= 0:
            batch.measured.append((record.prompt_tokens, record.prompt_size, record.tokens))
        batch.retries += record.retries
        batch.continued += record.continued
        batch.tokens += max(0, record.tokens)
        batch.bytes += record.bytes
        if record.skips:
            batch.skips.append(record.skips)
        if summary.failed(outcome):
            batch.failed.append(record)
    return batch.summed()
