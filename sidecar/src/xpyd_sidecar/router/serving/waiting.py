"""Requests before they are served: at once where there is room, else in the queue until there is.

Belongs here: the I/O around ``balance.queue``: timers, clients that go away, answers to those that get no place. Does not
belong here: who is next (``queue``), whether there is room (``context``, ``balance.concurrency``).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from xpyd_sidecar.router.api.faults import Fault, too_many, unavailable
from xpyd_sidecar.router.balance.queue import Full, Queue, Ticket
from xpyd_sidecar.router.http.patience import Alarm
from xpyd_sidecar.router.http.reply import Handler

logger = logging.getLogger(__name__)


class Request(Protocol):
    """What the line needs of a request."""

    key: str
    priority: int
    cost: float

    def room(self) -> bool:
        """Whether it could be served now."""

    def begin(self, queued_s: float) -> Handler:
        """Serve it."""

    def refuse(self, fault: Fault) -> None:
        """It was not served: answer it."""

    def left(self) -> None:
        """Its client has gone."""


class Waiting:
    """A request in the line, and later whoever serves it."""

    def __init__(self, line: Line, request: Request) -> None:
        self._line = line
        self._handler: Handler | None = None
        self._paused = False
        self.request = request
        self.ticket: Ticket | None = None

    def begin(self, queued_s: float) -> None:
        """It is its turn."""
        self.ticket = None
        self._handler = self.request.begin(queued_s)
        if self._paused:
            self._handler.on_pause()

    # ---- the client (reply.Handler)

    def on_client_gone(self) -> None:
        """Leave at once."""
        if self._handler is not None:
            self._handler.on_client_gone()
        elif self.ticket is not None:
            self._line.leave(self)
            self.request.left()

    def on_pause(self) -> None:
        """Its answer is to wait."""
        self._paused = True
        if self._handler is not None:
            self._handler.on_pause()

    def on_resume(self) -> None:
        """Not any more."""
        self._paused = False
        if self._handler is not None:
            self._handler.on_resume()


class Line:
    """All that wait in one router."""

    def __init__(self, loop: asyncio.AbstractEventLoop, size: int, timeout_s: float) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._queue = Queue(size, timeout_s)
        self.waits: dict[int, Waiting] = {}
        """Those that wait, by their tickets."""
        self._timer: Alarm | None = None
        self._due = False

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def passes(self, key: str) -> bool:
        """Whether nobody waits, so that a request of this key goes before nobody."""
        self._queue.note(key)
        return not self.waits

    def enter(self, request: Request) -> Handler:
        """Serve a request at once, or let it wait.

        Raises:
            Fault: 429, its key has its share of the queue; 503, the queue is full.
        """
        if self.passes(request.key) and request.room():
            return request.begin(0.0)
        now = self._loop.time()
        try:
            ticket = self._queue.put(now, request.key, request.priority, request.cost)
        except Full as full:
            made = too_many if full.own else unavailable
            raise made(full.reason, full.retry_after_s) from None
        waiting = Waiting(self, request)
        waiting.ticket = ticket
        self.waits[ticket.number] = waiting
        if self._timer is None:
            self._timer = Alarm(self._loop, self._queue.deadline, self._on_timer)
        return waiting

    def leave(self, waiting: Waiting) -> None:
        """It waits no longer."""
        if waiting.ticket is not None:
            self._queue.remove(waiting.ticket)
            self.waits.pop(waiting.ticket.number, None)
            waiting.ticket = None

    def moved(self) -> None:
        """There may be room now: those who are next begin, as soon as the event in hand is dealt with."""
        if self.waits and not self._due:
            self._due = True
            self._loop.call_soon(self._move)

    def end(self, reason: str) -> None:
        """Refuse all that wait: the router stops."""
        for waiting in list(self.waits.values()):
            self.leave(waiting)
            waiting.request.refuse(unavailable(reason))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _move(self) -> None:
        self._due = False
        now = self._loop.time()
        while (ticket := self._queue.peek()) is not None and self.waits[ticket.number].request.room():
            self._queue.take(now)
            waiting = self.waits.pop(ticket.number)
            try:
                waiting.begin(now - ticket.arrived)
            except Exception:
                # The others must not wait for ever because one could not begin.
                logger.exception("a request that waited could not begin")
                waiting.request.refuse(unavailable("the router failed to begin this request"))

    def _on_timer(self) -> None:
        self._timer = None
        now = self._loop.time()
        for ticket in self._queue.expired(now):
            waiting = self.waits.pop(ticket.number)
            waiting.ticket = None
            again = self._queue.retry_after(now, len(self._queue) + 1)
            words = f"no instance had room within {self._timeout_s:g} s"
            waiting.request.refuse(unavailable(words, again))
        if self.waits:
            self._timer = Alarm(self._loop, self._queue.deadline, self._on_timer)
