"""Carries out one exchange: its instructions become calls and replies, what comes back becomes events.

What follows from an event is decided by ``serving.exchange``. The hot path of a stream is ``UpstreamCall.relay`` →
``Reply.write``; the exchange hears of its first event and of its end.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from time import perf_counter, time
from typing import TYPE_CHECKING, Any

import msgspec

from xpyd_sidecar.contract.ids import Role, TransferId
from xpyd_sidecar.process.patience import Reminder
from xpyd_sidecar.router.api.faults import FailureKind, FailureReason, HttpFault, unavailable
from xpyd_sidecar.router.balance.picker import Selection
from xpyd_sidecar.router.http.reply import Reply
from xpyd_sidecar.router.http.wire import chunk_of
from xpyd_sidecar.router.observing.record import Record
from xpyd_sidecar.router.serving import endings
from xpyd_sidecar.router.serving import instructions as mv
from xpyd_sidecar.router.serving.attempts import Asks, Headers, OpenAttempt, OpenAttempts
from xpyd_sidecar.router.serving.context import RequestContext
from xpyd_sidecar.router.serving.exchange import Exchange
from xpyd_sidecar.router.stream import answers
from xpyd_sidecar.router.stream.events import ABORT
from xpyd_sidecar.router.stream.replay_recorder import FirstToken
from xpyd_sidecar.router.upstream.call import Sink, UpstreamCall

if TYPE_CHECKING:
    from xpyd_sidecar.router.observing.spans import Trace

logger = logging.getLogger(__name__)

_NO_FAULT = frozenset({FailureKind.LACKING, FailureKind.REFUSED, FailureKind.DIFFERS})
"""Ways of a leg to fail that say nothing of how its instance serves, or that it is not there."""


class Serving(Sink):
    """One request, from what is asked to its last byte."""

    __slots__ = ("_again", "_answer", "_asks", "_began", "_context", "_first", "_gone", "_paused", "_reminder",
                 "_reply", "_withheld", "exchange", "generating", "handed_over", "instances", "labels", "legs", "record",
                 "request_hash")

    def __init__(self, context: RequestContext, reply: Reply, asks: Asks, transfer: TransferId, passed: Headers, *,
                 picks: Selection, began: float, key: str = "", again: Callable[[Serving, HttpFault], bool]) -> None:
        """``passed``: headers of the client that engines read. ``picks``: who may serve it. ``began``: the loop's time.
        ``key``: whose it is. ``again``: whether somebody else goes on with it, in place of the answer that it would get.
        """
        self._context = context
        self._reply = reply
        self._asks = asks
        self._began = began
        self.record = Record(reply.request_id, transfer, asks.api, asks.stream, path=asks.path, skips=asks.skips,
                             arrived=perf_counter(), arrived_unix=time())
        self.legs = OpenAttempts(context, self.record, asks, passed, key)
        limits = msgspec.structs.replace(context.limits, decode_legs=1) if asks.once else context.limits
        self.exchange = Exchange(transfer, picks, limits, alone=asks.decode_only, now=began, stream=asks.resumable_stream,
                                 budget=context.budget, avoid=partial(context.poison.avoid, self))
        self._first = b""
        self._answer: tuple[UpstreamCall, bytes] | None = None
        self._reminder = Reminder(context.loop)
        self._paused = self._gone = False
        self._again = again
        self.request_hash, self.instances, self.handed_over = asks.request_hash, self.legs.instances, self.legs.handed_over
        self.labels, self.generating = asks.labels, asks.generating
        self._withheld: list[Callable[[], None]] | None = None
        """Not None: it is held, because it may be what ends engines. These would ask another one: they are done when it
        goes on."""

    def start(self, trace: Trace | None = None) -> None:
        """Pick a pair and send to it. ``trace``: where spans are made."""
        self.legs.trace = trace
        poison = self._context.poison
        if poison.alert and poison.comes(self):
            self._withheld = [lambda: self._on(None)]
            self._reminder.schedule(self.exchange.deadline, self._began, self._on_time)
        else:
            self._on(None)

    # ---- the client (reply.RequestHandler)

    def on_client_gone(self) -> None:
        """Abort both legs."""
        self._gone = True
        self._on(mv.GivenUp("client_gone"))

    def on_pause(self) -> None:
        """Stop reading decode."""
        self._paused = True
        if self.legs.relaying is not None:
            self.legs.relaying.read(False)

    def on_resume(self) -> None:
        """Read decode again."""
        self._paused = False
        if self.legs.relaying is not None:
            self.legs.relaying.read(True)

    # ---- the engines (call.Sink)

    def on_events(self, call: UpstreamCall, data: bytes) -> None:
        """The first part of an answer."""
        self._first = data
        leg = self.legs[call.tag]
        leg.record.first_at = perf_counter()
        self.legs.on_answer(leg)
        self._on(mv.AttemptBegun(call.tag))

    def on_comments(self, call: UpstreamCall, data: bytes) -> None:
        """Decode says that it is at work: its client may hear that, but nothing of an answer has begun."""
        assert call.head is not None
        if self._reply.started and not self._gone and not self._paused:
            self._reply.write(data)
        elif not self._gone and not self._paused:
            self._reply.begin(call.head.status, call.head.passed_on(), data)

    def on_end(self, call: UpstreamCall) -> None:
        """Decode's answer, which was relayed, is whole."""
        assert call.head is not None
        failure = self._asks.failure()
        self._shut_answered(call, call.head.status, failed=bool(failure))
        if call.rest:
            self._reply.hold(call.rest)
        self._on(mv.AttemptEnded(call.tag, failure, call.events is not None and call.events.client_fault))

    def on_whole(self, call: UpstreamCall, body: bytes) -> None:
        """A whole answer of either leg."""
        assert call.head is not None
        status = call.head.status
        aborted = status < 300 and body.find(ABORT) >= 0
        leg = self._shut_answered(call, status, failed=aborted)
        if 400 <= status < 500 and self._asks.resumable_stream is not None:
            self._asks.resumable_stream.on_refused()
        if leg is not None:
            leg.record.first_at = leg.record.ended
            if status < 500 and not aborted:
                self.legs.on_answer(leg, body)
            if status >= 400 and leg.send.role is Role.PREFILL:
                endings.warn_refused(self.record, leg, status, body)
            if status >= 400:
                self.legs.send_cancel_notice(leg, self.exchange.attempt)
        if self._withheld is not None and (status >= 400 or aborted):
            self._withheld.append(partial(self._answered, call, body, aborted=aborted))
        else:
            self._answered(call, body, aborted=aborted)

    def _shut_answered(self, call: UpstreamCall, status: int, *, failed: bool) -> OpenAttempt | None:
        answered = "2xx" if status < 300 else f"{status // 100}xx"
        leg = self.legs.shut(call.tag, FailureKind.ABORTED.value if failed else answered)
        if leg is not None and (failed or status >= 500):
            self.legs.blame(leg, "an answer was aborted" if failed else f"it answered {status}")
            self._broke(leg)
            self._context.watch.request_probe(leg.send.target)
        return leg

    def _answered(self, call: UpstreamCall, body: bytes, *, aborted: bool) -> None:
        assert call.head is not None
        self._answer = (call, body)
        self._on(mv.AttemptAnswered(call.tag, call.head.status, aborted))
        self._answer = None

    def on_failed(self, call: UpstreamCall, kind: FailureKind, reason: FailureReason) -> None:
        """A leg failed."""
        leg = self.legs.shut(call.tag, kind.value)
        if leg is not None:
            endings.warn_failed(self.record, leg, kind, reason)
            if kind not in _NO_FAULT:
                self.legs.blame(leg, reason.said)
            if kind is not FailureKind.LACKING and (kind is not FailureKind.REFUSED or call.again):
                self._broke(leg)
            if kind is FailureKind.REFUSED:
                self._context.watch.suspect(leg.send.target, reason.full)
            elif kind is not FailureKind.LACKING:
                self._context.watch.request_probe(leg.send.target)
        self._failed(call.tag, kind, reason)

    def _failed(self, leg: int, kind: FailureKind, reason: FailureReason) -> None:
        stream = self._asks.resumable_stream
        event = mv.AttemptFailed(leg, kind, reason)
        # What is missing of a stream may need no engine.
        if self._withheld is not None and (stream is None or stream.tail() is None):
            self._withheld.append(partial(self._on, event))
        else:
            self._on(event)

    # ---- the router

    def on_lost(self, instance: str, incarnation: str, reason: FailureReason) -> None:
        """The roster says that this incarnation will never answer."""
        for leg in self.legs.attempts_on(instance, incarnation):
            leg.call.cancel()
            self.legs.shut(leg.send.leg, FailureKind.LOST.value)
            self._broke(leg, lost=True)
            self._failed(leg.send.leg, FailureKind.LOST, reason)

    def on_leaving(self, instance: str, incarnation: str) -> None:
        """The incarnation ends soon. A body that was sent once cannot be sent elsewhere."""
        if self._withheld is None and not self._asks.once:
            for leg in self.legs.attempts_on(instance, incarnation):
                self._on(mv.AttemptLeaves(leg.send.leg))

    def on_stalled(self, instance: str, incarnation: str) -> None:
        """The core of this incarnation stands still, perhaps because of what this request asks."""
        for leg in self.legs.attempts_on(instance, incarnation):
            target = leg.send.target
            self._context.poison.note_break(target.instance, target.incarnation, self.request_hash(), self.labels())

    def sweep(self, now: float, awake: float) -> None:
        """Called every second: doubt an engine that is silent on an open leg, leave it, and mind the deadline.

        ``awake``: when this process last came back from standing still. Nobody was silent before.
        """
        self._reminder.schedule(self.exchange.deadline, now, self._on_time)
        begun = not math.isnan(self.record.first_at)
        if begun and not self._reply.done and not self._gone:  # once it is done, the connection is another's
            self._reply.connection.holding.settle(self._asks.keeps)
        if self._paused or self._asks.still_comes:
            return
        self.legs.probe_silent(now, awake)
        for leg in self.legs.silent(now, awake):
            if self._withheld is not None or self._asks.once or leg.send.leg not in self.legs:
                continue
            if leg.send.target.member.hung and self._context.poison.alert and self._context.poison.comes(self):
                self._withheld = [partial(self._leave, leg, leg.begun)]
            else:
                self._leave(leg, leg.begun)

    def _leave(self, leg: OpenAttempt, begun: bool) -> None:
        # Unless it has ended, or begun, while it was held.
        if leg.send.leg in self.legs and leg.begun == begun:
            self._on(mv.AttemptStalls(leg.send.leg, free=bool(leg.send.target.member.ejected)))
            self.legs.on_left(leg)

    def abort(self, reason: str) -> None:
        """The router stops before this request could end: cut it off."""
        self._on(mv.GivenUp("stopped", unavailable(reason)))

    # ---- requests that end engines (quarantine.Suspect)

    @property
    def decode_only(self) -> bool:
        """Whether it goes without prefill."""
        return self._asks.decode_only

    def go_on(self) -> None:
        """It was held: what happened meanwhile happens now."""
        withheld, self._withheld = self._withheld or [], None
        for act in withheld:
            act()

    def end_with(self, fault: HttpFault) -> None:
        """End with this answer: no engine is asked any more."""
        self._withheld = None
        self._on(mv.GivenUp(fault.outcome, fault))

    def _broke(self, leg: OpenAttempt, *, lost: bool = False) -> None:
        if self._context.poison.on_broken_leg(self, leg.send.target, lost=lost) and self._withheld is None:
            self._withheld = []
            for other in list(self.legs.values()) if leg.send.role is Role.DECODE else ():  # they may die of it, for no use
                self._take_back(mv.CancelAttempt(other.send.leg, self.exchange.attempt))

    # ---- instructions

    def _on(self, event: mv.Event | None) -> None:
        """Carry out what the exchange says to an event; None: to the beginning."""
        try:
            now, exchange = self._context.loop.time(), self.exchange
            for instruction in exchange.start(now) if event is None else exchange.handle(event, now):
                _DO[type(instruction)](self, instruction)
            self._reminder.schedule(exchange.deadline, now, self._on_time)
        except Exception:
            logger.exception("a request failed inside the router", extra={"transfer": self.record.transfer})
            self.give_up()

    def give_up(self) -> None:
        """End the request in whatever state: a bug costs one request, and leaves neither it hanging nor its legs open."""
        for leg in list(self.legs.values()):
            self.legs.shut(leg.send.leg, "cancelled")
            leg.call.cancel()
        fault = HttpFault(500, "the router failed; its log says why", kind="internal_error", code="internal")
        if not self._reply.done:
            self._fail(mv.Fail(fault))
        if self in self._context.servings:
            self._closed(mv.RequestOver("failed", fault.message))

    def _send(self, send: mv.SendAttempt) -> None:
        asks, reply, role, target = self._asks, self._reply, send.role, send.target
        started = reply.started
        speaks = asks.speaks and role is Role.PREFILL and not started
        reader = asks.reader(role, framed=not reply.old, speaks=speaks)
        call = UpstreamCall(self._context.pool, target.http, self, reader, send.leg, patient=started)
        if asks.once:
            call.body = asks.body(self.end_with)
        self.legs.ask(send, call, speaks=speaks)

    def _take_back(self, instruction: mv.CancelAttempt) -> None:
        leg = self.legs.shut(instruction.leg, "cancelled")
        if leg is not None:
            self.legs.cancel(leg, instruction.attempt)

    def _resume(self, _: mv.Resume) -> None:
        stream = self._asks.resumable_stream
        assert stream is not None, "an answer goes on that cannot"
        way, tokens = stream.resume()
        logger.info("a stream goes on elsewhere", extra={"transfer": self.record.transfer, "way": way, "tokens": tokens})

    def _relay(self, instruction: mv.Relay) -> None:
        call, reply = self.legs[instruction.leg].call, self._reply
        head, relays = call.head, not isinstance(call.events, FirstToken)
        assert head is not None
        if isinstance(call.events, FirstToken):
            assert self._asks.resumable_stream is not None
            self._asks.resumable_stream.on_first_token(call.events, (leg.call.events for leg in self.legs.values()))
        else:
            self.legs.relaying = call
            call.relay_to(reply.write, reply.connection.outlet)
        self._shown_first()
        first, self._first = self._first, b""
        if reply.started:
            reply.write(first)
        else:
            if self._asks.once:
                self._last_if_unread()
            reply.begin(head.status, head.passed_on(), first, length=head.length, ends=call.ends and relays)
        if self._paused and relays:
            call.read(False)

    def _pass(self, _: mv.Pass) -> None:
        assert self._answer is not None
        call, body = self._answer
        assert call.head is not None
        self._shown_first()
        if call.head.status < 300:
            self.record.prompt_tokens, self.record.tokens = answers.lengths(body)
        if not self._gone and self._reply.started:
            self._reply.fail(b"".join([b"data: %b\n" % line for line in body.splitlines()]) + b"\n")
        elif not self._gone:
            self._last_if_unread()
            self._reply.send_whole(call.head.status, call.head.end_to_end(), body)

    def _shown_first(self) -> None:
        if math.isnan(self.record.first_at):
            self.record.first_at = perf_counter()

    def _fail(self, instruction: mv.Fail) -> None:
        fault = instruction.fault
        if self._gone or self._again(self, fault):
            return
        if not self._reply.started:
            self._last_if_unread()
            self._reply.fault(fault)
        elif self._asks.opaque:
            self._reply.cut()
        else:  # it may be that it has comments alone; it gets the error as engines tell one in a stream
            self._reply.fail(fault.event())

    def _last_if_unread(self) -> None:
        # Where the next request would begin is not known while part of this one's body has not come.
        if self._asks.unread:
            self._reply.close = True

    def _complete(self, instruction: mv.Complete) -> None:
        if not self._gone:
            if instruction.tail:
                self._reply.write(chunk_of(instruction.tail) if self._reply.framed else instruction.tail)
            self._reply.end()

    def _on_time(self) -> None:
        # While it is held no engine may be asked, so of its deadlines the request's own is the only one.
        if self._withheld is None or self._context.loop.time() >= self._began + self._context.limits.request_s:
            self._on(mv.DeadlinePassed())

    def _closed(self, over: mv.RequestOver) -> None:
        assert not self.legs, "an exchange is over with legs open"
        record, exchange, context = self.record, self.exchange, self._context
        endings.finish(record, exchange, over, self._asks.lengths(), self._reply)
        self._withheld = None
        self._reminder.cancel()
        if context.poison.watching or context.poison.samples:
            context.poison.on_closed(self, whole=record.is_complete)
        self.legs.on_over(self._reply.connection)
        context.on_closed(self)
        context.observer.on_over(record)
        if self.legs.trace is not None:
            self.legs.trace.end()


_DO: dict[type[mv.Instruction], Callable[[Serving, Any], None]] = {
    mv.SendAttempt: Serving._send, mv.CancelAttempt: Serving._take_back, mv.Resume: Serving._resume,
    mv.Relay: Serving._relay, mv.Pass: Serving._pass, mv.Fail: Serving._fail, mv.Complete: Serving._complete,
    mv.RequestOver: Serving._closed}
