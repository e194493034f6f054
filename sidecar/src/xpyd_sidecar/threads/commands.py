"""A thread that alone may touch something: others have calls made on it, and between these it looks how far things are.

It never waits for anything but the next call, and for that no longer than until its next look. A call that fails ends
nobody; a look that fails again and again ends the thread, and with it the engine (``watched``).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from xpyd_sidecar.threads.watched import Faults, WatchedThread

logger = logging.getLogger(__name__)

END_S: Final = 10.0


class CommandThread:
    """The thread. Who makes one starts ``thread`` when all that it looks at is there."""

    def __init__(self, name: str, looks: str) -> None:
        """``looks``: what it looks at, for its words where that fails."""
        self.thread = WatchedThread(name, self._run)
        self._looks = Faults(looks)
        self._commands: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._ending = False

    def tell(self, call: Callable[[], None]) -> None:
        """Have a call made on the thread, after those told before; called on any thread."""
        with self._changed:
            self._commands.append(call)
            self._changed.notify()

    def stop(self) -> None:
        """End the thread."""
        self.tell(self._last)
        self.thread.end(END_S)

    # --- on the thread ---

    def enter(self) -> None:
        """Called on the thread before the first call."""

    def poll_once(self) -> bool:
        """Poll once. Returns whether anything has moved, so that it is worth polling again at once."""
        raise NotImplementedError

    def rest(self) -> float:
        """Seconds until the next look, if no call comes before."""
        raise NotImplementedError

    def end(self) -> None:
        """Called on the thread after the last poll."""

    def make_calls(self, seconds: float) -> None:
        """Make the calls that were told; wait for one so long at most."""
        with self._changed:
            if not self._commands and seconds > 0:
                self._changed.wait(seconds)
            commands, self._commands = self._commands, deque()
        for call in commands:
            self.guard(call)

    @staticmethod
    def guard(call: Callable[[], None]) -> None:
        """Make a call. One session's fault must not end the thread that serves all others."""
        try:
            call()
        except Exception:
            logger.exception("xpyd: a call of %s failed", threading.current_thread().name)

    def _run(self) -> None:
        self.enter()
        moved = False
        while not self._ending:
            self.make_calls(0.0 if moved else self.rest())
            moved = bool(self._looks.try_once(self.poll_once))
        self.end()

    def _last(self) -> None:
        self._ending = True
