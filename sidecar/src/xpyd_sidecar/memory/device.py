"""Blocks of a paged cache to packed memory and back on a CUDA device: all arrays and requests of a step together.

The host makes a table of rows (``device_rows``), and one kernel moves them all:

    out     cache ─[kernel]─▶ slab on the device ─[copy engine]─▶ host        host memory is pinned
    into    host ─[copy engine]─▶ slab ─[kernel]─▶ cache

Blocks go through a slab since a kernel that reads or writes host memory holds up every other kernel of the device while
the bus is full; a copy engine does not (docs/decisions/0039). What is on the device already is moved where it is. All of it
runs on one side stream, after all work that the compute stream has when it is enqueued. Who enqueues waits for nothing.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.memory.device_rows import PackedRows, PlacedRows, RowShape, tables
from xpyd_sidecar.memory.marks import CopyMark

PROGRAMS: Final = 64
"""Of the kernel."""
ROWS: Final = 1 << 17
"""That one launch moves at most: 8 GiB of blocks of 64 KiB."""
TABLE_BYTES: Final = 2 * 8 * ROWS
"""Of device memory, for their addresses."""
TILE_BYTES: Final = 16384
"""That one program moves at once."""


class CudaMark:
    """A mark that a CUDA event stands for. Asked by any thread."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event = event
        self._device = device

    def done(self) -> bool:
        """Whether the event has passed; never waits."""
        with torch.cuda.device(self._device):  # a thread begins with device 0, where asking would make a context
            return bool(self._event.query())

    def wait(self, seconds: float) -> bool:
        """Until it has passed; the interpreter is free meanwhile."""
        with torch.cuda.device(self._device):
            self._event.synchronize()
        return True


class Mover:
    """Moves rows of the caches of one device, on a stream of its own. Nothing waits for it but its marks."""

    def __init__(self, device: torch.device) -> None:
        """Make the stream.

        Raises:
            ConfigError: there is no Triton, which vLLM needs on a GPU too.
        """
        try:
            self._kernel = importlib.import_module("xpyd_sidecar.memory.device_kernel")
        except ImportError as error:
            raise ConfigError(f"kv connector: copies on {device} need Triton: {error}") from None
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._slab = torch.empty(0, dtype=torch.uint8, device=device)
        self._rows = torch.empty((ROWS, 2), dtype=torch.int64, device=device)
        self._last: Any = None
        self.launches = 0
        """Of kernels and copies, so far."""

    @property
    def slab_bytes(self) -> int:
        """Of device memory that blocks pass through."""
        return len(self._slab)

    def prepare(self, slab_bytes: int) -> None:
        """Take device memory to copy through: more at once goes through it in rounds."""
        self._slab = torch.empty(slab_bytes, dtype=torch.uint8, device=self._device)

    def compile(self, shape: RowShape) -> None:
        """Have the kernels for a shape made before they are needed: it takes seconds, once on a machine."""
        for out in (True, False):
            for aligned in (True, False):
                self._kernel.launch(self._rows[:0], shape, out=out, programs=1, tile=TILE_BYTES // shape.width,
                                    aligned=aligned)
        torch.cuda.synchronize(self._device)

    def out(self, moves: Sequence[PackedRows]) -> CopyMark:
        """Copy rows out into host memory, in rounds where they are more than the slab holds. Each move has no more."""
        with self._after_compute():
            for some in rounds(moves, len(self._slab)):
                self._launch(self._in_slab(some), out=True)
                for span, part in self._spans(some):
                    span.copy_(part, non_blocking=True)
            self._last = self._event()
        return CudaMark(self._last, self._device)

    def into(self, moves: Sequence[PackedRows]) -> CopyMark:
        """Copy rows into the cache, from host memory, in such rounds, or from where they are on the device."""
        with self._after_compute():
            here = [move.at(move.address) for move in moves if move.memory.is_cuda]
            if here:
                self._launch(here, out=False)
            hosts = sorted((move for move in moves if not move.memory.is_cuda), key=lambda move: move.address)
            for some in rounds(hosts, len(self._slab)):
                for span, part in self._spans(some):
                    part.copy_(span, non_blocking=True)
                self._launch(self._in_slab(some), out=False)
            return CudaMark(self._event(), self._device)

    def fence(self) -> None:
        """Later work of the compute stream waits for the copies out that are under way; the host does not."""
        if self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last)

    def _in_slab(self, moves: Sequence[PackedRows]) -> list[PlacedRows]:
        """The rows of a round, packed into the slab one behind the other."""
        out: list[PlacedRows] = []
        at = self._slab.data_ptr()
        for move in moves:
            out.append(move.at(at))
            at += move.size
        return out

    def _spans(self, moves: Sequence[PackedRows]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Host memory of a round and its part of the slab; neighbours of one allocation are one."""
        at = 0
        for span in spans(moves):
            self.launches += 1
            yield span, self._slab[at:at + len(span)]
            at += len(span)

    def _launch(self, placed: Sequence[PlacedRows], *, out: bool) -> None:
        for shape, addresses, aligned in tables(placed):
            for start in range(0, len(addresses), ROWS):
                some = torch.from_numpy(addresses[start:start + ROWS]).pin_memory()
                there = self._rows[:len(some)]
                there.copy_(some, non_blocking=True)
                self._kernel.launch(there, shape, out=out, programs=PROGRAMS, tile=TILE_BYTES // shape.width,
                                    aligned=aligned)
                self.launches += 2

    @contextlib.contextmanager
    def _after_compute(self) -> Iterator[None]:
        """Within it the side stream is the current one, and has waited for what the compute stream has now."""
        compute = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._side):
            self._side.wait_stream(compute)
            yield

    def _event(self) -> Any:
        event = torch.cuda.Event(blocking=True)
        event.record(self._side)
        return event


def rounds(moves: Sequence[PackedRows], slab_bytes: int) -> Iterator[Sequence[PackedRows]]:
    """One after the other, as many of them as the slab holds; those of a round by their addresses."""
    some: list[PackedRows] = []
    free = slab_bytes
    for move in moves:
        if move.size > free:
            yield sorted(some, key=lambda move: move.address)
            some, free = [], slab_bytes
        some.append(move)
        free -= move.size
    if some:
        yield sorted(some, key=lambda move: move.address)


def spans(moves: Sequence[PackedRows]) -> list[torch.Tensor]:
    """The packed memory of all, in order, with neighbours of one allocation as one."""
    found: list[tuple[torch.Tensor, int, int, int]] = []
    """The first tensor, what allocation it is of, its address, the bytes of all."""
    for move in moves:
        home = move.memory.untyped_storage().data_ptr()
        if found:
            first, of, address, size = found[-1]
            if of == home and address + size == move.address:
                found[-1] = first, of, address, size + move.size
                continue
        found.append((move.memory, home, move.address, move.size))
    return [first if len(first) == size else
            torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage(), first.storage_offset(), (size,))
            for first, _, _, size in found]
