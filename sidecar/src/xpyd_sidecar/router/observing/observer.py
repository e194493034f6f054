"""Who is told what happens in a router, and tells operators: metrics, history, ``/fleet``.

    a request ends ──on_over, on_unserved──▶ metrics, history, totals, access log
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Callable
from functools import lru_cache
from time import time
from typing import TYPE_CHECKING

import msgspec

from xpyd_sidecar.contract.fleet import Fleet, Rates
from xpyd_sidecar.contract.ids import Incarnation, InstanceName, Role, ServiceName
from xpyd_sidecar.contract.timeline import KEPT
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.process import logs
from xpyd_sidecar.router.api.paths import Route, RouteKind
from xpyd_sidecar.router.fleet.member import HealthResult, RosterChange
from xpyd_sidecar.router.fleet.roster import Roster
from xpyd_sidecar.router.observing import batch
from xpyd_sidecar.router.observing import history as hi
from xpyd_sidecar.router.observing.intake_window import IntakeWindow
from xpyd_sidecar.router.observing.metrics import RouterMetrics
from xpyd_sidecar.router.observing.record import HELD, Record
from xpyd_sidecar.router.observing.tenant_usage import TenantUsage
from xpyd_sidecar.router.observing.traffic_sample import TrafficSample

if TYPE_CHECKING:
    from xpyd_sidecar.router.observing.spans import SpanTracing

MAX_UNSETTLED = 256
"""Records that wait to be counted: until the next second, or until somebody asks."""
WINDOW_S = 60
"""What rates, latencies and pairs of ``/fleet`` are over; less while the router is younger."""
TELL_S = 0.25
MAX_OVER = 64
"""Requests that have ended are told of after so long, or when there are so many."""
access = logging.getLogger("xpyd_sidecar.access")


def line_of(record: Record) -> dict[str, object]:
    """The fields of a request that is over."""
    if not record.api:
        return {"request": record.request_id, "path": record.path, "status": record.status,
                "decode": record.last_instance(Role.DECODE), "attempt": len(record.legs),
                "seconds": round(record.last_at - record.arrived, 4), "detail": record.detail, **_bill(record)}
    passed = {"path": record.path} if record.path else {}
    return {"request": record.request_id, "transfer": record.transfer, "api": record.api, "stream": record.stream,
            "status": record.status, "prefill": record.last_instance(Role.PREFILL),
            "decode": record.last_instance(Role.DECODE), "attempt": record.attempt, "skips": record.skips,
            "continued": record.continued,
            "seconds": round(record.last_at - record.arrived, 4),
            "first_byte_s": None if math.isnan(record.first_at) else round(record.first_at - record.arrived, 4),
            "detail": record.detail, **passed, **_bill(record)}


def _bill(record: Record) -> dict[str, object]:
    """What a bill is made of; empty where there are no tenants. None: not known."""
    if not record.tenant:
        return {}
    told = {"prompt_tokens": record.prompt_tokens, "cached_tokens": record.cached_tokens,
            "completion_tokens": record.tokens}
    return {"tenant": record.tenant, "model": record.model,
            **{name: None if tokens < 0 else tokens for name, tokens in told.items()}, "charged_tokens": record.charged}


def passed_outcome(outcome: str, ended_as: str) -> str:
    """What ``xpyd_router_passed_requests_total`` calls the outcome of a request whose answer passes through.

    ``ended_as``: the result of the leg that answered, empty where none did.
    """
    if outcome == "ok":
        return "complete"
    if outcome in {"client_gone", "stopped"}:
        return "aborted"
    return "engine_error" if ended_as in {"4xx", "5xx", "aborted"} else outcome


class AccessLine:
    """``logs.Form``: the line of a request that is over."""

    fields = staticmethod(line_of)

    @staticmethod
    def message(record: Record) -> str:
        """How it ended."""
        return record.outcome if record.api else passed_outcome(record.outcome, record.ended_as)

    @staticmethod
    def timestamp(record: Record) -> float:
        """When it ended, in seconds since 1970."""
        return record.arrived_unix + record.last_at - record.arrived

    @staticmethod
    def json(record: Record) -> str:
        """The fields as JSON, without braces. No request id has what JSON escapes (``incoming.request_id_of``)."""
        if not record.api or record.path or record.detail or record.tenant:
            return _encode(line_of(record)).decode()[1:-1]
        arrived, first = record.arrived, record.first_at
        between = _between(record.api, record.last_instance(Role.PREFILL), record.last_instance(Role.DECODE), (
            record.stream, record.status, record.attempt, record.skips, record.continued))
        first_byte = "null" if math.isnan(first) else f"{first - arrived:.4f}"
        return (f'"request":"{record.request_id}","transfer":"{record.transfer}",{between},'
                f'"seconds":{record.last_at - arrived:.4f},"first_byte_s":{first_byte},"detail":""')


@lru_cache(maxsize=1024)
def _between(api: str, prefill: str, decode: str, rest: tuple[bool, int, int, str, int]) -> str:
    stream, status, attempt, skips, continued = rest
    fields = {"api": api, "stream": stream, "status": status, "prefill": prefill, "decode": decode, "attempt": attempt,
              "skips": skips, "continued": continued}
    return _encode(fields).decode()[1:-1]


_encode = msgspec.json.Encoder().encode


_LINE = AccessLine()


class RouterObserver:
    """Counts and remembers for one router."""

    def __init__(self, roster: Roster, loop: asyncio.AbstractEventLoop, *, access_log: bool = False) -> None:
        self._roster = roster
        self._loop = loop
        self._access_log = access_log
        self.cached: Callable[[InstanceName, Incarnation], int] = lambda *_: 0
        """How many prefixes an instance is taken to hold."""
        self._over: list[Record] = []
        """Requests that have ended, of which nobody was told yet."""
        self._telling = False
        """They will be, by the time."""
        self._unsettled: list[Record] = []
        self._opened: list[int] = []
        """About how many tokens the prompts of new requests have."""
        self._skipped = Counter[str]()
        """Of those, the tokens of prompts that skip prefill, by the rule or field."""
        self.intakes = IntakeWindow()
        self._recent: deque[Record] = deque(maxlen=KEPT)
        self.metrics = RouterMetrics(roster.members, self.settle)
        self.history = hi.History(time())
        self.counting = batch.Counting(time())
        self.sample = TrafficSample(time())
        self._tenants = TenantUsage(self.metrics.count)
        self.metrics.disaggregation = lambda: self.intakes.verdict

    # ---- requests

    def on_opened(self, tokens: int, skips: str) -> None:
        """A request is being served, whose prompt has about so many tokens. ``skips``: as ``Record.skips``."""
        self.metrics.in_flight += 1
        self._opened.append(tokens)
        if skips:
            self._skipped[skips] += tokens

    def on_unserved(self, route: Route, request_id: str, outcome: str, status: int, detail: str, *,
                    tenant: str = "") -> None:
        """A request ended before it was served: count it, and log it. ``tenant``: whose it was."""
        if tenant:
            self._tenants.count_unserved(tenant, outcome)
        api, passed = route.api or "", passed_outcome(outcome, "")
        if route.way is RouteKind.PASSED:
            self.on_passed(route.path, passed)
        if api:
            self.on_refused(api, request_id, outcome, status, detail)
        if self._access_log:
            which = {"api": api} if api else {"path": route.path}
            which |= {"tenant": tenant} if tenant else {}
            access.info("%s", outcome if api else passed,
                        extra={"request": request_id, **which, "status": status, "detail": detail[:500]})

    def on_over(self, record: Record) -> None:
        """A request that was served is over. What it leaves to be told waits for ``tell``: done for many at a time, with
        warm caches, it costs a fraction.
        """
        if record.api:
            self.metrics.in_flight -= 1
        self._over.append(record)
        if not self._telling:
            self._telling = True
            self._loop.call_later(TELL_S, self._tell)
        if len(self._over) >= MAX_OVER:
            self.tell()

    def _tell(self) -> None:
        self._telling = False
        self.tell()

    def tell(self) -> None:
        """Count and log the requests that have ended."""
        over, self._over = self._over, []
        if not over:
            return
        generated = []
        for record in over:
            if record.api:
                generated.append(record)
            if record.path:
                self.on_passed(record.path, passed_outcome(record.outcome, record.ended_as))
            if record.tenant and record.outcome != HELD:
                self._tenants.count_served(record)
        self._unsettled += generated
        self._recent += generated
        if len(self._unsettled) >= MAX_UNSETTLED:
            self.settle()
        if self._access_log:
            logs.tell_all(access, over, _LINE)

    def on_passed(self, path: str, outcome: str) -> None:
        """A request whose answer passes through ended so."""
        self.metrics.count("passed_requests", path, outcome)

    def on_audited(self, prefill: InstanceName, decode: InstanceName, result: str, difference: float) -> None:
        """An audit of a pair ended so, or was left out. ``difference``: of log probabilities; NaN: none was found."""
        self.metrics.count_audit(prefill, decode, result, difference)

    def on_refused(self, api: str, request_id: str, outcome: str, status: int, detail: str) -> None:
        """A request that would have generated was not served."""
        self.settle()
        self.metrics.count_outcome(api, outcome)
        self.history.on_refused(time(), request_id, outcome, status, detail)

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
            self.history.on_opened(len(opened))
            self.counting.on_opened(sum(opened), len(opened))
            skipped, self._skipped = self._skipped, Counter[str]()
            self.intakes.on_opened(self._loop.time(), sum(opened), skipped)
        records, self._unsettled = self._unsettled, []
        self.sample.add(records)
        for api in {record.api for record in records}:
            done = batch.of_records(api, [record for record in records if record.api == api])
            self.metrics.count_batch(done)
            self.counting.on_closed(done)
            self.history.on_closed(done)

    # ---- instances (watch.FleetWatch)

    def on_changed(self, change: RosterChange) -> None:
        """The roster changed."""
        self.metrics.count("roster_changes", change.kind)
        self.history.on_changed(time(), change.instance, change.what)

    def on_probed(self, result: HealthResult) -> None:
        """A health probe ended."""
        self.metrics.count("probes", result.value)

    # ---- what others read

    def tick(self) -> None:
        """Called every second or oftener."""
        self.settle()
        self.history.advance(time(), self.metrics.in_flight, self.metrics.queued())
        self.intakes.update(self._loop.time(), self._roster.members())

    def fleet(self, service: ServiceName, router: str, now: float, started: float, *, draining: bool,
              idle_s: float | None = None) -> Fleet:
        """What ``GET /fleet`` says. Times are those of the roster's clock. ``idle_s``: since there was a request."""
        self.tick()
        seconds = self.history.last(WINDOW_S)
        over = max(1, len(seconds))
        served = sum((Counter(second.served) for second in seconds), Counter[InstanceName]())

        def rate(name: str) -> float:
            total: int = sum(getattr(second, name) for second in seconds)
            return round(total / over, 4)

        return Fleet(
            service=service, router=router, uptime_s=round(now - started, 3), settled=self._roster.is_settled(now),
            instances=tuple(msgspec.structs.replace(
                each, served_s=round(served[each.instance] / over, 4),
                intake=self.intakes.rates(each.instance, each.incarnation),
                cached=self.cached(each.instance, each.incarnation)) for each in self._roster.fleet(now)),
            requests_total=self.metrics.requests_total, requests_failed=self.metrics.requests_failed, draining=draining,
            idle_s=idle_s,
            in_flight=self.metrics.in_flight, queued=self.metrics.queued(), window_s=len(seconds),
            rates=Rates(requests=rate("done"), **{name: rate(name) for name in (
                "failed", "retries", "continued", "tokens", "bytes")}),
            latencies={name: hi.quantiles(getattr(second, name) for second in seconds) for name in batch.MEASURES},
            pairs=hi.pairs(seconds, over), failures=tuple(self.history.failures), totals=self.counting.totals(),
            changes=tuple(self.history.changes), disaggregation=self.intakes.verdict)


def tracing_of(endpoint: str, service: ServiceName, router: InstanceName) -> SpanTracing | None:
    """What makes spans; None (and no import of OpenTelemetry) without an endpoint. Raises ConfigError: no packages."""
    if not endpoint:
        return None
    try:
        from xpyd_sidecar.router.observing.spans import SpanTracing  # noqa: PLC0415 (most routers make no spans)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is missing: install xpyd-sidecar[otel] - at `$.router.otlp_endpoint`") from None
    return SpanTracing(endpoint, service, router)
