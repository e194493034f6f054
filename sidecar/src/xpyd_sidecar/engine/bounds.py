"""What keeps the connector's memory bounded: a budget of bytes for copies out, chunks for payloads on their way in.

Free of torch, like the threads that use it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol


class Mark(Protocol):
    """A moment in the order of copies."""

    def done(self) -> bool:
        """Whether every copy before it is complete."""


class Now:
    """A mark that has passed."""

    def done(self) -> bool:
        """Always."""
        return True


NOW: Final = Now()


class Chunk(NamedTuple):
    """Staging memory for one frame's payload: one allocation, seen as a tensor and as bytes."""

    tensor: Any
    view: memoryview
    home: Callable[[], None] | None = None
    """Takes it back, where it is not of ``Staging``."""


class Staging:
    """Chunks of one size for payloads on their way in: at most ``most``, made when first needed. Safe across threads."""

    def __init__(self, make: Callable[[], Chunk], most: int) -> None:
        self._make = make
        self._most = most
        self._lock = threading.Lock()
        self._free: list[Chunk] = []
        self._made = 0
        self._waiting: Callable[[], None] | None = None

    def take(self) -> Chunk | None:
        """A chunk, or None where all are in use; ``on_free`` tells when to ask again."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._made >= self._most:
                return None
            self._made += 1
        return self._make()

    def give(self, chunk: Chunk) -> None:
        """Return a chunk."""
        if chunk.home is not None:
            chunk.home()
            return
        with self._lock:
            self._free.append(chunk)
            waiting = self._waiting
        if waiting is not None:
            waiting()

    def on_free(self, call: Callable[[], None] | None) -> None:
        """Call this whenever a chunk is returned."""
        with self._lock:
            self._waiting = call


class Tally:
    """Things that have not left yet; safe across threads."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def up(self) -> None:
        """One more."""
        with self._changed:
            self._count += 1

    def down(self) -> None:
        """One has left."""
        with self._changed:
            self._count -= 1
            if not self._count:
                self._changed.notify_all()

    def wait_none(self, seconds: float) -> bool:
        """Wait until none is left, that long at most. Whether none is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._count, seconds)


class Budget:
    """A bound on bytes, safe across threads, which no single holder can take whole.

    A holder may have up to ``SHARE`` times what is free after it has taken its part (dynamic thresholds: Choudhury and
    Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998). So one peer that stops keeps at most
    SHARE / (SHARE + 1) of the bound from the others, and a second one as much of the rest.
    """

    SHARE: Final = 4

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self._used = 0
        self._of: dict[str, int] = {}
        self._lock = threading.Lock()

    def reserve(self, size: int, holder: str = "") -> bool:
        """Take ``size`` bytes if they are left, and are within the holder's share; the holder "" has no share."""
        with self._lock:
            left = self.bound - self._used - size
            mine = self._of.get(holder, 0) + size
            if left < 0 or (holder and mine > self.SHARE * left):
                return False
            self._used += size
            if holder:
                self._of[holder] = mine
            return True

    def free(self, size: int, holder: str = "") -> None:
        """Give ``size`` bytes back."""
        with self._lock:
            self._used -= size
            if holder:
                self._of[holder] -= size
                if not self._of[holder]:
                    del self._of[holder]

    @property
    def used(self) -> int:
        """Bytes taken."""
        return self._used
