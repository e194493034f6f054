"""The door to the straight course: which requests take it, and how they begin."""

from __future__ import annotations

from time import perf_counter, time

from xpyd_sidecar.contract.ids import TransferId
from xpyd_sidecar.router.api import bodies, fields, prompt
from xpyd_sidecar.router.fleet.member import EngineTarget
from xpyd_sidecar.router.http import ids
from xpyd_sidecar.router.http.reply import HttpRequest, Reply, ReplyConnection
from xpyd_sidecar.router.http.wire import before_length
from xpyd_sidecar.router.serving.admission import key_of, serve
from xpyd_sidecar.router.serving.context import RequestContext
from xpyd_sidecar.router.serving.fast_path import NO_DEADLINE_S, FastPath
from xpyd_sidecar.router.serving.generation import HEADERS, PATHS, Generation
from xpyd_sidecar.router.serving.request import Serving
from xpyd_sidecar.router.serving.shapes import params

_ID = b"\r\nx-request-id: "


class Entrance:
    """The door of one process."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        config, limits = context.config, context.limits
        self._left, self._limit = round(limits.pair_s, 3), round(min(limits.prefill_s, limits.request_s), 3)
        """What legs are told of their times (``Exchange.start``)."""
        speaks = config.first_token == "prefill"  # noqa: S105 (a token of an answer)
        self.open = (not speaks and not config.skip_prefill_cached and context.tracing is None
                     and min(limits.request_s, limits.pair_s) >= NO_DEADLINE_S)
        """Requests may take the straight course, as far as settings go."""
        self._read = frozenset(HEADERS) | {context.affinity_header}
        """Headers that do not go with it."""

    def enter(self, client: ReplyConnection, api: fields.Api, http: HttpRequest) -> FastPath | Serving | None:
        """Begin to serve a request whose course will probably be straight. None: nothing was done."""
        headers = http.headers
        if not self.open or not self._read.isdisjoint(headers):
            return None
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
        key = "" if config.api_key_file is None else key_of(headers, config)
        if not context.line.passes(key) or not context.room(alone=False):
            return None
        asks = slots[shape.prompt_at]
        size = prompt.text_tokens(len(asks))
        if size < config.skip_prefill_below:
            return None
        arrived, arrived_unix, began = perf_counter(), time(), context.loop.time()
        picks = context.picker.asked(asks)
        pair = picks.pair(alone=False)
        target = None if pair is None else pair.prefill
        pool = context.pool
        prefill = None if pair is None or target is None or target.p2p or pair.decode.p2p else pool.idle(target.http)
        decode = None if prefill is None or pair is None else pool.idle(pair.decode.http)
        if pair is None or target is None or prefill is None or decode is None:
            if prefill is not None:
                prefill.take_back()
            reply = Reply(client, http.request_id, close=False, old=False, head_only=False)
            generation = Generation(shape.request(bodies.split(http.body), slots), config, context.terms)
            return serve(context, http, reply, generation, picks=picks, picked=pair)
        transfer, line = TransferId(ids.fresh()), b"%b%b\r\n\r\n" % (_ID, http.request_id.encode())
        to_prefill, to_decode = shape.templates()
        name, path, other = transfer.encode(), PATHS[api], pair.decode
        who = (other.instance, other.incarnation, other.control)
        asked = (_message(path, target, line, to_prefill.fill(slots, params(self._left, who, self._limit), name)),
                 _message(path, other, line, to_decode.fill(slots, params(self._left, None, self._limit), name)))
        lane = FastPath(context, client, shape, slots, http.body, picks, pair, transfer, http.request_id, began, arrived,
                        arrived_unix, size, asked, prefill, decode)
        prefill.lend(lane, asked[0])
        decode.lend(lane, asked[1])  # engines are at work while the rest is written down
        lane.opened_s = perf_counter()
        lane.members = context.leg_opened(target), context.leg_opened(pair.decode)
        context.observer.opened(size)
        context.budget.on_request(began)
        context.servings.add(lane)
        return lane


def _message(path: bytes, target: EngineTarget, line: bytes, body: bytes) -> bytes:
    rank = b"" if target.dp_rank is None else b"\r\nx-data-parallel-rank: %d" % target.dp_rank
    return b"%b%d%b%b%b" % (before_length(path, target.http), len(body), rank, line, body)
