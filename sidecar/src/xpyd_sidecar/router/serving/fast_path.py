"""A request on its straight course, without what the other courses need.

    entered ─▶ both legs sent ──▶ prefill answered 200 ──▶ decode's stream begins ──▶ … ──▶ ends ──▶ record
                └────────────────────┴───────────────────────┴── whatever else ──▶ ``unfold``: a ``Serving`` goes on

One object holds what a ``Serving``, its legs and calls would. It decides nothing: what is not on this way (a failure, a
slow engine, a client that goes, an instance that leaves) makes the ``Serving`` that has seen all of it, which hears of it
as if it had been there from the start. A test holds every course against that of a ``Serving``.
"""

from __future__ import annotations

import logging
import math
from functools import lru_cache
from operator import itemgetter
from time import perf_counter
from typing import Any

import msgspec

from xpyd_sidecar.contract.ids import Role, TransferId
from xpyd_sidecar.router.api import bodies
from xpyd_sidecar.router.api.bodies import hash_of
from xpyd_sidecar.router.api.faults import FailureReason
from xpyd_sidecar.router.balance.picker import Selection
from xpyd_sidecar.router.fleet.member import Pair
from xpyd_sidecar.router.http.reply import Reply
from xpyd_sidecar.router.http.wire import MAX_KNOWN, Malformed, ResponseHead, parse_head
from xpyd_sidecar.router.observing.record import LegRecord, Record
from xpyd_sidecar.router.relay.fast import Scanner
from xpyd_sidecar.router.relay.whole import Whole, take
from xpyd_sidecar.router.serving import instructions as mv
from xpyd_sidecar.router.serving.attempts import OpenAttempt
from xpyd_sidecar.router.serving.context import RequestContext
from xpyd_sidecar.router.serving.generation import Generation
from xpyd_sidecar.router.serving.request import Serving
from xpyd_sidecar.router.serving.shapes import Shape
from xpyd_sidecar.router.stream.events import ABORT, END, EventStream, only_comments
from xpyd_sidecar.router.stream.position import Position
from xpyd_sidecar.router.stream.replay_recorder import stream_of
from xpyd_sidecar.router.stream.token_recorder import NotedStream
from xpyd_sidecar.router.upstream.call import EngineConnection, UpstreamCall

logger = logging.getLogger(__name__)

MAX_PENDING = 64 << 10
"""Bytes of prefill's answer; a longer one is read by a ``Serving``."""
MAX_TAKEN = 2
"""Reads that are taken without a stream; one that knows what events are like is cheaper for more."""
MAX_KEPT = 16 << 10
"""Bytes of such a read; one that is longer, say by its prompt's ids, is not kept beside what a stream keeps of it."""
NO_DEADLINE_S = 6.0
"""Requests with a deadline that comes sooner are not served here."""
YOUNG_S = 3.0
"""Nobody counts as silent sooner."""
_PREFILL, _DECODE = Role
_EMPTY = b"\r\n\r\n"
"""Ends a head. Where it has not come, ``find`` says -1, and what is looked at then is no head."""
assert YOUNG_S < NO_DEADLINE_S


class FastPath(msgspec.Struct, eq=False):
    """One request (``reply.RequestHandler``), from both legs sent to its last byte, or to another course."""

    context: RequestContext
    reply: Reply
    shape: Shape
    slots: list[bytes]
    body: bytes
    picks: Selection
    pair: Pair
    transfer: TransferId
    began: float
    """On the event loop's clock."""
    arrived: float
    """On the clock of records, as each ``_s``."""
    arrived_unix: float
    prompt_size: int
    asked: tuple[bytes, bytes]
    prefill: EngineConnection | None
    """None: it has answered."""
    decode: EngineConnection | None
    opened_s: float = math.nan
    pending: bytes = b""
    """Of prefill's answer."""
    prefilled_s: float = math.nan
    begun_s: float = math.nan
    head: ResponseHead | None = None
    taken: tuple[tuple[Whole, bytes], ...] = ()
    """What was taken of decode's answer without reading it, and the reads."""
    name: str = ""
    """Of the answer, by its first event, as the next one."""
    created: int = 0
    prompt_tokens: int = 0
    """Of the prompt, as decode says; 0: it has not."""
    log: bytearray = bytearray()
    """As ``Position.log``."""
    stream: EventStream | None = None
    """What reads decode's answer where it was not, and what the client has of it then."""
    position: Position | None = None
    ended_s: float = math.nan
    serving: Serving | None = None
    """Who goes on with it on another course."""

    # ---- what is known

    @property
    def request(self) -> bodies.GenerationRequest:
        """What was asked, as other courses need it."""
        return self.shape.request(bodies.split(self.body), self.slots)

    def record(self) -> Record:
        """What is known of it, once it has ended."""
        position, pair = self.position, self.pair
        tokens = prompt_tokens = -1
        if position is not None:
            tokens, prompt_tokens = position.tokens, position.prompt_tokens
        elif self.prompt_tokens:
            tokens, prompt_tokens = self.log.count(b"\t"), self.prompt_tokens
        assert pair.prefill is not None
        first, ended, done = self.prefilled_s, self.ended_s, "2xx"
        legs = [LegRecord(_PREFILL, pair.prefill.instance, 1, self.opened_s, first, first, done),
                LegRecord(_DECODE, pair.decode.instance, 1, self.opened_s, self.begun_s, ended, done)]
        return Record(
            self.reply.request_id, self.transfer, self.shape.api, True, self.arrived, self.arrived_unix, "ok", 200,
            first_at=self.begun_s, last_at=ended, tokens=tokens, prompt_tokens=prompt_tokens, prompt_size=self.prompt_size,
            attempt=1, bytes=self.reply.sent, legs=legs)

    def handed_over(self) -> tuple[bodies.GenerationRequest, Pair]:
        """As ``InFlightRequest``'s: what ends here went the straight course."""
        return self.request, self.pair

    # ---- the engines

    def heard(self, connection: EngineConnection, data: bytes) -> bytes | None:
        """Bytes of an engine. What is returned is for the usual way, whose calls the connections have then."""
        try:
            return self._on_prefill(connection, data) if connection is self.prefill else self._on_decode(connection, data)
        except Exception:
            # A bug here must cost one request, not leave it hanging or its legs open.
            logger.exception("a request failed inside the router", extra={"transfer": self.transfer})
            self.unfold().give_up()
            return None

    def _on_prefill(self, connection: EngineConnection, data: bytes) -> bytes | None:
        if self.pending:
            data, self.pending = self.pending + data, b""
        at = data.find(_EMPTY) + len(_EMPTY)
        head = _head_of(data[:at]) if at <= MAX_KNOWN else None
        length = 0 if head is None else head.length or 0
        if not 0 < length <= MAX_PENDING:
            self.unfold()
            return data
        missing = at + length - len(data)
        if missing > 0:
            self.pending = data
            return None
        if missing < 0 or data.find(ABORT, at) >= 0:
            self.unfold()
            return data
        self.prefilled_s = perf_counter()
        self.prefill = None
        connection.take_back()
        assert self.pair.prefill is not None
        self.context.leg_closed(self.pair.prefill)
        return None

    def _on_decode(self, connection: EngineConnection, data: bytes) -> bytes | None:
        if self.head is None:
            at = data.find(_EMPTY) + len(_EMPTY)
            head = _head_of(data[:at]) if at <= MAX_KNOWN else None
            if head is None or not head.chunked or not head.is_event_stream:
                self.unfold()
                return data
            self.head = head
            if at == len(data):
                return None
            data = data[at:]
        if self.stream is None:
            if self._take(connection, data):
                return None
            self.read_on()
        stream = self.stream
        assert stream is not None
        try:
            out = stream.feed(data)
        except Malformed as error:
            self.unfold()
            connection.break_off(error)
            return None
        if stream.done or stream.failure:
            if stream.ended and not stream.failure and self.prefill is None:
                self._end(connection, out)
            else:
                self.unfold()
                connection.go_on(out)
        elif out and self.begun_s != self.begun_s and only_comments(out, framed=True):
            self.unfold()
            connection.go_on(out)
        else:
            self._go_on(out)
            if out:
                connection.relay(stream, self.reply.connection.outlet)
        return None

    def _take(self, connection: EngineConnection, data: bytes) -> bool:
        """Take a read that is whole events which nobody need read: nearly all of short answers, and others' beginnings."""
        shape = self.shape
        if not shape.noted or (len(self.taken) == MAX_TAKEN and not data.endswith(END)):
            return False
        chat = shape.api == "chat"
        found = take(data, chat, self.name, self.created, self.log)
        if found is None:
            return False
        out, name, created, _, _, _, _, _, ended, at, to, ids = found
        self.name, self.created, self.prompt_tokens = name, created, self.prompt_tokens or ids
        if not ended:
            self.taken = (*self.taken, (found, data))
            self._go_on(out)
            if len(data) > MAX_KEPT:
                self.read_on()
                assert self.stream is not None
                connection.relay(self.stream, self.reply.connection.outlet)
            elif to and self.prompt_tokens and not shape.shows_logprobs:
                scanner = Scanner()
                if scanner.learn(data, at, to, chat, self.log):
                    connection.relay(scanner, self.reply.connection.outlet)
        elif self.prefill is None:
            self._end(connection, out)
        else:  # before prefill's answer was read: what becomes of its leg is to be decided
            self.taken = (*self.taken, (found, data))
            self.unfold()
            connection.go_on(out)
        return True

    def _go_on(self, out: bytes) -> None:
        if self.begun_s == self.begun_s:
            self.reply.write(out)
        elif out:
            self._begin(out, ends=False)

    def _begin(self, out: bytes, *, ends: bool) -> None:
        assert self.head is not None
        self.begun_s = perf_counter()
        self.reply.begin(200, self.head.passed_on(), out, ends=ends)

    def read_on(self) -> None:
        """Have a stream read what comes, and know of what came."""
        self.position = self.shape.position()
        if self.position is not None:
            self.position.log = self.log
        self.stream = stream_of(self.position, framed=True)
        for found, data in self.taken:
            assert isinstance(self.stream, NotedStream)
            self.stream.taken(found, data)
        self.taken = ()

    def _end(self, connection: EngineConnection, out: bytes) -> None:
        context = self.context
        self.ended_s = perf_counter()
        self.decode = None
        connection.take_back()
        context.leg_closed(self.pair.decode)
        if self.begun_s == self.begun_s:
            self.reply.hold(out)
        else:
            self._begin(out, ends=True)
        self.reply.end()
        context.closed(self)
        if context.poison.watching:
            context.poison.whole(hash_of(self.shape.api, self.request.fields))
        context.observer.straight_over(self)

    # ---- another course

    def unfold(self) -> Serving:
        """The ``Serving`` that goes on, with calls on the connections. What was kept of prefill's answer is read there."""
        if self.serving is None:
            if self.head is not None and self.stream is None:
                self.read_on()
            self.serving = serving_of(self)
            self.reply.connection.hand_over(self, self.serving)
            servings, prefill = self.context.servings, self.prefill
            servings.discard(self)
            servings.add(self.serving)
            self.prefill = self.decode = None
            if self.pending and prefill is not None:
                prefill.received(self.pending)
        return self.serving

    def on_client_gone(self) -> None:
        """The client's connection is closed."""
        self.unfold().on_client_gone()

    def on_pause(self) -> None:
        """The client is slower than its answer; the write that ends it may say so, and then nothing is left to stop."""
        if math.isnan(self.ended_s):
            self.unfold().on_pause()

    def on_resume(self) -> None:
        """It has caught up."""
        if math.isnan(self.ended_s):
            self.unfold().on_resume()

    def on_lost(self, instance: str, incarnation: str, reason: FailureReason) -> None:
        """The roster says that this incarnation will never answer."""
        if self._open_on(instance, incarnation):
            self.unfold().on_lost(instance, incarnation, reason)

    def on_leaving(self, instance: str, incarnation: str) -> None:
        """The incarnation ends soon."""
        if self._open_on(instance, incarnation):
            self.unfold().on_leaving(instance, incarnation)

    def sweep(self, now: float, awake: float) -> None:
        """Called every second."""
        if now > self.began + YOUNG_S:
            self.unfold().sweep(now, awake)

    def abort(self, reason: str) -> None:
        """The router stops before this request could end."""
        self.unfold().abort(reason)

    def give_up(self) -> None:
        """End in whatever state it is: the router failed."""
        self.unfold().give_up()

    def _open_on(self, instance: str, incarnation: str) -> bool:
        open_ = ((self.prefill, self.pair.prefill), (self.decode, self.pair.decode))
        return any(connection and target and (target.instance, target.incarnation) == (instance, incarnation)
                   for connection, target in open_)


def serving_of(lane: FastPath) -> Serving:
    """One that has seen all that the lane has; its calls have the lane's connections."""
    context, begun = lane.context, not math.isnan(lane.begun_s)
    asks = Generation(lane.request, context.config, context.terms)
    if lane.head is not None:
        asks.position = lane.position
    serving = Serving(context, lane.reply, asks, lane.transfer, [], picks=lane.picks, began=lane.began)
    record, exchange = serving.record, serving.exchange
    record.arrived, record.arrived_unix, record.prompt_size = lane.arrived, lane.arrived_unix, lane.prompt_size
    first: list[Any] = exchange.start(lane.began, lane.pair)
    prefill, decode = first
    heard = ((lane.prefilled_s, mv.Answered(prefill.leg, 200)), (lane.begun_s, mv.Begun(decode.leg)))
    for _, event in sorted((one for one in heard if not math.isnan(one[0])), key=itemgetter(0)):
        exchange.handle(event, lane.began)
    if begun:
        record.first_at = lane.begun_s
    open_ = (lane.prefill, lane.decode)
    for send, connection, request in zip(first, open_, lane.asked, strict=True):
        leg = LegRecord(send.role, send.target.instance, 1, lane.opened_s)
        serving.sent[send.role] = send.target
        record.legs.append(leg)
        decodes = send.role is Role.DECODE
        if connection is None:
            leg.first_at = lane.begun_s if decodes else lane.prefilled_s
            leg.ended, leg.result = (perf_counter() if decodes else lane.prefilled_s), "2xx"
            continue
        events = (lane.stream or stream_of(asks.position, framed=True)) if decodes else None
        call = UpstreamCall(context.pool, send.target.http, request, serving, events=events, tag=send.leg,
                            asked_at=lane.began, connection=connection)
        context.pool.calls.add(call)
        connection.hand_over(call, lane.stream if decodes else None)
        serving.legs[send.leg] = OpenAttempt(send, call, leg)
        if decodes:
            call.head = lane.head
            if begun:
                leg.first_at = lane.begun_s
                if lane.stream is not None:
                    connection.relay(lane.stream, lane.reply.connection.outlet)
                serving.relaying, call.relay = call, lane.reply.write
    return serving


@lru_cache(maxsize=256)
def _head_of(raw: bytes) -> ResponseHead | None:
    """The head of an answer that is like nearly all: with success, on a connection that stays."""
    try:
        head = parse_head(raw[:-len(_EMPTY)])
    except Malformed:  # who reads it next says what is wrong
        return None
    return head if head.status == 200 and head.keep_alive else None
