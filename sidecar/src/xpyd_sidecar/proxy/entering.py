"""The door to the straight course: which requests take it, and how they begin.

Belongs here: everything up to both legs sent. Does not belong here: what comes back (``lane``). Requests that this door
does not let in go the usual way (``entry``, ``serving``), which serves every request.
"""

from __future__ import annotations

from time import perf_counter, time
from typing import TYPE_CHECKING

from xpyd_sidecar.contract.ids import TransferId
from xpyd_sidecar.proxy import ids
from xpyd_sidecar.proxy.generation import PATHS, Generation
from xpyd_sidecar.proxy.lane import Lane
from xpyd_sidecar.proxy.reply import Connection, HttpRequest, Reply
from xpyd_sidecar.proxy.serving import Serving
from xpyd_sidecar.proxy.upstream import before_length
from xpyd_sidecar.routing import fields, prompt
from xpyd_sidecar.routing.pick import Target

if TYPE_CHECKING:
    from xpyd_sidecar.proxy.dispatch import Dispatch

_ID = b"\r\nx-request-id: "


def enter(dispatch: Dispatch, client: Connection, api: fields.Api, http: HttpRequest) -> Lane | Serving | None:
    """Begin to serve a request whose course will probably be straight. None: nothing was done."""
    if not dispatch.straight or not dispatch.read.isdisjoint(http.headers):
        return None
    if dispatch.poison.alert and dispatch.poison.stops(api, http.body):
        return None
    found = dispatch.shapes.known(api, http.body)
    if found is None:
        return None
    shape, slots, given = found
    if not shape.plain or not dispatch.enters_at_once(shape.model, http.headers):
        return None
    asks = slots[shape.prompt_at]
    size = prompt.text_tokens(len(asks))
    if size < dispatch.config.skip_prefill_below:
        return None
    arrived, arrived_unix, began = perf_counter(), time(), dispatch.loop.time()
    picks = dispatch.picker.asked(asks)
    pair = picks.pair(alone=False)
    target = None if pair is None else pair.prefill
    pool = dispatch.pool
    prefill = None if pair is None or target is None or target.p2p or pair.decode.p2p else pool.idle(target.http)
    decode = None if prefill is None or pair is None else pool.idle(pair.decode.http)
    if pair is None or target is None or prefill is None or decode is None:
        if prefill is not None:
            prefill.take_back()
        reply = Reply(client, http.request_id, close=False, old=False, head_only=False)
        generation = Generation(shape.request(given, slots), dispatch.config, dispatch.terms)
        return dispatch.serve(http, reply, generation, picks, 0.0, picked=pair)
    transfer, request_id = TransferId(ids.fresh()), http.request_id.encode()
    params, name = dispatch.first_pair, transfer.encode()
    to_prefill, to_decode = shape.templates()
    path, line, (before, behind) = PATHS[api], b"".join((_ID, request_id, b"\r\n\r\n")), params.prefill(pair.decode)
    asked = (to_prefill.message(before_length(path, target.http), _ranked(line, target), (*slots, before, name, behind)),
             to_decode.message(before_length(path, pair.decode.http), _ranked(line, pair.decode),
                               (*slots, params.decode[0], name, params.decode[1])))
    dispatch.opened(size, began)
    members = (dispatch.leg_opened(target), dispatch.leg_opened(pair.decode))
    lane = Lane(dispatch, client, shape, slots, given, picks, pair, transfer, http.request_id, began, arrived,
                arrived_unix, size, asked, members, perf_counter(), prefill, decode)
    dispatch.servings.add(lane)
    prefill.lend(lane, asked[0])
    decode.lend(lane, asked[1])
    return lane


def _ranked(line: bytes, target: Target) -> bytes:
    return line if target.dp_rank is None else b"\r\nx-data-parallel-rank: %d%b" % (target.dp_rank, line)
