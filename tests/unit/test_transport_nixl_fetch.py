"""Decode's side of the link over NIXL by itself: what is ordered of the thread, and that each order is answered once."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.errors import PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv.array_layout import ArrayLayout, ArrayPart
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.manifests import Manifest
from xpyd_sidecar.kv.reach import TableSpan
from xpyd_sidecar.kv.selection import PackedSpan, Piece, packed_spans, pieces, places
from xpyd_sidecar.kv.session_bodies import LinkWelcome, NixlMemory
from xpyd_sidecar.memory.addresses import address_of
from xpyd_sidecar.memory.buffer_memory import BufferMemory
from xpyd_sidecar.transport.gates import Gate
from xpyd_sidecar.transport.landing import CacheArray, HostLanding, LoadTarget
from xpyd_sidecar.transport.links import FetchLink, FetchOrder
from xpyd_sidecar.transport.nixl.fetch import NixlFetcher, NixlFetchLink, reads_of
from xpyd_sidecar.transport.nixl.reading import ReadOrder

KEY = Key(TransferId("a" * 32), Attempt(1), 1)
ARRAYS = [ArrayLayout(4, 128, 1)] * 2
TABLE = TableSpan(1, (8, 0, 3, 5))
STORE = 64 << 10
BASE = 1 << 32
MEMORY = NixlMemory("agent", b"metadata", "1.5.1", BASE, STORE, 64, b"\1" * 32)


class World:
    """A session, whose owner and hub it is. Calls are made when ``run`` is."""

    peer = "p"

    def __init__(self, *, insists: bool = True, has_ring: bool = False, heads: tuple[int, int] = (0, 4)) -> None:
        self.has_ring = has_ring
        self.calls: deque[Callable[[], None]] = deque()
        self.errors: list[PeerError] = []
        self.fetches: list[int] = []
        self.failures: list[int] = []
        self.ordered: list[ReadOrder] = []
        self.given: list[int] = []
        self.left = 0
        self.settled: list[tuple[FetchLink | None, str]] = []
        self.link: Any = None
        self.parts = {at: ArrayPart(at, *heads, 0) for at in range(2)}
        self.caches = [np.zeros((10, heads[1], 128), np.uint8) for _ in range(2)]
        self.landing = HostLanding([CacheArray(cache.reshape(-1).data, heads[1] * 128, 128) for cache in self.caches],
                                   BufferMemory(self.none, (1, 1)), cover=True)
        self.target = LoadTarget(Gate(), [(TABLE.first, array("q", TABLE.ids))], self.parts)
        fetcher = NixlFetcher(self, insists=insists)  # type: ignore[arg-type]
        assert fetcher(self, self, LinkWelcome(nixl=MEMORY), self.take)

    @staticmethod
    def none(size: int) -> Any:
        raise MemoryError

    def take(self, link: FetchLink | None, reason: str) -> None:
        self.settled.append((link, reason))

    # --- the thread for NIXL ---

    def join(self, member: NixlFetchLink, memory: NixlMemory) -> int:
        assert memory == MEMORY
        self.link = member
        return 7

    def order(self, session: int, order: ReadOrder) -> None:
        assert session == 7
        self.ordered.append(order)

    def release_order(self, session: int, number: int) -> None:
        assert session == 7
        self.given.append(number)

    def leave(self, session: int) -> None:
        assert session == 7
        self.left += 1

    # --- the session ---

    def send(self, *_: Any) -> bytes:
        raise AssertionError("this link says nothing")

    def post(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def close(self, error: PeerError) -> None:
        self.errors.append(error)
        self.link.close()

    def run(self, most: int = 99) -> None:
        while self.calls and most:
            most -= 1
            try:
                self.calls.popleft()()
            except PeerError as error:
                self.close(error)

    # --- the owner ---

    def on_fetched(self, number: int, sums: np.ndarray) -> None:
        self.fetches.append(number)

    def on_fetch_failed(self, number: int) -> None:
        self.failures.append(number)

    def batch(self, offset: int = 512) -> tuple[Piece, ...]:
        return tuple(pieces(Manifest(0, 0, 2, 0, 6, offset), ARRAYS, self.parts, [TABLE], 1 << 20))

    def fetch(self, number: int, offset: int = 512, at: int | None = None) -> None:
        batch = self.batch(offset)
        rows = self.landing.blocks(self.target, batch)
        self.link.fetch(FetchOrder(number, KEY, 0, batch, rows, self.target.gate, at))


def read(batch: tuple[Piece, ...], store: np.ndarray) -> np.ndarray:
    """What NIXL makes of an order."""
    memory = np.zeros(places(batch)[-1], np.uint8)
    for part in reads_of(packed_spans(batch), BASE, 1000):
        for source, at, size in part:
            memory[at:at + size] = store[source - BASE:source - BASE + size]
    return memory


@pytest.mark.parametrize("heads", [(0, 4), (1, 2), (3, 1)])
def test_what_has_come_is_put_to_its_blocks_inside_of_their_gate(heads: tuple[int, int]) -> None:
    world = World(heads=heads)
    world.link.on_open()
    world.fetch(1)
    (order,) = world.ordered
    assert (order.number, order.size, order.at) == (1, places(world.batch())[-1], None)
    store = np.random.default_rng(1).integers(0, 256, STORE, np.uint8)
    memory = read(world.batch(), store)
    world.link.come([(1, address_of(memory.data))])
    assert (world.fetches, world.failures, world.given) == ([1], [], [1])
    for region, cache in enumerate(world.caches):
        packed = store[512 + region * 3072:512 + region * 3072 + 3072].reshape(6, 4, 128)
        for nth, block in enumerate(TABLE.ids):
            assert (cache[block] == packed[TABLE.first + nth, heads[0]:sum(heads)]).all()


def test_between_two_that_have_come_others_have_their_turn() -> None:
    world = World()
    world.link.on_open()
    memory = np.zeros(places(world.batch())[-1], np.uint8)
    for number in range(3):
        world.fetch(number)
    world.link.come([(number, address_of(memory.data)) for number in range(2)])
    assert world.fetches == [0]
    world.link.come([(2, address_of(memory.data))])
    assert world.fetches == [0]
    world.run(1)
    assert world.fetches == [0, 1]
    world.run()
    assert world.fetches == [0, 1, 2]


def test_nothing_is_written_once_the_load_is_over() -> None:
    world = World()
    world.link.on_open()
    world.fetch(1)
    world.target.gate.close()
    memory = np.ones(places(world.batch())[-1], np.uint8)
    world.link.come([(1, address_of(memory.data))])
    assert (world.fetches, world.failures, world.given) == ([], [1], [1])
    assert not any(cache.any() for cache in world.caches)


def test_what_cannot_be_placed_for_a_fault_of_ours_is_given_back() -> None:
    world = World()
    world.link.on_open()
    world.fetch(1)

    class Faulty:
        def copy(self, address: int) -> None:
            raise ValueError("a fault")

    world.link._orders[1] = world.link._orders[1]._replace(rows=[Faulty()])
    with pytest.raises(ValueError, match="a fault"):
        world.link.come([(1, 0)])
    assert (world.failures, world.given) == ([1], [1])
    world.target.gate.close()
    assert world.target.gate.done()


def test_a_session_that_ends_answers_each_order_once_and_gives_back_what_had_come() -> None:
    world = World()
    world.link.on_open()
    memory = np.ones(places(world.batch())[-1], np.uint8)
    for number in range(4):
        world.fetch(number)
    world.link.come([(0, address_of(memory.data)), (1, address_of(memory.data))])
    world.link.close()
    world.link.close()
    assert (world.fetches, world.failures, world.given, world.left) == ([0], [1], [0, 1], 1)
    world.run()
    world.link.on_order_dropped(2)
    before = [cache.copy() for cache in world.caches]
    world.link.come([(3, address_of(memory.data))])
    assert (world.fetches, world.failures, world.given) == ([0], [1, 2, 3], [0, 1, 3])
    assert all((cache == old).all() for cache, old in zip(world.caches, before, strict=True))
    world.fetch(9)
    world.run()
    assert world.failures == [1, 2, 3, 9]
    assert world.errors == []


def test_memory_that_orders_name_ranges_of_is_read_into_and_not_copied() -> None:
    world = World(has_ring=True)
    world.link.on_open()
    world.fetch(1, at=4096)
    assert world.ordered[0].at == 4096
    world.link.come([(1, 0)])
    assert (world.fetches, world.given) == ([1], [1])
    assert not any(cache.any() for cache in world.caches)


def test_without_such_memory_a_slot_is_asked_for() -> None:
    world = World()
    world.link.on_open()
    world.fetch(1, at=4096)
    assert world.ordered[0].at is None


@pytest.mark.parametrize("offset", [STORE, STORE - 1024, 1 << 40])
def test_what_lies_outside_of_the_store_is_not_read(offset: int) -> None:
    world = World()
    world.link.on_open()
    world.fetch(1, offset)
    assert world.failures == [], "nothing is answered before it returns"
    world.run()
    assert world.failures == [1]
    assert isinstance(world.errors[0], ProtocolError)
    assert world.ordered == []


@pytest.mark.parametrize("insists", [True, False])
def test_a_peer_that_cannot_be_reached_has_no_link(insists: bool) -> None:
    world = World(insists=insists)
    world.link.on_lost("no backend reaches it", late=False)
    assert world.settled == [(None, "nixl: no backend reaches it")]
    assert world.left == 1


def test_a_peer_that_does_not_answer_is_lost_where_there_is_no_other_link() -> None:
    world = World(insists=True)
    world.post(lambda: world.link.on_lost("no answer", late=True))
    world.run()
    assert world.settled == []
    assert [type(error) for error in world.errors] == [PeerGone]
    assert world.left == 1
    other = World(insists=False)
    other.link.on_lost("no answer", late=True)
    assert other.settled == [(None, "nixl: no answer")]


def test_a_link_that_is_lost_ends_its_session_and_says_no_more() -> None:
    world = World()
    world.link.on_open()
    assert world.settled == [(world.link, "")]
    world.post(lambda: world.link.on_lost("gone", late=False))
    world.run()
    assert [str(error) for error in world.errors] == ["p: nixl: gone"]
    world.link.on_lost("again", late=False)
    world.link.on_open()
    assert len(world.settled) == 1


def test_a_word_that_cannot_be_is_refused_at_once() -> None:
    world = World()
    wrong = NixlMemory("", b"metadata", "1.5.1", BASE, STORE, 64, b"\1" * 32)
    found: list[tuple[object, str]] = []
    fetcher = NixlFetcher(world, insists=True)  # type: ignore[arg-type]
    assert not fetcher(world, world, LinkWelcome(nixl=wrong), lambda *one: found.append(one))
    assert found == [(None, "nixl: no agent's name and ticket")]


def test_reads_have_so_many_bytes_at_most_and_all_of_them() -> None:
    spans = [PackedSpan(0, 10, 0), PackedSpan(100, 25, 16), PackedSpan(200, 3, 48)]
    assert reads_of(spans, 1000, 16) == [[(1000, 0, 10), (1100, 16, 6)], [(1106, 22, 16)], [(1122, 38, 3), (1200, 48, 3)]]
