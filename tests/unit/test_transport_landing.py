"""Fetched bytes come to their blocks and nowhere else, by themselves or by way of the buffer."""

from __future__ import annotations

import ctypes
from array import array

import numpy as np
import pytest
from manifest_sizes import size_of

from xpyd_sidecar.kv.array_layout import ArrayLayout, ArrayPart
from xpyd_sidecar.kv.buffer import BufferPlace
from xpyd_sidecar.kv.manifests import Manifest, layout
from xpyd_sidecar.kv.packing import sums_of as packed_sums
from xpyd_sidecar.kv.reach import TableSpan
from xpyd_sidecar.kv.selection import Piece, pieces, places
from xpyd_sidecar.memory.buffer_memory import BufferMemory
from xpyd_sidecar.memory.chunk import Chunk
from xpyd_sidecar.transport.gates import Gate
from xpyd_sidecar.transport.landing import CacheArray, HostLanding, LoadTarget, sums_of

HEAD = 64
ARRAYS = [ArrayLayout(4, HEAD, 1), ArrayLayout(4, HEAD, 1)]
MANIFEST = Manifest(0, 0, 2, 3, 4, 256)
"""Blocks 3 to 6 of two arrays with four heads."""
PARTS = {0: ArrayPart(0, 1, 2, 1), 1: ArrayPart(1, 1, 2, 1)}
"""Heads 1 and 2 of the source are heads 1 and 2 here, of three."""
TABLE = TableSpan(4, (9, 2, 5))
"""Blocks 4 to 6 are blocks 9, 2 and 5 of the cache."""


def made(size: int) -> Chunk:
    memory = np.full(size, 0xEE, np.uint8)
    return Chunk(memory, memory.data)


class Decode:
    """A cache of ten blocks of three heads, twice."""

    def __init__(self, *, cover: bool = True) -> None:
        self.caches = [np.full((10, 3, HEAD), 0xEE, np.uint8) for _ in range(2)]
        buffers = BufferMemory(made, (4096, 4096))
        assert buffers.usable(0)
        assert buffers.usable(1)
        self.landing = HostLanding([CacheArray(cache.reshape(-1).data, 3 * HEAD, HEAD) for cache in self.caches],
                                   buffers, cover=cover)
        self.target = LoadTarget(Gate(), [(TABLE.first, array("q", TABLE.ids))], PARTS)

    def placed(self, at: BufferPlace) -> list[np.ndarray | None]:
        """What is answered when what lies there is placed: here, before it returns."""
        out: list[np.ndarray | None] = []
        self.landing.place(self.target, wanted(), at, out.append)
        return out

    def has(self, source: np.ndarray) -> bool:
        """Whether the wanted heads of the wanted blocks are in their places, and no other byte is changed."""
        for region, cache in enumerate(self.caches):
            expected = np.full((10, 3, HEAD), 0xEE, np.uint8)
            for nth, block in enumerate(TABLE.ids):
                expected[block, 1:3] = source[region, TABLE.first - MANIFEST.first + nth, 1:3]
            if not (cache == expected).all():
                return False
        return True


@pytest.fixture
def source() -> np.ndarray:
    """By array, block from 3 on, head."""
    return np.random.default_rng(4).integers(0, 256, (2, 4, 4, HEAD), np.uint8)


def store(source: np.ndarray) -> np.ndarray:
    """As prefill packs it."""
    memory = np.zeros(MANIFEST.offset + size_of(MANIFEST, ARRAYS), np.uint8)
    for region, packed, offset in layout(MANIFEST, ARRAYS):
        memory[offset:offset + packed.size] = source[region].reshape(-1)
    return memory


def wanted() -> list[Piece]:
    return pieces(MANIFEST, ARRAYS, PARTS, [TABLE], 1 << 20)


def sums(source: np.ndarray) -> np.ndarray:
    every = np.concatenate([packed_sums(source[region].reshape(-1), packed)
                            for region, packed, _ in layout(MANIFEST, ARRAYS)])
    return np.concatenate([piece.sums_in(every) for piece in wanted()])


def test_what_is_read_from_prefills_memory_comes_right_into_its_blocks(source: np.ndarray) -> None:
    decode, memory = Decode(), store(source)
    rows = decode.landing.blocks(decode.target, wanted())
    base, ticket = memory.ctypes.data, ctypes.create_string_buffer(b"t" * 32, 32)
    for piece, one in zip(wanted(), rows, strict=True):
        first, second, *_ = piece.stretches
        assert one.read(base + first.offset, second.offset - first.offset, ctypes.addressof(ticket), b"t" * 32)
    assert decode.has(source)
    assert (sums_of(rows) == sums(source)).all()


@pytest.mark.parametrize("at", [BufferPlace(0, 256, 2048), BufferPlace(1, 512, 1024)])
@pytest.mark.parametrize("cover", [True, False])
def test_what_lies_elsewhere_is_placed_from_there(source: np.ndarray, at: BufferPlace, *, cover: bool) -> None:
    decode, memory = Decode(cover=cover), store(source)
    held = decode.landing.host_places(wanted(), at)
    for piece, one in zip(wanted(), held, strict=True):
        data = np.concatenate([memory[start:start + size] for start, size in piece.stretches])
        one.copy(data.ctypes.data)
    assert not decode.has(source)
    (found,) = decode.placed(at)
    assert decode.has(source)
    assert found is not None
    assert len(found) == (len(sums(source)) if cover else 0)
    assert not cover or (found == sums(source)).all()
    assert places(wanted())[-1] <= 1024


@pytest.mark.parametrize("cover", [True, False])
@pytest.mark.parametrize("most", [1 << 20, 2 * 2 * HEAD])
def test_of_what_came_before_there_were_blocks_those_go_to_their_places_that_the_load_has(source: np.ndarray, most: int,
                                                                                        *, cover: bool) -> None:
    """It may begin behind the first of them, and end before the last; they are summed up together."""
    decode, memory = Decode(cover=cover), store(source)
    table = TableSpan(4, (9, 2))
    decode.target = LoadTarget(Gate(), [(table.first, array("q", table.ids))], PARTS)
    every = np.concatenate([packed_sums(source[region].reshape(-1), packed)
                            for region, packed, _ in layout(MANIFEST, ARRAYS)])
    for piece in pieces(MANIFEST, ARRAYS, PARTS, None, most):
        at, answers = BufferPlace(0, 0, piece.size), list[np.ndarray | None]()
        (held,) = decode.landing.host_places([piece], at)
        data = np.concatenate([memory[start:start + size] for start, size in piece.stretches])
        held.copy(data.ctypes.data)
        if piece.packed.first + piece.packed.blocks <= 4 or piece.packed.first >= 6:
            continue  # the buffer lets go of it
        decode.landing.place(decode.target, [piece], at, answers.append)
        assert answers[0] is not None
        assert answers[0].tolist() == (piece.sums_in(every).tolist() if cover else [])
    for region, cache in enumerate(decode.caches):
        expected = np.full((10, 3, HEAD), 0xEE, np.uint8)
        for nth, block in enumerate(table.ids):
            expected[block, 1:3] = source[region, 1 + nth, 1:3]
        assert (cache == expected).all()


def test_nothing_is_placed_once_the_gate_is_closed(source: np.ndarray) -> None:
    decode = Decode()
    decode.target.gate.close()
    assert decode.placed(BufferPlace(0, 0, 1024)) == [None]
    assert all((cache == 0xEE).all() for cache in decode.caches)
    assert decode.target.gate.done()
    assert not decode.has(source)


def test_a_gate_is_done_when_it_is_closed_and_nobody_is_inside() -> None:
    gate = Gate()
    assert gate.enter()
    gate.close()
    assert not gate.done()
    gate.leave()
    assert gate.done()
    assert not gate.enter()
    assert gate.done()
