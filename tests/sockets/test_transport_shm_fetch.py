"""Decode fetches out of memory that prefill shares: whole pieces, only while prefill vouches for them, and each once."""

from __future__ import annotations

import mmap
import os
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.errors import PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv.array_layout import ArrayLayout, ArrayPart
from xpyd_sidecar.kv.buffer import BufferPlace
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.manifests import Manifest
from xpyd_sidecar.kv.reach import TableSpan
from xpyd_sidecar.kv.selection import Piece, pieces, places
from xpyd_sidecar.kv.session_bodies import SharedStore
from xpyd_sidecar.memory.buffer_memory import BufferMemory
from xpyd_sidecar.memory.chunk import Chunk
from xpyd_sidecar.transport.gates import Gate
from xpyd_sidecar.transport.landing import CacheArray, HostLanding, LoadTarget
from xpyd_sidecar.transport.links import FetchOrder
from xpyd_sidecar.transport.shm.fetch import Mapping, ShmFetchLink
from xpyd_sidecar.transport.shm.mailbox import mark
from xpyd_sidecar.transport.shm.serve import HEAD_BYTES, TICKETS_AT, SharedCopies

KEY = Key(TransferId("a" * 32), Attempt(1), 1)
ARRAYS = [ArrayLayout(4, 128, 1)] * 2
MANIFEST = Manifest(0, 0, 2, 0, 6, 512)
TABLE = TableSpan(1, (8, 0, 3, 5))
SIZE = 64 << 10


class World:
    """A session over one memory, and who has ordered. Calls are made when ``run`` is."""

    peer = "p"

    def __init__(self, heads: tuple[int, int] = (0, 4)) -> None:
        self.shared = SharedCopies(SIZE)
        self.shared.copies[:] = np.random.default_rng(1).integers(0, 256, len(self.shared.copies), np.uint8).data
        self.cell = self.shared.tickets.take()
        assert self.cell is not None
        at, ticket = self.shared.tickets.descriptor(self.cell)
        shown = SharedStore(self.shared.name, self.shared.size, TICKETS_AT + at, ticket, mark(b"x"))
        self.calls: deque[Callable[[], None]] = deque()
        self.errors: list[PeerError] = []
        self.fetches: list[int] = []
        self.failures: list[int] = []
        self.link = ShmFetchLink(self, self, Mapping(os.dup(self.shared.fd), shown), shown)
        head, count = heads
        self.parts = {0: ArrayPart(0, head, count, 0), 1: ArrayPart(1, head, count, 0)}
        self.caches = [np.zeros((10, count, 128), np.uint8) for _ in range(2)]
        self.landing = HostLanding([CacheArray(cache.reshape(-1).data, count * 128, 128) for cache in self.caches],
                                   BufferMemory(self.none, (1, 1)), cover=True)
        self.target = LoadTarget(Gate(), [(TABLE.first, array("q", TABLE.ids))], self.parts)

    @staticmethod
    def none(size: int) -> Any:
        raise MemoryError

    def send(self, *_: Any) -> bytes:
        raise AssertionError("this link says nothing")

    def post(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def close(self, error: PeerError) -> None:
        self.errors.append(error)
        self.link.close()

    def run(self) -> None:
        while self.calls:
            try:
                self.calls.popleft()()
            except PeerError as error:
                self.close(error)

    def on_fetched(self, number: int, sums: np.ndarray) -> None:
        assert len(sums) == sum(piece.packed.sums for piece in self.pieces())
        self.fetches.append(number)

    def on_fetch_failed(self, number: int) -> None:
        self.failures.append(number)

    def pieces(self, manifest: Manifest = MANIFEST) -> tuple[Piece, ...]:
        return tuple(pieces(manifest, ARRAYS, self.parts, [TABLE], 1 << 20))

    def order(self, number: int, manifest: Manifest = MANIFEST) -> None:
        batch = self.pieces(manifest)
        self.link.fetch(FetchOrder(number, KEY, 0, batch, self.landing.blocks(self.target, batch), self.target.gate))

    def right(self) -> bool:
        store = np.frombuffer(self.shared.copies, np.uint8)
        part = self.parts[0]
        for region, cache in enumerate(self.caches):
            packed = store[512 + region * 3072:512 + region * 3072 + 3072].reshape(6, 4, 128)
            for nth, block in enumerate(TABLE.ids):
                if not (cache[block] == packed[TABLE.first + nth, part.head:part.head + part.heads]).all():
                    return False
        return True


@pytest.mark.parametrize("heads", [(0, 4), (1, 2), (3, 1)])
def test_whole_blocks_and_some_of_their_heads_come_to_their_places(heads: tuple[int, int]) -> None:
    world = World(heads)
    world.order(5)
    assert world.fetches == [], "nothing is answered before it returns"
    world.run()
    assert (world.fetches, world.failures) == ([5], [])
    assert world.right()


def test_what_lies_elsewhere_until_there_are_blocks_is_whole_too() -> None:
    world = World((1, 2))
    batch = world.pieces()
    memory = np.zeros(places(batch)[-1], np.uint8)
    buffers = BufferMemory(lambda size: chunk(memory), (len(memory), 0))
    assert buffers.usable(0)
    landing = HostLanding([], buffers, cover=True)
    world.on_fetched = lambda number, sums: world.fetches.append(number)  # type: ignore[method-assign]
    world.link.fetch(FetchOrder(1, KEY, 0, batch, landing.host_places(batch, BufferPlace(0, 0, len(memory))), None))
    world.run()
    assert world.fetches == [1]
    store = np.frombuffer(world.shared.copies, np.uint8)
    for piece, start in zip(batch, places(batch), strict=False):
        expected = np.concatenate([store[at:at + size] for at, size in piece.stretches])
        assert (memory[start:start + piece.size] == expected).all()


def chunk(memory: np.ndarray) -> Any:
    return Chunk(memory, memory.data)


def test_nothing_is_written_once_the_load_is_over() -> None:
    world = World()
    world.order(1)
    world.target.gate.close()
    world.run()
    assert (world.fetches, world.failures, world.errors) == ([], [1], [])
    assert not any(cache.any() for cache in world.caches)


def test_what_comes_after_the_ticket_is_wiped_counts_for_nothing_and_ends_the_session() -> None:
    world = World()
    world.order(1)
    world.order(2)
    assert world.cell is not None
    world.shared.tickets.give(world.cell)
    world.run()
    assert world.fetches == []
    assert world.failures == [1, 2], "each is answered once"
    assert [type(error) for error in world.errors] == [PeerGone]


@pytest.mark.parametrize("offset", [SIZE, SIZE - 1024, 1 << 40])
def test_what_lies_outside_of_the_memory_is_not_read(offset: int) -> None:
    world = World()
    world.order(1, Manifest(0, 0, 2, 0, 6, offset))
    world.run()
    assert (world.fetches, world.failures) == ([], [1])
    assert isinstance(world.errors[0], ProtocolError)


def test_a_session_that_has_ended_answers_what_was_ordered() -> None:
    world = World()
    world.order(1)
    world.link.close()
    world.run()
    assert (world.fetches, world.failures, world.errors) == ([], [1], [])


def test_nobody_writes_into_the_memory_but_who_made_it() -> None:
    """Whoever holds the descriptor may open the file again, and has no more by that."""
    shared = SharedCopies(SIZE)
    shared.copies[:5] = b"right"
    fd = os.open(f"/proc/self/fd/{shared.fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"wrong", HEAD_BYTES)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, shared.size)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)
    assert bytes(shared.copies[:5]) == b"right"
    shared.copies[:5] = b"later"
    with mmap.mmap(shared.fd, shared.size, prot=mmap.PROT_READ) as seen:
        assert seen[HEAD_BYTES:HEAD_BYTES + 5] == b"later"
