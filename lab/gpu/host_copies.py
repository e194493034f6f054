"""Copies of blocks by a CPU, in the place of ``memory.device``: what the checks themselves are tried with, without a GPU.

Everything is done when it is called, so every mark has passed: that shows the bytes, the sums, and the checks. What moves
rows and makes sums is the tests' own (``tests/support/copies.py``).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xpyd_sidecar.memory.device import PackedRows
from xpyd_sidecar.memory.device_rows import RowShape
from xpyd_sidecar.memory.marks import NOW, CopyMark
from xpyd_sidecar.memory.registration import parts


class HostSums:
    """Sums that are made."""

    def __init__(self, made: NDArray[np.uint64]) -> None:
        self._made = made

    def read(self) -> NDArray[np.uint64]:
        """All of them, in the order of the arrays."""
        return self._made


class HostCopies:
    """The methods of ``DeviceCopies``, on a CPU. ``launches``: calls."""

    def __init__(self) -> None:
        self._support: Any = importlib.import_module("copies")
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._ring = torch.empty(0, dtype=torch.uint8)
        self.launches = 0

    def prepare(self, slab_bytes: int, ring_bytes: int) -> None:
        """Take the memory that copies pass through."""
        self._slab = torch.empty(slab_bytes, dtype=torch.uint8)
        self._ring = torch.empty(ring_bytes, dtype=torch.uint8)

    def ring_range(self, at: int, size: int) -> torch.Tensor:
        """Of the ring."""
        return self._ring[at:at + size]

    @property
    def slab_bytes(self) -> int:
        """The most that one ``gather`` may have."""
        return len(self._slab)

    def compile(self, shape: RowShape, heads: int) -> None:
        """Nothing is compiled."""

    def register(self, address: int, size: int) -> int:
        """A core reads whatever this process can."""
        del address, size
        return 0

    def unregister(self, address: int) -> int:
        """Nothing was registered."""
        del address
        return 0

    @property
    def capturing(self) -> bool:
        """A CPU records nothing."""
        return False

    def moment(self) -> CopyMark:
        """Now."""
        return NOW

    def fence(self) -> None:
        """Nothing is under way."""

    def gather(self, packed: PackedRows, spans: Sequence[tuple[torch.Tensor, int]]) -> tuple[CopyMark, HostSums]:
        """Copy blocks out of the cache."""
        self._check(packed, self._slab)
        self._support.moved(packed.rows, self._slab.data_ptr(), out=True)
        for host, at in spans:
            host.copy_(self._slab[at:at + len(host)])
        self.launches += 1 + _copies(spans)
        return NOW, HostSums(self._support.summed(packed, self._slab))

    def bring(self, spans: Sequence[tuple[torch.Tensor, int]]) -> CopyMark:
        """Copy host memory into ranges of the ring."""
        for host, at in spans:
            self._ring[at:at + len(host)].copy_(host)
        self.launches += _copies(spans)
        return NOW

    def scatter(self, packed: PackedRows, at: int, after: Sequence[CopyMark]) -> tuple[CopyMark, HostSums]:
        """Copy blocks out of a range of the ring into the cache."""
        del after
        self._check(packed, self._ring[at:])
        self._support.moved(packed.rows, self._ring.data_ptr() + at, out=False)
        self.launches += 1
        return NOW, HostSums(self._support.summed(packed, self._ring[at:]))

    @staticmethod
    def _check(packed: PackedRows, memory: torch.Tensor) -> None:
        """Rows are moved by their addresses, which nothing else bounds."""
        assert packed.size <= len(memory), f"{packed.size} bytes do not pass through {len(memory)}"


def _copies(spans: Sequence[tuple[torch.Tensor, int]]) -> int:
    """As many as a device makes of them."""
    return sum(len([*parts(host.data_ptr(), len(host))]) for host, _ in spans)
