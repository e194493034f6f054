"""Memory for kernels on one CUDA stream: tables of the rows that they move, and the sums that they return. Needs torch.

It is allocated at the start: an allocation takes milliseconds, in which the thread that launches waits and CUDA launches
nothing else.

    tables   numpy ──▶ slot, pinned ──▶ device ──▶ kernel
    sums                                           kernel ──▶ device ──▶ slot, pinned ──▶ ``MadeSums``

The device has one table and one array of sums, which launches reuse in the order of the stream. On the host each launch has
a slot, which is reused when its copies are complete and its ``MadeSums`` is deleted; after a launch that failed it never
is. A launch that is too large for a slot, or finds none free, gets memory of its own.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from xpyd_sidecar.memory.marks import NOW, CopyMark

WORD: Final = 8
"""Bytes of what tables and sums are made of."""


class MadeSums:
    """Sums that a kernel makes, in host memory: they can be read once the mark of their launch has passed."""

    def __init__(self, made: torch.Tensor) -> None:
        self._made = made

    def read(self) -> NDArray[np.uint64]:
        """Return a copy of all sums of the launch, ``[sums]``, in the order of its arrays."""
        found: NDArray[np.uint64] = self._made.numpy().view(np.uint64).copy()
        return found


class LaunchSlot:
    """Host memory (pinned for a GPU) for the tables and sums of one launch at a time."""

    def __init__(self, tables: torch.Tensor, sums: torch.Tensor) -> None:
        self.tables = tables
        self.sums = sums
        self.mark: CopyMark | None = NOW
        """When its copies are complete; None: a launch has it, and has not said."""
        self.made: Callable[[], MadeSums | None] = lambda: None
        """Who has the sums."""

    def fits(self, words: int, sums: int) -> bool:
        """Whether the slot is free and has room for a launch with ``words`` 64-bit words of tables and ``sums`` sums."""
        return (words <= len(self.tables) and sums <= len(self.sums) and self.made() is None
                and self.mark is not None and self.mark.done())


class LaunchArrays(NamedTuple):
    """Memory of one launch: its slot on the host, and tables ``[rows, 3]`` and sums ``[sums]`` on the device."""

    slot: LaunchSlot
    tables: torch.Tensor
    sums: torch.Tensor


class LaunchMemory:
    """Memory for the launches of one stream; used on one thread."""

    def __init__(self, device: torch.device, *, table_bytes: int, sums: int, slots: int) -> None:
        """Allocate ``slots`` slots, and memory on the device, for ``table_bytes`` bytes of tables and ``sums`` sums."""
        self._device = device
        self._tables, self._sums = self._on_device(table_bytes // WORD), self._on_device(sums)
        self._slots = deque(self._slot(table_bytes // WORD, sums) for _ in range(slots))

    def take(self, tables: NDArray[np.int64], sums: int) -> LaunchArrays:
        """Return memory for a launch with ``sums`` sums, and enqueue the copy of its tables ``[rows, 3]`` to the device.

        The caller must set ``slot.mark`` to a mark that passes when the launch and its copies are complete.
        """
        words = tables.size
        slot = next((one for one in self._slots if one.fits(words, sums)), None)
        if slot is None:
            slot = self._slot(words, sums)
        else:
            self._slots.remove(slot)
            self._slots.append(slot)
        slot.mark = None
        host = slot.tables[:words]
        host.numpy()[:] = tables.reshape(-1)
        there = self._tables[:words] if words <= len(self._tables) else self._on_device(words)
        there.copy_(host, non_blocking=True)
        made = self._sums[:sums] if sums <= len(self._sums) else self._on_device(sums)
        return LaunchArrays(slot, there.view(-1, 3), made)

    @staticmethod
    def bring_sums(of: LaunchArrays) -> MadeSums:
        """Enqueue the copy of a launch's sums to the host, in the current stream."""
        host = of.slot.sums[:len(of.sums)]
        if len(of.sums):
            host.copy_(of.sums, non_blocking=True)
        made = MadeSums(host)
        of.slot.made = weakref.ref(made)
        return made

    def _slot(self, words: int, sums: int) -> LaunchSlot:
        pinned = self._device.type == "cuda"
        return LaunchSlot(*(torch.empty(size, dtype=torch.int64, pin_memory=pinned) for size in (words, sums)))

    def _on_device(self, words: int) -> torch.Tensor:
        return torch.empty(words, dtype=torch.int64, device=self._device)
