"""A device copies out of prefill's memory by itself: each order is answered once, and the mapping outlives its copies."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.errors import PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv.array_layout import ArrayLayout, ArrayPart
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.manifests import Manifest
from xpyd_sidecar.kv.selection import PackedSpan, Piece, pieces, places
from xpyd_sidecar.kv.session_bodies import SharedStore
from xpyd_sidecar.transport.landing import rows_in
from xpyd_sidecar.transport.links import FetchOrder
from xpyd_sidecar.transport.shm.fetch import Mapping, ShmFetchLink
from xpyd_sidecar.transport.shm.serve import HEAD_BYTES, TICKETS_AT, SharedCopies

KEY = Key(TransferId("a" * 32), Attempt(1), 1)
SIZE = 64 << 10
ODD = ArrayLayout(2, 50, 1)
"""Three blocks of it have 300 bytes, and 212 of padding behind them."""


class Reader:
    """Copies of a device, which end when a test says so."""

    def __init__(self) -> None:
        self.reads: list[tuple[int, list[PackedSpan]]] = []
        self.under_way: deque[Callable[[], None]] = deque()
        self.closed: list[Callable[[], None]] = []
        self.fault: Exception | None = None

    def read(self, at: int, spans: Sequence[PackedSpan], done: Callable[[], None]) -> None:
        if self.fault is not None:
            raise self.fault
        self.reads.append((at, [*spans]))
        self.under_way.append(done)

    def close(self, closed: Callable[[], None]) -> None:
        assert not self.under_way, "something still reads the mapping"
        self.closed.append(closed)


class World:
    """A session, and whose fetches they are. Calls are made when ``run`` is."""

    peer = "p"

    def __init__(self) -> None:
        self.shared = SharedCopies(SIZE)
        cell = self.shared.tickets.take()
        assert cell is not None
        self.cell = cell
        at, ticket = self.shared.tickets.descriptor(cell)
        shown = SharedStore(self.shared.name, self.shared.size, TICKETS_AT + at, ticket, b"")
        self.reader = Reader()
        self.mapping = Mapping(os.dup(self.shared.fd), shown)
        self.calls: deque[Callable[[], None]] = deque()
        self.errors: list[PeerError] = []
        self.answers: list[tuple[str, int]] = []
        self.link = ShmFetchLink(self, self, self.mapping, shown, self.reader)

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
        assert len(sums) == 0, "a device makes them where it places what has come"
        self.answers.append(("fetched", number))

    def on_fetch_failed(self, number: int) -> None:
        self.answers.append(("failed", number))

    def order(self, number: int, batch: tuple[Piece, ...], at: int | None = 4096) -> None:
        self.link.fetch(FetchOrder(number, KEY, 0, batch, (), None, at))

    def copied(self) -> None:
        """The oldest copy ends; its word comes by another thread."""
        self.reader.under_way.popleft()()
        self.run()

    @property
    def mapped(self) -> bool:
        return not self.mapping._memory.closed


def batch(*, heads: tuple[int, int] = (0, 2), arrays: Sequence[ArrayLayout] = (ODD,) * 3,
          offset: int = 512) -> tuple[Piece, ...]:
    parts = {region: ArrayPart(region, *heads, 0) for region in range(len(arrays))}
    return tuple(pieces(Manifest(0, 0, len(arrays), 0, 3, offset), arrays, parts, None, 1 << 20))


def test_neighbours_are_copied_together_with_the_padding_between_them() -> None:
    world = World()
    world.order(1, batch())
    assert world.answers == world.reader.reads == [], "nothing is begun before it returns"
    world.run()
    assert world.reader.reads == [(4096, [PackedSpan(HEAD_BYTES + 512, 512 + 512 + 300, 4096)])]
    assert world.answers == []
    world.copied()
    assert world.answers == [("fetched", 1)]


def test_heads_that_lie_apart_in_the_store_lie_together_in_the_ring() -> None:
    world = World()
    world.order(1, batch(heads=(1, 1), arrays=[ODD]), at=0)
    world.run()
    ((at, spans),) = world.reader.reads
    assert at == 0
    assert spans == [PackedSpan(HEAD_BYTES + 562 + 100 * block, 50, 50 * block) for block in range(3)]


def test_every_byte_of_every_piece_is_copied_to_its_place() -> None:
    world = World()
    store = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
    for heads, arrays in (((0, 2), (ODD,) * 4), ((1, 1), (ODD,) * 2), ((2, 1), (ArrayLayout(4, 256, 2),) * 3),
                          ((0, 2), (ArrayLayout(4, 256, 2), ODD))):
        some = batch(heads=heads, arrays=arrays)
        world.order(1, some)
        world.run()
        _, spans = world.reader.reads[-1]
        ring = np.zeros(4096 + places(some)[-1], np.uint8)
        for span in spans:
            ring[span.at:span.at + span.size] = store[span.offset - HEAD_BYTES:][:span.size]
        for piece, start in zip(some, places(some), strict=False):
            wanted = np.concatenate([store[one.offset:one.offset + one.size] for one in piece.stretches])
            assert (ring[4096 + start:][:piece.size] == wanted).all()
        world.copied()


def test_what_is_fetched_before_there_are_blocks_is_copied_by_a_core() -> None:
    world = World()
    world.shared.copies[512:812] = bytes(n % 251 for n in range(300))
    memory = bytearray(300)
    some = batch(arrays=[ODD])
    world.link.fetch(FetchOrder(1, KEY, 0, some, [rows_in(memoryview(memory), len(some[0].stretches))], None, None))
    world.run()
    assert world.reader.reads == []
    assert world.answers == [("fetched", 1)]
    assert memory == world.shared.copies[512:812]


def test_a_ticket_that_is_gone_when_the_copy_ends_ends_the_session_and_nothing_of_it_counts() -> None:
    world = World()
    for number in (1, 2):
        world.order(number, batch())
    world.run()
    world.shared.tickets.give(world.cell)
    world.copied()
    assert world.answers == [("failed", 1)]
    assert [type(error) for error in world.errors] == [PeerGone]
    assert "given this session up" in str(world.errors[0])
    assert world.reader.closed == [], "the other copy still reads the mapping"
    world.copied()
    assert world.answers == [("failed", 1), ("failed", 2)]
    assert len(world.reader.closed) == len(world.errors) == 1


def test_a_mapping_is_let_go_when_the_last_copy_out_of_it_has_ended_and_each_order_is_answered_once() -> None:
    world = World()
    for number in (1, 2):
        world.order(number, batch())
    world.run()
    world.order(3, batch())
    world.link.close()
    assert (world.answers, world.reader.closed) == ([], [])
    world.run()
    assert world.answers == [("failed", 3)], "it was not begun"
    world.copied()
    assert (world.answers[1:], world.reader.closed) == ([("failed", 1)], [])
    world.copied()
    assert world.answers == [("failed", 3), ("failed", 1), ("failed", 2)]
    (closed,) = world.reader.closed
    assert world.mapped, "the device has to let go of it first"
    closed()
    assert not world.mapped


def test_a_session_without_copies_lets_go_at_once() -> None:
    world = World()
    world.order(1, batch())
    world.link.close()
    assert len(world.reader.closed) == 1
    world.run()
    assert (world.answers, world.reader.reads, len(world.reader.closed)) == ([("failed", 1)], [], 1)


@pytest.mark.parametrize("offset", [SIZE, SIZE - 1024, 1 << 40])
def test_what_lies_outside_of_the_memory_is_not_read(offset: int) -> None:
    world = World()
    world.order(1, batch(offset=offset))
    world.run()
    assert (world.answers, world.reader.reads) == ([("failed", 1)], [])
    assert isinstance(world.errors[0], ProtocolError)


def test_a_device_that_takes_no_copy_has_its_order_answered() -> None:
    world = World()
    world.reader.fault = RuntimeError("CUDA error: out of memory")
    world.order(1, batch())
    with pytest.raises(RuntimeError, match="out of memory"):
        world.run()
    assert world.answers == [("failed", 1)]
    world.link.close()
    assert len(world.reader.closed) == 1
