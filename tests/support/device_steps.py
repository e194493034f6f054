"""A device's copies of whole steps on a virtual clock: sizes and launches are those of ``memory.device``, no bytes move."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from xpyd_sidecar.engine.kv_cache import KvCache, Move
from xpyd_sidecar.engine.memory_sizes import MemorySizes, StepLoad, memory_sizes
from xpyd_sidecar.kv.reach import LayerGroup, Reach
from xpyd_sidecar.memory import device, device_rows
from xpyd_sidecar.memory.staging import Chunk

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


class StepDevice(KvCache):
    """The cache of that model, with hardly a byte of memory: copies take their time, one after the other."""

    def __init__(self, clock: StepClock, slab: int) -> None:
        memory = torch.empty(LAYERS, 8, TOKENS, 2 * 128, dtype=torch.bfloat16)
        caches = {f"layer{n}": memory[n].expand(CACHE_BLOCKS, -1, -1, -1) for n in range(LAYERS)}
        super().__init__(caches, CACHE_BLOCKS, dict.fromkeys(caches, LayerGroup(0, Reach("all", TOKENS))))
        assert (self.block_bytes, self.token_bytes) == ((BLOCK,) * LAYERS, LAYERS * BLOCK // TOKENS)
        self.clock, self.slab, self.free_at = clock, slab, 0.0
        self.enqueued: list[int] = []
        """Launches of each gather or scatter."""
        self.rounds: list[int] = []

    @property
    def at_once(self) -> bool:
        """Copies of all layers are enqueued when the step is."""
        return False

    @property
    def most_bytes(self) -> int | None:
        """Of device memory that copies out pass through."""
        return self.slab

    def gather(self, moves: Sequence[Move]) -> StepMark:
        """Out of the cache."""
        return self._enqueue(moves)

    def scatter(self, moves: Sequence[Move]) -> StepMark:
        """Into it."""
        return self._enqueue(sorted(moves, key=lambda move: move.packed.data_ptr()))

    def _enqueue(self, moves: Sequence[Move]) -> StepMark:
        packed = [self._packed(move) for move in moves]
        rounds = [*device.rounds(packed, self.slab)]
        tables = [table for some in rounds for table in device_rows.tables([move.at(move.address) for move in some])]
        tabled = sum(2 * math.ceil(len(table.addresses) / device.ROWS) for table in tables)
        self.enqueued.append(tabled + sum(len(device.spans(some)) for some in rounds))
        self.rounds.append(len(rounds))
        self.free_at = max(self.free_at, self.clock.now) + sum(move.size for move in packed) / BUS
        return StepMark(self.free_at, self.clock)


def untouched(size: int) -> Chunk:
    """Memory that nobody writes to, so that the system need not find any."""
    memory = torch.empty(size, dtype=torch.uint8)
    return Chunk(memory, memoryview(memory.numpy()))
