"""Requests that are held: nobody can be picked for them, and somebody is expected.

    nobody can be picked ──nobody is expected──▶ 503 at once
            │
            └─ somebody is expected (``fleet.expected``) ─▶ held ──somebody is there──▶ admission, as if it came now
                                                             ├─ client gone: its place is free at once
                                                             ├─ nobody is expected any more: 503, and why
                                                             ├─ the router stops, or sends clients elsewhere: 503
                                                             └─ held for too long: 503, and when to come again

Laws
  * Held requests are bounded in time (``router.hold``), in number (a place for each ``PLACE_BYTES`` of the router's budget
    of bytes, ``LEAST_PLACES`` at least) and in bytes (a half of that budget: what they have reserved in its ledger).
  * They are ordered as the queue is (``balance.queue``): fairly between keys, each of which has its share of the places.
    Who has heard a comment keeps its place; others of the key that has the most give way as there.
  * A request is held once. Whom nobody can be picked for afterwards hears of it at once.
  * Those that go on do so a few at a time, so that others have their turns of the loop.
  * A stream hears a comment every ``COMMENT_S``: proxies between do not take it for dead. What follows is the stream, or an
    error event, since the status has been sent.
  * What is said of coming again is what is known of who is expected, not a guess at load.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.api.faults import HttpFault, unavailable
from xpyd_sidecar.router.balance.queue import FairQueue
from xpyd_sidecar.router.fleet.expected import ExpectedInstances
from xpyd_sidecar.router.http.reply import Reply, RequestHandler
from xpyd_sidecar.router.http.wire import chunk_of, lines_of
from xpyd_sidecar.router.serving.waiting import AdmissionQueue, QueuedRequest

LEAST_PLACES = 1024
PLACE_BYTES = 256 << 10
"""A router has a place for each so many bytes of its budget."""
PART = 2
"""Held requests may have the budget divided by this."""
COMMENT_S = 15.0
"""A stream that is held hears a comment so often: proxies give up who is silent for 30 s and more."""
RETRY_AFTER_S = (1, 600)
"""Least and most that a client is told to wait."""
SLEEPS = ("no instance runs, and this request starts none: that takes one that generates, with a prompt, for a model "
          "known here")
"""What is said to who needs an instance and may not start one."""
COMMENT = b": waiting for an instance\n\n"
_HEAD = lines_of([(b"content-type", b"text/event-stream; charset=utf-8")])


class Holdable(Protocol):
    """A request that may be held (``attempts.Asks``)."""

    held: bool
    """It has been."""
    once: bool
    """Its body comes while it is handed on: there is nothing to hold."""

    wakes: bool
    """It may start instances where none runs."""

    @property
    def decode_only(self) -> bool:
        """Whether it needs no prefill."""


class HeldRequest(QueuedRequest):
    """One that is held."""

    def __init__(self, hold: Hold, reply: Reply, key: str, priority: int, cost: int, *, alone: bool, size: int,
                 streams: bool, wakes: bool = False, serve: Callable[[float], RequestHandler],
                 on_unserved: Callable[[HttpFault | None], None]) -> None:
        """``alone``: it needs no prefill. ``size``: bytes that it has in the ledger. ``streams``: its client takes
        comments. ``wakes``: it may start instances. The others are ``QueuedRequest``'s.
        """
        super().__init__(hold, reply, key, priority, cost, alone=alone, room=lambda: hold.missing(alone) is None,
                         serve=serve, on_unserved=on_unserved)
        self.size, self.wakes = size, wakes
        self._streams = streams
        self._paused = False
        self._comment_at = math.inf

    def comment(self, now: float) -> None:
        """Say that it waits, where that is due."""
        if self._comment_at == math.inf and self._streams:
            self._comment_at = now + COMMENT_S
        if now < self._comment_at or self._paused:
            return
        self._comment_at = now + COMMENT_S
        self._line.keep(self)
        reply = self._reply
        data = chunk_of(COMMENT) if reply.framed else COMMENT
        if reply.started:
            reply.write(data)
        else:
            reply.begin(200, _HEAD, data)

    def on_pause(self) -> None:
        """Its client does not read: say no more."""
        self._paused = True

    def on_resume(self) -> None:
        """It reads again."""
        self._paused = False


class _Places(FairQueue):
    """Places of those that are held: come again when who is expected should be there."""

    def __init__(self, size: int, timeout_s: float, again_s: Callable[[], int]) -> None:
        super().__init__(size, timeout_s)
        self._again_s = again_s

    def retry_after(self, now: float, before: int) -> int:  # noqa: ARG002 (the base class's names)
        """See the class."""
        return self._again_s()


class Hold(AdmissionQueue):
    """All that are held in one router."""

    waits: dict[int, HeldRequest]  # type: ignore[assignment]  # no others enter

    def __init__(self, loop: asyncio.AbstractEventLoop, expected: ExpectedInstances, *, hold_s: float, budget: int,
                 missing: Callable[[bool], Role | None], why_not: Callable[[Role], str]) -> None:
        """``hold_s``: how long one is held at most; 0: none is. ``budget``: bytes of the router's ledger. ``missing``: of
        which role nobody can be picked for a request that goes alone, or that does not; None: it can be served.
        ``why_not``: why that is so.
        """
        places = max(LEAST_PLACES, budget // PLACE_BYTES)
        super().__init__(loop, places, hold_s, _Places(places, hold_s, self.again_s))
        self.missing = missing
        self.bytes = 0
        """Of those that are held."""
        self.most_bytes = budget // PART
        self.wakers = 0
        """Of those that are held, who may start instances."""
        self.on_waker: Callable[[], None] = lambda: None
        """One of them has come."""
        self.closed = False
        """The router stops, or sends clients elsewhere: nobody is held any more."""
        self._expected = expected
        self._why_not = why_not
        self._looks = False

    def takes(self, asked: Holdable) -> bool:
        """Whether a request is to be held now."""
        role = self.missing(asked.decode_only)
        return (role is not None and self._timeout_s > 0 and not (self.closed or asked.once or asked.held)
                and self._expected.expects(role, self._loop.time(), wakes=asked.wakes or self.wakers > 0))

    def refusal(self, asked: Holdable) -> str:
        """Why a request that is not held has nobody, where instances are started for others; empty: no more is known."""
        standby, now = self._expected.standby, self._loop.time()
        if not standby.enabled or asked.held or self.missing(asked.decode_only) is None:
            return ""
        return SLEEPS if standby.asleep(now) and not asked.wakes else standby.why_not(now)

    def enter(self, request: QueuedRequest) -> RequestHandler:
        """Hold a request. Raises HttpFault: 429, its key has its share; 503, no place or no bytes are left."""
        assert isinstance(request, HeldRequest)
        if self.bytes + request.size > self.most_bytes:
            words = f"requests that wait for an instance hold {self.bytes} bytes, and may hold {self.most_bytes}"
            raise unavailable(words, self.again_s())
        handler = super().enter(request)
        self.bytes += request.size
        request.comment(self._loop.time())
        if request.wakes:
            self.wakers += 1
            self.on_waker()
        return handler

    def again_s(self) -> int:
        """Whole seconds in which who is expected should be there."""
        now, least, most = self._loop.time(), *RETRY_AFTER_S
        roles = {role for alone in (False, True) if (role := self.missing(alone)) is not None}
        soonest = max((self._expected.soonest_s(role, now) for role in roles), default=0.0)
        return least if soonest == math.inf else max(least, min(most, math.ceil(soonest)))

    def close(self, reason: str) -> None:
        """Hold nobody any more, and refuse all that are held, because of ``reason``."""
        self.closed = True
        self.end(reason)

    def open(self) -> None:
        """Hold again."""
        self.closed = False

    def on_fleet_change(self) -> None:
        """Who may be picked has changed, perhaps: look at it as soon as the event in hand is dealt with."""
        if not self._looks:
            self._looks = True
            self._loop.call_soon(self._look)

    def sweep(self, now: float) -> None:
        """Called every second: refuse whom nobody is expected for any more, and let streams hear of it that they wait."""
        self._expected.update(now)
        wakes = self.wakers > 0
        lost = {alone: role for alone in (False, True) if (role := self.missing(alone)) is not None
                and not self._expected.expects(role, now, wakes=wakes)}
        sleeps = not wakes and self._expected.standby.asleep(now)
        for request in list(self.waits.values()):
            if (role := lost.get(request.alone)) is not None:
                self.leave(request)
                request.on_unserved(unavailable(SLEEPS if sleeps else self._why_not(role)))
            elif request.ticket is not None:
                request.comment(now)
        self.schedule()

    def _look(self) -> None:
        self._looks = False
        self._expected.update(self._loop.time())
        self.schedule()

    def _out(self, number: int) -> QueuedRequest:
        request = self.waits[number]
        self.bytes -= request.size
        self.wakers -= request.wakes
        return super()._out(number)

    def _late(self) -> str:
        roles = [role for alone in (True, False) if (role := self.missing(alone)) is not None]
        why = f": {self._why_not(roles[0])}" if roles else ""
        return f"no instance was ready within {self._timeout_s:g} s{why}"
