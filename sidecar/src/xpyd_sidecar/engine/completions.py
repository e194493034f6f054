"""One thread that waits for copies of a device to be complete, and then tells whoever is to know.

A copy that is complete when it is handed over (every copy of a CPU) is told at once, by the caller, and there is no thread.
Marks of one rank pass in the order in which they are added: their copies are on one stream.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from xpyd_sidecar.engine.bounds import Mark

logger = logging.getLogger(__name__)

JOIN_S: Final = 5.0


class Completions:
    """The thread of one rank; it begins with the first copy that is not complete at once."""

    def __init__(self, name: str = "xpyd-copies") -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Mark, Callable[[], None]]] = deque()
        self._running = False
        """A mark is waited for, or its call is being made."""
        self._stop = False
        self._thread: threading.Thread | None = None
        self.failed: BaseException | None = None
        """Why the thread has ended: the device has failed, and no copy is complete any more."""

    def add(self, mark: Mark, call: Callable[[], None]) -> None:
        """Have ``call`` made once the mark has passed: now, or on the thread. It must not wait."""
        with self._changed:
            idle = not self._waiting and not self._running
            if not (idle and mark.done()):
                self._waiting.append((mark, call))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
                self._changed.notify()
                return
        call()

    def stop(self) -> None:
        """End the thread; what has not passed is not told."""
        with self._changed:
            self._stop = True
            self._waiting.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(JOIN_S)
            if self._thread.is_alive():  # a device that stands still holds it; it ends with the process
                logger.error("thread %s did not end within %s s", self._name, JOIN_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._running = False
                self._changed.wait_for(lambda: self._waiting or self._stop)
                if self._stop:
                    return
                mark, call = self._waiting.popleft()
                self._running = True
            try:
                while not mark.wait(1.0):
                    if self._stop:
                        return
            except Exception as error:
                self.failed = error
                logger.exception("xpyd: a copy of the KV cache has failed")
                return
            if self._stop:
                return
            try:
                call()
            except Exception:  # one transfer's fault must not end the thread that serves all others
                logger.exception("xpyd: what follows a copy has failed")
