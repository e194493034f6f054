"""A thread that looks after the readers of an executor's queue, also while nothing is sent, or an answer is waited for.

A reader that is lost ends the engine: the calls that it has not run are lost with it. One that is silent may come back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, Protocol

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.5


class WatchedReaders(Protocol):
    """Whose readers are looked after."""

    def lost_readers(self) -> dict[str, str] | None:
        """Readers that are lost, and why; None: they cannot be looked at now."""


class ReaderWatch:
    """The thread that finds lost readers."""

    def __init__(self, queue: WatchedReaders, lost: Callable[[str, str], None]) -> None:
        """Begin at once. ``lost``: called once, with a name and the reason; then the thread ends."""
        self._queue = queue
        self._lost = lost
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="xpyd-readers", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread with its next look; from any thread, its own too."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            for name, reason in (self._queue.lost_readers() or {}).items():
                if not self._stop.is_set():
                    self._lost(name, reason)
                return
