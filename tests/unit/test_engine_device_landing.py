"""What was fetched goes through the ring of a device into blocks: those of its load alone, summed up, and not before."""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
from copies import Clock, Gpu, LateCopies
from manifest_sizes import size_of
from numpy.typing import NDArray

from xpyd_sidecar.engine.worker.device_landing import DeviceLanding, block_ids, cache_rows
from xpyd_sidecar.kv.array_layout import ArrayLayout, ArrayPart
from xpyd_sidecar.kv.buffer import BufferPlace
from xpyd_sidecar.kv.manifests import Manifest, layout
from xpyd_sidecar.kv.packing import PackedArray
from xpyd_sidecar.kv.packing import sums_of as packed_sums
from xpyd_sidecar.kv.reach import TableSpan
from xpyd_sidecar.kv.ring import Ring
from xpyd_sidecar.kv.selection import PackedSpan, Piece, batches, packed_spans, pieces, places
from xpyd_sidecar.memory.allocation import Allocation
from xpyd_sidecar.memory.buffer_memory import BufferMemory
from xpyd_sidecar.memory.chunk import Chunk
from xpyd_sidecar.memory.mapped_store import Registrar
from xpyd_sidecar.memory.marks import CopyMark
from xpyd_sidecar.transport.gates import Gate
from xpyd_sidecar.transport.landing import LoadTarget

BLOCKS, HEADS, HEAD = 16, 2, 64
ARRAYS = (ArrayLayout(HEADS, HEAD, 4),) * 2
"""In runs of four blocks."""
MANIFEST = Manifest(0, 0, 2, 2, 9, 512)
"""Blocks 2 to 10: runs 2 and 3, 4 to 7, 8 to 10."""
TABLE = TableSpan(5, (9, 3, 6, 12))
"""Blocks 5 to 8, so of the two runs that are fetched 4, 9 and 10 are not wanted."""
WHOLE = {region: ArrayPart(region, 0, HEADS, 0) for region in range(2)}
RING = 8 << 10
THROUGH = 512
"""One run of one array."""
UNTOUCHED = 0xEE


def memory(size: int) -> Chunk:
    made = torch.zeros(size, dtype=torch.uint8)
    return Chunk(made, memoryview(made.numpy()))


class Decode:
    """A rank on a scripted GPU. What is posted is called when ``settle`` waits for something."""

    def __init__(self, *, cover: bool = True, heads: int = HEADS) -> None:
        self.clock = Clock()
        self.gpu = Gpu(self.clock)
        self.caches = {f"layer{n}": torch.full((BLOCKS, heads, HEAD), UNTOUCHED, dtype=torch.uint8) for n in range(2)}
        cache = self.gpu.memory(self.caches, BLOCKS)
        assert isinstance(cache.copies, LateCopies)
        self.copies: LateCopies = cache.copies
        self.copies.prepare(0, RING + THROUGH)
        self.buffers = BufferMemory(memory, (1 << 16, 1 << 16))
        assert self.buffers.usable(0)
        assert self.buffers.usable(1)
        self.host_ring = Allocation(memory, RING)
        self.landing = DeviceLanding(cache, Registrar(cache.copies), self.host_ring, self.buffers, through=(RING, THROUGH),
                                     cover=cover)
        self.posted: deque[Callable[[], None]] = deque()
        self.landing.start(self.posted.append)
        self.answers: list[NDArray[np.uint64] | None] = []

    def target(self, moment: CopyMark | None = None, parts: dict[int, ArrayPart] | None = None) -> LoadTarget:
        return LoadTarget(Gate(), [(TABLE.first, array("q", TABLE.ids))], parts or WHOLE, moment)

    def place(self, target: LoadTarget, batch: tuple[Piece, ...], at: int | BufferPlace) -> None:
        self.landing.place(target, batch, at, self.answers.append)

    def settle(self, what: Callable[[], object]) -> None:
        """The device goes on until something has come about."""
        deadline = time.monotonic() + 60
        while True:
            self.clock.step()
            while self.posted:
                self.posted.popleft()()
            if what():
                return
            assert time.monotonic() < deadline, "it does not come about"
            time.sleep(0.001)

    def answered(self, count: int = 1) -> None:
        self.settle(lambda: len(self.answers) >= count)

    def fill(self, batch: tuple[Piece, ...], at: int | BufferPlace, store: np.ndarray) -> None:
        """A link brings the bytes to host memory, which there is where such a link was chosen."""
        self.host_ring.prepare()
        for piece, rows in zip(batch, self.landing.host_places(batch, at), strict=True):
            data = np.concatenate([store[one.offset:one.offset + one.size] for one in piece.stretches])
            rows.copy(data.ctypes.data)

    def has(self, source: np.ndarray, *, head: int = 0, at: int = 0, heads: int = HEADS) -> bool:
        """Whether the wanted heads of the wanted blocks are in their places, and no other byte has changed."""
        for region, cache in enumerate(self.caches.values()):
            expected = np.full(tuple(cache.shape), UNTOUCHED, np.uint8)
            for nth, block in enumerate(TABLE.ids):
                expected[block, at:at + heads] = source[region, TABLE.first - MANIFEST.first + nth, head:head + heads]
            if not (cache.numpy() == expected).all():
                return False
        return True

    @property
    def untouched(self) -> bool:
        return all(bool((cache == UNTOUCHED).all()) for cache in self.caches.values())

    def stop(self) -> None:
        self.landing.completions.stop()
        self.landing.registrar.stop()


@pytest.fixture
def decode() -> Iterator[Decode]:
    made = Decode()
    yield made
    made.stop()


@pytest.fixture
def source() -> np.ndarray:
    """By array, block from 2 on, head."""
    return np.random.default_rng(4).integers(0, 200, (2, MANIFEST.count, HEADS, HEAD), np.uint8)


def store_of(source: np.ndarray) -> np.ndarray:
    """As prefill packs it."""
    packed_memory = np.zeros(MANIFEST.offset + size_of(MANIFEST, ARRAYS), np.uint8)
    for region, packed, offset in layout(MANIFEST, ARRAYS):
        for nth in range(MANIFEST.count):
            for head in range(HEADS):
                at = offset + packed.place(MANIFEST.first + nth, head)
                packed_memory[at:at + HEAD] = source[region, nth, head]
    return packed_memory


def wanted(parts: dict[int, ArrayPart] | None = None) -> tuple[Piece, ...]:
    return tuple(pieces(MANIFEST, ARRAYS, parts or WHOLE, [TABLE], 1 << 20))


def sums(store: np.ndarray, batch: tuple[Piece, ...]) -> NDArray[np.uint64]:
    """Those that prefill tells, of the pieces."""
    every = np.concatenate([packed_sums(store[offset:offset + packed.size], packed)
                            for _, packed, offset in layout(MANIFEST, ARRAYS)])
    return np.concatenate([piece.sums_in(every) for piece in batch])


# --- which blocks ---

@pytest.mark.parametrize(("first", "count", "found"), [
    (5, 4, [9, 3, 6, 12]), (6, 2, [3, 6]), (4, 7, [-1, 9, 3, 6, 12, -1, -1]), (0, 5, [-1] * 5), (9, 3, [-1] * 3),
    (0, 6, [-1] * 5 + [9]), (8, 4, [12, -1, -1, -1])])
def test_blocks_that_a_table_has_no_place_for_are_none(first: int, count: int, found: list[int]) -> None:
    assert block_ids(TABLE.first, TABLE.ids, first, count).tolist() == found


def test_an_empty_table_has_no_place_for_any_block() -> None:
    assert block_ids(5, (), 4, 3).tolist() == [-1, -1, -1]


def test_arrays_with_the_same_blocks_and_heads_go_together_and_others_apart() -> None:
    parts = {0: ArrayPart(3, 0, 1, 1), 1: ArrayPart(4, 0, 1, 1), 2: ArrayPart(5, 0, 1, 0), 3: ArrayPart(6, 0, 1, 1, 1)}
    target = LoadTarget(Gate(), [(5, array("q", (9, 3, 6, 12))), (7, array("q", (1,)))], parts)
    batch = [Piece(region, (), PackedArray(4, 4, 1, HEAD, 4), (0, 1, 1)) for region in range(4)]
    batch.append(Piece(0, (), PackedArray(8, 2, 1, HEAD, 4), (0, 1, 1)))
    found = cache_rows(target, batch)
    assert [(rows.regions, rows.ids.tolist(), rows.head) for rows in found] == [
        ([3, 4], [-1, 9, 3, 6], 1), ([5], [-1, 9, 3, 6], 0), ([6], [-1, -1, -1, 1], 1), ([3], [12, -1], 1)]
    starts = [at for rows in found for _, at in rows.packed]
    assert sorted(starts) == places(batch)[:-1]
    assert [packed for packed, _ in found[0].packed] == [batch[0].packed, batch[1].packed]


# --- from the ring ---

@pytest.mark.parametrize("cover", [True, False])
def test_what_a_link_brings_to_host_memory_goes_into_the_loads_blocks_and_whole_runs_are_summed_up(
        source: np.ndarray, cover: bool) -> None:
    decode, store, batch = Decode(cover=cover), store_of(source), wanted()
    try:
        target = decode.target()
        decode.landing.expect(target, batch, 1024)
        decode.fill(batch, 1024, store)
        decode.place(target, batch, 1024)
        assert decode.answers == [], "the device has not come to it"
        assert decode.untouched
        target.gate.close()
        assert not target.gate.done(), "the device still writes into its blocks"
        decode.answered()
        assert target.gate.done()
        assert decode.has(source)
        (found,) = decode.answers
        assert found is not None
        assert found.tolist() == (sums(store, batch).tolist() if cover else [])
    finally:
        decode.stop()


def test_some_heads_go_into_theirs_and_into_no_others(source: np.ndarray) -> None:
    decode = Decode(heads=3)
    try:
        parts = {region: ArrayPart(region, 1, 1, 2) for region in range(2)}
        batch, target = wanted(parts), decode.target(parts=parts)
        decode.fill(batch, 0, store_of(source))
        decode.place(target, batch, 0)
        decode.answered()
        assert decode.has(source, head=1, at=2, heads=1)
        assert decode.answers[0] is not None
        assert decode.answers[0].tolist() == sums(store_of(source), batch).tolist()
    finally:
        decode.stop()


def test_what_is_read_out_of_a_mapped_store_is_placed_with_it_and_reported_once_it_is(decode: Decode,
                                                                                     source: np.ndarray) -> None:
    store, batch, target, at = store_of(source), wanted(), decode.target(), 1024
    reader = decode.landing.reader(memoryview(store))
    decode.landing.expect(target, batch, at)
    spans = [PackedSpan(one.offset, one.size, at + one.at) for one in packed_spans(batch)]
    done = threading.Event()
    reader.read(at, spans, done.set)
    assert decode.copies.scatters == 1, "both were launched together"
    assert not done.is_set()
    decode.settle(done.is_set)
    assert decode.has(source)
    decode.place(target, batch, at)
    assert decode.copies.scatters == 1
    (found,) = decode.answers
    assert found is not None
    assert found.tolist() == sums(store, batch).tolist()
    target.gate.close()
    assert target.gate.done()
    closed = threading.Event()
    reader.close(closed.set)
    assert closed.wait(20)


def test_what_is_read_for_a_load_that_is_over_is_placed_nowhere(decode: Decode, source: np.ndarray) -> None:
    store, batch, target = store_of(source), wanted(), decode.target()
    reader, done = decode.landing.reader(memoryview(store)), threading.Event()
    decode.landing.expect(target, batch, 0)
    target.gate.close()
    reader.read(0, [PackedSpan(one.offset, one.size, one.at) for one in packed_spans(batch)], done.set)
    decode.settle(done.is_set)
    decode.place(target, batch, 0)
    assert (decode.answers, decode.copies.scatters, decode.untouched) == ([None], 0, True)


def test_a_load_that_ends_while_it_is_written_is_not_settled_before_that_is_over(decode: Decode,
                                                                                 source: np.ndarray) -> None:
    store, batch, target = store_of(source), wanted(), decode.target()
    reader, done = decode.landing.reader(memoryview(store)), threading.Event()
    decode.landing.expect(target, batch, 0)
    reader.read(0, [PackedSpan(one.offset, one.size, one.at) for one in packed_spans(batch)], done.set)
    target.gate.close()
    assert not target.gate.done()
    decode.settle(done.is_set)
    assert target.gate.done()


def test_of_a_range_that_is_given_back_nothing_is_kept(decode: Decode, source: np.ndarray) -> None:
    """Its try has ended, so that nobody says where it belongs."""
    store, batch, target = store_of(source), wanted(), decode.target()
    reader, done = decode.landing.reader(memoryview(store)), threading.Event()
    ring = Ring(RING, decode.landing.free)
    at = ring.take(1, places(batch)[-1])
    assert at is not None
    decode.landing.expect(target, batch, at)
    reader.read(at, [PackedSpan(one.offset, one.size, at + one.at) for one in packed_spans(batch)], done.set)
    decode.settle(done.is_set)
    ring.give(1, at, places(batch)[-1])
    assert not decode.landing._coming


@pytest.mark.parametrize("way", ["read", "link", "buffer"])
def test_a_launch_that_fails_leaves_its_load_without_kv_and_holds_nothing(decode: Decode, source: np.ndarray, way: str,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    store, batch, target = store_of(source), wanted(), decode.target()

    def scatter(*_: object) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(decode.copies, "scatter", scatter)
    if way == "read":
        reader, done = decode.landing.reader(memoryview(store)), threading.Event()
        decode.landing.expect(target, batch, 0)
        reader.read(0, [PackedSpan(one.offset, one.size, one.at) for one in packed_spans(batch)], done.set)
        decode.settle(done.is_set)
        decode.place(target, batch, 0)
    elif way == "link":
        decode.fill(batch, 0, store)
        decode.place(target, batch, 0)
    else:
        decode.place(target, *buffered(decode, store)[0])
    decode.answered()
    target.gate.close()
    assert (decode.answers, target.gate.done(), decode.untouched) == ([None], True, True)
    monkeypatch.undo()
    later = decode.target()
    decode.answers.clear()
    decode.fill(wanted(), 0, store)
    decode.place(later, wanted(), 0)
    decode.answered()
    assert decode.has(source)


def test_a_range_that_a_link_fills_by_itself_is_placed_from_the_device(decode: Decode, source: np.ndarray) -> None:
    store, batch, target, at = store_of(source), wanted(), decode.target(), 2048
    decode.landing.expect(target, batch, at)
    into = decode.landing.device(at, places(batch)[-1])
    for one in packed_spans(batch):
        into[one.at:one.at + one.size] = torch.from_numpy(store[one.offset:one.offset + one.size])
    decode.place(target, batch, at)
    decode.answered()
    assert decode.has(source)
    assert not decode.host_ring.made, "it needs no host memory"


def test_what_a_link_into_the_device_brings_to_host_memory_after_all_is_looked_for_there(decode: Decode,
                                                                                       source: np.ndarray) -> None:
    batch, target = wanted(), decode.target()
    decode.landing.expect(target, batch, 0)
    decode.landing.device(0, places(batch)[-1]).fill_(7)
    decode.fill(batch, 0, store_of(source))
    decode.place(target, batch, 0)
    decode.answered()
    assert decode.has(source)


@pytest.mark.parametrize("expected", [True, False])
def test_nothing_is_launched_for_a_load_that_is_over(decode: Decode, source: np.ndarray, expected: bool) -> None:
    batch, target = wanted(), decode.target()
    decode.fill(batch, 0, store_of(source))
    if expected:
        decode.landing.expect(target, batch, 0)
    target.gate.close()
    decode.place(target, batch, 0)
    assert (decode.answers, decode.copies.scatters) == ([None], 0)


def test_blocks_are_written_only_from_the_moment_on_that_the_engine_has_named(decode: Decode, source: np.ndarray) -> None:
    """Steps that were enqueued before still use them."""
    def write() -> None:
        for cache in decode.caches.values():
            assert bool((cache == UNTOUCHED).all()), "they were written while another request had them"

    decode.gpu.compute(1.0, write)
    batch = wanted()
    for at, reads in ((0, False), (4096, True)):
        target = decode.target(decode.copies.moment())
        if reads:
            decode.landing.expect(target, batch, at)
            reader = decode.landing.reader(memoryview(store_of(source)))
            reader.read(at, [PackedSpan(one.offset, one.size, at + one.at) for one in packed_spans(batch)], lambda: None)
        else:
            decode.fill(batch, at, store_of(source))
            decode.place(target, batch, at)
    decode.clock.advance(0.99)
    assert decode.untouched
    decode.settle(lambda: decode.has(source))


# --- by way of memory beside the ring ---

def buffered(decode: Decode, store: np.ndarray) -> list[tuple[tuple[Piece, ...], BufferPlace]]:
    """Each piece in a place of its own of the lookup buffer."""
    out = []
    for number, (piece,) in enumerate(batches(pieces(MANIFEST, ARRAYS, WHOLE, [TABLE], 512), 1)):
        place = BufferPlace(number % 2, 4096 * number, piece.size)
        decode.fill((piece,), place, store)
        out.append(((piece,), place))
    return out


def test_what_came_ahead_waits_for_device_memory_in_its_order_and_goes_on(decode: Decode, source: np.ndarray) -> None:
    store, target = store_of(source), decode.target()
    ahead = buffered(decode, store)
    assert len(ahead) == 4, "one passes at once"
    for batch, place in ahead:
        decode.place(target, batch, place)
    assert decode.copies.scatters == 1
    decode.answered(len(ahead))
    assert decode.copies.scatters == len(ahead)
    assert decode.has(source)
    for made, (batch, _) in zip(decode.answers, ahead, strict=True):
        assert made is not None
        assert made.tolist() == sums(store, batch).tolist()
    target.gate.close()
    assert target.gate.done()
    assert decode.landing._through.used == 0


def test_one_whose_load_is_over_meanwhile_holds_up_nobody_behind_it(decode: Decode, source: np.ndarray) -> None:
    store, target, over = store_of(source), decode.target(), decode.target()
    ahead = buffered(decode, store)
    answered: list[str] = []
    for number, (batch, place) in enumerate(ahead):
        decode.landing.place(over if number == len(ahead) - 2 else target, batch, place,
                             lambda made: answered.append("placed" if made is not None else "over"))
    over.gate.close()
    decode.settle(lambda: len(answered) == len(ahead))
    assert answered == ["placed"] * (len(ahead) - 2) + ["over", "placed"]
    assert over.gate.done()
    assert decode.landing._through.used == 0


def test_nobody_but_a_kernel_writes_into_blocks(decode: Decode) -> None:
    with pytest.raises(NotImplementedError):
        decode.landing.blocks(decode.target(), wanted())


def test_its_threads_end() -> None:
    decode = Decode()
    decode.landing.completions.add(decode.gpu.moment(), partial(int, 0))
    decode.stop()
    assert not decode.landing.registrar.thread.is_alive()
    assert not decode.landing.completions.thread.is_alive()
