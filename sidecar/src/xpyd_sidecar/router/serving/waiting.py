"""Requests of one process: those that are served, and those that wait for that in the queue until there is room."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from xpyd_sidecar.process.patience import Alarm
from xpyd_sidecar.router.api.bodies import GenerationRequest
from xpyd_sidecar.router.api.faults import FailureReason, HttpFault, too_many, unavailable
from xpyd_sidecar.router.balance.queue import FairQueue
from xpyd_sidecar.router.balance.tickets import Ticket
from xpyd_sidecar.router.fleet.member import InstanceLeaves, InstanceLost, Pair
from xpyd_sidecar.router.http.reply import Reply, RequestHandler

logger = logging.getLogger(__name__)
STALL_S = 10.0
"""Silence on an open leg after which its engine is probed."""
AT_ONCE = 32
"""So many that waited begin in one turn of the loop."""


class InFlightRequest(Protocol):
    """A request that is being served (``request.Serving``)."""

    generating: bool
    """A model writes its answer: while there are such, instances are not idle."""

    def handed_over(self) -> tuple[GenerationRequest, Pair] | None:
        """Once it has ended well: what was asked, and of which pair. None: not with KV from prefill, or with trouble."""

    def on_lost(self, instance: str, incarnation: str, reason: FailureReason) -> None:
        """The roster says that this incarnation will never answer."""

    def on_leaving(self, instance: str, incarnation: str) -> None:
        """The incarnation ends soon."""

    def on_stalled(self, instance: str, incarnation: str) -> None:
        """The core of this incarnation stands still."""

    def sweep(self, now: float, awake: float) -> None:
        """Called every second. ``awake``: when this process last came back from standing still."""

    def abort(self, reason: str) -> None:
        """The router stops before this request could end."""

    def give_up(self) -> None:
        """End in whatever state it is: the router failed."""


class InFlight(set[InFlightRequest]):
    """All requests that one process serves. What one of them hears may end others; none keeps a word from others."""

    def on_lost(self, gone: InstanceLost) -> None:
        """The roster says that this incarnation will never answer."""
        self._each(lambda one: one.on_lost(gone.instance, gone.incarnation, gone.reason))

    def on_leaving(self, soon: InstanceLeaves) -> None:
        """The time of its drain is nearly over: what can go on elsewhere does, while nothing is lost yet."""
        self._each(lambda one: one.on_leaving(soon.instance, soon.incarnation))

    def on_stalled(self, instance: str, incarnation: str) -> None:
        """The core of this incarnation stands still: what ran there may be the reason."""
        self._each(lambda one: one.on_stalled(instance, incarnation))

    def sweep(self, now: float, awake: float) -> None:
        """Called every second."""
        self._each(lambda one: one.sweep(now, awake))

    def abort(self, reason: str) -> None:
        """Cut off all of them."""
        self._each(lambda one: one.abort(reason))

    def _each(self, tell: Callable[[InFlightRequest], None]) -> None:
        for one in list(self):
            try:
                tell(one)
            except Exception:
                logger.exception("a request failed inside the router")
                one.give_up()


class QueuedRequest(RequestHandler):
    """A request that waits: it answers to its client, and hands that on to who serves it."""

    ticket: Ticket | None = None

    def __init__(self, line: AdmissionQueue, reply: Reply, key: str, priority: int, cost: int, *, alone: bool,
                 room: Callable[[], bool], serve: Callable[[float], RequestHandler],
                 on_unserved: Callable[[HttpFault | None], None]) -> None:
        """``key``: whose share of the queue it takes, and ``cost`` how many tokens of it. ``alone``: it needs no prefill.
        ``room``: whether it could be served. ``serve``: begin to, after so many seconds. ``on_unserved``: it was not, and
        gets this answer; None: its client has gone.
        """
        self._line = line
        self._reply = reply
        self.key, self.priority, self.cost, self.alone = key, priority, cost, alone
        self.room, self.serve, self.on_unserved = room, serve, on_unserved

    @property
    def heard(self) -> bool:
        """Whether its client has heard a byte of its answer."""
        return self._reply.started

    def begin(self, queued_s: float) -> None:
        """It waited, and it is its turn."""
        self.ticket = None
        self._reply.connection.hand_over(self, self.serve(queued_s))

    def on_client_gone(self) -> None:
        """Leave at once."""
        if self.ticket is not None:
            self._line.leave(self)
            self.on_unserved(None)


class AdmissionQueue:
    """All that wait in one router."""

    def __init__(self, loop: asyncio.AbstractEventLoop, size: int, timeout_s: float,
                 queue: FairQueue | None = None) -> None:
        """``queue``: who orders them; None: a fair queue."""
        self._loop = loop
        self._timeout_s = timeout_s
        self._queue = FairQueue(size, timeout_s) if queue is None else queue
        self.waits: dict[int, QueuedRequest] = {}
        """Those that wait, by their tickets."""
        self._timer: Alarm | None = None
        self._due = False

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def passes(self, key: str, *, alone: bool, blocked: Callable[[], bool]) -> bool:
        """Whether a request of this key goes before nobody: nobody waits; or it needs no prefill (``alone``), as nobody who
        waits, and these cannot be served (``blocked``).
        """
        self._queue.note(key)
        return not self.waits or (alone and not self._queue.alone and blocked())

    def enter(self, request: QueuedRequest) -> RequestHandler:
        """Let a request wait; in a full queue somebody may have to give way. Raises HttpFault: 429, its key has its share;
        503, the queue is full.
        """
        now = self._loop.time()
        late = self._queue.make_room(request.key)
        ticket = request.ticket = self._queue.put(now, request.key, request.priority, request.cost, alone=request.alone)
        self.waits[ticket.number] = request
        if request.heard:
            self._queue.keep(ticket)
        if late is not None:
            self._give_way(late, now)
        if self._timer is None:
            self._timer = Alarm(self._loop, self._queue.deadline, self._on_timer)
        return request

    def keep(self, request: QueuedRequest) -> None:
        """Its client hears of it from now on: it does not give way."""
        if request.ticket is not None:
            self._queue.keep(request.ticket)

    def leave(self, request: QueuedRequest) -> None:
        """It waits no longer."""
        if request.ticket is not None:
            self._queue.remove(request.ticket)
            self._out(request.ticket.number)
            request.ticket = None

    def on_begun(self, key: str, tokens: int, *, waited: bool) -> None:
        """A request of this key is served from now on; ``waited``: it was its turn here."""
        self._queue.on_begun(key, tokens, waited=waited)

    def on_over(self, key: str, tokens: int, used: int) -> None:
        """A request of this key has ended: it counted for ``tokens``, and took ``used``."""
        self._queue.on_ended(key, tokens, used)

    def schedule(self) -> None:
        """There may be room now: those who are next begin, as soon as the event in hand is dealt with."""
        if self.waits and not self._due:
            self._due = True
            self._loop.call_soon(self._move)

    def end(self, reason: str) -> None:
        """Refuse all that wait: the router stops."""
        for request in list(self.waits.values()):
            self.leave(request)
            request.on_unserved(unavailable(reason))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _move(self) -> None:
        self._due = False
        now = self._loop.time()
        for _ in range(AT_ONCE):
            ticket = self._following()
            if ticket is None:
                return
            self._queue.take(now, ticket)
            request = self._out(ticket.number)
            try:
                request.begin(now - ticket.arrived)
            except HttpFault as fault:  # it would have to wait elsewhere, and cannot
                request.on_unserved(fault)
            except Exception:
                # The others must not wait for ever because one could not begin.
                logger.exception("a request that waited could not begin")
                request.on_unserved(unavailable("the router failed to begin this request"))
        self.schedule()

    def _following(self) -> Ticket | None:
        """Who can be served next: where the next one waits for prefill, whoever needs none."""
        ticket = self._queue.peek()
        if ticket is not None and not ticket.alone and not self.waits[ticket.number].room():
            ticket = self._queue.peek(alone=True)
        return ticket if ticket is not None and self.waits[ticket.number].room() else None

    def _give_way(self, ticket: Ticket, now: float) -> None:
        request = self._out(ticket.number)
        request.ticket = None
        words = "this key has more requests that wait than any other, and one of another key took this one's place"
        request.on_unserved(too_many(words, self._queue.retry_after(now, len(self._queue))))

    def _out(self, number: int) -> QueuedRequest:
        """It waits no longer."""
        return self.waits.pop(number)

    def _late(self) -> str:
        """What is said to who waited for too long."""
        return f"no instance had room within {self._timeout_s:g} s"

    def _on_timer(self) -> None:
        self._timer = None
        now = self._loop.time()
        for ticket in self._queue.take_expired(now):
            request = self._out(ticket.number)
            request.ticket = None
            again = self._queue.retry_after(now, len(self._queue) + 1)
            request.on_unserved(unavailable(self._late(), again))
        if self.waits:
            self._timer = Alarm(self._loop, self._queue.deadline, self._on_timer)
