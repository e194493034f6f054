"""Who is told what happens in a router, and tells operators: metrics, history, ``/fleet``.

    a request ends ──over, straight_over, unserved──▶ metrics, history, totals, access log
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from time import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from xpyd_sidecar import logs
from xpyd_sidecar.contract.fleet import Fleet, Rates
from xpyd_sidecar.contract.ids import Incarnation, InstanceName, Role, ServiceName
from xpyd_sidecar.contract.timeline import KEPT
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.router.api.paths import Route, RouteKind
from xpyd_sidecar.router.fleet.member import Changed, Probed
from xpyd_sidecar.router.fleet.roster import Roster
from xpyd_sidecar.router.observing import batch
from xpyd_sidecar.router.observing import history as hi
from xpyd_sidecar.router.observing.metrics import RouterMetrics
from xpyd_sidecar.router.observing.record import Record

if TYPE_CHECKING:
    from xpyd_sidecar.router.observing.spans import SpanTracing

MAX_UNSETTLED = 256
"""Records that wait to be counted: until the next second, or until somebody asks."""
WINDOW_S = 60
"""What rates, latencies and pairs of ``/fleet`` are over; less while the router is younger."""
TELL_S = 0.25
MAX_OVER, LONG = 64, 4096
"""Requests of the straight course that have ended are told of after so long, when there are so many, or at once where the
prompt has so many tokens: they hold what they were asked.
"""
access = logging.getLogger("xpyd_sidecar.access")


def line_of(record: Record) -> dict[str, object]:
    """The fields of a request that is over."""
    if not record.api:
        return {"request": record.request_id, "path": record.path, "status": record.status,
                "decode": record.went(Role.DECODE), "attempt": len(record.legs),
                "seconds": round(record.last_at - record.arrived, 4), "detail": record.detail}
    passed = {"path": record.path} if record.path else {}
    return {"request": record.request_id, "transfer": record.transfer, "api": record.api, "stream": record.stream,
            "status": record.status, "prefill": record.went(Role.PREFILL), "decode": record.went(Role.DECODE),
            "attempt": record.attempt, "skips": record.skips, "continued": record.continued,
            "seconds": round(record.last_at - record.arrived, 4),
            "first_byte_s": None if math.isnan(record.first_at) else round(record.first_at - record.arrived, 4),
            "detail": record.detail, **passed}


def passed_outcome(outcome: str, ended_as: str) -> str:
    """What ``xpyd_router_passed_requests_total`` calls the outcome of a request whose answer passes through.

    ``ended_as``: the result of the leg that answered, empty where none did.
    """
    if outcome == "ok":
        return "complete"
    if outcome in {"client_gone", "stopped"}:
        return "aborted"
    return "engine_error" if ended_as in {"4xx", "5xx", "aborted"} else outcome


def tell_straight(records: list[Record]) -> None:
    """Log some that went their straight course (prefill and decode answered well at once); their lines leave at once."""
    logs.tell_all(access, "ok", records, _Straight())


class _Straight:
    """``logs.Form``: the line of one that went its straight course."""

    fields = staticmethod(line_of)

    @staticmethod
    def at(one: Record) -> float:
        """When it ended, in seconds since 1970."""
        return one.arrived_unix + one.last_at - one.arrived

    @staticmethod
    def json(one: Record) -> str:
        """The fields as JSON, without braces. No request id has what JSON escapes (``incoming.request_id_of``)."""
        arrived, (prefill, decode) = one.arrived, one.legs
        between = _between(one.api, prefill.instance, decode.instance)
        return (f'"request":"{one.request_id}","transfer":"{one.transfer}",{between},'
                f'"seconds":{one.last_at - arrived:.4f},"first_byte_s":{one.first_at - arrived:.4f},"detail":""')


@lru_cache(maxsize=1024)
def _between(api: str, prefill: str, decode: str) -> str:
    fields = {"api": api, "stream": True, "status": 200, "prefill": prefill, "decode": decode, "attempt": 1, "skips": "",
              "continued": 0}
    return _encode(fields).decode()[1:-1]


_encode = msgspec.json.Encoder().encode


class Straight(Protocol):
    """A request that has ended on its straight course."""

    prompt_size: int

    def record(self) -> Record:
        """What is known of it."""


class RouterObserver:
    """Counts and remembers for one router."""

    def __init__(self, roster: Roster, loop: asyncio.AbstractEventLoop, *, access_log: bool = False) -> None:
        self._roster = roster
        self._loop = loop
        self._access_log = access_log
        self.cached: Callable[[InstanceName, Incarnation], int] = lambda *_: 0
        """How many prefixes an instance is taken to hold."""
        self._over: list[Straight] = []
        """Requests of the straight course that have ended, of which nobody was told yet."""
        self._telling = False
        """They will be, by the time."""
        self._unsettled: list[Record] = []
        self._straight: list[Record] = []
        """The same of those that went their straight course."""
        self._opened: list[int] = []
        """About how many tokens the prompts of new requests have."""
        self._recent: deque[Record] = deque(maxlen=KEPT)
        self.metrics = RouterMetrics(roster.members, self.settle)
        self.history = hi.History(time())
        self.counting = batch.Counting(time())

    # ---- requests

    def opened(self, tokens: int) -> None:
        """A request is being served, whose prompt has about so many tokens."""
        self.metrics.in_flight += 1
        self._opened.append(tokens)

    def unserved(self, route: Route, request_id: str, outcome: str, status: int, detail: str) -> None:
        """A request ended before it was served: count it, and log it."""
        api, passed = route.api or "", passed_outcome(outcome, "")
        if route.way is RouteKind.PASSED:
            self.passed(route.path, passed)
        if api:
            self.refused(api, request_id, outcome, status, detail)
        if self._access_log:
            which = {"api": api} if api else {"path": route.path}
            access.info("%s", outcome if api else passed,
                        extra={"request": request_id, **which, "status": status, "detail": detail[:500]})

    def over(self, record: Record) -> None:
        """A request that was served is over: count it, and log it."""
        passed = passed_outcome(record.outcome, record.ended_as)
        if record.path:
            self.passed(record.path, passed)
        if record.api:
            self.closed(record)
        if self._access_log:
            logs.tell(access, record.outcome if record.api else passed, partial(line_of, record))

    def straight_over(self, one: Straight) -> None:
        """A request is over that went its straight course. What it leaves to be told waits for ``tell``: done for many at a
        time, with warm caches, it costs a fraction.
        """
        self.metrics.in_flight -= 1
        over = self._over
        over.append(one)
        if not self._telling:
            self._telling = True
            self._loop.call_later(TELL_S, self._tell)
        if len(over) >= MAX_OVER or one.prompt_size >= LONG:
            self.tell()

    def _tell(self) -> None:
        self._telling = False
        self.tell()

    def tell(self) -> None:
        """Count and log the requests of the straight course that have ended."""
        over, self._over = self._over, []
        if not over:
            return
        records = [one.record() for one in over]
        self._ended(records, self._straight)
        if self._access_log:
            tell_straight(records)

    def passed(self, path: str, outcome: str) -> None:
        """A request whose answer passes through ended so."""
        self.metrics.count("passed_requests", path, outcome)

    def audited(self, prefill: InstanceName, decode: InstanceName, result: str, difference: float) -> None:
        """An audit of a pair ended so, or was left out. ``difference``: of log probabilities; NaN: none was found."""
        self.metrics.audited(prefill, decode, result, difference)

    def refused(self, api: str, request_id: str, outcome: str, status: int, detail: str) -> None:
        """A request that would have generated was not served."""
        self.settle()
        self.metrics.counted(api, outcome)
        self.history.refused(time(), request_id, outcome, status, detail)

    def closed(self, *records: Record) -> None:
        """Requests are over."""
        self.metrics.in_flight -= len(records)
        self._ended(records, self._unsettled)

    def _ended(self, records: Sequence[Record], those: list[Record]) -> None:
        # Many are counted at a time, which is cheaper: between requests the caches are cold.
        those += records
        self._recent += records
        if len(those) >= MAX_UNSETTLED:
            self.settle()

    @property
    def recent(self) -> list[Record]:
        """Those that ended last, for timelines."""
        self.tell()
        return list(self._recent)

    def settle(self) -> None:
        """Count what has ended."""
        self.tell()
        opened, self._opened = self._opened, []
        if opened:
            self.history.opened(len(opened))
            self.counting.opened(sum(opened), len(opened))
        straight, others, self._straight, self._unsettled = self._straight, self._unsettled, [], []
        for count, records in ((batch.of_straight, straight), (batch.of_records, others)):
            for api in {record.api for record in records}:
                done = count(api, [record for record in records if record.api == api])
                self.metrics.closed(done)
                self.counting.closed(done)
                self.history.closed(done)

    # ---- instances (watch.FleetWatch)

    def changed(self, change: Changed) -> None:
        """The roster changed."""
        self.metrics.count("roster_changes", change.kind)
        self.history.changed(time(), change.instance, change.what)

    def probed(self, result: Probed) -> None:
        """A health probe ended."""
        self.metrics.count("probes", result.value)

    # ---- what others read

    def turn(self) -> None:
        """Called every second or oftener."""
        self.settle()
        self.history.turn(time(), self.metrics.in_flight, self.metrics.queued())

    def fleet(self, service: ServiceName, router: str, now: float, started: float, *, draining: bool) -> Fleet:
        """What ``GET /fleet`` says. Times are those of the roster's clock."""
        self.turn()
        seconds = self.history.last(WINDOW_S)
        over = max(1, len(seconds))
        served = sum((Counter(second.served) for second in seconds), Counter[InstanceName]())

        def rate(name: str) -> float:
            total: int = sum(getattr(second, name) for second in seconds)
            return round(total / over, 4)

        return Fleet(
            service=service, router=router, uptime_s=round(now - started, 3), settled=self._roster.settled(now),
            instances=tuple(msgspec.structs.replace(
                each, served_s=round(served[each.instance] / over, 4),
                cached=self.cached(each.instance, each.incarnation)) for each in self._roster.fleet(now)),
            requests_total=self.metrics.requests_total, requests_failed=self.metrics.requests_failed, draining=draining,
            in_flight=self.metrics.in_flight, queued=self.metrics.queued(), window_s=len(seconds),
            rates=Rates(requests=rate("done"), **{name: rate(name) for name in (
                "failed", "retries", "continued", "tokens", "bytes")}),
            latencies={name: hi.quantiles(getattr(second, name) for second in seconds) for name in batch.MEASURES},
            pairs=hi.pairs(seconds, over), failures=tuple(self.history.failures), totals=self.counting.told(),
            changes=tuple(self.history.changes))


def tracing_of(endpoint: str, service: ServiceName, router: InstanceName) -> SpanTracing | None:
    """What makes spans; None (and no import of OpenTelemetry) without an endpoint. Raises ConfigError: no packages."""
    if not endpoint:
        return None
    try:
        from xpyd_sidecar.router.observing.spans import SpanTracing  # noqa: PLC0415 (most routers make no spans)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is missing: install xpyd-sidecar[otel] - at `$.router.otlp_endpoint`") from None
    return SpanTracing(endpoint, service, router)
