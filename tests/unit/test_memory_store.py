"""The memory for copies: leased in parts that never overlap, within one bound, and by nobody whole."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest

from xpyd_sidecar.memory import allocation
from xpyd_sidecar.memory.chunk import Chunk
from xpyd_sidecar.memory.store import CopyStore, offsets


def memory(size: int) -> Chunk:
    return Chunk(None, memoryview(bytearray(size)))


def test_memory_is_made_once_and_when_first_needed() -> None:
    made: list[int] = []

    def make(size: int) -> Chunk:
        made.append(size)
        return memory(size)

    store = CopyStore(make, 1 << 20)
    assert made == []
    first, second = store.lease(5000), store.lease(4096)
    assert first is not None
    assert second is not None
    assert made == [1 << 20]
    first.chunk.view[:] = b"a" * 5000
    second.chunk.view[:] = b"b" * 4096
    assert bytes(first.chunk.view) == b"a" * 5000
    assert store.used_bytes == 20 * 256 + 4096
    store.give(first)
    store.give(second)
    assert store.used_bytes == 0
    assert store.lease(1 << 20) is not None


def test_all_that_is_allowed_can_be_had_and_no_more() -> None:
    store = CopyStore(memory, 8192)
    held = [store.lease(256) for _ in range(32)]
    assert None not in held
    assert store.lease(1) is None
    store.give(held[7])  # type: ignore[arg-type]
    assert store.lease(257) is None
    assert store.lease(256) is not None
    assert CopyStore(memory, 0).lease(1) is None


def test_parts_of_a_lease_come_back_by_themselves() -> None:
    store = CopyStore(memory, 4096)
    *starts, size = offsets(store, [100, 300, 256])
    assert (starts, size) == ([0, 256, 768], 1024)
    lease = store.lease(size, "d")
    assert lease is not None
    parts = [lease.part(start, end - start) for start, end in zip(starts, [*starts[1:], size], strict=True)]
    lease.chunk.view[256:300] = b"x" * 44
    assert bytes(parts[1].chunk.view[:44]) == b"x" * 44
    store.give(parts[1])
    assert store.used_bytes == 512
    with pytest.raises(ValueError, match="not handed out"):
        store.give(parts[1])
    again = store.lease(512)
    assert again is not None
    assert again.offset == 256, "the lowest that fits"
    for part in (parts[0], parts[2], again):
        store.give(part)
    assert (store.used_bytes, store.most_units(4096)) == (0, 1)


def test_no_holder_takes_all_so_that_a_stopped_peer_leaves_room_for_others() -> None:
    store = CopyStore(memory, 1000, unit=1)
    taken = []
    while (one := store.lease(10, "stopped")) is not None:
        taken.append(one)
    assert len(taken) == 80
    assert store.most_units(10, "stopped") == 0
    other = []
    while store.most_units(10, "other"):
        one = store.lease(10, "other")
        assert one is not None, "most_units says what can be had"
        other.append(one)
    assert store.lease(10, "other") is None
    assert len(other) == 16
    assert store.lease(10, "third") is not None
    for one in other:
        store.give(one)
    assert store.lease(150, "other") is not None
    for one in taken:
        store.give(one)
    assert store.used_bytes == 10 + 150


def test_a_lease_that_is_lost_leaks_and_is_never_anothers() -> None:
    store = CopyStore(memory, 64 * 4096)
    held = [store.lease(4096) for _ in range(4)]
    lost = store.lease(4096)
    assert lost is not None
    gone, lost = lost.offset, None
    gc.collect()
    more = []
    while (one := store.lease(4096)) is not None:
        more.append(one)
    taken = [one.offset for one in (*held, *more) if one is not None]
    assert len(taken) == len(set(taken)) == 63
    assert gone not in taken
    assert store.used_bytes == 64 * 4096


def test_what_has_no_holder_has_no_share() -> None:
    store = CopyStore(memory, 1000, unit=1)
    assert store.most_units(100) == 10
    assert store.lease(1000) is not None


def test_a_lease_whose_memory_cannot_be_made_is_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = [MemoryError("pinning failed"), None]

    def make(size: int) -> Chunk:
        if (fault := tries.pop(0)) is not None:
            raise fault
        return memory(size)

    monkeypatch.setattr(allocation, "LACK_S", 0.0)
    store = CopyStore(make, 4096)
    assert store.lease(256, "d") is None
    assert store.used_bytes == 0
    assert store.lease(256, "d") is not None


def test_memory_that_nobody_has_a_use_for_goes_back_whenever_it_is_empty_and_is_there_for_who_has() -> None:
    emptied: list[bool] = []
    store = CopyStore(memory, 8192, emptied=lambda: emptied.append(store.made))
    store.spare(spare=True)
    assert emptied == [], "there is none yet"
    store.spare(spare=False)
    held = store.lease(4096)
    assert held is not None
    store.spare(spare=True)
    assert store.made, "a lease is still held"
    assert store.most_units(256) == 16
    late = store.lease(256, "d")
    assert late is not None
    store.give(held)
    assert store.made, "a prompt is under way"
    store.give(late)
    assert not store.made
    late = store.lease(256, "d")
    assert late is not None, "one came late"
    store.give(late)
    assert not store.made
    assert emptied == [False, False], "once each time, when the memory is nobody's"
    store.spare(spare=False)
    again = store.lease(4096)
    assert again is not None
    store.give(again)
    assert store.made, "kept for the next"


def test_threads_never_get_the_same_bytes() -> None:
    store = CopyStore(memory, 64 * 4096)
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(300):
            lease = store.lease(4096)
            if lease is None:
                continue
            lease.chunk.view[:] = bytes([mark]) * 4096
            if bytes(lease.chunk.view) != bytes([mark]) * 4096:
                wrong.append(mark)
            store.give(lease)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert store.used_bytes == 0


def test_whoever_comes_while_the_memory_is_being_made_makes_none_and_waits_for_nothing() -> None:
    made: list[int] = []
    calls: list[Callable[[], None]] = []

    def make(size: int) -> Chunk:
        made.append(size)
        return memory(size)

    store = CopyStore(make, 1 << 16, later=calls.append)
    assert store.lease(4096) is None
    assert store.lease(4096, "d") is None
    assert not store.ready()
    assert (store.used_bytes, made, len(calls)) == (0, [], 1)
    calls.pop()()
    assert made == [1 << 16]
    assert store.lease(4096, "d") is not None


def test_memory_that_goes_back_has_gone_before_it_is_made_again() -> None:
    """What is given up must not be what the next lease gets (``engine.worker.shm_setup``)."""
    order: list[str] = []
    calls: list[Callable[[], None]] = []

    def make(size: int) -> Chunk:
        order.append("made")
        return memory(size)

    store = CopyStore(make, 4096, later=calls.append, emptied=lambda: order.append("emptied"))
    store.prepare()
    store.spare(spare=True)
    assert not store.made
    assert store.lease(256) is None, "a prompt came late"
    assert order == ["made"], "whoever gives the last of it back waits for nothing"
    for call in calls:
        call()
    assert order == ["made", "emptied", "made"]
    assert store.lease(256) is not None
