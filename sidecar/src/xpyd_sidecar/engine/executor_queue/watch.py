"""A thread that checks whether the readers of an executor's broadcast queue still live, even while nothing is sent.

The readers are the engine's workers. A reader that is lost must end the engine, since the calls that it has not run are
lost with it. A reader that is only silent (stopped, or cut off) need not: it may come back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, Protocol

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.5


class WatchedReaders(Protocol):
    """A queue whose readers can be checked."""

    def lost_readers(self) -> dict[str, str] | None:
        """Return the names of lost readers, each with the reason; None where they cannot be checked now."""


class ReaderWatch:
    """The thread that checks the readers of one queue every ``LOOK_S`` seconds, until one is lost."""

    def __init__(self, queue: WatchedReaders, lost: Callable[[str, str], None]) -> None:
        """Start the thread. ``lost``: called on that thread, once, with a lost reader's name and the reason."""
        self._queue = queue
        self._lost = lost
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="xpyd-readers", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Have the thread end, without waiting for it. May be called from any thread, this one included."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            for name, reason in (self._queue.lost_readers() or {}).items():
                if not self._stop.is_set():
                    self._lost(name, reason)
                return
