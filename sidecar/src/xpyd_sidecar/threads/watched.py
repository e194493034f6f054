"""Threads whose death ends the engine, with the words that they have left.

    thread = Watched("xpyd-sender", self._run)             every thread of the connector is one
    thread.start()
    check(sender.thread, receiver.thread)                  by the engine's thread, in each step: raises ThreadEnded

Laws
1. A thread ends when it is told to. One that ends by an error has died: it says so in the log and in the container's
   termination log (``termination_log``), and ``check`` raises from then on.
2. What belongs to one peer is guarded by itself and ends nobody. What the thread cannot do without (to wait for its
   sockets, to look at deadlines) may fail now and then, but not ``FAULTS_MAX`` times one after the other (``Faults``):
   then the thread dies, since it would only seem to live.

An engine without requests and without anything open makes no steps, so it hears of a death in the step of its next request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from xpyd_sidecar.errors import OurFault
from xpyd_sidecar.threads import termination_log

logger = logging.getLogger(__name__)

FAULTS_MAX: Final = 10
PAUSE_S: Final = 0.01
"""After a fault, so that a thread which meets one at once again does not take a whole processor."""


class ThreadEnded(OurFault):
    """A thread of the connector has died. The message names it, and has its words."""


class Watched(threading.Thread):
    """A thread that leaves its words when it dies."""

    def __init__(self, name: str, body: Callable[[], None]) -> None:
        """``body`` returns when the thread has been told to end."""
        super().__init__(name=name, daemon=True)
        self.words = ""
        """Of its death; empty while it lives, and where it has ended as it should."""
        self._body = body

    def run(self) -> None:
        """As threading calls it."""
        try:
            self._body()
        except BaseException as error:
            self.words = f"thread {self.name} ended: {termination_log.innermost(error)}"
            logger.critical("xpyd: %s; the engine ends with its next step", self.words, exc_info=error)
            termination_log.leave(termination_log.TERMINATION_LOG, self.words)

    def end(self, seconds: float) -> bool:
        """Wait until it has ended, which it has been told to. Whether it has."""
        if self.ident is not None:
            self.join(seconds)
        if self.is_alive():
            logger.error("thread %s did not end within %s s", self.name, seconds)
            return False
        return True


def check(*threads: Watched | None) -> None:
    """Look whether all of them live; None: there is no such thread.

    Raises:
        ThreadEnded: one has died.
    """
    for thread in threads:
        if thread is not None and thread.words:
            raise ThreadEnded(thread.words)


class Faults:
    """Faults of one thing that a thread does again and again, in a row."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._count = 0

    def met(self, error: Exception) -> None:
        """It has failed. Rests for a moment.

        Raises:
            Exception: ``error`` itself, where it has failed too often.
        """
        self._count += 1
        if self._count >= FAULTS_MAX:
            raise error
        logger.error("xpyd: %s: %s failed (%d in a row, %d end the thread)", threading.current_thread().name, self._what,
                     self._count, FAULTS_MAX, exc_info=error)
        time.sleep(PAUSE_S)

    def none(self) -> None:
        """It has worked."""
        self._count = 0
