"""A scripted GPU: the streams of ``memory.device``, its copy engines, and what enqueuing costs the thread that does it.

    device = ScriptedDevice(counters)
    mark = device.forward(0.006, began)        one layer of a step, which the host began to enqueue at ``began``
    ScriptedCopies(device, …).gather(…)        a mark that passes when the copy is complete, after what is computed now

    compute  ──[layer 0]──[layer 1]──[layer 2]──
    leave              └─[gather]──               waits for what compute has when it is enqueued
    come     ──[bring]──[bring]──                 waits for nothing
    place           └─[scatter]──                 waits for the marks that it is told of

Times are real: a mark passes when the clock has come to it, and whoever waits for one sleeps. What the connector computes
for a copy (rows, tables, spans) runs as it is; the host's time for the whole call is at least what was measured, and the
rest of it holds the interpreter. No memory is touched: caches, slab, ring and store are pages that nobody has written to,
and the sums of both sides are those of zeros.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lab.scripted_device import parameters
from lab.scripted_device.byte_work import ByteWork
from lab.scripted_device.counting import Counters
from xpyd_sidecar.engine import connector
from xpyd_sidecar.engine.worker import kv_cache
from xpyd_sidecar.engine.worker.kv_cache import KvCache
from xpyd_sidecar.engine.worker.worker_side import WorkerSide
from xpyd_sidecar.memory import registration
from xpyd_sidecar.memory.device import PackedRows
from xpyd_sidecar.memory.device_rows import RowShape, sum_tables, tables
from xpyd_sidecar.memory.marks import CopyMark


class ScriptedMark:
    """A moment of the device; asked by any thread."""

    def __init__(self, when: float) -> None:
        self.when = when

    def done(self) -> bool:
        """Whether it has passed."""
        return time.monotonic() >= self.when

    def wait(self, seconds: float) -> bool:
        """Sleep until it has, or for so long. Whether it has."""
        left = self.when + parameters.MARK_LATE_S - time.monotonic()
        if left > 0:
            time.sleep(min(left, seconds))
        return self.done()


class ScriptedDevice:
    """Of one process. By stream: when all that it has will be done."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._compute = self._leave = self._come = self._place = 0.0

    def hold(self, seconds: float, what: str) -> None:
        """The calling thread computes in Python for so much processor time, and holds the interpreter as other Python does:
        whoever wants it gets it after the switch interval, and this takes the longer.
        """
        self._counters.add_here(f"{what}_s", max(0.0, seconds))
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    def forward(self, seconds: float, began: float) -> ScriptedMark:
        """Some of a step is enqueued, which the host began at ``began``: it ends no sooner than its last launch."""
        start = max(self._compute, began)
        self._compute = max(start + seconds, time.monotonic())
        self._counters.span("forward", start, self._compute)
        return ScriptedMark(self._compute)

    def moment(self) -> ScriptedMark:
        """Now, in the order of the compute stream."""
        return ScriptedMark(max(self._compute, time.monotonic()))

    def leave(self, seconds: float) -> ScriptedMark:
        """Enqueue a copy out, after what is computed now."""
        start = max(self._leave, self._compute, time.monotonic())
        self._leave = start + seconds
        self._counters.span("out", start, self._leave)
        return ScriptedMark(self._leave)

    def come(self, seconds: float) -> ScriptedMark:
        """Enqueue a copy into the ring."""
        start = max(self._come, time.monotonic())
        self._come = start + seconds
        self._counters.span("in", start, self._come)
        return ScriptedMark(self._come)

    def place(self, seconds: float, after: Sequence[ScriptedMark]) -> ScriptedMark:
        """Enqueue a kernel that writes into blocks, after those marks."""
        start = max(self._place, time.monotonic(), *(mark.when for mark in after))
        self._place = start + seconds
        self._counters.span("place", start, self._place)
        return ScriptedMark(self._place)

    def fence(self, mark: ScriptedMark) -> None:
        """Later steps wait for a copy."""
        self._compute = max(self._compute, mark.when)

    def launched(self, call: str, count: int) -> None:
        """A call (``gather``, ``bring``, ``scatter``) has enqueued so many kernels and copies."""
        self._counters.add(f"calls {call}")
        self._counters.add("launches", count)


class Ranges:
    """Memory that CUDA knows, by address."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._sizes: dict[int, int] = {}

    def add(self, address: int, size: int) -> None:
        """It knows so many bytes from there on."""
        bisect.insort(self._begins, address)
        self._sizes[address] = size

    def remove(self, address: int) -> None:
        """Not any more."""
        self._begins.remove(address)
        del self._sizes[address]

    def holds(self, address: int, size: int) -> bool:
        """Whether it knows all of these bytes, and as one."""
        at = bisect.bisect_right(self._begins, address) - 1
        return at >= 0 and address + size <= self._begins[at] + self._sizes[self._begins[at]]


class ZeroSums:
    """Sums of pages that nobody has written to."""

    def __init__(self, count: int) -> None:
        self._count = count

    def read(self) -> NDArray[np.uint64]:
        """All of them."""
        return np.zeros(self._count, np.uint64)


class ScriptedRuntime:
    """CUDA's calls for this process's own memory (``memory.registration``)."""

    def __init__(self, work: ByteWork) -> None:
        self.known = Ranges()
        self._work = work

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 (CUDA's name)
        """Memory that is pinned is touched."""
        del flags
        self._work.first_touch(size)
        self.known.add(address, size)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 (CUDA's name)
        """Pages stay as they are."""
        self.known.remove(address)
        return 0


class ScriptedCopies:
    """What ``memory.device.DeviceCopies`` does on CUDA's streams, on those of a scripted device."""

    def __init__(self, scripted: ScriptedDevice, work: ByteWork, runtime: ScriptedRuntime) -> None:
        self.launches = 0
        self._scripted = scripted
        self._work = work
        self._runtime = runtime
        self._mapped = Ranges()
        self._last: ScriptedMark | None = None
        self.prepare(0, 0)

    def prepare(self, slab_bytes: int, ring_bytes: int) -> None:
        """Pages of the host that nobody touches stand for the device's."""
        self._slab, self._ring = (torch.empty(size, dtype=torch.uint8) for size in (slab_bytes, ring_bytes))

    def ring_range(self, at: int, size: int) -> torch.Tensor:
        """As of ``DeviceCopies``."""
        return self._ring[at:at + size]

    @property
    def slab_bytes(self) -> int:
        """As of ``DeviceCopies``."""
        return len(self._slab)

    @property
    def capturing(self) -> bool:
        """Graphs are recorded before there are prompts."""
        return False

    def compile(self, shape: RowShape, heads: int) -> None:
        """There is no kernel."""

    def register(self, address: int, size: int) -> int:
        """As of ``DeviceCopies``."""
        self._work.registered(size)
        self._mapped.add(address, size)
        return 0

    def unregister(self, address: int) -> int:
        """As of ``DeviceCopies``."""
        self._mapped.remove(address)
        return 0

    def moment(self) -> ScriptedMark:
        """As of ``DeviceCopies``."""
        return self._scripted.moment()

    def gather(self, packed: PackedRows, spans: Sequence[tuple[torch.Tensor, int]]) -> tuple[ScriptedMark, ZeroSums]:
        """As of ``DeviceCopies``."""
        with self._enqueuing("gather", parameters.gather_host_s(packed.size)):
            sums = self._launch(packed, self._slab.data_ptr())
            self.launches += len(spans)
        self._last = self._scripted.leave(parameters.gather_s(packed.size))
        return self._last, sums

    def fence(self) -> None:
        """As of ``DeviceCopies``."""
        if self._last is not None:
            self._scripted.fence(self._last)

    def bring(self, spans: Sequence[tuple[torch.Tensor, int]]) -> ScriptedMark:
        """As of ``DeviceCopies``: at once by the driver, where CUDA does not know the memory."""
        seconds = 0.0
        with self._enqueuing("bring", len(spans) * parameters.BRING_HOST_S):
            for host, _ in spans:
                address, size = host.data_ptr(), len(host)
                self.launches += 1
                if self._mapped.holds(address, size):
                    seconds += size / parameters.MAPPED_READ
                elif self._runtime.known.holds(address, size):
                    seconds += size / parameters.PINNED_READ
                else:
                    self._work.driver_read(size)
        return self._scripted.come(seconds)

    def scatter(self, packed: PackedRows, at: int, after: Sequence[CopyMark]) -> tuple[ScriptedMark, ZeroSums]:
        """As of ``DeviceCopies``."""
        marks = [mark for mark in after if isinstance(mark, ScriptedMark)]
        assert len(marks) == len(after)
        with self._enqueuing("scatter", parameters.scatter_host_s(packed.size)):
            sums = self._launch(packed, self._ring.data_ptr() + at)
        return self._scripted.place(parameters.scatter_s(packed.size), marks), sums

    def _launch(self, packed: PackedRows, address: int) -> ZeroSums:
        """Make the tables, and enqueue nothing."""
        rows = tables(packed.rows, address)
        runs = sum_tables([(array, address + at) for array, at in packed.arrays])
        count = sum(array.sums for array, _ in packed.arrays)
        self.launches += 1 + len(rows) + len(runs) + bool(count)  # the tables in, a kernel for each, the sums out
        return ZeroSums(count)

    @contextlib.contextmanager
    def _enqueuing(self, call: str, seconds: float) -> Iterator[None]:
        """The calling thread takes at least so long."""
        began, before = time.thread_time(), self.launches
        yield
        self._scripted.launched(call, self.launches - before)
        self._scripted.hold(seconds - (time.thread_time() - began), "launch")


class ScriptedCache(KvCache):
    """The connector's view of a cache on the scripted device."""

    def __init__(self, copies: ScriptedCopies, *how: Any) -> None:
        """``how``: as of ``KvCache``."""
        super().__init__(*how)
        self.device = torch.device("cuda", 0)
        scripted: Any = copies
        self.copies = scripted


def install(scripted: ScriptedDevice, work: ByteWork, room: int = 0) -> None:
    """Have connectors that are made from now on take the scripted device for CUDA's. ``room``: bytes of it that vLLM leaves
    to them; 0, as where the size of its cache is stated: they take what there is room for anyway.
    """
    runtime = ScriptedRuntime(work)

    def logical(region: torch.Tensor) -> bool:
        """A device's blocks have their values in order."""
        return bool(region.dtype.is_floating_point)

    def memory_bytes() -> int:
        return parameters.MACHINE_BYTES

    def left() -> int:
        return room

    view = partial(ScriptedCache, ScriptedCopies(scripted, work, runtime))
    connector.WorkerSide = partial(WorkerSide, view=view)  # type: ignore[attr-defined, assignment]
    connector.memory_bytes = memory_bytes  # type: ignore[attr-defined, assignment]
    connector.compat_room.device_bytes_left = left  # type: ignore[attr-defined]
    kv_cache.logical = logical
    registration._runtime = lambda: runtime
