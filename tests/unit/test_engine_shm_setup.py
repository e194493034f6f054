"""The memory of a rank's store: shared, so that decodes of the host may map it, registered with CUDA on a GPU, given up."""

from __future__ import annotations

import os

import pytest
import torch

from xpyd_sidecar.engine.worker import shm_setup
from xpyd_sidecar.engine.worker.shm_setup import StoreMemory
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.memory import registration
from xpyd_sidecar.memory.addresses import address_of
from xpyd_sidecar.memory.chunk import Chunk
from xpyd_sidecar.memory.node_binding import NodeBinding
from xpyd_sidecar.memory.store import CopyStore
from xpyd_sidecar.transport.shm.serve import SharedCopies, ShmServer

SIZE = 1 << 20


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
    monkeypatch.setattr(registration, "_runtime", lambda: made)
    return made


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether memory that is not shared was asked for pinned, each time."""
    asked: list[bool] = []
    real = shm_setup.host_memory

    def host_memory(size: int, *, pinned: bool, binding: NodeBinding) -> Chunk:
        asked.append(pinned)
        return real(size, pinned=False, binding=binding)

    monkeypatch.setattr(shm_setup, "host_memory", host_memory)
    return asked


class Rank:
    """A server, the store's memory, and how often sessions were told to let go of it."""

    def __init__(self, *, pinned: bool, insists: bool = False) -> None:
        self.server = ShmServer("this host", None, insists=insists)
        self.memory = StoreMemory(self.server, SIZE, pinned=pinned, insists=insists)
        self.given_up = 0
        self.memory.given_up = self._given_up

    def _given_up(self) -> None:
        self.given_up += 1

    @property
    def shared(self) -> SharedCopies:
        assert self.server.copies is not None
        return self.server.copies


def pages(shared: SharedCopies) -> int:
    return os.fstat(shared.fd).st_blocks * 512


@pytest.mark.parametrize("pinned", [False, True])
def test_the_store_lies_in_memory_that_peers_may_map_and_a_store_that_is_given_up_is_another_one(pinned: bool,
                                                                                              runtime: Runtime) -> None:
    rank = Rank(pinned=pinned)
    assert pages(rank.shared) < SIZE, "there is some for whoever maps it, and it costs nothing"
    names = set()
    for times in range(1, 4):
        at = address_of(rank.shared.copies)
        chunk = rank.memory.make(SIZE)
        assert sum(runtime.held.values()) == (SIZE if pinned else 0)
        assert min(runtime.held, default=at) == at
        chunk.tensor.fill_(7)
        assert chunk.view == rank.shared.copies == b"\7" * SIZE
        assert address_of(rank.memory.make(SIZE).view) == at, "it was made before: the same memory, registered once"
        names.add(rank.shared.name)
        rank.memory.release()
        assert runtime.held == {}
        assert rank.given_up == times
        assert pages(rank.shared) < SIZE
    assert len(names) == 3


def test_who_maps_memory_that_is_given_up_keeps_it_and_its_pages_go_with_the_last(runtime: Runtime) -> None:
    rank = Rank(pinned=True)
    rank.memory.make(SIZE).tensor.fill_(7)
    fd = os.dup(rank.shared.fd)
    rank.memory.release()
    assert os.pread(fd, 3, os.fstat(fd).st_size - 3) == b"\7\7\7"
    os.close(fd)


def test_sessions_are_told_when_the_next_memory_is_there(runtime: Runtime) -> None:
    """Who begins again at once is shown that, and not what is given up."""
    rank = Rank(pinned=True)
    rank.memory.make(SIZE)
    before, seen = rank.shared.name, list[bytes]()
    rank.memory.given_up = lambda: seen.append(rank.shared.name)
    rank.memory.release()
    assert seen == [rank.shared.name] != [before]


def test_a_store_of_a_rank_that_has_another_use_goes_back_when_it_is_empty(runtime: Runtime) -> None:
    rank = Rank(pinned=True)
    store = CopyStore(rank.memory.make, SIZE, emptied=rank.memory.release)
    lease = store.lease(1000)
    assert lease is not None
    store.spare(spare=True)
    assert (rank.given_up, sum(runtime.held.values())) == (0, SIZE)
    store.give(lease)
    assert (rank.given_up, runtime.held) == (1, {})


def test_memory_is_shared_where_a_link_within_a_host_is_wanted_alone(ordinary: list[bool]) -> None:
    memory = StoreMemory(None, SIZE, pinned=True, insists=False)
    memory.given_up = lambda: pytest.fail("there is nothing to let go of")
    assert len(memory.make(SIZE).view) == SIZE
    assert ordinary == [True]
    memory.release()


def test_a_system_without_such_memory_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch, ordinary: list[bool],
                                                            caplog: pytest.LogCaptureFixture) -> None:
    def none(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", none)
    rank = Rank(pinned=False)
    assert rank.server.copies is None
    assert "cannot map the copies of this rank: Function not implemented" in caplog.text
    assert len(rank.memory.make(SIZE).view) == SIZE
    assert ordinary == [False]
    with pytest.raises(ConfigError, match=r"shm cannot be used: Function not implemented; write kv\.transport: auto"):
        Rank(pinned=False, insists=True)


def test_cuda_that_does_not_register_it_is_named_at_the_start_and_meets_no_later_launch(
        runtime: Runtime, ordinary: list[bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    launches: list[str] = []

    def launch(_: int, device: str) -> None:
        launches.append(device)
        raise RuntimeError("CUDA error: what was refused before")

    monkeypatch.setattr(torch, "zeros", launch)
    runtime.refuses["register"] = 801
    rank = Rank(pinned=True)
    for _ in range(2):
        rank.memory.make(SIZE)
        assert rank.server.copies is None
    assert (ordinary, launches) == ([True, True], ["cuda"])
    assert caplog.text.count("CUDA does not register shared memory (error 801)") == 1
    with pytest.raises(ConfigError, match="shm cannot be used: CUDA does not register"):
        Rank(pinned=True, insists=True).memory.make(SIZE)


def test_memory_that_cuda_does_not_let_go_of_stays_and_the_engine_goes_on(runtime: Runtime,
                                                                         caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank(pinned=True)
    chunk, before = rank.memory.make(SIZE), rank.shared
    runtime.refuses["unregister"] = 713
    rank.memory.release()
    assert "the memory of copies stays taken: CUDA does not let go of it (error 713)" in caplog.text
    assert (rank.given_up, rank.shared) == (0, before)
    rank.memory.make(SIZE).tensor.fill_(8)
    assert chunk.view == b"\10" * SIZE


def test_a_system_that_has_no_more_such_memory_later_ends_no_engine(runtime: Runtime, monkeypatch: pytest.MonkeyPatch,
                                                                   ordinary: list[bool],
                                                                   caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank(pinned=True, insists=True)
    rank.memory.make(SIZE)

    def none(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none)
    rank.memory.release()
    assert (rank.server.copies, rank.given_up) == (None, 1)
    assert "Too many open files" in caplog.text
    assert len(rank.memory.make(SIZE).view) == SIZE
