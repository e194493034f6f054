"""Memory by which kernels are told of rows and tell of sums, of one stream. Needs torch.

All of it is taken at the start: to take some costs milliseconds, in which the thread that launches waits and CUDA launches
nothing else.

    tables   numpy ──▶ slot, pinned ──▶ device ──▶ kernel
    sums                                           kernel ──▶ device ──▶ slot, pinned ──▶ ``MadeSums``

On the device there is one table and one list of sums, used anew by each launch, in the order of the stream. A slot is used
again when its copies are complete and nobody has its sums any more; one whose launch has failed never is. What is too large
for it, or finds none that is free, has memory of its own.
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
    """Sums that a kernel makes: there once their mark has passed."""

    def __init__(self, made: torch.Tensor) -> None:
        self._made = made

    def read(self) -> NDArray[np.uint64]:
        """All of them, in the order of the arrays; their memory is used again when this is gone."""
        found: NDArray[np.uint64] = self._made.numpy().view(np.uint64).copy()
        return found


class LaunchSlot:
    """Pinned memory of one launch."""

    def __init__(self, tables: torch.Tensor, sums: torch.Tensor) -> None:
        self.tables = tables
        self.sums = sums
        self.mark: CopyMark | None = NOW
        """When its copies are complete; None: a launch has it, and has not said."""
        self.made: Callable[[], MadeSums | None] = lambda: None
        """Who has the sums."""

    def fits(self, words: int, sums: int) -> bool:
        """Whether a launch has room in it, now."""
        return (words <= len(self.tables) and sums <= len(self.sums) and self.made() is None
                and self.mark is not None and self.mark.done())


class LaunchArrays(NamedTuple):
    """The arrays of one launch: tables and sums, on the host and on the device."""

    slot: LaunchSlot
    tables: torch.Tensor
    sums: torch.Tensor


class LaunchMemory:
    """Memory for the launches of one stream; used on one thread."""

    def __init__(self, device: torch.device, *, table_bytes: int, sums: int, slots: int) -> None:
        """Take it: so many slots for tables of so many bytes, and so many sums."""
        self._device = device
        self._tables, self._sums = self._on_device(table_bytes // WORD), self._on_device(sums)
        self._slots = deque(self._slot(table_bytes // WORD, sums) for _ in range(slots))

    def take(self, tables: NDArray[np.int64], sums: int) -> LaunchArrays:
        """Memory of a launch with these tables ``[rows, 3]``, which are on their way to the device then.

        Whoever launches says with the slot's mark when that is done with.
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
        """Have the sums of a launch come to the host."""
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
