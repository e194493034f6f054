"""The door to the straight course: which requests take it, and how they begin.

Belongs here: everything up to both legs sent. Does not belong here: what comes back (``lane``). Requests that this door
does not let in go the usual way (``entry``, ``serving``), which serves every request.
"""

from __future__ import annotations

from time import perf_counter, time
from typing import TYPE_CHECKING

from xpyd_sidecar.contract.ids import Role, TransferId
from xpyd_sidecar.proxy import ids
from xpyd_sidecar.proxy.lane import Lane
from xpyd_sidecar.proxy.legs import PATHS
from xpyd_sidecar.proxy.reply import Connection, HttpRequest, Reply
from xpyd_sidecar.proxy.serving import Serving
from xpyd_sidecar.proxy.upstream import before_length
from xpyd_sidecar.routing import fields, prompt
from xpyd_sidecar.routing.pick import Target

if TYPE_CHECKING:
    from xpyd_sidecar.proxy.dispatch import Dispatch


def enter(dispatch: Dispatch, client: Connection, api: fields.Api, http: HttpRequest) -> Lane | Serving | None:
    """Begin to serve a request whose course will probably be straight. None: nothing was done."""
    if not dispatch.straight or not dispatch.read.isdisjoint(http.headers):
        return None
    request = dispatch.shapes.known(api, http.body)
    if request is None or not request.stream or request.skips or "priority" in request.fields:
        return None
    if not dispatch.enters_at_once(request, http.headers):
        return None
    asks = request.prompt
    size = prompt.tokens(asks)
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
        return dispatch.serve(http, reply, request, picks, 0.0, picked=pair)
    transfer, request_id = TransferId(ids.fresh()), http.request_id.encode()
    assert request.shape is not None
    shape, params, name = request.shape, dispatch.first_pair, transfer.encode()
    asked = (_asked(api, target, request_id, shape.template(Role.PREFILL).fill(
                 request.slots, params.prefill(pair.decode), name)),
             _asked(api, pair.decode, request_id, shape.template(Role.DECODE).fill(request.slots, params.decode, name)))
    dispatch.opened(size)
    members = (dispatch.leg_opened(target), dispatch.leg_opened(pair.decode))
    lane = Lane(dispatch, client, request, picks, pair, transfer, http.request_id, began, arrived, arrived_unix, size,
                asked, members, perf_counter(), prefill, decode)
    dispatch.servings.add(lane)
    prefill.lend(lane, asked[0])
    decode.lend(lane, asked[1])
    return lane


def _asked(api: fields.Api, target: Target, request_id: bytes, body: bytes) -> bytes:
    rank = b"" if target.dp_rank is None else b"\r\nx-data-parallel-rank: %d" % target.dp_rank
    return b"%b%d\r\nx-request-id: %b%b\r\n\r\n%b" % (
        before_length(PATHS[api], target.http), len(body), request_id, rank, body)
