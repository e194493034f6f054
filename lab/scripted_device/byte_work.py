"""What cores do with bytes of KV: counted, and where it is CUDA's, as waits of the right length that hold no interpreter.

    driver_read(size)       a core copies what the copy engine cannot read, for ``bring``
    registered(size)        CUDA locks memory of which it is told
    first_touch(size)       … and touches it, where nobody has before

What the connector itself does to bytes (sums, copies) runs as it is, on pages that nobody has written to, and ``watch``
counts it.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any, Final

from lab.scripted_device import parameters
from lab.scripted_device.counting import Counters
from xpyd_sidecar.session import stored_copy
from xpyd_sidecar.transport import landing, moves

TRIES: Final = 200
_PR_SET_TIMERSLACK: Final = 29


class ByteWork:
    """Of one process."""

    def __init__(self, counters: Counters) -> None:
        """Make sleeps as exact as they can be, for threads that begin from now on, and see how late they end."""
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        self._counters = counters
        self.late_s = sorted(_late(50e-6) for _ in range(TRIES))[TRIES // 10]
        """That a wait of a thread which nobody holds up ends too late: every wait is shorter by it."""

    def watch(self) -> None:
        """Count the bytes that the connector's own code sums and copies."""
        copies: Any = stored_copy
        places: Any = landing
        sums, packed, scatter = moves.sums, copies.sums_of, places.Scatter

        def summed(data: Any, size: int, /) -> bytes:
            self.count("summed", len(data))
            return sums(data, size)

        def summed_packed(data: Any, array: Any) -> Any:
            self.count("summed", array.size)
            return packed(data, array)

        def copied(view: Any, row: int, rows: int, *more: Any) -> Any:
            """Whoever makes one fills it once."""
            self.count("copied", row * rows)
            return scatter(view, row, rows, *more)

        moves.sums, copies.sums_of, places.Scatter = summed, summed_packed, copied

    def driver_read(self, size: int) -> None:
        """The driver copies memory that CUDA does not know."""
        self.count("copied", size)
        self.wait(size / parameters.DRIVER_READ)

    def first_touch(self, size: int) -> None:
        """Memory is touched for the first time."""
        self.count("touched", size)
        self.wait(size / parameters.FIRST_TOUCH)

    def registered(self, size: int) -> None:
        """CUDA locks pages that are there."""
        self.wait(size / parameters.REGISTER)

    def count(self, what: str, size: int) -> None:
        """Bytes that a core has touched."""
        self._counters.add(f"bytes {what}", size)

    def wait(self, seconds: float) -> None:
        """A core works for so long; the calling thread is that core."""
        self._counters.add_here("bytes_s", seconds)
        time.sleep(max(0.0, seconds - self.late_s))


def _late(seconds: float) -> float:
    began = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - began - seconds
