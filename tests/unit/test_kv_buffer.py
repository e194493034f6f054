from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.kv.buddy import Buddy
from xpyd_sidecar.kv.buffer import Buffer, BufferedCut, BufferPlace, Item
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.reach import ArraySpan

A, B = b"a" * 32, b"b" * 32
UNIT = 16


def key(letter: str, attempt: int = 1) -> Key:
    return Key(TransferId(letter * 32), Attempt(attempt), 1)


def buffer(units: int = 8, pool: int = 0, *, most: int = 100) -> Buffer:
    return Buffer(Buddy(units * UNIT, UNIT), Buddy(pool * UNIT, UNIT), ttl_s=10, most=most)


def cut(region: int, first: int, blocks: int = 1) -> BufferedCut:
    return BufferedCut(region, first, blocks, blocks * UNIT)


def insert(buffer: Buffer, which: Key, *cuts: BufferedCut) -> None:
    assert buffer.offer(which, cuts)
    for one in cuts:
        place = buffer.take(which, one)
        assert place is not None
        assert buffer.insert(which, one, place)


def test_what_was_inserted_is_selected_by_its_transfer_once() -> None:
    b = buffer()
    b.expect(key("a"), A, 4, 0)
    insert(b, key("a"), cut(0, 0, 2), cut(1, 0))
    items = b.drop_select(key("a"), 0, 2)
    assert [(item.region, item.first, item.blocks) for item in items] == [(0, 0, 2), (1, 0, 1)]
    assert b.used == (3 * UNIT, 0)
    for item in items:
        b.free(item.place)
    assert b.used == (0, 0)
    assert b.drop_select(key("a"), 0, 2) == []


def test_only_the_blocks_that_decode_lacks_are_selected_and_the_others_places_are_free() -> None:
    b = buffer()
    b.expect(key("a"), A, 8, 0)
    insert(b, key("a"), cut(0, 0, 4), cut(1, 0, 2), cut(1, 2, 2))
    items = b.drop_select(key("a"), 3, 1)
    assert [item[:3] for item in items] == [(0, 3, 1), (1, 3, 1)]
    assert [(item.skip, item.size) for item in items] == [(3 * UNIT, UNIT), (UNIT, UNIT)]
    assert b.used == (6 * UNIT, 0)  # the place of blocks 0 and 1 of region 1 is free


def test_of_arrays_with_other_blocks_those_are_selected() -> None:
    b = buffer()
    b.expect(key("a"), A, 6, 0)
    insert(b, key("a"), cut(0, 0, 4), cut(1, 2, 2))
    items = b.drop_select_content(key("a").transfer, A, 1, 3, (ArraySpan(1, 1, 3, 1),))
    assert [item[:3] for item in items] == [(0, 1, 3), (1, 3, 1)]
    assert [(item.skip, item.size) for item in items] == [(UNIT, 3 * UNIT), (UNIT, UNIT)]


def test_by_content_only_whole_entries_of_the_same_transfer_and_prompt_are_selected() -> None:
    b = buffer()
    older, newer, others = key("a", 1), key("a", 2), key("b")
    for which in (older, newer, others):
        b.expect(which, A, 2, 0)
    insert(b, older, cut(0, 0))
    insert(b, newer, cut(0, 0), cut(0, 1))
    insert(b, others, cut(0, 0), cut(0, 1))
    assert b.drop_select_content(newer.transfer, B, 0, 2) == []
    assert len(b.drop_select_content(newer.transfer, A, 0, 2)) == 2
    assert newer not in b
    assert b.drop_select_content(newer.transfer, A, 0, 2) == []
    assert older in b
    assert others in b


def test_the_pool_takes_over_and_then_it_is_busy_until_something_leaves() -> None:
    b = buffer(2, pool=2)
    for letter in "ab":
        b.expect(key(letter), A, 8, 0)
    insert(b, key("a"), cut(0, 0), cut(0, 1), cut(0, 2))
    assert b.used == (2 * UNIT, UNIT)
    assert not b.offer(key("b"), [cut(0, 0), cut(0, 1)])
    assert b.used == (2 * UNIT, UNIT), "a refused offer holds nothing"
    assert b.offer(key("b"), [cut(0, 0)])
    assert b.forget(key("a"))
    assert b.offer(key("b"), [cut(0, 1)])
    assert b.forget(key("b"))
    assert b.used == (0, 0)
    assert not b.forget(key("b"))


def test_of_an_offer_no_more_is_looked_at_than_the_prompt_has_blocks() -> None:
    b, looked = buffer(), []

    def cuts() -> Iterator[BufferedCut]:
        for at in range(1 << 32):
            looked.append(at)
            yield cut(0, at)

    assert not b.offer(key("a"), cuts()), "nobody expects it"
    assert not looked
    b.expect(key("a"), A, 4, 0)
    with pytest.raises(ValueError, match="more than the prompt has"):
        b.offer(key("a"), cuts())
    assert looked == [0, 1, 2, 3, 4]
    assert b.used == (0, 0)


def test_what_no_request_claims_leaves_after_its_time() -> None:
    b = buffer()
    b.expect(key("a"), A, 2, 0)
    b.expect(key("b"), A, 2, 5)
    insert(b, key("a"), cut(0, 0))
    assert b.tick(9.9) == []
    assert b.tick(10) == [key("a")]
    assert b.used == (0, 0)
    assert list(b.tick(15)) == [key("b")]


def test_a_lost_source_takes_what_is_unfinished_and_leaves_what_is_whole() -> None:
    b = buffer()
    for letter in "ab":
        b.expect(key(letter), A, 2, 0)
    insert(b, key("a"), cut(0, 0))
    insert(b, key("b"), cut(0, 0, 2))
    assert b.broken(key("a"))
    assert not b.broken(key("b"))
    assert key("b") in b


def test_a_frame_that_is_still_arriving_when_its_entry_leaves_gives_its_place_back() -> None:
    b = buffer()
    b.expect(key("a"), A, 2, 0)
    assert b.offer(key("a"), [cut(0, 0), cut(0, 1)])
    place = b.take(key("a"), cut(0, 0))
    assert place is not None
    assert b.forget(key("a"))
    assert b.used == (UNIT, 0)
    assert not b.insert(key("a"), cut(0, 0), place)
    assert b.used == (0, 0)
    assert b.take(key("a"), cut(0, 1)) is None


def test_the_oldest_entry_gives_way_to_more_than_there_may_be() -> None:
    b = buffer(most=2)
    assert [b.expect(key(letter), A, 1, 0) for letter in "abca"] == [[], [], [key("a")], [key("b")]]
    assert b.expect(key("c"), A, 1, 0) == []
    assert len(b) == 2


def test_blocks_offered_twice_or_beyond_the_prompt_are_refused() -> None:
    b = buffer()
    b.expect(key("a"), A, 2, 0)
    assert b.offer(key("a"), [cut(0, 0)])
    for wrong in ([cut(0, 0)], [cut(0, 1), cut(1, 0)]):
        with pytest.raises(ValueError, match="offered twice"):
            b.offer(key("a"), wrong)
    assert not b.offer(key("b"), [cut(0, 0)])
    with pytest.raises(KeyError):
        buffer().drop_any()


class Judge:
    """Random events on a small buffer; every place is written on as memory would be, so that an overlap shows."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.sizes = (self.draw.randrange(1, 20), self.draw.randrange(0, 8))
        self.buffer = buffer(*self.sizes, most=4)
        self.memory = [bytearray(units * UNIT) for units in self.sizes]
        self.prompts: dict[Key, tuple[bytes, int]] = {}
        self.granted: dict[Key, list[BufferedCut]] = {}
        self.offered: dict[Key, set[tuple[int, int]]] = {}
        self.writing: list[tuple[Key, BufferedCut, BufferPlace]] = []
        self.selected: list[tuple[bytes, Item]] = []
        self.claimed: set[Key] = set()
        self.now = 0.0
        self.count = 0

    def run(self, events: int) -> None:
        moves = (self.expect, self.offer, self.offer, self.begin, self.begin, self.complete, self.complete, self.select,
                 self.content, self.use, self.use, self.lose, self.wait)
        for _ in range(events):
            self.draw.choice(moves)()
            for used, units in zip(self.buffer.used, self.sizes, strict=True):
                assert 0 <= used <= units * UNIT
            assert len(self.buffer) <= 4
        while self.writing:
            self.complete()
        while self.selected:
            self.use()
        self.buffer.tick(self.now + 100)
        assert self.buffer.used == (0, 0), "a place was not given back"
        assert len(self.buffer) == 0

    def expect(self) -> None:
        self.count += 1
        which = key("abcdef0123456789"[self.count % 16], attempt=self.count)
        self.prompts[which] = self.draw.choice((A, B)), self.draw.randrange(1, 5)
        self.granted[which], self.offered[which] = [], set()
        identity, blocks = self.prompts[which]
        self.gone(self.buffer.expect(which, identity, 2 * blocks, self.now))

    def gone(self, keys: list[Key]) -> None:
        for which in keys:
            assert which not in self.buffer
            assert which not in self.claimed
            self.granted[which] = []

    def some(self) -> Key | None:
        return self.draw.choice(list(self.prompts)) if self.prompts else None

    def offer(self) -> None:
        if (which := self.some()) is None:
            return
        region, first = self.draw.randrange(2), self.draw.randrange(self.prompts[which][1])
        blocks = self.draw.randrange(1, self.prompts[which][1] - first + 1)
        slots = {(region, first + n) for n in range(blocks)}
        known = which in self.buffer
        if known and slots & self.offered[which]:
            with pytest.raises(ValueError, match="twice"):
                self.buffer.offer(which, [cut(region, first, blocks)])
            return
        if self.buffer.offer(which, [cut(region, first, blocks)]):
            assert known
            self.granted[which].append(cut(region, first, blocks))
            self.offered[which] |= slots

    def begin(self) -> None:
        if (which := self.some()) is None:
            return
        wanted = self.draw.choice(self.granted[which]) if self.granted[which] else cut(0, 0)
        place = self.buffer.take(which, wanted)
        assert (place is None) == (wanted not in self.granted[which] or which not in self.buffer)
        if place is not None:
            self.granted[which].remove(wanted)
            self.writing.append((which, wanted, place))

    def complete(self) -> None:
        if not self.writing:
            return
        which, wanted, place = self.writing.pop(self.draw.randrange(len(self.writing)))
        memory = self.memory[place.tier]
        assert place.offset + place.size <= len(memory)
        view = memoryview(memory)[place.offset:place.offset + place.size]
        known = which in self.buffer
        if self.draw.random() < 0.1:  # its connection has ended
            self.buffer.free(place)
            if known:
                self.buffer.forget(which)
            return
        for at in range(wanted.blocks):
            view[at * UNIT:(at + 1) * UNIT] = bytes(self.stamp(self.prompts[which][0], wanted.region, wanted.first + at))
        assert self.buffer.insert(which, wanted, place) == known

    def stamp(self, identity: bytes, region: int, block: int) -> Iterator[int]:
        return iter([identity[0], region, block] + [0] * (UNIT - 3))

    def select(self) -> None:
        if (which := self.some()) is None:
            return
        first = self.draw.randrange(self.prompts[which][1])
        items = self.buffer.drop_select(which, first, self.draw.randrange(1, 6))
        assert not items or which not in self.claimed
        self.keep(which, items, first)

    def content(self) -> None:
        identity, transfer = self.draw.choice((A, B)), (self.some() or key("a")).transfer
        before = [one for one in self.prompts if one in self.buffer]
        items = self.buffer.drop_select_content(transfer, identity, 0, 9)
        left = [one for one in before if one not in self.buffer]
        assert len(left) == (1 if items else 0)
        for which in left:
            prompt, blocks = self.prompts[which]
            assert (prompt, which.transfer) == (identity, transfer)
            assert sum(item.blocks for item in items) == 2 * blocks
            self.keep(which, items, 0)

    def keep(self, which: Key, items: list[Item], first: int) -> None:
        if items:
            self.claimed.add(which)
        assert all(item.first >= first for item in items)
        self.selected += [(self.prompts[which][0], item) for item in items]

    def use(self) -> None:
        if not self.selected:
            return
        identity, item = self.selected.pop(self.draw.randrange(len(self.selected)))
        start = item.place.offset + item.skip
        for at in range(item.blocks):
            read = self.memory[item.place.tier][start + at * UNIT:start + (at + 1) * UNIT]
            assert bytes(read) == bytes(self.stamp(identity, item.region, item.first + at)), "another's bytes"
        self.buffer.free(item.place)

    def lose(self) -> None:
        if (which := self.some()) is not None and self.draw.random() < 0.4:
            known = which in self.buffer
            assert self.buffer.broken(which) == (known and which not in self.buffer)

    def wait(self) -> None:
        self.now += self.draw.random() * 3
        self.gone(self.buffer.tick(self.now))


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_events_loses_a_place_or_gives_anothers_bytes(seed: int) -> None:
    Judge(seed).run(300)
