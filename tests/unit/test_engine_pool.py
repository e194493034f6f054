from __future__ import annotations

import threading

from rows import fails

from xpyd_sidecar.engine.bounds import Chunk
from xpyd_sidecar.engine.pool import Arena, Pool


def test_memory_is_made_once_and_when_first_needed() -> None:
    made: list[int] = []

    def make(size: int) -> Chunk:
        made.append(size)
        return Chunk(None, memoryview(bytearray(size)))

    pool = Pool(make, 1 << 20)
    assert made == []
    first, second = pool.take(5000), pool.take(4096)
    assert first is not None
    assert second is not None
    assert made == [1 << 20]
    first.chunk.view[:] = b"a" * 5000
    second.chunk.view[:] = b"b" * 4096
    assert bytes(first.chunk.view) == b"a" * 5000
    assert pool.usage.used == 8192 + 4096
    pool.give(first)
    pool.give(second)
    assert pool.usage.largest == 1 << 20


def test_what_does_not_fit_is_refused() -> None:
    pool = Pool(lambda size: Chunk(None, memoryview(bytearray(size))), 8192)
    held = pool.take(4097)
    assert held is not None
    assert pool.take(1) is None
    pool.give(held)
    assert pool.take(8192) is not None
    assert Pool(lambda size: Chunk(None, memoryview(bytearray(size))), 0).take(1) is None


def test_memory_that_nobody_has_a_use_for_goes_back_when_it_is_empty() -> None:
    pool = Pool(lambda size: Chunk(None, memoryview(bytearray(size))), 8192)
    held = pool.take(4096)
    assert held is not None
    pool.spare(spare=True)
    assert pool.made, "a piece is still held"
    assert pool.take(1) is None
    pool.give(held)
    assert not pool.made
    pool.spare(spare=False)
    again = pool.take(4096)
    assert again is not None
    pool.give(again)
    assert pool.made, "kept for the next"


def test_an_arena_is_cut_where_one_says() -> None:
    arena = Arena(lambda size: Chunk(None, memoryview(bytearray(range(size)))), 100)
    assert bytes(arena.at(10, 3).view) == bytes((10, 11, 12))


def test_threads_never_get_the_same_piece() -> None:
    pool = Pool(lambda size: Chunk(None, memoryview(bytearray(size))), 64 * 4096)
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(300):
            piece = pool.take(4096)
            if piece is None:
                continue
            piece.chunk.view[:] = bytes([mark]) * 4096
            if bytes(piece.chunk.view) != bytes([mark]) * 4096:
                wrong.append(mark)
            pool.give(piece)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert pool.usage.used == 0


@fails("B10", "a hook that comes while the pool is being made makes all of it once more")
def test_a_hook_that_comes_while_the_memory_is_being_made_makes_none() -> None:
    made: list[int] = []
    making, go_on = threading.Event(), threading.Event()

    def make(size: int) -> Chunk:
        made.append(size)
        if len(made) == 1:
            making.set()
            assert go_on.wait(20)
        return Chunk(None, memoryview(bytearray(size)))

    pool = Pool(make, 1 << 16)
    preparing, hook = threading.Thread(target=pool.prepare), threading.Thread(target=pool.take, args=(4096,))
    preparing.start()
    assert making.wait(20)
    hook.start()
    hook.join(0.2)  # it may wait for the memory, or do without
    go_on.set()
    preparing.join(20)
    hook.join(20)
    assert made == [1 << 16]
