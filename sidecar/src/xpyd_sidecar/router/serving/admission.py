"""The doors for every request that engines answer: what is asked, whose it is, how urgent; then served, or refused.

    admit ──parsed, checked──▶ the queue (``waiting``) ──▶ served        completions, chats, dialects
                      └──────────────────────────────────▶ served        other paths
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import cast

import msgspec
from msgspec import Raw

from xpyd_sidecar.contract.ids import TransferId
from xpyd_sidecar.contract.launch import RouterConfig
from xpyd_sidecar.router.api.bodies import PassedBody, passed
from xpyd_sidecar.router.api.faults import HttpFault, bad_request, unavailable, unknown_model
from xpyd_sidecar.router.api.fields import Api
from xpyd_sidecar.router.api.hidden import refuse_form_type, refuse_in_form
from xpyd_sidecar.router.api.paths import BodyKind, Route, RouteKind
from xpyd_sidecar.router.api.prompt import PromptPrefix, prefix_of
from xpyd_sidecar.router.balance.picker import Selection
from xpyd_sidecar.router.http import auth, heads
from xpyd_sidecar.router.http.reply import HttpRequest, Reply, RequestHandler
from xpyd_sidecar.router.serving.attempts import Asks
from xpyd_sidecar.router.serving.context import RequestContext
from xpyd_sidecar.router.serving.generation import Generation, Passthrough
from xpyd_sidecar.router.serving.request import Serving
from xpyd_sidecar.router.serving.waiting import QueuedRequest

PRIORITY = b"x-vllm-priority"
SESSION = b"x-session-id"
BYTES_PER_COST = 4096
"""A prompt of so many bytes counts for one request more in its key's share of the queue."""
LEFT = "the client went away while its request waited"
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
    if context.poison.alert:
        context.poison.refuse(asks.request_hash())
    size = len(request.body)
    reply.connection.holding.reserve(key_of(request.headers, context.config), size, asks.reserves(size))
    if asks.api:
        return _enter(context, route, request, reply, asks)
    if len(context.servings) >= context.config.max_in_flight:
        raise unavailable(f"{context.config.max_in_flight} requests are being served, which is the limit")
    return serve(context, request, reply, asks, picks=context.picker.asked(PromptPrefix(b"")))


def serve(context: RequestContext, request: HttpRequest, reply: Reply, asks: Asks, *, picks: Selection,
          queued_s: float = 0.0) -> Serving:
    """Begin to serve a request that waited for so long. ``picks``: who may serve it."""
    now, headers = context.loop.time(), request.headers
    passed_on = [] if headers.keys().isdisjoint(asks.passed_on) else [
        (name, headers[name]) for name in asks.passed_on if name in headers]
    serving = Serving(context, reply, asks, TransferId(heads.fresh()), passed_on, picks=picks, began=now,
                      key=key_of(headers, context.config))
    serving.legs.picks = picks
    record, trace = serving.record, None
    if queued_s:
        record.queued_s = queued_s
        record.arrived -= queued_s
        record.arrived_unix -= queued_s
    context.servings.add(serving)
    if record.api:
        if context.tracing is not None:
            trace = context.tracing.begin(headers, record)
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


def _enter(context: RequestContext, route: Route, request: HttpRequest, reply: Reply, asks: Asks) -> RequestHandler:
    """A request that generates: served at once, or once there is room. Raises HttpFault: 400, the priority is no whole
    number; 429 and 503, it cannot wait.
    """
    below, line = context.config.skip_prefill_below, context.line
    if not asks.skips and below and context.lengths.tokens(asks.prompt) < below:
        asks.skips = SHORT
    key, priority = key_of(request.headers, context.config), priority_of(request.headers, asks.fields)
    if line.passes(key) and context.room(alone=asks.alone):
        return _begin(context, request, reply, asks)

    def unserved(fault: HttpFault | None) -> None:
        if fault is not None:
            reply.fault(fault)
        ended = ("client_gone", 0, LEFT) if fault is None else (fault.outcome, fault.status, fault.message)
        context.observer.unserved(route, request.request_id, *ended)

    return line.enter(QueuedRequest(
        line, reply, key, priority, 1 + len(asks.prompt) / BYTES_PER_COST, room=lambda: context.room(alone=asks.alone),
        serve=partial(_begin, context, request, reply, asks), unserved=unserved))


def _begin(context: RequestContext, request: HttpRequest, reply: Reply, asks: Asks, queued_s: float = 0.0) -> Serving:
    """Serve a request that generates, after it waited for so long."""
    fields, headers = asks.fields, request.headers
    whose = key_of(headers, context.config).encode("latin-1") + bytes(fields.get("model", b""))
    prefix = prefix_of(cast("Api", asks.api), fields, whose, headers.get(SESSION, b""))
    picks = context.picker.asked(prefix, context.lengths.tokens(asks.prompt), context.loop.time())
    if not asks.skips and context.config.skip_prefill_rest and picks.cached():
        asks.skips = CACHED
    return serve(context, request, reply, asks, picks=picks, queued_s=queued_s)


def key_of(headers: Mapping[bytes, bytes], config: RouterConfig) -> str:
    """Whose share of the queue a request belongs to: its client key's, or everybody's where none is asked for."""
    return _key(headers[b"authorization"]) if config.api_key_file is not None else ""


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
