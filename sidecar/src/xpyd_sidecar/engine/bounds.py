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
        with self._lock:
            self._free.append(chunk)
            waiting = self._waiting
        if waiting is not None:
            waiting()

    def on_free(self, call: Callable[[], None] | None) -> None:
        """Call this whenever a chunk is returned."""
        with self._lock:
            self._waiting = call


class Budget:
    """A bound on bytes, safe across threads."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self._used = 0
        self._lock = threading.Lock()

    def reserve(self, size: int) -> bool:
        """Take ``size`` bytes if they are left."""
        with self._lock:
            if self._used + size > self.bound:
                return False
            self._used += size
            return True

    def free(self, size: int) -> None:
        """Give ``size`` bytes back."""
        with self._lock:
            self._used -= size

    @property
    def used(self) -> int:
        """Bytes taken."""
        return self._used
