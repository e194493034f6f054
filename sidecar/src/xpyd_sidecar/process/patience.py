"""Deadlines of a process that may itself stand still: a paused machine, SIGSTOP, a live migration.

A loop that runs again hears of its timers before it has read its sockets, and what a peer did in time waits there. So a
deadline that is noticed late blames nobody yet:

    due ──noticed within LATE_S──▶ over
     └────noticed later──────────▶ GRACE_S more, once ──▶ over

One grace and no second: a loop that always lags keeps its deadlines, each a little later.
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
    """Whether the loop cannot have looked at its sockets since ``due``."""
    return now - due > LATE_S


class Alarm:
    """Calls ``ring`` at ``due`` (seconds of the loop's clock), or once the grace is over."""

    __slots__ = ("_due", "_handle", "_loop", "_ring")

    def __init__(self, loop: asyncio.AbstractEventLoop, due: float, ring: Callable[[], object]) -> None:
        self._loop = loop
        self._due = due
        self._ring = ring
        self._handle = loop.call_at(due, self._on_time)

    def cancel(self) -> None:
        """Do not ring."""
        self._handle.cancel()

    def _on_time(self) -> None:
        self._handle.cancel()  # asyncio's keeps what it has called, which is this alarm
        if late(self._loop.time(), self._due):
            self._handle = self._loop.call_later(GRACE_S, self._ring)
        else:
            self._ring()


class Reminder:
    """An alarm for a moment that moves.

    Most of what has a deadline is over long before it. So a moment that is far away has no alarm yet: its owner says it
    again (``schedule``) every second. One that rings too early costs less than one that is set anew whenever the moment
    moves.

    What rings is held only while an alarm is set: who owns a reminder and is rung by it goes without the collector.
    """

    __slots__ = ("_alarm", "_due", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._alarm: Alarm | None = None
        self._due = math.inf

    def schedule(self, due: float, now: float, ring: Callable[[], object]) -> None:
        """Call ``ring`` at ``due``, in place of what was scheduled before. Both times are seconds of the loop's clock;
        infinity: never.
        """
        if self._due <= due < math.inf or due == self._due or (self._alarm is None and due >= now + SOON_S):
            return
        self.cancel()
        if due < now + SOON_S:
            self._due = due
            self._alarm = Alarm(self._loop, due, partial(self._rings, ring))

    def cancel(self) -> None:
        """Do not ring."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._due = None, math.inf

    def _rings(self, ring: Callable[[], object]) -> None:
        self._alarm, self._due = None, math.inf
        ring()


@contextlib.asynccontextmanager
async def timeout_with_grace(seconds: float) -> AsyncIterator[None]:
    """``asyncio.timeout`` with the grace. Raises ``TimeoutError`` where the block takes longer."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        alarm = Alarm(loop, loop.time() + seconds, lambda: limit.reschedule(loop.time()))
        try:
            yield
        finally:
            alarm.cancel()
