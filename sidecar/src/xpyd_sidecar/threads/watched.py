"""Threads whose death ends the engine, with the words that they have left.

    thread = WatchedThread("xpyd-sender", self._run)       every thread of the connector is one
    thread.start()
    check(publisher.thread, receiver.thread)                by the engine's thread, in each step: raises ThreadEnded

Laws
1. A thread ends when it is told to. One that ends by an error has died: it says so in the log and in the container's
   termination log (``termination_log``), and ``check`` raises from then on.
2. What belongs to one peer is guarded by itself and ends nobody. What the thread cannot do without (to wait for its
   sockets, to look at deadlines) may fail now and then, but not ``FAULTS_MAX`` times one after the other (``Faults``):
   then the thread dies, since it would only seem to live.

An engine without requests and without anything open makes no steps, so it hears of a death in the step of its next request.
Where that is too late, the thread has ``abandon``: it is called ``ABANDON_S`` after the death, whatever the engine does.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from xpyd_sidecar.errors import OurFault
from xpyd_sidecar.threads import termination_log
from xpyd_sidecar.threads.processors import restrict

logger = logging.getLogger(__name__)

T = TypeVar("T")
FAULTS_MAX: Final = 10
ABANDON_S: Final = 3.0
"""For the engine to end by itself."""
PAUSE_S: Final = 0.01
"""After a fault, so that a thread which meets one at once again does not take a whole processor."""


class ThreadEnded(OurFault):
    """A thread of the connector has died. The message names it, and has its words."""


class WatchedThread(threading.Thread):
    """A thread that leaves its words when it dies."""

    def __init__(self, name: str, body: Callable[[], None], abandon: Callable[[], None] | None = None) -> None:
        """``body`` returns when the thread has been told to end; ``abandon`` ends a process that does not end by itself."""
        super().__init__(name=name, daemon=True)
        self._abandon = abandon
        self.words = ""
        """Of its death; empty while it lives, and where it has ended as it should."""
        self._body = body
        self._processors: frozenset[int] = frozenset()

    def bind(self, processors: frozenset[int]) -> None:
        """Have it run on these processors alone, and the threads that it starts: from its start, or from now on."""
        self._processors = processors
        if self.native_id is not None and self.is_alive():
            restrict(self.native_id, processors)

    def run(self) -> None:
        """Run the body, as threading calls it."""
        try:
            if self._processors:
                restrict(0, self._processors)
            self._body()
        except BaseException as error:
            self.words = f"thread {self.name} ended: {termination_log.innermost(error)}"
            logger.critical("xpyd: %s; the engine ends with its next step", self.words, exc_info=error)
            termination_log.leave(termination_log.TERMINATION_LOG, self.words)
            if self._abandon is not None:
                time.sleep(ABANDON_S)
                self._abandon()

    def end(self, seconds: float) -> bool:
        """Wait until it has ended, which it has been told to. Whether it has."""
        if self.ident is not None:
            self.join(seconds)
        if self.is_alive():
            logger.error("thread %s did not end within %s s", self.name, seconds)
            return False
        return True


def end_process() -> None:
    """End this process at once: nothing of it is of use any more, and it may be stuck."""
    logger.critical("xpyd: process %d ends", os.getpid())
    logging.shutdown()
    os._exit(1)


def check(*threads: WatchedThread | None) -> None:
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

    def try_once(self, call: Callable[[], T]) -> T | None:
        """Make the call once and return its result; None where it has failed, after a pause of ``PAUSE_S``.

        Raises:
            Exception: the call's own, where it has failed too often.
        """
        try:
            found = call()
        except Exception as error:
            self._count += 1
            if self._count >= FAULTS_MAX:
                raise
            logger.error("xpyd: %s: %s failed (%d in a row, %d end the thread)",  # noqa: TRY400  # it says which error
                         threading.current_thread().name, self._what, self._count, FAULTS_MAX, exc_info=error)
            time.sleep(PAUSE_S)
            return None
        self._count = 0
        return found
