"""A thread on which calls are made one after the other, each of which may take as long as it does."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Final

from xpyd_sidecar.threads.watched import WatchedThread

END_S: Final = 5.0


class CallThread:
    """The thread. A call that raises ends it, and with it the engine (``watched``)."""

    def __init__(self, name: str) -> None:
        self.thread = WatchedThread(name, self._run)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def tell(self, call: Callable[[], None]) -> None:
        """Have a call made on the thread, after those told before; called on any thread."""
        self._calls.put(call)

    def stop(self) -> None:
        """End the thread, after the calls that it was told to make."""
        self._calls.put(None)
        self.thread.end(END_S)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
