"""Blocks of a paged cache to packed memory and back on a CUDA device, with sums that a kernel makes.

Prefill, by the engine's thread, for all arrays of a group of layers and all requests of a step together:

    cache ─[kernel]─▶ slab on the device ─[kernel: sums]   ─[copy engine]─▶ the store, in pinned host memory

Decode, by the thread that fetches; the engine's thread only says from when on the blocks may be written (``moment``):

    the store, mapped and registered here ─[copy engine]─▶ a range of the ring ─[kernel]─▶ cache, ─[kernel: sums]

Blocks go through device memory since a kernel that reads or writes host memory holds up every other kernel of the device
while the bus is full; a copy engine does not (docs/decisions/0039). Who enqueues waits for nothing. Streams: one for what
leaves, one for copies that come, one for what is placed; each waits on the device for what it needs of another.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv.packing import PackedArray
from xpyd_sidecar.memory import registration
from xpyd_sidecar.memory.device_rows import BlockRows, RowShape, sum_tables, tables
from xpyd_sidecar.memory.launch_memory import LaunchMemory, MadeSums
from xpyd_sidecar.memory.marks import CopyMark

FIRST: Final = -1
"""Priority of the streams: what they run is short, and others wait for it."""
PROGRAMS: Final = 64
"""Of the kernel that moves rows."""
TILE_BYTES: Final = 16384
"""That one program moves at once."""
TABLE_BYTES: Final = 1 << 20
"""Of the tables of a launch: 24 for each block and array."""
SUMS: Final = 1 << 14
OUT_SLOTS, IN_SLOTS = 20, 32
"""Launches whose tables or sums are in use at once: of parts of a step, and of pieces in the ring and beside it."""


class CudaMark:
    """A mark that a CUDA event stands for. Asked by any thread."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self.event = event
        self._device = device

    def done(self) -> bool:
        """Whether the event has passed; never waits."""
        with torch.cuda.device(self._device):  # a thread begins with device 0, where asking would make a context
            return bool(self.event.query())

    def wait(self, seconds: float) -> bool:
        """Until it has passed; the interpreter is free meanwhile."""
        del seconds
        with torch.cuda.device(self._device):
            self.event.synchronize()
        return True


class PackedRows(NamedTuple):
    """Rows of blocks, and the packed arrays that their sums are of, in one piece of memory."""

    rows: Sequence[BlockRows]
    arrays: Sequence[tuple[PackedArray, int]]
    """Each with where it begins in that memory; empty: no sums are wanted."""
    size: int
    """Bytes of that memory."""


class DeviceCopies:
    """Copies of one rank between its caches on a device and packed memory. ``launches``: of kernels and copies, so far."""

    def __init__(self, device: torch.device) -> None:
        """Make the streams.

        Raises:
            ConfigError: there is no Triton, which vLLM needs on a GPU too.
        """
        try:
            self._kernel = importlib.import_module("xpyd_sidecar.memory.device_kernel")
        except ImportError as error:
            raise ConfigError(f"kv connector: copies on {device} need Triton: {error}") from None
        self._device = device
        self._leave, self._come, self._place = (torch.cuda.Stream(device, priority=FIRST) for _ in range(3))
        self._slab = torch.empty(0, dtype=torch.uint8, device=device)
        self._ring = torch.empty(0, dtype=torch.uint8, device=device)
        self._out = LaunchMemory(device, table_bytes=TABLE_BYTES, sums=SUMS, slots=OUT_SLOTS)
        self._in = LaunchMemory(device, table_bytes=TABLE_BYTES // 4, sums=SUMS // 4, slots=IN_SLOTS)
        self._last: Any = None
        self.launches = 0

    def prepare(self, slab_bytes: int, ring_bytes: int) -> None:
        """Take the device memory that copies pass through."""
        self._slab = torch.empty(slab_bytes, dtype=torch.uint8, device=self._device)
        self._ring = torch.empty(ring_bytes, dtype=torch.uint8, device=self._device)

    def ring_range(self, at: int, size: int) -> torch.Tensor:
        """A range of the ring, for who fills it otherwise than by ``bring``."""
        return self._ring[at:at + size]

    @property
    def slab_bytes(self) -> int:
        """The most that one ``gather`` may have."""
        return len(self._slab)

    def compile(self, shape: RowShape, heads: int) -> None:
        """Have the kernels for a shape made before they are needed: it takes seconds, once on a machine."""
        nothing = torch.empty((0, 3), dtype=torch.int64, device=self._device)
        for out in (True, False):
            for aligned in (True, False):
                self._kernel.launch(nothing, shape, heads=heads, out=out, programs=1, tile=TILE_BYTES // shape.width,
                                    aligned=aligned)
        self._kernel.launch_sums(nothing, nothing.view(-1), heads=heads, head_bytes=shape.words * shape.width // heads)
        torch.cuda.synchronize(self._device)

    def register(self, address: int, size: int) -> int:
        """Have CUDA lock memory that this process only reads, so that ``bring`` needs no core. 0, or CUDA's error."""
        with torch.cuda.device(self._device):
            return registration.register(address, size, registration.READ_ONLY)

    def unregister(self, address: int) -> int:
        """Have CUDA let go of it. 0, or CUDA's error."""
        with torch.cuda.device(self._device):
            return registration.unregister(address)

    @property
    def capturing(self) -> bool:
        """Whether the compute stream records a graph: what is enqueued now does not run, and nothing else may be."""
        return bool(torch.cuda.is_current_stream_capturing())

    def moment(self) -> CudaMark:
        """Now, in the order of the compute stream: what was enqueued before uses blocks that are others' from now on."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return CudaMark(event, self._device)

    # --- what leaves: by the engine's thread ---

    def gather(self, packed: PackedRows, spans: Sequence[tuple[torch.Tensor, int]]) -> tuple[CopyMark, MadeSums]:
        """Copy blocks out, after all work that the compute stream has; no more than the slab holds.

        ``spans``: host memory, and from where on in the packed memory it is copied.
        """
        compute = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._leave):
            self._leave.wait_stream(compute)
            address = self._slab.data_ptr()
            sums = self._launch(packed, address, out=True)
            for host, at in self._locked(spans):
                host.copy_(self._slab[at:at + len(host)], non_blocking=True)
            self._last = self._event(self._leave)
        return CudaMark(self._last, self._device), sums

    def fence(self) -> None:
        """Later work of the compute stream waits for the copies out that are under way; the host does not."""
        if self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last)

    # --- what comes: by the thread that fetches ---

    def bring(self, spans: Sequence[tuple[torch.Tensor, int]]) -> CudaMark:
        """Copy pinned host memory into ranges of the ring. The host memory is in use until the mark has passed."""
        with self._here(self._come):
            for host, at in self._locked(spans):
                self._ring[at:at + len(host)].copy_(host, non_blocking=True)
            return CudaMark(self._event(self._come), self._device)

    def scatter(self, packed: PackedRows, at: int, after: Sequence[CopyMark]) -> tuple[CopyMark, MadeSums]:
        """Copy blocks out of a range of the ring into the cache, after those marks. The range is used until the new one."""
        with self._here(self._place):
            for mark in after:
                assert isinstance(mark, CudaMark)
                self._place.wait_event(mark.event)
            address = self._ring.data_ptr() + at
            sums = self._launch(packed, address, out=False)
            return CudaMark(self._event(self._place), self._device), sums

    def _launch(self, packed: PackedRows, address: int, *, out: bool) -> MadeSums:
        """Have kernels move rows and make sums, by tables that go to the device together."""
        rows = tables(packed.rows, address)
        runs = sum_tables([(array, address + at) for array, at in packed.arrays])
        found = [one.addresses for one in rows] + [one.runs for one in runs]
        memory = self._out if out else self._in
        arrays = memory.take(np.concatenate(found), sum(array.sums for array, _ in packed.arrays))
        device = arrays.tables.split([len(one) for one in found])
        for (shape, heads, _, aligned), addresses in zip(rows, device, strict=False):
            self._kernel.launch(addresses, shape, heads=heads, out=out, programs=PROGRAMS, tile=TILE_BYTES // shape.width,
                                aligned=aligned)
        for one, table in zip(runs, device[len(rows):], strict=True):
            self._kernel.launch_sums(table, arrays.sums, heads=one.heads, head_bytes=one.head_bytes)
        made = memory.bring_sums(arrays)
        arrays.slot.mark = CudaMark(self._event(self._leave if out else self._place), self._device)
        self.launches += 1 + len(device) + bool(runs)
        return made

    def _locked(self, spans: Sequence[tuple[torch.Tensor, int]]) -> Iterator[tuple[torch.Tensor, int]]:
        """The same, cut where one copy cannot have both sides."""
        for host, at in spans:
            for offset, size in registration.parts(host.data_ptr(), len(host)):
                self.launches += 1
                yield host[offset:offset + size], at + offset

    @contextlib.contextmanager
    def _here(self, stream: Any) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield

    @staticmethod
    def _event(stream: Any) -> Any:
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event
