"""A device's copies of whole steps on a virtual clock: sizes and launches are those of ``memory.device``, no bytes move."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from xpyd_sidecar.engine.worker.kv_cache import KvCache
from xpyd_sidecar.engine.worker.memory_sizes import MemorySizes, StepLoad, memory_sizes
from xpyd_sidecar.kv.reach import LayerGroup, Reach
from xpyd_sidecar.memory import device, device_rows
from xpyd_sidecar.memory.chunk import Chunk

LAYERS, BLOCK, TOKENS = 36, 64 << 10, 16
"""Of an 8B model: a block of one layer has 16 tokens, keys and values of 8 heads of 128 in 16 bits."""
STEP_TOKENS: Final = 16 << 10
LINK, BUS = 8e9, 50e9
"""Bytes a second."""
CACHE_BLOCKS: Final = 16384


class StepClock:
    """Calls at times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Have a call made then."""
        heapq.heappush(self._due, (when, next(self._numbers), call))

    def advance(self, end: float) -> None:
        """Make every call that is due until then."""
        while self._due and self._due[0][0] <= end:
            self.now, _, call = heapq.heappop(self._due)
            call()
        self.now = end


@dataclass(frozen=True)
class StepMark:
    """Passes at a time; where ``clock`` comes to it, nothing waits for it."""

    when: float
    clock: StepClock

    def done(self) -> bool:
        """Whether it has passed."""
        return self.clock.now >= self.when

    def wait(self, seconds: float) -> bool:
        """An engine's thread must not wait for copies."""
        raise AssertionError("something waits for a copy")


def sizes_of(tokens: int = STEP_TOKENS, *, keep: int | None = None) -> MemorySizes:
    """Of one rank of that model, on a machine with enough memory."""
    return memory_sizes(keep, LAYERS * BLOCK // TOKENS, StepLoad(tokens, device_room=1 << 40), device=True)


class StepSums:
    """Sums of bytes that there are none of."""

    def __init__(self, count: int) -> None:
        self._count = count

    def read(self) -> NDArray[np.uint64]:
        """As many as a kernel would make."""
        return np.zeros(self._count, np.uint64)


class StepCopies:
    """Copies of whole steps, one after the other on a bus."""

    def __init__(self, clock: StepClock, slab: int) -> None:
        self.clock, self.slab_bytes, self.free_at = clock, slab, 0.0
        self.launches = 0
        self.capturing = False
        self.gathered: list[int] = []
        """Bytes of each gather."""
        self.computed_at = 0.0
        """When the compute stream will have done what was enqueued so far."""

    def gather(self, packed: device.PackedRows, spans: Sequence[tuple[torch.Tensor, int]]) -> tuple[StepMark, StepSums]:
        """Out of the cache: a table and a kernel for each shape, the same for sums, their copy, and one for each span."""
        assert packed.size <= self.slab_bytes
        assert sum(len(host) for host, _ in spans) == packed.size
        tabled = len([*device_rows.tables(packed.rows, 0)]) + len([*device_rows.sum_tables(packed.arrays)])
        self.launches += 2 * tabled + 1 + len(spans)
        self.gathered.append(packed.size)
        return self.bring(packed.size), StepSums(sum(one.sums for one, _ in packed.arrays))

    def bring(self, size: int) -> StepMark:
        """Have so many bytes pass over the bus."""
        self.free_at = max(self.free_at, self.clock.now, self.computed_at) + size / BUS
        return StepMark(self.free_at, self.clock)

    def fence(self) -> None:
        """Nothing follows on a compute stream that is not there."""


class StepDevice(KvCache):
    """The cache of that model, with hardly a byte of memory."""

    def __init__(self, clock: StepClock, slab: int) -> None:
        memory = torch.empty(LAYERS, 8, TOKENS, 2 * 128, dtype=torch.bfloat16)
        caches = {f"layer{n}": memory[n].expand(CACHE_BLOCKS, -1, -1, -1) for n in range(LAYERS)}
        super().__init__(caches, CACHE_BLOCKS, dict.fromkeys(caches, LayerGroup(0, Reach("all", TOKENS))))
        assert (self.block_bytes, self.token_bytes) == ((BLOCK,) * LAYERS, LAYERS * BLOCK // TOKENS)
        self.steps = StepCopies(clock, slab)
        copies: Any = self.steps
        self.copies = copies


def untouched(size: int) -> Chunk:
    """Memory that nobody writes to, so that the system need not find any."""
    memory = torch.empty(size, dtype=torch.uint8)
    return Chunk(memory, memoryview(memory.numpy()))
