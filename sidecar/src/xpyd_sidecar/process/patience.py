"""Deadlines of a process that may itself be stopped for a while: a paused machine, SIGSTOP, a live migration.

When an event loop runs again, its timers may fire before it has read its sockets, where the answer may lie that a peer
gave in time. So a deadline that the loop notices late is not over at once:

    due ──noticed within LATE_S──▶ over
     └────noticed later──────────▶ GRACE_S more, once ──▶ over

There is one grace and no second: in a loop that always lags, deadlines still end, each a little later.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from functools import partial

LATE_S = 0.25
"""A timer that rings so much too late: the loop did not run."""
GRACE_S = 1.0
"""Time to read what came meanwhile, and for a peer that stood still too to go on."""
SOON_S = 3.0
"""A moment that moves has an alarm if it comes sooner."""


def late(now: float, due: float) -> bool:
    """Whether ``now`` is more than ``LATE_S`` after ``due`` (seconds of the loop's clock): then the loop did not run when
    it should have.
    """
    return now - due > LATE_S


class Alarm:
    """Calls ``ring`` at ``due`` (seconds of the loop's clock), or ``GRACE_S`` after the loop has noticed that late."""

    __slots__ = ("_due", "_handle", "_loop", "_ring")

    def __init__(self, loop: asyncio.AbstractEventLoop, due: float, ring: Callable[[], object]) -> None:
        self._loop = loop
        self._due = due
        self._ring = ring
        self._handle = loop.call_at(due, self._on_time)

    def cancel(self) -> None:
        """Cancel the alarm: ``ring`` will not be called."""
        self._handle.cancel()

    def _on_time(self) -> None:
        self._handle.cancel()  # asyncio's keeps what it has called, which is this alarm
        if late(self._loop.time(), self._due):
            self._handle = self._loop.call_later(GRACE_S, self._ring)
        else:
            self._ring()


class Reminder:
    """An alarm for a deadline that changes often and is seldom reached.

    A timer is set only for a time less than ``SOON_S`` seconds away: until then the owner calls ``schedule`` every
    second. A timer that is set stays where the deadline moves further away, since to set one anew each time would cost
    more: so ``ring`` may be called too early, and has to look at the deadline itself.

    ``ring`` is referenced only while a timer is set, so that an owner whose own method it is can be freed without the
    garbage collector.
    """

    __slots__ = ("_alarm", "_due", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._alarm: Alarm | None = None
        self._due = math.inf

    def schedule(self, due: float, now: float, ring: Callable[[], object]) -> None:
        """Have ``ring`` called at ``due``, or at an earlier time for which a timer is set already. Sets no timer where
        ``due`` is ``SOON_S`` or more away: call it again later. ``due`` and ``now`` are seconds of the loop's clock;
        infinity: never.
        """
        if self._due <= due < math.inf or due == self._due or (self._alarm is None and due >= now + SOON_S):
            return
        self.cancel()
        if due < now + SOON_S:
            self._due = due
            self._alarm = Alarm(self._loop, due, partial(self._rings, ring))

    def cancel(self) -> None:
        """Cancel the timer, if one is set: ``ring`` will not be called."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._due = None, math.inf

    def _rings(self, ring: Callable[[], object]) -> None:
        self._alarm, self._due = None, math.inf
        ring()


@contextlib.asynccontextmanager
async def timeout_with_grace(seconds: float) -> AsyncIterator[None]:
    """``asyncio.timeout``, with ``GRACE_S`` more where the loop notices late that the time is over.

    Raises:
        TimeoutError: the block takes longer.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        alarm = Alarm(loop, loop.time() + seconds, lambda: limit.reschedule(loop.time()))
        try:
            yield
        finally:
            alarm.cancel()
