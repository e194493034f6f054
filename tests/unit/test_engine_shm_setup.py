"""The memory of a rank's store: shared, so that decodes of the host may map it, and registered with CUDA on a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from xpyd_sidecar.engine import shm_setup
from xpyd_sidecar.engine.shm_setup import StoreMemory
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.session.link_choice import LinkOptions
from xpyd_sidecar.transport.moves_plain import address_of

SIZE = 1 << 20
AUTO, SHM = LinkOptions("auto"), LinkOptions("shm")


class Runtime:
    """Of CUDA: what is registered, and which call is refused."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.refuses: dict[str, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # CUDA's name
        assert (address in self.held, flags) == (False, 0)
        if not self.refuses.get("register"):
            self.held[address] = size
        return self.refuses.get("register", 0)

    def cudaHostUnregister(self, address: int) -> int:
        if not self.refuses.get("unregister"):
            del self.held[address]
        return self.refuses.get("unregister", 0)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(shm_setup, "_runtime", lambda: made)
    return made


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether memory that is not shared was asked for pinned, each time."""
    asked: list[bool] = []
    real = shm_setup.kv_cache.chunk

    def chunk(size: int, *, pinned: bool) -> Any:
        asked.append(pinned)
        return real(size, pinned=False)

    monkeypatch.setattr(shm_setup.kv_cache, "chunk", chunk)
    return asked


def pages(memory: StoreMemory) -> int:
    assert memory.sharing is not None
    return os.fstat(memory.sharing.fd).st_blocks * 512


@pytest.mark.parametrize("pinned", [False, True])
def test_the_store_lies_in_memory_that_peers_may_map_and_its_pages_go_back(pinned: bool, runtime: Runtime) -> None:
    memory = StoreMemory(AUTO, SIZE, pinned=pinned)
    assert memory.sharing is not None
    at = address_of(memory.sharing.copies)
    for _ in range(3):
        chunk = memory.make(SIZE)
        assert runtime.held == ({at: SIZE} if pinned else {})
        chunk.tensor.fill_(7)
        assert chunk.view == memory.sharing.copies == b"\7" * SIZE
        assert address_of(memory.make(SIZE).view) == at, "it was made before: the same memory, registered once"
        memory.emptied()
        assert runtime.held == {}
        assert pages(memory) < SIZE
        assert not any(chunk.view)


@pytest.mark.parametrize("transport", ["tcp", "nccl", "rdma"])
def test_memory_is_shared_where_a_way_within_a_host_is_wanted(transport: str, ordinary: list[bool]) -> None:
    memory = StoreMemory(LinkOptions(transport), SIZE, pinned=True)
    assert memory.sharing is None
    assert len(memory.make(SIZE).view) == SIZE
    assert ordinary == [True]
    memory.emptied()


def test_a_system_without_such_memory_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch, ordinary: list[bool],
                                                            caplog: pytest.LogCaptureFixture) -> None:
    def none(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", none)
    memory = StoreMemory(AUTO, SIZE, pinned=False)
    assert memory.sharing is None
    assert "cannot map the copies of this rank: Function not implemented" in caplog.text
    assert len(memory.make(SIZE).view) == SIZE
    assert ordinary == [False]
    with pytest.raises(ConfigError, match=r"shm cannot be used: Function not implemented; write kv\.transport: auto"):
        StoreMemory(SHM, SIZE, pinned=False)


def test_cuda_that_does_not_register_it_is_named_at_the_start_and_meets_no_later_launch(
        runtime: Runtime, ordinary: list[bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    launches: list[str] = []

    def launch(_: int, device: str) -> None:
        launches.append(device)
        raise RuntimeError("CUDA error: what was refused before")

    monkeypatch.setattr(torch, "zeros", launch)
    runtime.refuses["register"] = 801
    memory = StoreMemory(AUTO, SIZE, pinned=True)
    for _ in range(2):
        memory.make(SIZE)
        assert memory.sharing is None
    assert (ordinary, launches) == ([True, True], ["cuda"])
    assert caplog.text.count("CUDA does not register shared memory (error 801)") == 1
    with pytest.raises(ConfigError, match="shm cannot be used: CUDA does not register"):
        StoreMemory(SHM, SIZE, pinned=True).make(SIZE)


@pytest.mark.parametrize("why", ["cuda", "system"])
def test_pages_that_cannot_go_back_stay_and_the_engine_goes_on(why: str, runtime: Runtime, monkeypatch: pytest.MonkeyPatch,
                                                               caplog: pytest.LogCaptureFixture) -> None:
    memory = StoreMemory(AUTO, SIZE, pinned=True)
    chunk = memory.make(SIZE)
    chunk.tensor.fill_(7)
    assert memory.sharing is not None
    with monkeypatch.context() as patch:
        if why == "cuda":
            patch.setitem(runtime.refuses, "unregister", 713)
        else:
            patch.setattr(memory.sharing, "fd", -1)
        memory.emptied()
    assert "the memory of copies stays taken" in caplog.text
    assert all(chunk.view)
    memory.make(SIZE).tensor.fill_(8)
    assert chunk.view == b"\10" * SIZE
