"""What keeps payloads on their way in bounded, and how many are. Free of torch, like the threads that use it."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple


class Chunk(NamedTuple):
    """Staging memory for one frame's payload: one allocation, seen as a tensor and as bytes."""

    tensor: Any
    view: memoryview
    home: Callable[[], None] | None = None
    """Takes it back, where it is not of ``Staging``."""

    def part(self, start: int, size: int) -> Chunk:
        """``size`` bytes of it from ``start`` on; as it goes back, so does the whole."""
        tensor = self.tensor[start:start + size] if self.tensor is not None else None
        return self._replace(tensor=tensor, view=self.view[start:start + size])


class Staging:
    """Chunks of one size for payloads on their way in: at most ``most``, made when first needed. Safe across threads.

    The one that was made first is taken first: those in use are neighbours where ``make`` makes neighbours, and a device
    copies neighbours at once.
    """

    def __init__(self, make: Callable[[int], Chunk], most: int) -> None:
        """``make``: the chunk of a number, again where it could not be made."""
        self._make = make
        self._most = most
        self._lock = threading.Lock()
        self._free: list[tuple[int, Chunk]] = []
        """A heap, by number."""
        self._numbers: dict[int, int] = {}
        """By the identity of a chunk's view, which lives as long as the chunk."""
        self._waiting: Callable[[], None] | None = None

    def take(self) -> Chunk | None:
        """A chunk, or None where all are in use; ``on_free`` tells when to ask again."""
        with self._lock:
            if self._free:
                return heapq.heappop(self._free)[1]
            if len(self._numbers) >= self._most:
                return None
            number = len(self._numbers)
            made = self._make(number)
            self._numbers[id(made.view)] = number
            return made

    def give(self, chunk: Chunk) -> None:
        """Return a chunk."""
        if chunk.home is not None:
            chunk.home()
            return
        with self._lock:
            heapq.heappush(self._free, (self._numbers[id(chunk.view)], chunk))
            waiting = self._waiting
        if waiting is not None:
            waiting()

    def homed(self, chunk: Chunk) -> Chunk:
        """A chunk of it that knows its way back: it may be given to other staging memory, and so may its parts."""
        return chunk._replace(home=partial(self.give, chunk))

    def on_free(self, call: Callable[[], None] | None) -> None:
        """Call this whenever a chunk is returned."""
        with self._lock:
            self._waiting = call


class Tally:
    """Things that have not left yet; safe across threads."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def up(self, count: int = 1) -> None:
        """So many more."""
        with self._changed:
            self._count += count

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
