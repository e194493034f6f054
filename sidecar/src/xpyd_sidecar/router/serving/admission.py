"""The doors for every request that engines answer: what is asked, whose it is, how urgent; then served, or refused.

    admit ──parsed, checked──▶ nobody waits, and there is room ──▶ served
                      │    └─▶ the queue (``waiting``), one for all paths ──▶ served
                      └─ nobody there, somebody expected ▶ held (``hold``), and then as if it came now
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, cast

from xpyd_sidecar.contract.ids import TransferId
from xpyd_sidecar.contract.tenants import Tenant
from xpyd_sidecar.router.api.bodies import PassedBody, passed_body
from xpyd_sidecar.router.api.faults import FailureKind, HttpFault, came_back, unavailable, unknown_model
from xpyd_sidecar.router.api.fields import Api
from xpyd_sidecar.router.api.hidden import refuse_form_type, refuse_in_form
from xpyd_sidecar.router.api.paths import BodyKind, Route, RouteKind
from xpyd_sidecar.router.api.priority import PRIORITY, PriorityBand, priority_of
from xpyd_sidecar.router.api.prompt import PromptPrefix, prefix_of
from xpyd_sidecar.router.api.prompt_fields import has_prompt
from xpyd_sidecar.router.api.salts import CacheSalt, require_salted
from xpyd_sidecar.router.api.spending import ExpectedTokens, may_generate, of_form
from xpyd_sidecar.router.balance.picker import Selection
from xpyd_sidecar.router.http import auth, heads
from xpyd_sidecar.router.http.reply import HttpRequest, Reply, RequestHandler
from xpyd_sidecar.router.observing.record import HELD
from xpyd_sidecar.router.serving.attempts import Asks
from xpyd_sidecar.router.serving.context import RequestContext
from xpyd_sidecar.router.serving.generation import Generation, Passthrough
from xpyd_sidecar.router.serving.hold import HeldRequest
from xpyd_sidecar.router.serving.request import Serving
from xpyd_sidecar.router.serving.tenancy import TenantRequest
from xpyd_sidecar.router.serving.waiting import QueuedRequest

SESSION = b"x-session-id"
LEFT = "the client went away while its request waited"
UNAVAILABLE = 503
UNSEEN = frozenset({FailureKind.REFUSED.value, "cancelled"})
"""Results of legs to instances that were not there, and of those that went with them."""
SHORT, CACHED = "short", "cached"
"""Why a request skips prefill, beside the names of fields (``Record.skips``)."""


def admit(context: RequestContext, route: Route, request: HttpRequest, reply: Reply) -> RequestHandler:
    """Serve a request, at once or when there is room. Raises HttpFault: it is refused, before anything was sent."""
    tenancy = _tenancy(context, request, reply)
    tenant = None if tenancy is None else tenancy.tenant
    asks, band = _asked(context, route, request, tenant), context.band(tenant)
    asks.tenancy = tenancy
    asks.priority = priority_of(request.headers, asks.fields if route.body is not BodyKind.FORM else {}, band)
    if tenancy is not None and (route.api is not None or route.body is not BodyKind.NONE):
        own = "" if route.body is BodyKind.FORM else context.config.model  # which one a form names is not read
        tenancy.require_model(asks.model or own or None)
    if asks.model is not None and asks.model != context.config.model and not context.serves(asks.model):
        raise unknown_model(asks.model, context.models())
    if (via := request.headers.get(b"via")) is not None and context.via in via:
        raise came_back()
    if route.generates:
        asks.generating = True
        prompted = has_prompt(route.api or "", route.path, asks.fields)
        asks.wakes = prompted and not asks.once and context.knows(asks.model)
        context.used = context.loop.time()
    if context.poison.alert:
        context.poison.refuse(asks.request_hash(), asks.labels)
    asks.tokens = _tokens(context, route, request, asks)
    below = context.config.skip_prefill_below
    if below and asks.api and not asks.skips and asks.tokens.prompt < below:
        asks.skips = SHORT
    size = len(request.body)
    one = AcceptedRequest(context, route, request, reply, asks)
    reply.connection.holding.reserve(one.key, size, asks.reserves(size))
    if tenancy is None:
        return _go_on(one)
    tenancy.take(asks.tokens, context.loop.time())
    reply.added += tenancy.limits(context.loop.time())
    try:
        return _go_on(one)
    except Exception:
        tenancy.end(context.loop.time())
        raise


class AcceptedRequest(NamedTuple):
    """A request that is in order, and has its room in the ledger."""

    context: RequestContext
    route: Route
    request: HttpRequest
    reply: Reply
    asks: Asks

    def on_unserved(self, fault: HttpFault | None) -> None:
        """It waited, is not served, and gets this answer; None: its client has gone."""
        reply, upload = self.reply, self.request.upload
        if upload is not None and not upload.done:
            reply.close = True  # the rest of its body will not be read
        if fault is not None and reply.started:  # with comments
            reply.fail(fault.event())
        elif fault is not None:
            reply.fault(fault)
        if self.asks.generating:
            self.context.used = self.context.loop.time()  # it was waited for until now
        ended = ("client_gone", 0, LEFT) if fault is None else (fault.outcome, fault.status, fault.message)
        tenancy = self.asks.tenancy
        if tenancy is not None:
            tenancy.end(self.context.loop.time())
        self.context.observer.on_unserved(self.route, self.request.request_id, *ended,
                                          tenant="" if tenancy is None else tenancy.tenant.name)

    @property
    def key(self) -> str:
        """Whose share it takes of what is shared."""
        tenancy = self.asks.tenancy
        return self.context.clients.name(self.request.headers) if tenancy is None else tenancy.tenant.name

    def try_hold(self, serving: Serving, fault: HttpFault) -> bool:
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
            self.on_unserved(full)
        return True


def _go_on(one: AcceptedRequest, waited_s: float = 0.0) -> RequestHandler:
    """Hold, queue or serve a request that has waited for so long. Raises HttpFault: 429 and 503, it cannot wait, or not be
    served.
    """
    context, asks = one.context, one.asks
    asks.waited_s += waited_s
    if context.hold.takes(asks):
        return _hold(one)
    if why := context.hold.refusal(asks):
        raise unavailable(why, context.hold.again_s())
    line, key, alone = context.line, one.key, asks.decode_only
    passes = line.passes(key, alone=alone, blocked=lambda: not context.has_room(alone=False))
    if passes and context.has_room(alone=alone):
        return _begin(one)
    handler = line.enter(QueuedRequest(
        line, one.reply, key, asks.priority, asks.weighed_tokens(asks.tokens.total), alone=alone,
        room=lambda: context.has_room(alone=alone), serve=partial(_turn, one), on_unserved=one.on_unserved))
    if alone:
        line.schedule()  # those before it may wait for prefill
    return handler


def _hold(one: AcceptedRequest) -> RequestHandler:
    """A request for which somebody is expected. Raises HttpFault: as ``_go_on``."""
    context, asks, body = one.context, one.asks, len(one.request.body)
    asks.held = True
    return context.hold.enter(HeldRequest(
        context.hold, one.reply, one.key, asks.priority, asks.weighed_tokens(asks.tokens.total), alone=asks.decode_only,
        size=body + asks.reserves(body), streams=asks.stream and not asks.opaque, wakes=asks.wakes,
        serve=partial(_go_on, one), on_unserved=one.on_unserved))


def serve(one: AcceptedRequest, *, picks: Selection, waited: bool = False) -> Serving:
    """Begin to serve a request. ``picks``: who may serve it. ``waited``: in the queue, until its turn."""
    context, asks, reply = one.context, one.asks, one.reply
    now, headers = context.loop.time(), one.request.headers
    passed_on = [] if headers.keys().isdisjoint(asks.passed_on) else [
        (name, headers[name] if name != PRIORITY else b"%d" % asks.priority) for name in asks.passed_on if name in headers]
    if (via := headers.get(b"via")) is not None:
        passed_on.append((b"via", b"%b, %b" % (via, context.via)))
    key = one.key
    serving = Serving(context, reply, asks, TransferId(heads.fresh()), passed_on, picks=picks, began=now, key=key,
                      again=one.try_hold)
    serving.legs.picks = picks
    record, trace = serving.record, None
    if asks.waited_s:
        record.queued_s = asks.waited_s
        record.arrived -= asks.waited_s
        record.arrived_unix -= asks.waited_s
    context.generating += asks.generating
    context.servings.add(serving)
    context.line.on_begun(key, asks.weighed_tokens(asks.tokens.total), waited=waited)
    if asks.tenancy is not None:
        record.tenant, record.model = asks.tenancy.tenant.name, asks.model or context.config.model
    if record.api:
        if context.tracing is not None:
            trace = context.tracing.begin(headers, record, asks.model or context.config.model)
        record.prompt_size = picks.tokens
        context.observer.on_opened(record.prompt_size, record.skips)
    context.budget.on_request(now)
    serving.start(trace)
    return serving


def _tenancy(context: RequestContext, request: HttpRequest, reply: Reply) -> TenantRequest | None:
    """Of which tenant a request is; None: keys have no tenants. Raises HttpFault: 429, nothing is left to it; 401, its key
    was taken out meanwhile.
    """
    if not context.clients.tenants:
        return None
    tenant = context.clients.tenant(request.headers)
    account = None if tenant is None else context.quotas.account(tenant.name)
    if tenant is None or account is None:
        raise auth.unknown(request.headers)
    tenancy = TenantRequest(tenant, account, context.quotas)
    fault = tenancy.begin(context.loop.time(), context.lengths.tokens(request.body))
    if fault is not None:
        reply.added += tenancy.limits(context.loop.time())
        raise fault
    return tenancy


def _asked(context: RequestContext, route: Route, request: HttpRequest, tenant: Tenant | None) -> Asks:
    """What a request asks, its fields as its client may have them."""
    band, salt = context.band(tenant), None
    if tenant is not None and tenant.isolated and require_salted(route, tenant.name):
        salt = CacheSalt(context.salt_key, tenant.name)
    if route.way is RouteKind.PASSED or route.api is None:
        return _passed(route, request, band, salt, anew=tenant is not None and bool(tenant.models))
    return Generation(*context.profiles.parse(route.api, request.body, band, salt), context.terms)


def _passed(route: Route, request: HttpRequest, band: PriorityBand, salt: CacheSalt | None, *, anew: bool) -> Passthrough:
    asked = PassedBody(None, {}, request.body)
    if route.body is BodyKind.FORM:
        refuse_form_type(request.headers.get(b"content-type", b""))
        refuse_in_form(request.body)
        if request.upload is not None and request.upload.fault is not None:
            raise request.upload.fault
    elif route.body is BodyKind.JSON:
        asked = passed_body(route.path, request.body, band, salt, anew=anew)
    return Passthrough(route, request, asked)


def _tokens(context: RequestContext, route: Route, request: HttpRequest, asks: Asks) -> ExpectedTokens:
    """What a request is expected to take of the engines."""
    if route.body is BodyKind.FORM:
        return of_form(len(request.body) if request.upload is None else request.upload.length)
    prompt = context.lengths.tokens(asks.prompt or request.body)
    return ExpectedTokens(prompt, may_generate(asks.api, route.path, asks.fields, context.answers.usual))


def _turn(one: AcceptedRequest, queued_s: float) -> RequestHandler:
    """It is the turn of a request that waited for so long; where all have gone meanwhile it may be held. Raises HttpFault:
    its body will not be whole.
    """
    one.asks.waited_s += queued_s
    upload = one.request.upload
    if upload is not None and upload.fault is not None:
        raise upload.fault
    return _hold(one) if one.context.hold.takes(one.asks) else _begin(one, waited=True)


def _begin(one: AcceptedRequest, *, waited: bool = False) -> RequestHandler:
    """Serve a request. ``waited``: see ``serve``."""
    context, asks, fields, headers = one.context, one.asks, one.asks.fields, one.request.headers
    if not asks.api:
        return serve(one, picks=context.picker.selection(PromptPrefix(b""), name=asks.model or ""), waited=waited)
    whose = one.key.encode("latin-1") + bytes(fields.get("model", b""))
    prefix = prefix_of(cast("Api", asks.api), fields, whose, headers.get(SESSION, b""), context.cut_seed)
    if context.picker.holdings is not None:
        asks.cuts = prefix.cuts
    picks = context.picker.selection(prefix, asks.tokens.prompt, context.loop.time(), asks.model or "")
    if not asks.skips and context.config.skip_prefill_rest and picks.cached():
        asks.skips = CACHED
    pull = None if asks.decode_only or asks.pulled else context.pulls.plan(asks.generates, picks)
    if pull is None:
        return serve(one, picks=picks, waited=waited)
    asks.pulled = True

    def go_on(pulled_s: float) -> Serving:
        asks.waited_s += pulled_s
        return serve(one, picks=picks, waited=waited)

    return pull.begin(one.reply, go_on, one.on_unserved)

