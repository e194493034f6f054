"""Memory that CUDA locks: as much as was asked for, in parts that no copy crosses, and given back with the last of it."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest

from xpyd_sidecar.memory import registration
from xpyd_sidecar.memory.registration import PART_BYTES, host_memory, lock, parts, unlock

MIB = 1 << 20


class Runtime:
    """Of CUDA: what is locked, and what it refuses."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.written: set[tuple[int, int]] = set()
        self.most = 1 << 60
        """Parts that it locks."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # CUDA's name
        assert flags == 0
        assert (address, size) in self.written, "pages are made while nothing waits for CUDA"
        if len(self.held) >= self.most:
            return 2
        self.held[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.held.pop(address, 0) else 713


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(registration, "_runtime", lambda: made)
    monkeypatch.setattr(registration.ctypes, "memset", lambda address, _, size: made.written.add((address, size)))
    return made


def mapped() -> int:
    """Bytes of all mappings of this process. The system joins neighbours, so that of one alone nothing can be told."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


@pytest.mark.parametrize("size", [1, 3 * MIB, 4608 * MIB])
def test_so_much_is_taken_as_was_asked_for(cuda: Runtime, size: int) -> None:
    """Nothing is rounded up but to pages: 4.5 GiB are not 8. No page of them is touched."""
    gc.collect()  # what others have left is not to go meanwhile
    before = mapped()
    memory = host_memory(size, pinned=True)
    assert (len(memory.view), len(memory.tensor)) == (size, size)
    assert size <= sum(cuda.held.values()) < size + 4096
    assert size <= mapped() - before < size + 2 * MIB
    del memory
    gc.collect()
    assert cuda.held == {}


def test_more_than_the_system_has_is_refused_with_its_size() -> None:
    with pytest.raises(MemoryError, match="the system does not give 134217728 MiB of memory"):
        host_memory(1 << 47, pinned=False)


def test_a_part_keeps_all_of_it_and_the_last_one_gives_it_back(cuda: Runtime) -> None:
    memory = host_memory(3 * MIB, pinned=True)
    part = memory.part(MIB, 10)
    del memory
    gc.collect()
    assert sum(cuda.held.values()) == 3 * MIB
    del part
    gc.collect()
    assert cuda.held == {}


@pytest.mark.parametrize(("begin", "size"), [(0, PART_BYTES), (4096, 3 * PART_BYTES), (PART_BYTES - 4096, 8192), (5, 1),
                                             (7, 0)])
def test_parts_are_the_same_for_all_memory_and_for_any_copy_within(begin: int, size: int) -> None:
    found = [(begin + offset, length) for offset, length in parts(begin, size)]
    assert sum(length for _, length in found) == size
    for at, length in found:
        assert at // PART_BYTES == (at + length - 1) // PART_BYTES
    for cut in (0, size // 3, size // 2):
        whole = [*parts(begin, size)]
        for offset, length in parts(begin + cut, size - cut):
            assert any(at <= cut + offset and cut + offset + length <= at + more for at, more in whole)


def test_what_cuda_does_not_lock_is_not_locked_in_part(cuda: Runtime) -> None:
    cuda.most = 2
    assert lock(4096, 3 * PART_BYTES) == 2
    assert cuda.held == {}
    cuda.most = 4
    assert lock(4096, 3 * PART_BYTES) == 0
    assert unlock(4096, 3 * PART_BYTES) == 0
    assert unlock(4096, MIB) == 713
    cuda.most = 0
    with pytest.raises(MemoryError, match="CUDA does not lock 3 MiB of memory"):
        host_memory(3 * MIB, pinned=True)
