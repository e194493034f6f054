"""One allocation of host memory: made when somebody first needs it, and given back when nobody does.

CUDA locks a gigabyte in some 0.4 s, so who needs memory is not who waits for it:

    ready() ─▶ False ── later ─▶ [made] … ready() ─▶ True, at(offset, size) …      drop() ── later ─▶ [given back]

Meanwhile blocks wait in prefill's cache, decode answers BUSY, and no link is chosen that fetches through host memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from xpyd_sidecar.memory.chunk import Chunk

logger = logging.getLogger(__name__)

LACK_S: Final = 10.0
"""How long no memory is asked for after none was to be had."""
Later = Callable[[Callable[[], None]], None]
"""Has calls made in their order, by a thread that may wait."""


def at_once(call: Callable[[], None]) -> None:
    """Make a call now: memory of a host is there at once, since its pages come when they are written."""
    call()


class Allocation:
    """Memory of a fixed number of bytes. Safe across threads."""

    def __init__(self, make: Callable[[int], Chunk], size: int, later: Later = at_once) -> None:
        """``make``: memory of a size. ``later``: where it is made and given back."""
        self.size = size
        self._make = make
        self._later = later
        self._lock = threading.Lock()
        self._whole: Chunk | None = None
        self._asked = False
        """It is being made, or will be."""
        self._asks_at = 0.0
        """When it may be asked for again."""

    @property
    def made(self) -> bool:
        """Whether there is memory now."""
        return self._whole is not None

    def prepare(self) -> None:
        """Make it now, before anybody else asks; raises what ``make`` does."""
        if self._whole is None:
            self._whole = self._make(self.size)

    def ready(self) -> bool:
        """Whether there is memory; if not, it is being made, or none was to be had a moment ago."""
        with self._lock:
            if self._whole is not None:
                return True
            if self._asked or time.monotonic() < self._asks_at:
                return False
            self._asked = True
        self._later(self._ask)
        return self._whole is not None

    def settle(self, call: Callable[[], None]) -> None:
        """Make a call once there is memory, or none is to be had: now, or where it is made."""
        if self.ready():
            call()
        else:
            self._later(call)

    def drop(self) -> None:
        """Give the memory back; chunks of it that are still held keep it."""
        with self._lock:
            held, self._whole = [self._whole], None
        if held != [None]:
            self._later(held.clear)

    def chunk_at(self, offset: int, size: int) -> Chunk:
        """``size`` bytes from ``offset`` on, of memory that is there."""
        assert self._whole is not None
        return self._whole.part(offset, size)

    def _ask(self) -> None:
        try:
            self._whole = self._make(self.size)
        except Exception as error:  # noqa: BLE001  # torch's, Python's and the system's have no common root
            self._asks_at = time.monotonic() + LACK_S
            logger.warning("xpyd: there are no %d MiB of memory for copies of KV, which is asked for again in %g s: %s: %s",
                           self.size >> 20, LACK_S, type(error).__name__, error)
        self._asked = False
