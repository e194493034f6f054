"""The doors for every request that engines answer: what is asked, whose it is, how urgent; then served, or refused.

    admit ──parsed, checked──▶ the queue (``waiting``) ──▶ served        completions, chats, dialects
                      └──────────────────────────────────▶ served        other paths
    Entrance ──of a known shape──▶ ``FastPath``, at once                 streams whose course will probably be straight
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from time import perf_counter, time

import msgspec
from msgspec import Raw

from xpyd_sidecar.contract.ids import TransferId
from xpyd_sidecar.contract.launch import RouterConfig
from xpyd_sidecar.router.api import bodies, prompt
from xpyd_sidecar.router.api.bodies import PassedBody, passed
from xpyd_sidecar.router.api.faults import HttpFault, bad_request, unavailable, unknown_model
from xpyd_sidecar.router.api.fields import Api
from xpyd_sidecar.router.api.hidden import refuse_form_type, refuse_in_form
from xpyd_sidecar.router.api.paths import PATHS, TABLE, BodyKind, Route, RouteKind
from xpyd_sidecar.router.balance.picker import Selection
from xpyd_sidecar.router.fleet.member import Pair
from xpyd_sidecar.router.http import auth, heads
from xpyd_sidecar.router.http.reply import HttpRequest, Reply, ReplyConnection, RequestHandler
from xpyd_sidecar.router.http.wire import before_length
from xpyd_sidecar.router.serving.attempts import Asks
from xpyd_sidecar.router.serving.context import RequestContext
from xpyd_sidecar.router.serving.fast_path import NO_DEADLINE_S, FastPath
from xpyd_sidecar.router.serving.generation import HEADERS, Generation, Passthrough
from xpyd_sidecar.router.serving.request import Serving
from xpyd_sidecar.router.serving.shapes import params
from xpyd_sidecar.router.serving.waiting import QueuedRequest

PRIORITY = b"x-vllm-priority"
BYTES_PER_COST = 4096
"""A prompt of so many bytes counts for one request more in its key's share of the queue."""
LEFT = "the client went away while its request waited"
SHORT, CACHED = "short", "cached"
"""Why a request skips prefill, beside the names of fields (``Record.skips``)."""


def admit(context: RequestContext, route: Route, request: HttpRequest, reply: Reply) -> RequestHandler:
    """Serve a request, at once or when there is room. Raises HttpFault: it is refused, before anything was sent."""
    asks: Asks = _passed(route, request) if route.way is RouteKind.PASSED or route.api is None else Generation(
        context.shapes.parse(route.api, request.body), context.config, context.terms)
    if not context.serves(asks.model):
        assert asks.model is not None
        raise unknown_model(asks.model, context.models())
    if context.poison.alert:
        context.poison.refuse(asks.request_hash())
    if asks.api:
        return context.line.enter(_queued(context, route, request, reply, asks))
    if len(context.servings) >= context.config.max_in_flight:
        raise unavailable(f"{context.config.max_in_flight} requests are being served, which is the limit")
    return serve(context, request, reply, asks, picks=context.picker.asked(b""))


def serve(context: RequestContext, request: HttpRequest, reply: Reply, asks: Asks, *, picks: Selection,
          queued_s: float = 0.0, picked: Pair | None = None) -> Serving:
    """Begin to serve a request that waited for so long. ``picked``: the first of its picks, where it was made."""
    now, headers = context.loop.time(), request.headers
    passed_on = [(name, headers[name]) for name in asks.passed_on if name in headers]
    serving = Serving(context, reply, asks, TransferId(heads.fresh()), passed_on, picks=picks, began=now)
    record, trace = serving.record, None
    record.queued_s = queued_s
    record.arrived -= queued_s
    record.arrived_unix -= queued_s
    context.servings.add(serving)
    if record.api:
        if context.tracing is not None:
            trace = context.tracing.begin(headers, record)
        record.prompt_size = prompt.tokens(asks.prompt)
        context.observer.opened(record.prompt_size)
    context.budget.on_request(now)
    serving.start(picked, trace)
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


def _queued(context: RequestContext, route: Route, request: HttpRequest, reply: Reply, asks: Asks) -> QueuedRequest:
    """A request that generates, while it is not served yet. Raises HttpFault: 400, the priority is no whole number."""
    below, affinity = context.config.skip_prefill_below, context.affinity_header
    if not asks.skips and below and prompt.tokens(asks.prompt) < below:
        asks.skips = SHORT

    def begin(queued_s: float) -> RequestHandler:
        session = request.headers.get(affinity, b"") if affinity else b""
        picks = context.picker.asked(asks.prompt, prompt.key_of(session) if session else 0)
        if not asks.skips and context.config.skip_prefill_cached and picks.cached():
            asks.skips = CACHED
        return serve(context, request, reply, asks, picks=picks, queued_s=queued_s)

    def unserved(fault: HttpFault | None) -> None:
        if fault is not None:
            reply.fault(fault)
        ended = ("client_gone", 0, LEFT) if fault is None else (fault.outcome, fault.status, fault.message)
        context.observer.unserved(route, request.request_id, *ended)

    return QueuedRequest(
        context.line, reply, key_of(request.headers, context.config), priority_of(request.headers, asks.fields),
        1 + len(asks.prompt) / BYTES_PER_COST, room=lambda: context.room(alone=asks.alone), serve=begin, unserved=unserved)


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


GENERATION = {route.path: route.api for route in TABLE if route.api is not None}
_ID = b"\r\nx-request-id: "


class Entrance:
    """The door to the straight course, of one process: which requests take it, and how they begin."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        config, limits = context.config, context.limits
        self._left, self._limit = round(limits.pair_s, 3), round(min(limits.prefill_s, limits.request_s), 3)
        """What legs are told of their times (``Exchange.start``)."""
        self._from = params(self._left, None, self._limit)
        """Decode's parameters."""
        speaks = config.first_token == "prefill"  # noqa: S105 (a token of an answer)
        self.open = (not speaks and not config.skip_prefill_cached and context.tracing is None
                     and min(limits.request_s, limits.pair_s) >= NO_DEADLINE_S)
        """Requests may take the straight course, as far as settings go."""
        self._read = {*HEADERS, context.affinity_header, *((b"origin",) if config.cors_origins else ())}
        """Headers that do not go with it."""
        self._latest: tuple[Mapping[bytes, bytes], tuple[Api, str] | None] = {}, None
        """Headers of a request, and what followed from its head: API and key, or that it does not go with it."""

    def enter(self, http: HttpRequest, client: ReplyConnection) -> FastPath | Serving | None:
        """Begin to serve a request, which was judged, if its course will probably be straight. None: nothing was done."""
        headers, way = self._latest
        if http.headers is not headers:  # requests of a known head have the very same
            way = self._way(http)
            self._latest = http.headers, way
        if way is None or not self.open:
            return None
        api, key = way
        context = self._context
        config = context.config
        if context.poison.alert and context.poison.stops(api, http.body):
            return None
        found = context.shapes.known(api, http.body)
        if found is None:
            return None
        shape, slots = found
        model = shape.model
        if not shape.plain or (model is not None and model != config.model and not context.serves(model)):
            return None
        if not context.line.passes(key) or not context.room(alone=False):
            return None
        asks = slots[shape.prompt_at]
        size = prompt.text_tokens(len(asks))
        if size < config.skip_prefill_below:
            return None
        arrived, arrived_unix, began = perf_counter(), time(), context.loop.time()
        reply = Reply(client, http.request_id)
        picks = context.picker.asked(asks)
        pair = picks.pair(alone=False)
        target = None if pair is None else pair.prefill
        pool = context.pool
        prefill = None if pair is None or target is None else pool.idle(target.http)
        decode = None if prefill is None or pair is None else pool.idle(pair.decode.http)
        if pair is None or target is None or prefill is None or decode is None:
            if prefill is not None:
                prefill.take_back()
            generation = Generation(shape.request(bodies.split(http.body), slots), config, context.terms)
            return serve(context, http, reply, generation, picks=picks, picked=pair)
        transfer, line = TransferId(heads.fresh()), _ID + http.request_id.encode() + b"\r\n\r\n"
        to_prefill, to_decode = shape.templates()
        name, path, other = transfer.encode(), PATHS[api], pair.decode
        to = params(self._left, (other.instance, other.incarnation, other.control), self._limit)
        asked = (to_prefill.fill(slots, to, name, before_length(path, target.http),
                                 line if target.dp_rank is None else _ranked(target.dp_rank, line)),
                 to_decode.fill(slots, self._from, name, before_length(path, other.http),
                                line if other.dp_rank is None else _ranked(other.dp_rank, line)))
        lane = FastPath(context, reply, shape, slots, http.body, picks, pair, transfer, began, arrived,
                        arrived_unix, size, asked, prefill, decode)
        prefill.lend(lane, asked[0])
        decode.lend(lane, asked[1])  # engines are at work while the rest is written down
        lane.opened_s = perf_counter()
        context.leg_opened(target)
        context.leg_opened(other)
        context.observer.opened(size)
        context.budget.on_request(began)
        context.servings.add(lane)
        return lane

    def _way(self, http: HttpRequest) -> tuple[Api, str] | None:
        api = GENERATION.get(http.path)
        if api is None or http.method != "POST" or not self._read.isdisjoint(http.headers):
            return None
        return api, key_of(http.headers, self._context.config)


def _ranked(rank: int, line: bytes) -> bytes:
    return b"\r\nx-data-parallel-rank: %d%b" % (rank, line)
