"""Another process's memory is registered part by part, in turns, bounded, and let go of only when nothing reads it."""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from xpyd_sidecar.memory import mapped_store
from xpyd_sidecar.memory.addresses import address_of
from xpyd_sidecar.memory.mapped_store import MappedStore, Registrar

PART = 4096


class Copies:
    """What CUDA has registered; ``codes``: what it answers, by call."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.calls: list[tuple[str, int, int]] = []
        self.codes: dict[str, int] = {}

    def register(self, address: int, size: int) -> int:
        self.calls.append(("register", address, size))
        if not self.codes.get("register"):
            assert address not in self.registered
            self.registered[address] = size
        return self.codes.get("register", 0)

    def unregister(self, address: int) -> int:
        self.calls.append(("unregister", address, 0))
        del self.registered[address]
        return self.codes.get("unregister", 0)


class HandRegistrar(Registrar):
    """Whose thread is the test."""

    def __init__(self, copies: Copies) -> None:
        made: Any = copies
        super().__init__(made)
        self.told: deque[Callable[[], None]] = deque()

    def tell(self, call: Callable[[], None]) -> None:
        self.told.append(call)

    def run(self, most: int = 1000) -> None:
        while self.told and most:
            self.told.popleft()()
            most -= 1


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_store, "PART_BYTES", PART)


@pytest.fixture
def copies() -> Copies:
    return Copies()


@pytest.fixture
def registrar(copies: Copies) -> HandRegistrar:
    return HandRegistrar(copies)


def memory(size: int) -> memoryview:
    return memoryview(bytes(n % 251 for n in range(size)))


def cuts(store: MappedStore, offset: int, size: int) -> list[tuple[int, int]]:
    assert store._tensor is not None
    begin = store._tensor.data_ptr()
    return [(part.data_ptr() - begin, len(part)) for part in store.parts(offset, size)]


def test_it_is_registered_part_by_part_and_others_have_their_turn_between_two(copies: Copies,
                                                                             registrar: HandRegistrar) -> None:
    one, other = memory(2 * PART + 100), memory(PART)
    first, second = MappedStore(one, registrar), MappedStore(other, registrar)
    assert (first.registered_bytes, copies.calls) == (0, []), "whoever maps it does not wait"
    registrar.run(1)
    assert first.registered_bytes == PART
    registrar.run()
    assert (first.registered_bytes, second.registered_bytes) == (2 * PART + 100, PART)
    assert copies.calls == [("register", address_of(one), PART), ("register", address_of(other), PART),
                            ("register", address_of(one) + PART, PART), ("register", address_of(one) + 2 * PART, 100)]


def test_bytes_are_cut_where_one_copy_would_have_two_parts_whatever_is_registered_by_then(
        registrar: HandRegistrar) -> None:
    view = memory(5 * PART)
    store = MappedStore(view, registrar)
    for known in (0, 2 * PART, 5 * PART):
        assert store.registered_bytes == known
        assert cuts(store, 1000, 10_000) == [(1000, PART - 1000), (PART, PART), (2 * PART, 11_000 - 2 * PART)]
        assert cuts(store, 0, PART) == [(0, PART)]
        assert cuts(store, PART - 1, 2) == [(PART - 1, 1), (PART, 1)]
        registrar.run(2 if not known else 1000)
    found = [*store.parts(1000, 10_000)]
    assert b"".join(bytes(part.numpy()) for part in found) == view[1000:11_000]
    assert [len(part) for part in found] == [PART - 1000, PART, 11_000 - 2 * PART]


def test_where_cuda_takes_no_such_memory_it_is_said_once_and_not_asked_again(
        copies: Copies, registrar: HandRegistrar, caplog: pytest.LogCaptureFixture) -> None:
    copies.codes["register"] = 801
    stores = [MappedStore(memory(3 * PART), registrar) for _ in range(2)]
    registrar.run()
    stores.append(MappedStore(memory(PART), registrar))
    registrar.run()
    assert [call for call, _, _ in copies.calls] == ["register"]
    assert (registrar.refused, caplog.text.count("error 801")) == (801, 1)
    assert [store.registered_bytes for store in stores] == [0, 0, 0]
    assert cuts(stores[0], 0, 3 * PART) == [(0, PART), (PART, PART), (2 * PART, PART)]
    closed: list[bool] = []
    stores[0].close(lambda: closed.append(True))
    registrar.run()
    assert (closed, len(copies.calls)) == ([True], 1)


def test_a_refusal_in_the_middle_leaves_what_is_registered(copies: Copies, registrar: HandRegistrar) -> None:
    store = MappedStore(memory(3 * PART), registrar)
    registrar.run(1)
    copies.codes["register"] = 2
    registrar.run()
    assert store.registered_bytes == PART
    assert cuts(store, 0, 3 * PART) == [(0, PART), (PART, PART), (2 * PART, PART)]
    store.close(lambda: None)
    registrar.run()
    assert copies.registered == {}


def test_what_all_peers_have_registered_is_bounded_and_comes_back(copies: Copies, registrar: HandRegistrar) -> None:
    registrar.left = 3 * PART - 1
    first, second = (MappedStore(memory(2 * PART), registrar) for _ in range(2))
    registrar.run()
    assert first.registered_bytes + second.registered_bytes == sum(copies.registered.values()) == 2 * PART
    for store in (first, second):
        store.close(lambda: None)
    registrar.run()
    assert (registrar.left, copies.registered) == (3 * PART - 1, {})


def test_one_that_is_closed_while_it_is_registered_is_registered_no_further(copies: Copies,
                                                                           registrar: HandRegistrar) -> None:
    store = MappedStore(memory(5 * PART), registrar)
    registrar.run(2)
    closed: list[int] = []
    store.close(lambda: closed.append(len(copies.registered)))
    assert (closed, len(copies.registered)) == ([], 2)
    left = registrar.left
    registrar.run()
    assert closed == [0], "told once, when CUDA has let go of all of it"
    assert [call for call, _, _ in copies.calls] == ["register"] * 2 + ["unregister"] * 2
    assert (store.registered_bytes, registrar.left) == (0, left + 2 * PART)


def test_a_mapping_that_cuda_does_not_let_go_of_is_said(copies: Copies, registrar: HandRegistrar,
                                                       caplog: pytest.LogCaptureFixture) -> None:
    store = MappedStore(memory(PART), registrar)
    registrar.run()
    copies.codes["unregister"] = 713
    closed: list[bool] = []
    store.close(lambda: closed.append(True))
    registrar.run()
    assert (closed, caplog.text.count("error 713")) == ([True], 1)


def test_nothing_holds_the_memory_once_it_is_closed(copies: Copies) -> None:
    """By its own thread, on which whoever has mapped the memory may unmap it."""
    fd = os.memfd_create("store")
    os.ftruncate(fd, 3 * PART)
    mapping = mmap.mmap(fd, 3 * PART, prot=mmap.PROT_READ)
    os.close(fd)
    made: Any = copies
    registrar = Registrar(made)
    registrar.start()
    try:
        store = MappedStore(memoryview(mapping), registrar)
        registered = threading.Event()
        while store.registered_bytes < 3 * PART:
            registrar.tell(registered.set)
            assert registered.wait(20)
            registered.clear()
        closed = threading.Event()
        threads: list[str] = []
        store.close(lambda: [threads.append(threading.current_thread().name), mapping.close(), closed.set()])  # type: ignore[func-returns-value]
        assert closed.wait(20)
        assert (threads, mapping.closed, copies.registered) == (["xpyd-registrar"], True, {})
    finally:
        registrar.stop()
