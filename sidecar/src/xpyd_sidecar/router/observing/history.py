"""The last ten minutes of a router, second by second: what ``/fleet`` and the dashboard show. Pure: time is an argument.

    records ──▶ the second that runs ──advance──▶ ring of 600 seconds ──▶ rates, percentiles, flows

Laws
  * Bounded: a ring of ``SECONDS`` seconds; durations are kept as counts of buckets, pairs up to ``MAX_PAIRS`` a second
    (those beyond it count as ``OTHER``), failures and changes up to ``MAX_NEWS``.
  * Every second is there once, in order, also one in which nothing happened. A pause longer than the ring leaves it empty.

Buckets are those of ``contract.totals``, so a percentile is right within 4.5 %.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from xpyd_sidecar.contract.fleet import FleetFailure, FleetNews, FleetPair, Quantiles
from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.contract.totals import Buckets, add_buckets, middle_of
from xpyd_sidecar.router.observing.batch import MAX_PAIRS, MEASURES, SUMS, Batch, Flow, Pair
from xpyd_sidecar.router.observing.record import FAILED

SECONDS = 600
MAX_NEWS = 64
MAX_WORDS = 500
"""Characters kept of one reason."""
Row = tuple[int | float | None, ...]


def quantiles(buckets: Iterable[Buckets]) -> Quantiles:
    """p50, p95, p99 of many buckets together; zeros where there is nothing."""
    total: Buckets = {}
    for each in buckets:
        add_buckets(total, each)
    count = sum(total.values())
    if not count:
        return Quantiles()
    found: list[float] = []
    ordered = sorted(total.items())
    for share in (0.5, 0.95, 0.99):
        need, seen = share * count, 0
        for bucket, number in ordered:
            seen += number
            if seen >= need:
                found.append(round(middle_of(bucket), 6))
                break
    return Quantiles(count, *found)


class Second(msgspec.Struct):
    """What happened within one second. Requests count in the second in which they end."""

    at: int
    """Seconds since 1970."""
    opened: int = 0
    done: int = 0
    failed: int = 0
    retries: int = 0
    continued: int = 0
    tokens: int = 0
    bytes: int = 0
    in_flight: int = 0
    """At its end."""
    queued: int = 0
    """At its end: requests that wait for a place."""
    ttft: Buckets = {}
    tpot: Buckets = {}
    total: Buckets = {}
    queue: Buckets = {}
    handover: Buckets = {}
    flows: dict[Pair, Flow] = {}
    served: dict[InstanceName, int] = {}
    """Legs that ended well, by instance."""
    row: Row = ()
    """The same as the dashboard draws it, once it is over: made once, since making all of them takes long."""


COUNTS = ("at", "done", "failed", *SUMS, "in_flight", "queued")
COLUMNS = (*COUNTS, *(f"{measure}_{which}" for measure in MEASURES for which in ("p50", "p95")))
"""What a row says: counts of one second, and percentiles (None where nothing was measured)."""

def row_of(second: Second) -> Row:
    """A second as the dashboard draws it, in the order of ``COLUMNS``."""
    found: list[int | float | None] = [getattr(second, name) for name in COUNTS]
    for measure in MEASURES:
        quantile = quantiles([getattr(second, measure)])
        found += [quantile.p50, quantile.p95] if quantile.count else [None, None]
    return tuple(found)


class History:
    """The ring, what went wrong, and what changed."""

    def __init__(self, now_unix: float) -> None:
        self.seconds: deque[Second] = deque(maxlen=SECONDS)
        """Those that are over, oldest first."""
        self.failures: deque[FleetFailure] = deque(maxlen=MAX_NEWS)
        self.changes: deque[FleetNews] = deque(maxlen=MAX_NEWS)
        self._now = Second(int(now_unix))

    # ---- events

    def on_opened(self, requests: int = 1) -> None:
        """Requests came."""
        self._now.opened += requests

    def on_refused(self, now_unix: float, request_id: str, outcome: str, status: int, detail: str) -> None:
        """A request was refused before a leg was sent."""
        self._now.done += 1
        if outcome in FAILED:
            self._now.failed += 1
            self.failures.append(FleetFailure(round(now_unix, 3), outcome, status, detail[:MAX_WORDS], request_id))

    def on_closed(self, batch: Batch) -> None:
        """Requests are over."""
        now = self._now
        now.done += batch.requests
        for name in SUMS:
            setattr(now, name, getattr(now, name) + getattr(batch, name))
        for measure in MEASURES:
            add_buckets(getattr(now, measure), batch.buckets[measure])
        batch.flow_into(now.flows)
        for name, count in batch.served.items():
            if name in now.served or len(now.served) < MAX_PAIRS:
                now.served[name] = now.served.get(name, 0) + count
        now.failed += len(batch.failed)
        for record in batch.failed:
            ended = record.arrived_unix + record.last_at - record.arrived
            self.failures.append(FleetFailure(
                round(ended, 3), record.outcome, record.status, record.detail[:MAX_WORDS], record.request_id,
                record.transfer, record.last_instance(Role.PREFILL), record.last_instance(Role.DECODE), record.attempt))

    def on_changed(self, now_unix: float, instance: InstanceName, what: str) -> None:
        """The roster changed."""
        self.changes.append(FleetNews(round(now_unix, 3), instance, what[:MAX_WORDS]))

    def advance(self, now_unix: float, in_flight: int, queued: int) -> None:
        """The clock went on: put away seconds that are over. A clock that was set back makes this second longer."""
        second = int(now_unix)
        if second <= self._now.at:
            return
        self._now.in_flight, self._now.queued = in_flight, queued
        missed = range(max(self._now.at + 1, second - SECONDS), second)
        for over in (self._now, *(Second(at, in_flight=in_flight, queued=queued) for at in missed)):
            over.row = row_of(over)
            self.seconds.append(over)
        self._now = Second(second)

    # ---- what others read

    def last(self, seconds: int) -> list[Second]:
        """The newest seconds that are over, oldest first."""
        return list(self.seconds)[-seconds:]

    def rows_since(self, at: int) -> list[Row]:
        """Rows of the seconds after ``at``, oldest first."""
        return [second.row for second in self.seconds if second.at > at]


def pairs(seconds: Iterable[Second], over_s: float) -> tuple[FleetPair, ...]:
    """Flows between pairs, the busiest first, with their rates over so many seconds."""
    total: dict[Pair, Flow] = {}
    for second in seconds:
        for pair, flow in second.flows.items():
            both = total.setdefault(pair, Flow())
            both.count += flow.count
            both.seconds += flow.seconds
    ordered = sorted(total.items(), key=lambda item: (-item[1].count, item[0]))[:MAX_PAIRS]
    return tuple(FleetPair(prefill, decode, flow.count, round(flow.count / over_s, 4), round(flow.seconds / flow.count, 6))
                 for (prefill, decode), flow in ordered)
