"""When copies between a KV cache and host memory are complete: at once (a CPU), or when a scripted GPU has come to them.

    clock = Clock()
    gpu = Gpu(clock)                            one for each rank; the ranks and engines of a test share the clock
    gpu.compute(LAYER_S, write)                 a kernel: nothing is written before the clock has come to its end
    gpu.memory(caches, blocks).copies.gather(…)  a mark that passes later
    clock.step()                                a moment passes

A GPU has the streams that ``memory.device`` uses on CUDA. Who enqueues does not wait, so the host runs ahead:

    host      forward n │ forward n+1 │ …
    compute   ──[layer 0]──[layer 1]──[layer 2]──[layer 0]──
    leave                                        └─[gather]──          waits for what compute had when it was enqueued
    come      ──[bring]──[bring]──                                     waits for nothing
    place                └─[scatter]──                                 waits for what it is told to

Everything happens at the end of its time, in that order: a copy out has what the cache holds *then*, so what the host
enqueued before it is in it, and what ought to wait for it and does not ruins it. Host memory of a copy that is not complete
is filled with ``GARBAGE``. The clock moves when it is told to, and never by itself.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from xpyd_sidecar.engine.worker.kv_cache import KvCache
from xpyd_sidecar.kv.packing import sums_of
from xpyd_sidecar.kv.reach import LayerGroup
from xpyd_sidecar.memory import device, device_rows
from xpyd_sidecar.memory.marks import NOW, CopyMark

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
        if threading.current_thread().name in {"xpyd-copies", "xpyd-arrivals"}:
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
        self._side = self._come = self._place = 0.0

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

    def moment(self) -> Event:
        """When all kernels that are enqueued now will have ended."""
        return self.clock.at(max(self._compute, self.clock.now), lambda: None)

    def come(self, call: Callable[[], None]) -> Event:
        """Enqueue a copy that comes: it waits for those before it alone."""
        self._come = max(self._come, self.clock.now) + self.copy_s
        return self.clock.at(self._come, call)

    def place(self, after: Sequence[Event], call: Callable[[], None]) -> Event:
        """Enqueue a kernel that places what has come, after those events."""
        self._place = max(self._place, self.clock.now, *(event.at for event in after)) + self.place_s
        return self.clock.at(self._place, call)

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
    """The cache of a scripted GPU: its copies are ``LateCopies``."""

    def __init__(self, gpu: Gpu, caches: dict[str, torch.Tensor], num_blocks: int, groups: Groups = ONE) -> None:
        super().__init__(caches, num_blocks, groups)
        copies: Any = LateCopies(gpu)
        self.copies = copies


class LateSums:
    """Sums that a kernel makes: there when its event has passed."""

    def __init__(self) -> None:
        self.made: NDArray[np.uint64] | None = None

    def read(self) -> NDArray[np.uint64]:
        """All of them."""
        if self.made is None:
            raise Misuse("sums were read before their kernel has ended")
        return self.made


class LateCopies:
    """What ``memory.device.DeviceCopies`` does on CUDA's streams, on those of a scripted GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self.gathers = self.scatters = self.launches = 0
        """Times that something was enqueued."""
        self.registered: dict[int, int] = {}
        """Bytes, by address."""
        self._gpu = gpu
        self._last: Event | None = None
        self._slab = self._ring = torch.empty(0, dtype=torch.uint8)

    def prepare(self, slab_bytes: int, ring_bytes: int) -> None:
        """Take the device memory that copies pass through."""
        self._slab = torch.empty(SLAB_BYTES, dtype=torch.uint8)
        self._ring = torch.empty(ring_bytes, dtype=torch.uint8)

    def ring_range(self, at: int, size: int) -> torch.Tensor:
        """Of the ring, for who fills it otherwise than by ``bring``."""
        return self._ring[at:at + size]

    @property
    def slab_bytes(self) -> int:
        """The most that one ``gather`` may have."""
        return len(self._slab)

    @property
    def capturing(self) -> bool:
        """Whether the compute stream records a graph."""
        return self._gpu.capturing

    def compile(self, shape: device_rows.RowShape, heads: int) -> None:
        """Nothing is compiled."""

    def register(self, address: int, size: int) -> int:
        """The copy engine reads it from now on."""
        self.registered[address] = size
        return 0

    def unregister(self, address: int) -> int:
        """Not any more."""
        del self.registered[address]
        return 0

    def moment(self) -> Event:
        """Now, in the order of the compute stream."""
        return self._gpu.moment()

    def gather(self, packed: device.PackedRows, spans: Sequence[tuple[torch.Tensor, int]]) -> tuple[Event, LateSums]:
        """Copy blocks out, after all kernels that are enqueued now."""
        self.gathers += 1
        sums = LateSums()
        for host, _ in spans:
            host.fill_(GARBAGE)

        def act() -> None:
            moved(packed.rows, self._slab.data_ptr(), out=True)
            sums.made = summed(packed, self._slab)
            for host, at in spans:
                host.copy_(self._slab[at:at + len(host)])

        self._last = self._gpu.side(self._gpu.copy_s, act)
        return self._last, sums

    def fence(self) -> None:
        """Later kernels wait for the copies out."""
        if self._last is not None:
            self._gpu.fence(self._last)

    def bring(self, spans: Sequence[tuple[torch.Tensor, int]]) -> Event:
        """Copy host memory into the ring: it is read then."""
        def act() -> None:
            for host, at in spans:
                self._ring[at:at + len(host)].copy_(host)

        return self._gpu.come(act)

    def scatter(self, packed: device.PackedRows, at: int, after: Sequence[Event]) -> tuple[Event, LateSums]:
        """Copy blocks out of the ring into the cache, after those events: it is read then."""
        self.scatters += 1
        sums = LateSums()

        def act() -> None:
            moved(packed.rows, self._ring.data_ptr() + at, out=False)
            sums.made = summed(packed, self._ring[at:])

        return self._gpu.place(after, act), sums


def summed(packed: device.PackedRows, memory: torch.Tensor) -> NDArray[np.uint64]:
    """The sums of packed arrays, in their order."""
    view = memory.numpy()
    found = [sums_of(view[at:at + one.size], one) for one, at in packed.arrays]
    return np.concatenate(found) if found else np.zeros(0, np.uint64)


def moved(rows: Sequence[device_rows.BlockRows], address: int, *, out: bool) -> None:
    """What ``memory.device_kernel`` does: words of each row go from the cache to packed memory, or back."""
    for shape, heads, addresses, _ in device_rows.tables(rows, address):
        word, head = np.arange(shape.words), shape.words // heads
        outer = word // shape.together
        second = outer // shape.sizes[2]
        there = (second // shape.sizes[1] * shape.strides[0] + second % shape.sizes[1] * shape.strides[1] +
                 outer % shape.sizes[2] * shape.strides[2] + word % shape.together)
        for cache, place, apart in addresses.tolist():
            here = word // head * apart + word % head
            theirs, ours = words_at(cache, shape.width, there), words_at(place, shape.width, here)
            if out:
                ours[here] = theirs[there]
            else:
                theirs[there] = ours[here]


def words_at(address: int, width: int, used: NDArray[np.int64]) -> NDArray[Any]:
    """Memory from an address on, as far as it is used."""
    kind = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}[width]
    found: NDArray[Any] = np.ctypeslib.as_array((kind * (int(used.max()) + 1)).from_address(address))
    return found


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
