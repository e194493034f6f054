"""One thread, one selector: the I/O loop that publisher and receiver run on.

Nothing on it may block. Other threads hand work over with ``post``, which never blocks either; the queue is bounded by what
its callers bound (bytes of copies, number of loads), and a loop that has ended takes nothing more. If it dies, its closers
run all the same, so that peers hear of it at once; the engine hears of it by ``thread`` (``watched``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from xpyd_sidecar.threads.watched import Faults, WatchedThread

logger = logging.getLogger(__name__)

TICK_S: Final = 0.1
SWITCH_S: Final = 0.0005
"""How long a thread that computes in Python may keep the interpreter while this one wants it. Python's own 5 ms, at each
of the hundreds of times that a transfer asks for it, made transfers beside such a thread several times slower (0013).
"""
JOIN_S: Final = 5.0


class HasFileno(Protocol):
    """A socket, or what else the kernel can wait for."""

    def fileno(self) -> int:
        """The number of the file."""


class Loop:
    """The thread. ``on_tick(now)`` is called about every ``TICK_S`` seconds."""

    def __init__(self, name: str, on_tick: Callable[[float], None]) -> None:
        self._on_tick = on_tick
        self._selector = selectors.EpollSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._closing = threading.Lock()
        self._closed = False
        """The descriptor to wake by is gone, and its number may be another file's."""
        self._posted: deque[Callable[[], None]] = deque()
        self._awake = threading.Event()
        self._stop = threading.Event()
        self._closers: list[Callable[[], None]] = []
        self._selects, self._ticks = Faults("to wait for its sockets"), Faults("its look at deadlines")
        self.thread = WatchedThread(name, self._run)

    def start(self) -> None:
        """Start the thread. Sets the switch interval of the whole process."""
        sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
        self.thread.start()

    def post(self, call: Callable[[], None]) -> None:
        """Have ``call`` run on the loop's thread soon; never, where the loop has ended or just ends."""
        if self._stop.is_set() or self.thread.words:
            return
        self._posted.append(call)
        if not self._awake.is_set():
            self._awake.set()
            with self._closing:
                if not self._closed:
                    os.eventfd_write(self._wake, 1)

    def at_end(self, call: Callable[[], None]) -> None:
        """Have ``call`` run on the loop's thread when it ends."""
        self._closers.append(call)

    def watch(self, sock: HasFileno, events: int, call: Callable[[int], None]) -> None:
        """Call back with the ready events of a socket, or of what else has a file; 0 stops watching."""
        known = sock in self._selector.get_map()
        if not events:
            if known:
                self._selector.unregister(sock)
        elif known:
            self._selector.modify(sock, events, call)
        else:
            self._selector.register(sock, events, call)

    def stop(self) -> None:
        """End the thread and wait for it."""
        if self._stop.is_set():
            return
        self._stop.set()
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)
        if self.thread is not threading.current_thread() and not self.thread.end(JOIN_S):
            return
        self._selector.close()
        with self._closing:
            self._closed = True
            os.close(self._wake)

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            for call in self._closers:
                self._guard(call)

    def _serve(self) -> None:
        tick_at = time.monotonic() + TICK_S
        while not self._stop.is_set():
            ready = self._selects.try_once(partial(self._selector.select, max(0.0, tick_at - time.monotonic())))
            if ready is None:
                continue
            for key, events in ready:
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                else:
                    self._guard(key.data, events)
            self._awake.clear()
            for _ in range(len(self._posted)):
                self._guard(self._posted.popleft())
            now = time.monotonic()
            if now >= tick_at:
                tick_at = now + TICK_S
                self._ticks.try_once(partial(self._on_tick, now))

    def _guard(self, call: Callable[..., None], *args: object) -> None:
        try:
            call(*args)
        except Exception:  # one peer's fault must not end the thread that serves all others
            logger.exception("xpyd: a callback of %s failed", self.thread.name)
