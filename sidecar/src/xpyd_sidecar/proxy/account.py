"""What is known of one passed request: its legs and its answer, and in the end its record and its line of the log.

    opened ── leg, leg … ── part, part … ── over ──▶ observer (where it is generation), access log

Belongs here: noting. Does not belong here: what happens to the request (``passed``), what is read of an answer
(``routing.answers``), what a record means (``routing.summary``).

All that passes has legs and a line; a record, and with it metrics, spans and a timeline, have only requests in a dialect
that generates: of the others the router knows no prompt and no tokens.
"""

from __future__ import annotations

import math
from time import perf_counter, time
from typing import TYPE_CHECKING

from xpyd_sidecar.contract.ids import InstanceName, Role, TransferId
from xpyd_sidecar.proxy.access import access, line_of
from xpyd_sidecar.proxy.legs import traced
from xpyd_sidecar.proxy.reply import HttpRequest, Reply
from xpyd_sidecar.routing import prompt
from xpyd_sidecar.routing.answers import Answer
from xpyd_sidecar.routing.dialects import Request
from xpyd_sidecar.routing.paths import Route
from xpyd_sidecar.routing.record import LegRecord, Record

if TYPE_CHECKING:
    from xpyd_sidecar.proxy.dispatch import Dispatch
    from xpyd_sidecar.proxy.spans import Headers

_NO_TRANSFER = TransferId("")


class Account:
    """Of one passed request."""

    def __init__(self, dispatch: Dispatch, route: Route, request: HttpRequest, asked: Request | None, *, skips: str,
                 queued_s: float) -> None:
        """``asked``: of a request in a dialect. ``skips``: why it goes without prefill."""
        self._dispatch = dispatch
        self._path = route.path
        self.generates = asked is not None
        """Whether it counts among the requests that generate."""
        api, stream = ("", False) if asked is None else (asked.dialect.name, asked.stream)
        self.record = Record(request.request_id, _NO_TRANSFER, api, stream, perf_counter() - queued_s, time() - queued_s,
                             queued_s=queued_s, skips=skips)
        self._answer: Answer | None = None
        """Decode's, of the leg that was sent last."""
        self._trace = None
        if asked is not None:
            self.record.prompt_size = prompt.tokens(asked.prompt)
            if dispatch.tracing is not None:
                self._trace = dispatch.tracing.begin(request.headers, self.record)
            dispatch.opened(self.record.prompt_size, dispatch.loop.time())

    @property
    def begun(self) -> bool:
        """Whether the answer has shown output; true of those that are not read."""
        return self._answer is None or self._answer.begun

    # ---- legs

    def leg(self, role: Role, instance: InstanceName, attempt: int, transfer: TransferId = _NO_TRANSFER) -> LegRecord:
        """A leg is sent. ``attempt``: 0 where decode does all of it."""
        leg = LegRecord(role, instance, attempt, perf_counter())
        self.record.legs.append(leg)
        self.record.transfer = transfer or self.record.transfer
        if role is Role.DECODE and self.generates:
            self._answer = Answer(stream=self.record.stream)
        return leg

    def traced(self, headers: Headers, leg: LegRecord) -> Headers:
        """What goes to its engine of the client's headers, with its span's context where spans are made."""
        return traced(headers, self._trace, leg)

    def shut(self, leg: LegRecord, result: str) -> None:
        """It has ended so."""
        leg.ended, leg.result = perf_counter(), result
        if result == "2xx" and math.isnan(leg.first_at):
            leg.first_at = leg.ended

    # ---- the answer

    def part(self, leg: LegRecord, body: bytes) -> None:
        """More of it came from decode."""
        if self._answer is not None:
            self._answer.take(body)
            if self._answer.begun and math.isnan(self.record.first_at):
                self.record.first_at = perf_counter()
                if self.record.stream:
                    leg.first_at = self.record.first_at

    def end(self) -> bool:
        """It is whole. Whether it is one: false where the engine says in it that it failed."""
        if self._answer is None:
            return True
        self._answer.end()
        self.record.prompt_tokens, self.record.tokens = self._answer.prompt_tokens, self._answer.tokens
        return not self._answer.failed

    # ---- the end

    def over(self, outcome: str, reply: Reply, detail: str = "", *, gone: bool = False) -> None:
        """The request is over, for the words of ``xpyd_router_passed_requests``. ``gone``: its client is."""
        record, legs = self.record, self.record.legs
        record.status, record.detail = reply.status, detail[:500]
        record.last_at, record.bytes = perf_counter(), reply.sent
        if legs:
            record.attempt = legs[-1].attempt
            record.retries = max(0, len(legs) - (2 if legs[0].attempt else 1))
        if self.generates:
            outcome = record.outcome = outcome_of(outcome, reply.status, gone=gone)
            self._dispatch.observer.left()
            self._dispatch.ended(record)
            if self._trace is not None:
                self._trace.end()
        if self._dispatch.access_log:
            access.info("%s", outcome, extra=self._line())

    def _line(self) -> dict[str, object]:
        record = self.record
        if self.generates:
            return line_of(record) | {"path": self._path}
        return {"request": record.request_id, "path": self._path, "status": record.status,
                "decode": record.went(Role.DECODE), "attempt": len(record.legs),
                "seconds": round(record.last_at - record.arrived, 4), "detail": record.detail}


def outcome_of(passed: str, status: int, *, gone: bool) -> str:
    """As requests that do not pass through call it (``summary``, docs/observability.md)."""
    match passed:
        case "complete":
            return "ok"
        case "engine_error":
            return "client_error" if 400 <= status < 500 else "failed"
        case "aborted":
            return "client_gone" if gone else "stopped"
        case _:
            return passed
