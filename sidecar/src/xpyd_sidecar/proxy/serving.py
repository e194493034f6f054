"""Carries out one exchange: its instructions become calls and replies, what comes back becomes events.

Belongs here: the I/O of one generation request. Does not belong here: decisions (``routing.exchange``), what engines are
asked (``asking``), the calls themselves (``legs``) and sockets (``server``, ``upstream``). The hot path of a stream is
``on_events`` → ``Reply.write``; the exchange hears of its first event and of its end.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter, time
from typing import TYPE_CHECKING, Any

from xpyd_sidecar import logs
from xpyd_sidecar.contract.ids import InstanceName, Role, TransferId
from xpyd_sidecar.proxy.access import access, line_of
from xpyd_sidecar.proxy.asking import Asking
from xpyd_sidecar.proxy.events import EventStream
from xpyd_sidecar.proxy.kept import FirstToken
from xpyd_sidecar.proxy.legs import Leg, Legs
from xpyd_sidecar.proxy.patience import SOON_S, Reminder
from xpyd_sidecar.proxy.poison import Apart
from xpyd_sidecar.proxy.reply import Reply
from xpyd_sidecar.proxy.streams import stream_of
from xpyd_sidecar.proxy.upstream import Call
from xpyd_sidecar.proxy.wire import chunk_of
from xpyd_sidecar.routing import answers, bodies
from xpyd_sidecar.routing import moves as mv
from xpyd_sidecar.routing.exchange import Exchange, Picks
from xpyd_sidecar.routing.faults import Fault
from xpyd_sidecar.routing.pick import Pair
from xpyd_sidecar.routing.reason import Reason
from xpyd_sidecar.routing.record import REFUSED, LegRecord, Record
from xpyd_sidecar.routing.request_hash import RequestHash, hash_of
from xpyd_sidecar.routing.straight import DECODE, NO_DEADLINE_S, PREFILL, Straight

if TYPE_CHECKING:
    from xpyd_sidecar.proxy.dispatch import Dispatch
    from xpyd_sidecar.proxy.lane import Lane
    from xpyd_sidecar.proxy.spans import Trace

logger = logging.getLogger(__name__)

_ABORTED = b'"finish_reason":"abort"'
_SHOWN = 500
"""Bytes of a refusal that the log shows."""
STREAM_STALL_S = 3.0
"""Silence of a stream that has begun after which its engine is probed. One that was told to end may leave its streams open
and say nothing more; it refuses connections, and so fails the probe."""


class Serving:
    """One generation request, from its parsed fields to its last byte."""

    __slots__ = ("_answer", "_asking", "_course", "_dispatch", "_first", "_gone", "_hash", "_held", "_legs", "_loop",
                 "_made", "_paused", "_picks", "_relaying", "_reminder", "_reply", "_request", "_withheld", "record")

    def __init__(self, dispatch: Dispatch, reply: Reply, request: bodies.Request, transfer: TransferId,
                 passed: list[tuple[bytes, bytes]], *, picks: Picks) -> None:
        self._dispatch = dispatch
        self._loop = dispatch.loop
        self._reply = reply
        self._request = request
        self.record = Record(reply.request_id, transfer, request.api, request.stream, skips=request.skips,
                             arrived=perf_counter(), arrived_unix=time())
        self._asking = Asking(request, dispatch.config)
        self._legs = Legs(dispatch, self.record, passed)
        self._held: Leg | None = None
        """Decode's leg to an older engine while prefill's is open."""
        self._picks = picks
        self._course = Straight(self._loop.time())
        self._made: Exchange | None = None
        self._relaying: Call | None = None
        self._first = b""
        self._answer: tuple[Call, bytes] | None = None
        self._reminder = Reminder(self._loop)
        self._paused = False
        self._gone = False
        self._hash: RequestHash | None = None
        self._withheld: list[Callable[[], None]] | None = None
        """Not None: it is held, because it may be what ends engines, and this is to be done when it goes on."""

    @classmethod
    def taking_over(cls, lane: Lane) -> Serving:
        """What goes on where a lane ends: it has seen all that the lane has, and its calls have the lane's connections."""
        dispatch, pair = lane.dispatch, lane.pair
        reply = Reply(lane.client, lane.request_id, close=False, old=False, head_only=False)
        serving = cls(dispatch, reply, lane.request, lane.transfer, [], picks=lane.picks)
        record, began = serving.record, not math.isnan(lane.begun_at)
        record.arrived, record.arrived_unix, record.prompt_size = lane.arrived, lane.arrived_unix, lane.prompt_size
        course = serving._course = Straight(lane.began)
        sends = course.start(pair, lane.transfer, dispatch.limits)
        if lane.prefill is None:
            course.prefilled(lane.prefilled_at)
        if lane.head is not None:
            serving._asking.position = lane.position
        if began:
            course.begun(lane.begun_at)
            reply.begun(200, lane.sent, close=lane.close)
            record.first_at = lane.begun_s
        open_ = (lane.prefill, lane.decode)
        for send, connection, member, request in zip(sends, open_, lane.members, lane.asked, strict=True):
            assert isinstance(send, mv.Send)
            leg = LegRecord(send.role, send.target.instance, 1, lane.opened_s)
            record.legs.append(leg)
            decode = send.role is Role.DECODE
            if connection is None:
                leg.first_at = lane.begun_s if decode else lane.prefilled_s
                leg.ended, leg.result = (perf_counter() if decode else lane.prefilled_s), "2xx"
                continue
            events = (lane.stream or stream_of(serving._asking.position, framed=True)) if decode else None
            call = Call(dispatch.pool, send.target.http, request, serving, streams=decode, framed=True, events=events,
                        tag=send.leg)
            call.taken_over(connection, lane.began)
            connection.hand_over(call, lane.stream if decode else None)
            serving._legs.take(Leg(send, call, member, leg))
            if decode:
                call.head = lane.head
                if began:
                    leg.first_at = lane.begun_s
                    if lane.stream is not None:
                        connection.relay(lane.stream, reply.outlet)
                    serving._relaying, call.relay = call, reply.write
        return serving

    def start(self, pair: Pair | None = None, trace: Trace | None = None) -> None:
        """Send to a pair that was picked, or pick one. ``trace``: where spans are made."""
        self._legs.trace = trace
        poison = self._dispatch.poison
        if poison.alert and poison.comes(self):
            self._withheld = [lambda: self._do(self._exchange.start(self._course.began))]
            self._reminder.at(self._exchange.deadline, self._on_time)
            return
        course, limits = self._course, self._dispatch.limits
        if pair is None:
            pair = self._picks.pair(alone=bool(self._request.skips))
        if pair is None:
            self._do(self._exchange.start(course.began))  # it knows why
            return
        sends = [] if self._asking.speaks else course.start(pair, self.record.transfer, limits)
        self._do(sends or self._exchange.started(pair, course.began))

    @property
    def _exchange(self) -> Exchange:
        """What decides. Made when the course is no longer straight, with all that has happened so far."""
        if self._made is None:
            dispatch = self._dispatch
            picks = Apart(self._picks, dispatch.poison, self)
            self._made = self._course.exchange(
                self.record.transfer, picks, dispatch.limits, dispatch.budget, skips=self._request.skips,
                course=self._asking if self._asking.position is not None else None)
        return self._made

    # ---- the client (server.Handler)

    def on_client_gone(self) -> None:
        """Abort both legs."""
        self._gone = True
        self._on(mv.ClientGone())

    def on_pause(self) -> None:
        """Stop reading decode."""
        self._paused = True
        if self._relaying is not None:
            self._relaying.pause()

    def on_resume(self) -> None:
        """Read decode again."""
        self._paused = False
        if self._relaying is not None:
            self._relaying.resume()

    # ---- the engines (upstream.Sink)

    def on_events(self, call: Call, data: bytes) -> None:
        """Part of decode's stream."""
        self._first = data
        self._legs[call.tag].record.first_at = perf_counter()
        follows = self._course.begun(self._loop.time()) if self._made is None and call.tag == DECODE else []
        if follows:
            self._do(follows)
        else:
            self._on(mv.Begun(call.tag))

    def on_comments(self, call: Call, data: bytes) -> None:
        """Decode says that it is at work: its client may hear that, but nothing of an answer has begun."""
        assert call.head is not None
        if self._gone or self._paused:
            return
        if self._reply.started:
            self._reply.write(data)
        else:
            self._reply.begin(call.head.status, call.head.passed_on(), data)

    def on_end(self, call: Call) -> None:
        """Decode's stream is whole."""
        self._shut(call.tag, "2xx")
        if call.rest:
            self._reply.hold(call.rest)
        follows = self._course.ended() if self._made is None else []
        if follows:
            self._do(follows)
        else:
            self._on(mv.Ended(call.tag))

    def on_whole(self, call: Call, body: bytes) -> None:
        """A whole answer of either leg."""
        assert call.head is not None
        status = call.head.status
        aborted = status < 300 and body.find(_ABORTED) >= 0
        leg = self._shut(call.tag, "aborted" if aborted else f"{status // 100}xx")
        if self._made is None and call.tag == PREFILL and status == 200 and not aborted and leg is not None:
            leg.record.first_at = leg.record.ended
            self._course.prefilled(self._loop.time())
            return
        if 400 <= status < 500:
            self._asking.refused()
        if leg is not None:
            leg.record.first_at = leg.record.ended
            if status >= 400 and leg.send.role is Role.PREFILL:
                logger.warning("prefill instance answered %d", status, extra={
                    "transfer": self.record.transfer, "peer": leg.send.target.instance, "detail": _words(body)})
            if status >= 500 or aborted:
                self._broke(leg)
                self._dispatch.doubt(leg.send.target)
            if status >= 400:
                self._legs.farewell(leg)
        if self._withheld is not None and (status >= 400 or aborted):
            self._withheld.append(partial(self._answered, call, body, leg, aborted=aborted))
        else:
            self._answered(call, body, leg, aborted=aborted)

    def _answered(self, call: Call, body: bytes, leg: Leg | None, *, aborted: bool) -> None:
        assert call.head is not None
        status = call.head.status
        self._answer = (call, body)
        self._on(mv.Answered(call.tag, status, aborted))
        self._answer = None
        if self._held is not None and leg is not None and leg.send.role is Role.PREFILL and status < 300 and not aborted:
            self._asking.prefilled(body)
            self._send_held()

    def on_failed(self, call: Call, kind: mv.Kind, reason: Reason) -> None:
        """A leg failed."""
        leg = self._shut(call.tag, kind.value)
        if leg is not None:
            logger.warning("%s leg failed: %s", leg.send.role, reason.full, extra={
                "transfer": self.record.transfer, "peer": leg.send.target.instance, "kind": kind.value,
                "address": call.address})
            if kind is not mv.Kind.LACKING and (kind is not mv.Kind.REFUSED or call.again):
                self._broke(leg)
            if kind is mv.Kind.REFUSED:
                self._dispatch.suspect(leg.send.target, reason.full)
            elif kind is not mv.Kind.LACKING:
                self._dispatch.doubt(leg.send.target)
        self._failed(mv.Failed(call.tag, kind, reason))

    def _failed(self, event: mv.Failed) -> None:
        if self._withheld is None or self._asking.tail() is not None:  # what is missing needs no engine
            self._on(event)
        else:
            self._withheld.append(partial(self._on, event))

    # ---- the router

    def on_lost(self, instance: str, incarnation: str, reason: Reason) -> None:
        """The roster says that this incarnation will never answer."""
        for leg in self._legs.to(instance, incarnation):
            leg.call.cancel()
            self._shut(leg.send.leg, mv.Kind.LOST.value)
            self._broke(leg, lost=True)
            self._failed(mv.Failed(leg.send.leg, mv.Kind.LOST, reason))

    def on_leaving(self, instance: str, incarnation: str, reason: str) -> None:
        """The incarnation ends soon."""
        for leg in self._legs.to(instance, incarnation) if self._withheld is None else ():
            self._on(mv.Leaving(leg.send.leg, reason))

    def sweep(self, now: float, awake: float, stall_s: float) -> None:
        """Called every second: doubt an engine that is silent on an open leg, and mind the deadline.

        ``awake``: when this process last came back from standing still. Nobody was silent before.
        """
        if self._made is not None or now > self._course.began + NO_DEADLINE_S - SOON_S:
            self._reminder.at(self._exchange.deadline, self._on_time)
        for leg in self._legs:
            bound = min(stall_s, STREAM_STALL_S) if leg.call is self._relaying else stall_s
            if now - max(leg.call.last_at, awake) > bound and not self._paused:
                self._dispatch.doubt(leg.send.target)

    def abort(self, reason: str) -> None:
        """The router stops before this request could end: cut it off."""
        self._on(mv.Stop(reason))

    # ---- requests that end engines (poison.Suspect)

    @property
    def alone(self) -> bool:
        """Whether it goes without prefill."""
        return bool(self._request.skips)

    def request_hash(self) -> RequestHash:
        """Made when it is needed."""
        if self._hash is None:
            self._hash = hash_of(self._request.api, self._request.fields)
        return self._hash

    def instances(self) -> Iterable[InstanceName]:
        """Those on which it has a leg open."""
        return [leg.send.target.instance for leg in self._legs]

    def go_on(self) -> None:
        """It was held: what happened meanwhile happens now."""
        withheld, self._withheld = self._withheld or [], None
        for act in withheld:
            act()

    def condemn(self, fault: Fault) -> None:
        """End with this answer."""
        self._withheld = None
        self._on(mv.Condemned(fault))

    def _broke(self, leg: Leg, *, lost: bool = False) -> None:
        if self._dispatch.poison.broke(self, leg.send.target, lost=lost) and self._withheld is None:
            self._withheld = []

    # ---- instructions

    def _on(self, event: mv.Event) -> None:
        self._do(self._exchange.handle(event, self._loop.time()))

    def _do(self, instructions: list[mv.Instruction]) -> None:
        try:
            self._carry_out(instructions)
        except Exception:
            logger.exception("a request failed inside the router", extra={"transfer": self.record.transfer})
            self.give_up()

    def give_up(self) -> None:
        """End the request in whatever state: a bug costs one request, and leaves neither it hanging nor its legs open."""
        for leg in self._legs:
            self._shut(leg.send.leg, "cancelled")
            leg.call.cancel()
        self._reminder.cancel()
        fault = Fault(500, "the router failed; its log says why", kind="internal_error", code="internal")
        if not self._gone and not self._reply.done:
            self._refused(fault)
        if self in self._dispatch.servings:
            self._closed("failed", fault.message)

    def _carry_out(self, instructions: list[mv.Instruction]) -> None:
        for instruction in instructions:
            _DO[type(instruction)](self, instruction)
        if self._made is not None:
            self._reminder.at(self._made.deadline, self._on_time)

    def _refuse(self, instruction: mv.Refuse) -> None:
        if not self._gone:
            self._refused(instruction.fault)

    def _refused(self, fault: Fault) -> None:
        # A client that has heard comments has a head as well: it gets the error as engines tell one in a stream.
        if self._reply.started:
            self._reply.fail(fault.event())
        else:
            self._reply.fault(fault)

    def _break(self, instruction: mv.Break) -> None:
        if not self._gone:
            self._reply.fail(instruction.fault.event())

    def _complete(self, instruction: mv.Complete) -> None:
        if not self._gone:
            if instruction.tail:
                self._reply.write(chunk_of(instruction.tail) if self._reply.framed else instruction.tail)
            self._reply.end()

    def _take_back(self, instruction: mv.Cancel) -> None:
        leg = self._shut(instruction.leg, "cancelled")
        if leg is not None:
            self._legs.cancel(leg)

    def _send(self, send: mv.Send) -> None:
        target, decode = send.target, send.role is Role.DECODE
        asking, framed = self._asking, self._reply.framed
        speaks = asking.speaks and not decode and not target.p2p and not self._reply.started
        events: EventStream | None = FirstToken(framed=framed) if speaks else None
        if decode and self._request.stream:
            events = asking.stream(framed=framed)
        leg = self._legs.hold(send, self, framed=framed, events=events)
        leg.call.patient = self._reply.started
        asked = asking.leg(send, self._reply.request_id.encode(), speaks=speaks)
        if asked is None:
            self._held = leg
        else:
            self._legs.ask(leg, *asked)

    def _send_held(self) -> None:
        leg, self._held = self._held, None
        if leg is not None and leg.send.leg in self._legs:  # not cancelled meanwhile
            self._legs.ask(leg, *self._asking.held(leg.send.target))

    def _resume(self, _: mv.Resume) -> None:
        way, tokens = self._asking.resume()
        logger.info("a stream goes on elsewhere", extra={"transfer": self.record.transfer, "way": way, "tokens": tokens})

    def _relay(self, instruction: mv.Relay) -> None:
        call = self._legs[instruction.leg].call
        assert call.head is not None
        if isinstance(call.events, FirstToken):
            self._asking.spoken(call.events, (leg.call.events for leg in self._legs))
        else:
            self._relaying = call
            call.relay_to(self._reply.write, self._reply.outlet)
        if math.isnan(self.record.first_at):
            self.record.first_at = perf_counter()
        if self._reply.started:
            first, self._first = self._first, b""
            self._reply.write(first)
            if self._paused:
                call.pause()
            return
        first, self._first = self._first, b""
        self._reply.begin(call.head.status, call.head.passed_on(), first, ends=call.ends and call is self._relaying)
        if self._paused and call is self._relaying:
            call.pause()

    def _pass(self, _: mv.Pass) -> None:
        assert self._answer is not None
        call, body = self._answer
        assert call.head is not None
        if math.isnan(self.record.first_at):
            self.record.first_at = perf_counter()
        if call.head.status < 300:
            self.record.prompt_tokens, self.record.tokens = answers.lengths(body)
        if self._gone:
            return
        if self._reply.started:
            self._reply.fail(b"".join([b"data: %b\n" % line for line in body.splitlines()]) + b"\n")
        else:
            self._reply.whole(call.head.status, call.head.end_to_end(), body)

    def _shut(self, number: int, result: str) -> Leg | None:
        leg = self._legs.shut(number, result)
        if leg is not None and leg.call is self._relaying:
            self._relaying = None
        return leg

    def _on_time(self) -> None:
        # While it is held no engine may be asked, so of its deadlines the request's own is the only one.
        if self._withheld is None or self._loop.time() >= self._course.began + self._dispatch.limits.request_s:
            self._on(mv.Tick())

    def _end(self, instruction: mv.Over) -> None:
        self._closed(instruction.outcome, instruction.detail)

    def _closed(self, outcome: str, detail: str) -> None:
        assert not self._legs, "an exchange is over with legs open"
        record = self.record
        record.outcome, record.detail, record.status = outcome, detail, self._reply.status
        if self._made is None:
            record.attempt = 1
        else:
            record.attempt, record.retries, record.continued = self._made.attempt, self._made.retries, self._made.continued
            record.skips = record.skips or (REFUSED if self._made.refused else "")
        if (position := self._asking.position) is not None:
            record.tokens, record.prompt_tokens = position.tokens, position.prompt_tokens
        record.last_at, record.bytes = perf_counter(), self._reply.sent
        self._withheld = None
        if self._dispatch.poison.watching:
            ends = [leg.result for leg in record.legs if leg.role is Role.DECODE or outcome == "client_error"]
            whole = outcome in {"ok", "client_error"} and bool(ends) and ends[-1] in {"2xx", "4xx"}
            self._dispatch.poison.closed(self, whole=whole)
        self._dispatch.closed(self, record)
        if self._legs.trace is not None:
            self._legs.trace.end()
        if self._dispatch.access_log:
            logs.tell(access, outcome, partial(line_of, record))


def _words(body: bytes) -> str:
    """What an engine's refusal says, for the log."""
    return body[:_SHOWN].decode("utf-8", "replace")


_DO: dict[type[mv.Instruction], Callable[[Serving, Any], None]] = {
    mv.Send: Serving._send, mv.Cancel: Serving._take_back, mv.Resume: Serving._resume, mv.Relay: Serving._relay,
    mv.Pass: Serving._pass, mv.Refuse: Serving._refuse, mv.Break: Serving._break, mv.Complete: Serving._complete,
    mv.Over: Serving._end}
"""How each instruction is carried out."""
