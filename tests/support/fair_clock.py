"""A clock that goes on only while this process does, so that tests blame nobody for a machine that is full.

A test's deadlines, and those of what it runs in its own process, measure how long something takes that has a processor.
On a starved machine a process may get none for seconds: both ends of a session stand still, and a second of silence is
over before either of them could speak. Here what passes between two looks at the clock counts up to ``STEP_S``. A thread
looks often, so a longer gap is one in which nothing of this process ran.

    with fair_clock(): …            time.monotonic of every thread, and so asyncio's clock (uvloop has one of its own)

Other processes have clocks of their own; what sleeps or waits in the kernel does so in real time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

STEP_S: Final = 0.25
LOOK_S: Final = 0.05


class FairClock:
    """``now`` in seconds; as ``real`` until there is a gap, and behind it from then on."""

    def __init__(self, real: Callable[[], float]) -> None:
        self._real = real
        self._looked = real()
        self._lost = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        """Look at the clock."""
        with self._lock:
            now = self._real()
            self._lost += max(0.0, now - self._looked - STEP_S)
            self._looked = now
            return now - self._lost

    def forked(self) -> None:
        """In a child: whoever held the lock is not there."""
        self._lock = threading.Lock()


@contextmanager
def fair_clock() -> Iterator[FairClock]:
    """``time.monotonic`` is fair meanwhile."""
    real = time.monotonic
    clock, over = FairClock(real), threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            clock.now()

    looking = threading.Thread(target=look, name="fair-clock", daemon=True)
    looking.start()
    os.register_at_fork(after_in_child=clock.forked)
    time.monotonic = clock.now  # type: ignore[assignment]
    try:
        yield clock
    finally:
        time.monotonic = real
        over.set()
        looking.join()
