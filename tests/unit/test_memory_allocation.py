"""Memory that takes long to make: nobody who needs some waits for it, and whoever cannot have it is told."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import pytest

from xpyd_sidecar.memory import allocation
from xpyd_sidecar.memory.allocation import Allocation
from xpyd_sidecar.memory.buffer_memory import BufferMemory
from xpyd_sidecar.memory.chunk import Chunk


class Bytes:
    """Memory, and whether anybody still has it."""

    def __init__(self) -> None:
        self.faults: list[Exception] = []
        self.made: list[weakref.ref[np.ndarray]] = []

    def make(self, size: int) -> Chunk:
        if self.faults:
            raise self.faults.pop()
        memory = np.arange(size, dtype=np.uint8)
        self.made.append(weakref.ref(memory))
        return Chunk(memory, memory.data)


class Thread:
    """That may wait: it makes its calls when ``run`` says so."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def tell(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def run(self) -> None:
        while self.calls:
            self.calls.pop(0)()


def test_who_asks_is_told_no_until_it_is_made_elsewhere() -> None:
    memory, thread = Bytes(), Thread()
    one = Allocation(memory.make, 100, thread.tell)
    assert [one.ready(), one.ready(), one.made] == [False] * 3
    assert (memory.made, len(thread.calls)) == ([], 1), "it is asked for once"
    thread.run()
    assert one.ready()
    assert bytes(one.chunk_at(10, 3).view) == bytes((10, 11, 12))


def test_a_call_that_needs_it_comes_when_it_is_there_or_when_there_is_none() -> None:
    memory, thread, told = Bytes(), Thread(), list[bool]()
    one = Allocation(memory.make, 100, thread.tell)
    memory.faults.append(MemoryError("so much cannot be locked"))
    for _ in range(2):
        one.settle(lambda: told.append(one.made))
    assert told == []
    thread.run()
    assert told == [False, False]
    one.prepare()
    one.settle(lambda: told.append(one.made))
    assert told[2:] == [True], "at once"


def test_what_cannot_be_had_is_said_and_asked_for_again_after_a_while(monkeypatch: pytest.MonkeyPatch,
                                                                      caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    monkeypatch.setattr(allocation.time, "monotonic", lambda: now)
    memory = Bytes()
    memory.faults.append(MemoryError("so much cannot be locked"))
    one = Allocation(memory.make, 3 << 20)
    assert not one.ready()
    assert "there are no 3 MiB of memory for copies of KV" in caplog.text
    assert "so much cannot be locked" in caplog.text
    now += allocation.LACK_S - 0.1
    assert not one.ready()
    now += 0.2
    assert one.ready()
    assert len(memory.made) == 1


def test_memory_that_is_dropped_is_given_back_elsewhere_and_only_when_nobody_holds_a_part() -> None:
    memory, thread = Bytes(), Thread()
    one = Allocation(memory.make, 100, thread.tell)
    one.prepare()
    held: list[Chunk] = [one.chunk_at(0, 10)]
    one.drop()
    assert not one.made
    held.clear()
    assert memory.made[0]() is not None, "to unlock it takes long, too"
    thread.run()
    assert memory.made[0]() is None
    one.drop()
    assert thread.calls == [], "there is nothing to give back"
    one.prepare()
    held.append(one.chunk_at(0, 10))
    one.drop()
    thread.run()
    assert memory.made[1]() is not None


def test_tiers_of_the_buffer_are_made_one_by_one() -> None:
    memory, thread = Bytes(), Thread()
    buffers = BufferMemory(memory.make, (100, 200), thread.tell)
    assert [buffers.usable(1), buffers.usable(1)] == [False, False]
    thread.run()
    assert buffers.usable(1)
    assert len(memory.made) == 1
    buffers.drop()
    thread.run()
    assert memory.made[0]() is None
