"""When copies between a KV cache and host memory are complete: at once (a CPU), or when a scripted GPU has come to them.

    clock = Clock()
    gpu = Gpu(clock)                            one for each rank; the ranks and engines of a test share the clock
    gpu.compute(LAYER_S, write)                 a kernel: nothing is written before the clock has come to its end
    gpu.memory(caches, blocks).gather(…)        a mark that passes later
    clock.step()                                a moment passes

A GPU has two streams, as ``engine.kv_cache`` uses them on CUDA. Who enqueues does not wait, so the host runs ahead:

    host      forward n │ forward n+1 │ …
    compute   ──[layer 0]──[layer 1]──[layer 2]──[layer 0]──
    side                                         └─[gather]──          waits for what compute had when it was enqueued

Everything happens at the end of its time, in that order: a copy out has what the cache holds *then*, so what the host
enqueued before it is in it, and what ought to wait for it and does not ruins it. Host memory of a copy that is not complete
is filled with ``GARBAGE``. The clock moves when it is told to, and never by itself.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from xpyd_sidecar.engine.kv_cache import KvCache, Move
from xpyd_sidecar.kv.reach import LayerGroup
from xpyd_sidecar.memory.marks import NOW, CopyMark
from xpyd_sidecar.transport.gates import CacheArray

Groups = Mapping[str, LayerGroup]
ONE: Final[Groups] = {}
"""All layers are of one group."""
MOMENT_S: Final = 0.002
"""Between two steps of an engine."""
LAYER_S: Final = 0.001
"""A layer's forward: the host enqueues one of three layers while the GPU has done none of them."""
COPY_S: Final = 0.0005
"""Of blocks out of the cache."""
PLACE_S: Final = 0.01
"""Of blocks into it: longer than a load's report takes to the scheduler, so one that is made too early is seen."""
SLAB_BYTES: Final = 1 << 16
GARBAGE: Final = 0xA5
PATIENCE_S: Final = 0.05
"""Of a thread that waits for a mark, between two looks whether it is to end."""
RUNNERS: Final = ("at once", "late", "late v1")
"""What by-hand tests run with: V1 on a CPU, V2 on a GPU; V1 on a GPU too where the order of hooks matters."""


class Misuse(AssertionError):
    """What CUDA forbids."""


class Event:
    """A mark that passes at ``at`` on the clock. Asked by any thread."""

    def __init__(self, at: float, clock: Clock) -> None:
        self.at = at
        self._clock = clock
        self._passed = threading.Event()

    def passes(self) -> None:
        """The clock has come to it."""
        self._passed.set()

    def done(self) -> bool:
        """Whether it has passed; never waits."""
        return self._passed.is_set()

    def wait(self, seconds: float) -> bool:
        """Whether it has passed. The thread that waits for copies leaves the clock alone; any other is the host of a
        forward, which the device goes on with meanwhile.
        """
        if threading.current_thread().name == "xpyd-copies":
            return self._passed.wait(min(seconds, PATIENCE_S))
        self._clock.advance(max(0.0, self.at - self._clock.now))
        return self.done()


class Clock:
    """A script's time. An engine stepped by hand moves it on, and so does a test: it is one itself."""

    def __init__(self) -> None:
        self.now = 0.0
        self.counts: dict[str, float] = {}
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None], Event]] = []

    def at(self, when: float, call: Callable[[], None]) -> Event:
        """Have ``call`` made at a time; what is due at one time is done in the order in which it was put down."""
        with self._lock:
            event = Event(when, self)
            heapq.heappush(self._due, (when, next(self._numbers), call, event))
            return event

    def advance(self, seconds: float) -> None:
        """Time passes."""
        with self._lock:
            end = self.now + seconds
            while self._due and self._due[0][0] <= end:
                self.now, _, call, event = heapq.heappop(self._due)
                call()
                event.passes()
            self.now = end

    def step(self) -> None:
        """A moment passes."""
        self.advance(MOMENT_S)

    def stop(self) -> None:
        """Nothing to end."""


class Cpu:
    """Everything is done at once."""

    capturing = False
    """Whether a graph is being recorded; its memory says so to the hooks of a forward."""

    def compute(self, seconds: float, call: Callable[[], object] | None = None) -> None:
        """Do it."""
        if call is not None:
            call()

    def wait(self) -> None:
        """Nothing is under way."""

    def memory(self, caches: dict[str, torch.Tensor], num_blocks: int, groups: Groups = ONE) -> KvCache:
        """As it is."""
        return KvCache(caches, num_blocks, groups)


class Gpu:
    """Two streams on a clock."""

    def __init__(self, clock: Clock, *, copy_s: float = COPY_S, place_s: float = PLACE_S) -> None:
        self.clock = clock
        self.copy_s = copy_s
        self.place_s = place_s
        self.capturing = False
        self._compute = 0.0
        """When all that was enqueued so far will be done."""
        self._side = 0.0

    def compute(self, seconds: float, call: Callable[[], object] | None = None) -> None:
        self._compute = max(self._compute, self.clock.now) + seconds
        self.clock.at(self._compute, lambda: call and call())

    def wait(self) -> None:
        self.clock.advance(max(0.0, self._compute - self.clock.now))

    def memory(self, caches: dict[str, torch.Tensor], num_blocks: int, groups: Groups = ONE) -> KvCache:
        return LateMemory(self, caches, num_blocks, groups)

    def side(self, seconds: float, call: Callable[[], None]) -> Event:
        """Enqueue a copy: it waits for all kernels that are enqueued now."""
        if self.capturing:
            raise Misuse("a copy was enqueued while the compute stream recorded a graph")
        self._side = max(self._side, self._compute, self.clock.now) + seconds
        return self.clock.at(self._side, call)

    def fence(self, event: Event) -> None:
        """Kernels that are enqueued later wait for an event."""
        self._compute = max(self._compute, event.at)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """The compute stream records what is enqueued, and runs none of it."""
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False


class LateMemory(KvCache):
    """The connector's memory on a scripted GPU: what it does there with CUDA's streams and events."""

    def __init__(self, gpu: Gpu, caches: dict[str, torch.Tensor], num_blocks: int, groups: Groups = ONE) -> None:
        super().__init__(caches, num_blocks, groups)
        self._gpu = gpu
        self._out: Event | None = None
        self.gathers = self.scatters = 0
        """Times that copies were enqueued."""

    @property
    def at_once(self) -> bool:
        """Copies are enqueued when the whole step is."""
        return False

    @property
    def most_bytes(self) -> int | None:
        """Of device memory that copies out pass through."""
        return SLAB_BYTES

    def caches(self) -> list[CacheArray | None]:
        """Other threads may write into none."""
        return [None for _ in self.regions]

    def gather(self, moves: Sequence[Move]) -> CopyMark:
        """Enqueue it."""
        self.gathers += 1
        for move in moves:
            move.packed.fill_(GARBAGE)
        host = super().gather
        self._out = self._gpu.side(self._gpu.copy_s, lambda: _nothing(host(moves)))
        return self._out

    def fence(self) -> None:
        """Later kernels wait for the copies out."""
        if self._out is not None:
            self._gpu.fence(self._out)
            self._out = None

    def scatter(self, moves: Sequence[Move]) -> CopyMark:
        """Enqueue it: packed memory is read then."""
        self.scatters += 1
        host = super().scatter
        return self._gpu.side(self._gpu.place_s, lambda: _nothing(host(moves)))


@dataclass
class Looks:
    """A mark that passes at the nth look at it, for ranks that have no clock; ``most`` 0: never."""

    most: int
    count: int = 0

    def done(self) -> bool:
        """One more look."""
        self.count += 1
        return 0 < self.most <= self.count

    def wait(self, seconds: float) -> bool:
        """One more look, after a moment."""
        time.sleep(min(seconds, 0.001))
        return self.done()


def clock_of(copies: str) -> dict[str, Any]:
    """What an engine is given so that its copies are complete then; the engines of one test share it."""
    if copies == "at once":
        return {}
    return {"clock": Clock(), "runner": "v1" if copies == "late v1" else "v2"}


def at_once() -> CopyMark:
    """A mark of a CPU."""
    return NOW


def after_looks() -> CopyMark:
    """A mark of a GPU that is asked three times."""
    return Looks(3)


def _nothing(_: object) -> None:
    """What an action returned."""
