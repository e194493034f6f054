"""One side of a contender, in a process of its own: ``peer.py NAME p|d BYTES``.

Both say a line of JSON, read the other's, and then take orders, one a line:

    p    "BLOCK COVER BUSY"    make ready to move BYTES in blocks of BLOCK bytes; answers "ready"; decode's order moves them
    d    "BLOCK COVER BUSY"    have them moved; answers "SECONDS RIGHT PROCESSOR_SECONDS", when all is known to be in place

The source is packed, as prefill keeps its copies; the destination's blocks lie in the order of ``place``. BUSY: a thread of
Python computes in each process while the bytes move. COVER: 0 no sums, 1 with them, 2 as 1 but none made beforehand.
"""

from __future__ import annotations

import importlib
import json
import mmap
import sys
import threading
import time
from types import TracebackType
from typing import Any, Protocol

import numpy as np

PARTS = 16
BLOCKS = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
KINDS = {"ours": "ours", "gloo": "gloo", "nixl": "rivals", "mooncake": "rivals"}


class Side(Protocol):
    """What a contender's module has, as Prefill and Decode."""

    def hello(self) -> dict[str, Any]:
        """What the other side must know."""

    def meet(self, other: dict[str, Any]) -> None:
        """What the other side has said."""

    def ready(self, block: int, *, cover: int) -> None:
        """Make ready for a transfer, untimed."""

    def move(self, block: int) -> None:
        """Decode: have the blocks moved. Prefill: until the transfer that was made ready is over."""


def place(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where each of so many blocks goes: each of 16 parts has an order of its own; 7919 is prime to every power of two."""
    at = np.arange(count, dtype=np.int64)
    each = max(1, count // PARTS)
    return at // each * each + at % each * 7919 % each


def content(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes that are moved."""
    at = np.arange(size, dtype=np.uint32)
    return ((at >> 10) * 31 + at).astype(np.uint8)


def pages(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Zeros in small pages, as raw.c has them and an engine on CPU: numpy itself asks for large ones."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def right(target: np.ndarray[Any, np.dtype[np.uint8]], source: np.ndarray[Any, np.dtype[np.uint8]], block: int) -> bool:
    """Whether every block is in its place (its first 64 bytes)."""
    count = len(source) // block
    found = target.reshape(count, block)[place(count), :64]
    return bool((found == source.reshape(count, block)[:, :64]).all())


class Busy:
    """A thread that computes in Python until the end of the ``with``."""

    def __init__(self, *, on: bool) -> None:
        self._on = on
        self._thread = threading.Thread(target=self._compute)

    def _compute(self) -> None:
        n = 0
        while self._on:
            n += 1

    def __enter__(self) -> None:
        if self._on:
            self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._on:
            self._on = False
            self._thread.join()


def main() -> None:
    name, role, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    module = importlib.import_module(KINDS[name.split("_")[0]])
    source, target = pages(size), pages(size)
    source[:] = content(size)
    side: Side = (module.Prefill if role == "p" else module.Decode)(name, source if role == "p" else target)
    print(json.dumps(side.hello()), flush=True)
    side.meet(json.loads(sys.stdin.readline()))
    print("met", flush=True)
    for line in sys.stdin:
        block, cover, busy = map(int, line.split())
        side.ready(block, cover=cover)
        if role == "p":
            print("ready", flush=True)
            with Busy(on=bool(busy)):
                side.move(block)
            continue
        target[:] = 0
        used = time.process_time()
        with Busy(on=bool(busy)):
            began = time.perf_counter()
            side.move(block)
            took = time.perf_counter() - began
        used = time.process_time() - used
        print(took, int(right(target, source, block)), used, flush=True)


if __name__ == "__main__":
    main()
