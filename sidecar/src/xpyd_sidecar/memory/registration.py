"""Host memory that CUDA locks, so that its copy engines reach it without a core. Needs torch."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch

from xpyd_sidecar.memory.addresses import address_of
from xpyd_sidecar.memory.chunk import Chunk
from xpyd_sidecar.memory.node_binding import UNBOUND, NodeBinding

READ_ONLY: Final = 8
"""cudaHostRegisterReadOnly: of memory that this process can only read."""
PART_BYTES: Final = 256 << 20
"""Locked at once: 10 ms on an H200, in which this process launches nothing."""


def host_memory(size: int, *, pinned: bool, binding: NodeBinding = UNBOUND) -> Chunk:
    """``size`` bytes, which go back to the system with the last who holds some. ``pinned``: CUDA locks them.

    ``binding``: says at which NUMA node they are.

    Not torch's pinned memory: that is rounded up to a power of two, and kept when nobody has it any more.

    Raises:
        MemoryError: the system does not give so much, or CUDA does not lock it.
    """
    try:
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system does not give {size >> 20} MiB of memory ({error.strerror})") from error
    view = memoryview(memory)
    binding.memory(view)
    if pinned:
        address = address_of(view)
        with binding.pages():
            code = lock(address, len(view))
        if code:
            raise MemoryError(f"CUDA does not lock {size >> 20} MiB of memory (error {code})")
        weakref.finalize(view, _give_back, address, len(view), memory).atexit = False
    tensor = torch.frombuffer(view, dtype=torch.uint8)[:size]
    return Chunk(tensor, memoryview(tensor.numpy()))


def _give_back(address: int, size: int, memory: mmap.mmap) -> None:
    """CUDA lets go, and then the system has it."""
    unlock(address, size)
    memory.close()


def lock(address: int, size: int) -> int:
    """Have CUDA lock fresh memory of this process, in parts (``parts``). 0, or CUDA's error.

    Its pages are made before, by writing zeros: that takes ten times as long as to lock them, and nothing waits for it.
    """
    for offset, length in parts(address, size):
        ctypes.memset(address + offset, 0, length)
        if code := register(address + offset, length):
            unlock(address, offset)
            return code
    return 0


def unlock(address: int, size: int) -> int:
    """Have CUDA let go of memory that it has locked. 0, or CUDA's error."""
    return max((unregister(address + offset) for offset, _ in parts(address, size)), default=0)


def parts(address: int, size: int) -> Iterator[tuple[int, int]]:
    """Offset and size of the parts in which memory is locked, whatever it is a part of: CUDA copies within one alone."""
    offset = 0
    while offset < size:
        length = min(size - offset, PART_BYTES - (address + offset) % PART_BYTES)
        yield offset, length
        offset += length


def register(address: int, size: int, flags: int = 0) -> int:
    """Have CUDA lock memory, for all devices. 0, or CUDA's error."""
    code = int(_runtime().cudaHostRegister(address, size, flags))
    if code:
        with contextlib.suppress(RuntimeError):  # it stays the thread's last error, which its next launch would raise
            torch.zeros(1, device="cuda")
    return code


def unregister(address: int) -> int:
    """Have CUDA let go of memory. 0, or CUDA's error."""
    return int(_runtime().cudaHostUnregister(address))


def _runtime() -> Any:
    return torch.cuda.cudart()
