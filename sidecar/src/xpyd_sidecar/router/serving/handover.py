"""Where the fast path ends: the ``Serving`` that goes on with what a ``FastPath`` has begun.

Belongs here: one function, which hands everything over that a lane knows. Does not belong here: when that happens
(``fast_path``) and what follows (``request``). A test holds every course of a lane against that of a ``Serving`` from the
start.
"""

from __future__ import annotations

import math
from operator import itemgetter
from time import perf_counter
from typing import Any

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.http.reply import Reply
from xpyd_sidecar.router.observing.record import LegRecord
from xpyd_sidecar.router.serving import instructions as mv
from xpyd_sidecar.router.serving.attempts import OpenAttempt
from xpyd_sidecar.router.serving.fast_state import FastState
from xpyd_sidecar.router.serving.generation import Generation
from xpyd_sidecar.router.serving.request import Serving
from xpyd_sidecar.router.stream.streams import stream_of
from xpyd_sidecar.router.upstream.call import UpstreamCall


def serving_of(lane: FastState) -> Serving:
    """One that has seen all that the lane has; its calls have the lane's connections."""
    context, asks = lane.context, Generation(lane.request, lane.context.config, lane.context.terms)
    reply = Reply(lane.client, lane.request_id, close=False, old=False, head_only=False)
    if lane.head is not None:
        asks.position = lane.position
    serving = Serving(context, reply, asks, lane.transfer, [], picks=lane.picks, began=lane.began)
    record, exchange, began = serving.record, serving.exchange, not math.isnan(lane.begun_at)
    record.arrived, record.arrived_unix, record.prompt_size = lane.arrived, lane.arrived_unix, lane.prompt_size
    first: list[Any] = exchange.started(lane.pair, lane.began)
    prefill, decode = first
    heard = ((lane.prefilled_at, mv.Answered(prefill.leg, 200)), (lane.begun_at, mv.Begun(decode.leg)))
    for at, event in sorted((one for one in heard if not math.isnan(one[0])), key=itemgetter(0)):
        exchange.handle(event, at)
    if began:
        reply.begun(200, lane.sent, close=lane.close)
        record.first_at = lane.begun_s
    open_ = (lane.prefill, lane.decode)
    for send, connection, member, request in zip(first, open_, lane.members, lane.asked, strict=True):
        leg = LegRecord(send.role, send.target.instance, 1, lane.opened_s)
        serving.sent[send.role] = send.target
        record.legs.append(leg)
        decodes = send.role is Role.DECODE
        if connection is None:
            leg.first_at = lane.begun_s if decodes else lane.prefilled_s
            leg.ended, leg.result = (perf_counter() if decodes else lane.prefilled_s), "2xx"
            continue
        events = (lane.stream or stream_of(asks.position, framed=True)) if decodes else None
        call = UpstreamCall(context.pool, send.target.http, request, serving, events=events, tag=send.leg)
        call.taken_over(connection, lane.began)
        connection.hand_over(call, lane.stream if decodes else None)
        serving.legs.take(OpenAttempt(send, call, member, leg))
        if decodes:
            call.head = lane.head
            if began:
                leg.first_at = lane.begun_s
                if lane.stream is not None:
                    connection.relay(lane.stream, reply.outlet)
                serving.relaying, call.relay = call, reply.write
    return serving
