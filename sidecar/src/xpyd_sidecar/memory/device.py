"""Copies of KV blocks between a paged cache on a CUDA device and packed memory, with checksums that a kernel makes.

Prefill, on the engine's thread, for all arrays of a group of layers and all requests of a step together:

    cache ─[kernel]─▶ slab on the device ─[kernel: sums]   ─[copy engine]─▶ the store, in pinned host memory

Decode, on the thread that fetches; the engine's thread only marks from when on the blocks may be written (``moment``):

    the store, mapped and registered here ─[copy engine]─▶ a range of the ring ─[kernel]─▶ cache, ─[kernel: sums]

Slab and ring are device memory that is allocated once. Blocks pass through it since a kernel that reads or writes host
memory stalls every other kernel of the device while the bus is full, and a copy engine does not (docs/decisions/0039).
``gather``, ``bring`` and ``scatter`` enqueue work and do not wait for it. There are three streams: for copies out, for
copies into the ring, and for copies from the ring into the cache; where one needs another's work, the device waits.
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
    """A ``CopyMark`` that has passed once a recorded CUDA event has. May be used on any thread."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self.event = event
        self._device = device

    def done(self) -> bool:
        """Whether the event has passed; never waits."""
        with torch.cuda.device(self._device):  # a thread begins with device 0, where asking would make a context
            return bool(self.event.query())

    def wait(self, seconds: float) -> bool:
        """Wait until the event has passed, however long (``seconds`` is ignored), without the GIL. Always True."""
        del seconds
        with torch.cuda.device(self._device):
            self.event.synchronize()
        return True


class PackedRows(NamedTuple):
    """Rows of blocks that one launch moves, and the packed arrays that it makes sums of, in one range of packed memory."""

    rows: Sequence[BlockRows]
    arrays: Sequence[tuple[PackedArray, int]]
    """Each with where it begins in that memory; empty: no sums are wanted."""
    size: int
    """Bytes of that memory."""


class DeviceCopies:
    """Copies between one rank's KV cache on a device and packed memory. ``launches``: kernels and copies so far."""

    def __init__(self, device: torch.device) -> None:
        """Create the streams, and the memory for tables and sums.

        Raises:
            ConfigError: Triton, which vLLM needs on a GPU too, cannot be imported.
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
        """Allocate the device memory that copies pass through: the slab for copies out, the ring for copies in."""
        self._slab = torch.empty(slab_bytes, dtype=torch.uint8, device=self._device)
        self._ring = torch.empty(ring_bytes, dtype=torch.uint8, device=self._device)

    def ring_range(self, at: int, size: int) -> torch.Tensor:
        """Return bytes ``at`` to ``at + size`` of the ring, for a link that fills them itself instead of by ``bring``."""
        return self._ring[at:at + size]

    @property
    def slab_bytes(self) -> int:
        """Size of the slab: the most packed bytes that one ``gather`` may copy."""
        return len(self._slab)

    def compile(self, shape: RowShape, heads: int) -> None:
        """Compile the kernels for rows of one shape with ``heads`` heads, which takes seconds the first time on a machine.

        Waits for the device; to be called before the engine serves.
        """
        nothing = torch.empty((0, 3), dtype=torch.int64, device=self._device)
        for out in (True, False):
            for aligned in (True, False):
                self._kernel.launch(nothing, shape, heads=heads, out=out, programs=1, tile=TILE_BYTES // shape.width,
                                    aligned=aligned)
        self._kernel.launch_sums(nothing, nothing.view(-1), heads=heads, head_bytes=shape.words * shape.width // heads)
        torch.cuda.synchronize(self._device)

    def register(self, address: int, size: int) -> int:
        """Have CUDA lock ``size`` bytes that this process only reads, so that ``bring`` needs no CPU core for them.

        Returns 0, or CUDA's error code.
        """
        with torch.cuda.device(self._device):
            return registration.register(address, size, registration.READ_ONLY)

    def unregister(self, address: int) -> int:
        """Undo ``register`` for the memory that begins at ``address``. Returns 0, or CUDA's error code."""
        with torch.cuda.device(self._device):
            return registration.unregister(address)

    @property
    def capturing(self) -> bool:
        """Whether the compute stream records a CUDA graph: work enqueued now would not run, and no copy may be enqueued."""
        return bool(torch.cuda.is_current_stream_capturing())

    def moment(self) -> CudaMark:
        """Return a mark that passes when the compute stream's work so far is done: freed blocks may be written then."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return CudaMark(event, self._device)

    # --- what leaves: by the engine's thread ---

    def gather(self, packed: PackedRows, spans: Sequence[tuple[torch.Tensor, int]]) -> tuple[CopyMark, MadeSums]:
        """Copy blocks from the cache into host memory, after all work that the compute stream has now.

        Returns a mark that passes when the copies are complete, and the sums, which can be read then.

        Args:
            packed: the blocks, ``slab_bytes`` packed bytes at most.
            spans: host memory, each with the offset in bytes in packed memory that its copy begins at.
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
        """Make later work of the compute stream wait, on the device, for all copies out that were enqueued before."""
        if self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last)

    # --- what comes: by the thread that fetches ---

    def bring(self, spans: Sequence[tuple[torch.Tensor, int]]) -> CudaMark:
        """Copy pinned host memory into the ring. ``spans``: host memory, each with its offset in bytes in the ring.

        The host memory must stay unchanged until the returned mark has passed.
        """
        with self._here(self._come):
            for host, at in self._locked(spans):
                self._ring[at:at + len(host)].copy_(host, non_blocking=True)
            return CudaMark(self._event(self._come), self._device)

    def scatter(self, packed: PackedRows, at: int, after: Sequence[CopyMark]) -> tuple[CopyMark, MadeSums]:
        """Copy blocks from the ring, where they begin at byte ``at``, into the cache, once all marks ``after`` have passed.

        Returns a mark and the sums. Until the mark has passed the sums cannot be read, and the range of the ring is in use.
        """
        with self._here(self._place):
            for mark in after:
                assert isinstance(mark, CudaMark)
                self._place.wait_event(mark.event)
            address = self._ring.data_ptr() + at
            sums = self._launch(packed, address, out=False)
            return CudaMark(self._event(self._place), self._device), sums

    def _launch(self, packed: PackedRows, address: int, *, out: bool) -> MadeSums:
        """Enqueue kernels that move rows (``out``: to ``address``, else from it) and make sums, in the current stream."""
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
        """Yield the spans, cut so that none crosses the border of two parts that CUDA locks (``registration.parts``)."""
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
