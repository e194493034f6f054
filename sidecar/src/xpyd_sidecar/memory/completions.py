"""One thread that waits for copies of a device to be complete, and then tells whoever is to know.

A copy that is complete when it is handed over is told at once, by the caller, unless others wait before it.
Marks of one rank pass in the order in which they are added: their copies are on one stream. A device that has failed ends
the thread, since no copy is complete any more, and so the engine (``watched``).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from xpyd_sidecar.memory.marks import CopyMark
from xpyd_sidecar.threads.watched import WatchedThread

logger = logging.getLogger(__name__)

JOIN_S: Final = 5.0


class Completions:
    """The thread of one rank; it begins with the first copy that is not complete at once."""

    def __init__(self, name: str = "xpyd-copies") -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[CopyMark, Callable[[], None]]] = deque()
        self._running = False
        """A mark is waited for, or its call is being made."""
        self._stop = False
        self.thread = WatchedThread(name, self._run)

    def add(self, mark: CopyMark, call: Callable[[], None]) -> None:
        """Have ``call`` made once the mark has passed: now, or on the thread. It must not wait."""
        with self._changed:
            idle = not self._waiting and not self._running
            if not (idle and mark.done()):
                self._waiting.append((mark, call))
                if self.thread.ident is None:
                    self.thread.start()
                self._changed.notify()
                return
        call()

    def stop(self) -> None:
        """End the thread; what has not passed is not told."""
        with self._changed:
            self._stop = True
            self._waiting.clear()
            self._changed.notify()
        self.thread.end(JOIN_S)  # a device that stands still holds it; it ends with the process then

    def _run(self) -> None:
        while True:
            with self._changed:
                self._running = False
                self._changed.wait_for(lambda: self._waiting or self._stop)
                if self._stop:
                    return
                mark, call = self._waiting.popleft()
                self._running = True
            while not mark.wait(1.0):
                if self._stop:
                    return
            if self._stop:
                return
            try:
                call()
            except Exception:  # one transfer's fault must not end the thread that serves all others
                logger.exception("xpyd: what follows a copy has failed")
