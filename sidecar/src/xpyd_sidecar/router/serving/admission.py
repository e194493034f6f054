"""The doors for every request that engines answer: what is asked, whose it is, how urgent; then served, or refused.

    admit ──parsed, checked──▶ the queue (``waiting``) ──▶ served        completions, chats, dialects
                      │    └─────────────────────────────▶ served        other paths
                      └─ nobody there, somebody expected ▶ held (``hold``), and then as if it came now
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import NamedTuple, cast

import msgspec
from msgspec import Raw

from xpyd_sidecar.contract.ids import TransferId
from xpyd_sidecar.contract.launch import RouterConfig
from xpyd_sidecar.router.api.bodies import PassedBody, passed
from xpyd_sidecar.router.api.faults import FailureKind, HttpFault, bad_request, came_back, unavailable, unknown_model
from xpyd_sidecar.router.api.fields import Api
from xpyd_sidecar.router.api.hidden import refuse_form_type, refuse_in_form
from xpyd_sidecar.router.api.paths import BodyKind, Route, RouteKind
from xpyd_sidecar.router.api.prompt import PromptPrefix, prefix_of
from xpyd_sidecar.router.balance.picker import Selection
from xpyd_sidecar.router.http import auth, heads
from xpyd_sidecar.router.http.reply import HttpRequest, Reply, RequestHandler
from xpyd_sidecar.router.observing.record import HELD
from xpyd_sidecar.router.serving.attempts import Asks
from xpyd_sidecar.router.serving.context import RequestContext
from xpyd_sidecar.router.serving.generation import Generation, Passthrough
from xpyd_sidecar.router.serving.hold import HeldRequest
from xpyd_sidecar.router.serving.request import Serving
from xpyd_sidecar.router.serving.waiting import QueuedRequest

PRIORITY = b"x-vllm-priority"
SESSION = b"x-session-id"
BYTES_PER_COST = 4096
"""A prompt of so many bytes counts for one request more in its key's share of the queue."""
LEFT = "the client went away while its request waited"
UNAVAILABLE = 503
UNSEEN = frozenset({FailureKind.REFUSED.value, "cancelled"})
"""Results of legs to instances that were not there, and of those that went with them."""
SHORT, CACHED = "short", "cached"
"""Why a request skips prefill, beside the names of fields (``Record.skips``)."""


def admit(context: RequestContext, route: Route, request: HttpRequest, reply: Reply) -> RequestHandler:
    """Serve a request, at once or when there is room. Raises HttpFault: it is refused, before anything was sent."""
    asks: Asks
    if route.way is RouteKind.PASSED or route.api is None:
        asks = _passed(route, request)
    else:
        asks = Generation(*context.profiles.parse(route.api, request.body), context.terms)
    if asks.model is not None and asks.model != context.config.model and not context.serves(asks.model):
        raise unknown_model(asks.model, context.models())
    if (via := request.headers.get(b"via")) is not None and context.via in via:
        raise came_back()
    if context.poison.alert:
        context.poison.refuse(asks.request_hash(), asks.labels)
    below = context.config.skip_prefill_below
    if below and asks.api and not asks.skips and context.lengths.tokens(asks.prompt) < below:
        asks.skips = SHORT
    size = len(request.body)
    reply.connection.holding.reserve(key_of(request.headers, context.config), size, asks.reserves(size))
    return _go_on(Accepted(context, route, request, reply, asks))


class Accepted(NamedTuple):
    """A request that is in order, and has its room in the ledger."""

    context: RequestContext
    route: Route
    request: HttpRequest
    reply: Reply
    asks: Asks

    def unserved(self, fault: HttpFault | None) -> None:
        """It waited, is not served, and gets this answer; None: its client has gone."""
        reply = self.reply
        if fault is not None and reply.started:  # with comments
            reply.fail(fault.event())
        elif fault is not None:
            reply.fault(fault)
        ended = ("client_gone", 0, LEFT) if fault is None else (fault.outcome, fault.status, fault.message)
        self.context.observer.unserved(self.route, self.request.request_id, *ended)

    @property
    def cost(self) -> float:
        """What it counts for in its key's share."""
        return 1 + len(self.asks.prompt) / BYTES_PER_COST

    def again(self, serving: Serving, fault: HttpFault) -> bool:
        """Hold it in place of an answer that says that nobody could be asked, if somebody is expected and no engine has
        seen it; whether it is held, or has its answer now.
        """
        reply, record = self.reply, serving.record
        unseen = record.legs and all(leg.result in UNSEEN for leg in record.legs)
        if fault.status != UNAVAILABLE or reply.started or not unseen or not self.context.hold.takes(self.asks):
            return False
        record.outcome = HELD
        try:
            reply.connection.hand_over(serving, _hold(self))
        except HttpFault as full:
            self.unserved(full)
        return True


def _go_on(one: Accepted, waited_s: float = 0.0) -> RequestHandler:
    """Hold, queue or serve a request that has waited for so long. Raises HttpFault: 400, the priority is no whole number;
    429 and 503, it cannot wait, or not be served.
    """
    context, asks = one.context, one.asks
    asks.waited_s += waited_s
    if context.hold.takes(asks):
        return _hold(one)
    if asks.api:
        return _enter(one)
    if len(context.servings) >= context.config.max_in_flight:
        raise unavailable(f"{context.config.max_in_flight} requests are being served, which is the limit")
    return serve(one, picks=context.picker.asked(PromptPrefix(b"")))


def _hold(one: Accepted) -> RequestHandler:
    """A request for which somebody is expected. Raises HttpFault: as ``_go_on``."""
    context, asks, body = one.context, one.asks, len(one.request.body)
    key = key_of(one.request.headers, context.config)
    priority = priority_of(one.request.headers, asks.fields if asks.api else {})
    asks.held = True
    return context.hold.enter(HeldRequest(
        context.hold, one.reply, key, priority, one.cost, alone=asks.alone, size=body + asks.reserves(body),
        streams=asks.stream and not asks.opaque, serve=partial(_go_on, one), unserved=one.unserved))


def serve(one: Accepted, *, picks: Selection) -> Serving:
    """Begin to serve a request. ``picks``: who may serve it."""
    context, asks, reply = one.context, one.asks, one.reply
    now, headers = context.loop.time(), one.request.headers
    passed_on = [] if headers.keys().isdisjoint(asks.passed_on) else [
        (name, headers[name]) for name in asks.passed_on if name in headers]
    if (via := headers.get(b"via")) is not None:
        passed_on.append((b"via", b"%b, %b" % (via, context.via)))
    serving = Serving(context, reply, asks, TransferId(heads.fresh()), passed_on, picks=picks, began=now,
                      key=key_of(headers, context.config), again=one.again)
    serving.legs.picks = picks
    record, trace = serving.record, None
    if asks.waited_s:
        record.queued_s = asks.waited_s
        record.arrived -= asks.waited_s
        record.arrived_unix -= asks.waited_s
    context.servings.add(serving)
    if record.api:
        if context.tracing is not None:
            trace = context.tracing.begin(headers, record, asks.model or context.config.model)
        record.prompt_size = picks.tokens
        context.observer.opened(record.prompt_size, record.skips)
    context.budget.on_request(now)
    serving.start(trace)
    return serving


def _passed(route: Route, request: HttpRequest) -> Passthrough:
    asked = PassedBody(None, {}, request.body)
    if route.body is BodyKind.FORM:
        refuse_form_type(request.headers.get(b"content-type", b""))
        refuse_in_form(request.body)
        if request.upload is not None and request.upload.fault is not None:
            raise request.upload.fault
    elif route.body is BodyKind.JSON:
        asked = passed(route.path, request.body)
    return Passthrough(route, request, asked)


def _enter(one: Accepted) -> RequestHandler:
    """A request that generates: served at once, or once there is room. Raises HttpFault: as ``_go_on``."""
    context, request, asks = one.context, one.request, one.asks
    line, key, priority = context.line, key_of(request.headers, context.config), priority_of(request.headers, asks.fields)
    if line.passes(key) and context.room(alone=asks.alone):
        return _begin(one)
    return line.enter(QueuedRequest(
        line, one.reply, key, priority, one.cost, room=lambda: context.room(alone=asks.alone),
        serve=partial(_turn, one), unserved=one.unserved))


def _turn(one: Accepted, queued_s: float) -> RequestHandler:
    """It is the turn of a request that waited for so long; where all have gone meanwhile it may be held."""
    one.asks.waited_s += queued_s
    return _hold(one) if one.context.hold.takes(one.asks) else _begin(one)


def _begin(one: Accepted) -> Serving:
    """Serve a request that generates."""
    context, asks, fields, headers = one.context, one.asks, one.asks.fields, one.request.headers
    whose = key_of(headers, context.config).encode("latin-1") + bytes(fields.get("model", b""))
    prefix = prefix_of(cast("Api", asks.api), fields, whose, headers.get(SESSION, b""))
    picks = context.picker.asked(prefix, context.lengths.tokens(asks.prompt), context.loop.time())
    if not asks.skips and context.config.skip_prefill_rest and picks.cached():
        asks.skips = CACHED
    return serve(one, picks=picks)


def key_of(headers: Mapping[bytes, bytes], config: RouterConfig) -> str:
    """Whose share of the queue a request belongs to: its client key's, or everybody's where none is asked for."""
    return _key(auth.shown(headers)) if config.api_key_file is not None else ""


@lru_cache(maxsize=1024)
def _key(header: bytes) -> str:  # remembered: it brought a known key, and those are few
    return auth.bearer({b"authorization": header}).decode("latin-1")


def priority_of(headers: Mapping[bytes, bytes], asked: Mapping[str, Raw]) -> int:
    """The header X-Vllm-Priority, else the field ``priority``, else 0; lower is sooner. Raises HttpFault: it is none."""
    header, raw = headers.get(PRIORITY), asked.get("priority")
    if header is not None:
        try:
            return int(header)
        except ValueError:
            raise bad_request(f"the header X-Vllm-Priority must be a whole number, not {header!r}") from None
    if raw is None:
        return 0
    try:
        return msgspec.json.decode(raw, type=int | None) or 0
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"'priority': {error}", param="priority") from None
