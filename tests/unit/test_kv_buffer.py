from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.kv.buddy import Buddy
from xpyd_sidecar.kv.buffer import Buffer, BufferedCut, BufferPlace, Item, TryId
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.reach import ArraySpan

A, B = b"a" * 32, b"b" * 32
UNIT = 16


def key(letter: str, attempt: int = 1, source: int = 0) -> TryId:
    return Key(TransferId(letter * 32), Attempt(attempt), 1), source


def buffer(units: int = 8, pool: int = 0, *, most: int = 100) -> Buffer[str]:
    return Buffer(Buddy(units * UNIT, UNIT), Buddy(pool * UNIT, UNIT), ttl_s=10, most=most)


def cut(region: int, first: int, blocks: int = 1) -> BufferedCut:
    return BufferedCut(region, first, blocks, blocks * UNIT)


def insert(buffer: Buffer[str], which: TryId, *cuts: BufferedCut) -> None:
    assert buffer.offer(which, cuts)
    for one in cuts:
        place = buffer.take(which, one)
        assert place is not None
        assert buffer.insert(which, one, place, f"array {one.region}")


def test_what_was_inserted_is_selected_by_its_transfer_once() -> None:
    b = buffer()
    b.expect(key("a"), A, 4, 0)
    insert(b, key("a"), cut(0, 0, 2), cut(1, 0))
    items = b.drop_select(key("a"), 0, 2)
    assert [(item.cut, item.what) for item in items] == [(cut(0, 0, 2), "array 0"), (cut(1, 0), "array 1")]
    assert b.bytes_in_use == (3 * UNIT, 0)
    for item in items:
        b.free(item.place)
    assert b.bytes_in_use == (0, 0)
    assert b.drop_select(key("a"), 0, 2) == []


def test_only_what_has_blocks_that_decode_lacks_is_selected_and_other_places_are_free() -> None:
    b = buffer()
    b.expect(key("a"), A, 8, 0)
    insert(b, key("a"), cut(0, 0, 4), cut(1, 0, 2), cut(1, 2, 2))
    items = b.drop_select(key("a"), 3, 1)
    assert [item.cut for item in items] == [cut(0, 0, 4), cut(1, 2, 2)]
    assert b.bytes_in_use == (6 * UNIT, 0)  # the place of blocks 0 and 1 of region 1 is free


def test_of_arrays_with_other_blocks_those_are_selected() -> None:
    b = buffer()
    b.expect(key("a"), A, 6, 0)
    insert(b, key("a"), cut(0, 0, 4), cut(1, 2, 2))
    items = b.drop_select(key("a"), 1, 3, (ArraySpan(1, 1, 0, 1),))
    assert [item.cut for item in items] == [cut(0, 0, 4)]
    assert b.bytes_in_use == (4 * UNIT, 0)


def test_by_content_only_whole_entries_of_the_same_transfer_and_prompt_are_selected() -> None:
    b = buffer()
    older, newer, others = key("a", 1), key("a", 2), key("b")
    for which in (older, newer, others):
        b.expect(which, A, 2, 0)
    insert(b, older, cut(0, 0))
    insert(b, newer, cut(0, 0), cut(0, 1))
    insert(b, others, cut(0, 0), cut(0, 1))
    later = key("a", 3)
    assert b.find_content(later, B) is None
    assert b.find_content(key("a", 3, source=1), A) is None
    assert b.find_content(later, A) == newer
    assert len(b.drop_select(newer, 0, 2)) == 2
    assert newer not in b
    assert b.find_content(later, A) is None
    assert older in b
    assert others in b


def test_what_will_not_come_may_be_offered_again() -> None:
    b = buffer()
    b.expect(key("a"), A, 3, 0)
    insert(b, key("a"), cut(0, 0))
    assert b.offer(key("a"), [cut(0, 1), cut(0, 2)])
    place = b.take(key("a"), cut(0, 2))
    assert place is not None
    for one in (cut(0, 0), cut(0, 1), cut(0, 2)):
        b.withdraw(key("a"), one)
    b.free(place)
    assert b.bytes_in_use == (UNIT, 0), "what is there stays"
    assert [b.has(key("a"), cut(0, at)) for at in range(3)] == [True, False, False]
    assert b.offer(key("a"), [cut(0, 1), cut(0, 2)])
    with pytest.raises(ValueError, match="offered twice"):
        b.offer(key("a"), [cut(0, 0)])
    b.withdraw(key("b"), cut(0, 0))


def test_it_is_busy_while_its_memory_is_being_made_and_the_pool_is_not_asked_in_its_place() -> None:
    asked: list[int] = []
    b: Buffer[str] = Buffer(Buddy(2 * UNIT, UNIT), Buddy(2 * UNIT, UNIT), ttl_s=10,
                            usable=lambda tier: bool(asked.append(tier)))
    b.expect(key("a"), A, 4, 0)
    assert not b.offer(key("a"), [cut(0, 0)])
    assert (asked, b.bytes_in_use) == ([0], (0, 0))


def test_the_pool_takes_over_and_then_it_is_busy_until_something_leaves() -> None:
    b = buffer(2, pool=2)
    for letter in "ab":
        b.expect(key(letter), A, 8, 0)
    insert(b, key("a"), cut(0, 0), cut(0, 1), cut(0, 2))
    assert b.bytes_in_use == (2 * UNIT, UNIT)
    assert not b.offer(key("b"), [cut(0, 0), cut(0, 1)])
    assert b.bytes_in_use == (2 * UNIT, UNIT), "a refused offer holds nothing"
    assert b.offer(key("b"), [cut(0, 0)])
    assert b.forget(key("a"))
    assert b.offer(key("b"), [cut(0, 1)])
    assert b.forget(key("b"))
    assert b.bytes_in_use == (0, 0)
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
    assert b.bytes_in_use == (0, 0)


def test_what_no_request_claims_leaves_after_its_time() -> None:
    b = buffer()
    b.expect(key("a"), A, 2, 0)
    b.expect(key("b"), A, 2, 5)
    insert(b, key("a"), cut(0, 0))
    assert b.tick(9.9) == []
    assert b.tick(10) == [key("a")]
    assert b.bytes_in_use == (0, 0)
    assert list(b.tick(15)) == [key("b")]


def test_a_lost_source_takes_what_is_unfinished_and_leaves_what_is_whole() -> None:
    b = buffer()
    for letter in "ab":
        b.expect(key(letter), A, 2, 0)
    insert(b, key("a"), cut(0, 0))
    insert(b, key("b"), cut(0, 0, 2))
    assert b.drop_unfinished(key("a"))
    assert not b.drop_unfinished(key("b"))
    assert key("b") in b


def test_a_fetch_that_is_still_under_way_when_its_entry_leaves_gives_its_place_back() -> None:
    b = buffer()
    b.expect(key("a"), A, 2, 0)
    assert b.offer(key("a"), [cut(0, 0), cut(0, 1)])
    place = b.take(key("a"), cut(0, 0))
    assert place is not None
    assert b.forget(key("a"))
    assert b.bytes_in_use == (UNIT, 0)
    assert not b.insert(key("a"), cut(0, 0), place, "late")
    assert b.bytes_in_use == (0, 0)
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
        self.prompts: dict[TryId, tuple[bytes, int]] = {}
        self.granted: dict[TryId, list[BufferedCut]] = {}
        self.offered: dict[TryId, set[tuple[int, int]]] = {}
        self.writing: list[tuple[TryId, BufferedCut, BufferPlace]] = []
        self.selected: list[tuple[bytes, Item[str]]] = []
        self.claimed: set[TryId] = set()
        self.now = 0.0
        self.count = 0

    def run(self, events: int) -> None:
        moves = (self.expect, self.offer, self.offer, self.begin, self.begin, self.complete, self.complete, self.select,
                 self.content, self.use, self.use, self.lose, self.wait)
        for _ in range(events):
            self.draw.choice(moves)()
            for used, units in zip(self.buffer.bytes_in_use, self.sizes, strict=True):
                assert 0 <= used <= units * UNIT
            assert len(self.buffer) <= 4
        while self.writing:
            self.complete()
        while self.selected:
            self.use()
        self.buffer.tick(self.now + 100)
        assert self.buffer.bytes_in_use == (0, 0), "a place was not given back"
        assert len(self.buffer) == 0

    def expect(self) -> None:
        self.count += 1
        which = key("abcdef0123456789"[self.count % 16], attempt=self.count)
        self.prompts[which] = self.draw.choice((A, B)), self.draw.randrange(1, 5)
        self.granted[which], self.offered[which] = [], set()
        identity, blocks = self.prompts[which]
        self.gone(self.buffer.expect(which, identity, 2 * blocks, self.now))

    def gone(self, keys: list[TryId]) -> None:
        for which in keys:
            assert which not in self.buffer
            assert which not in self.claimed
            self.granted[which] = []

    def some(self) -> TryId | None:
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
        assert self.buffer.insert(which, wanted, place, "") == known

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
        identity, ((transfer, _, _), _) = self.draw.choice((A, B)), self.some() or key("a")
        which = self.buffer.find_content((Key(transfer, Attempt(99), 1), 0), identity)
        if which is None:
            return
        prompt, blocks = self.prompts[which]
        items = self.buffer.drop_select(which, 0, 9)
        assert (prompt, which[0].transfer) == (identity, transfer)
        assert sum(item.cut.blocks for item in items) == 2 * blocks
        self.keep(which, items, 0)

    def keep(self, which: TryId, items: list[Item[str]], first: int) -> None:
        if items:
            self.claimed.add(which)
        assert all(item.cut.first + item.cut.blocks > first for item in items)
        self.selected += [(self.prompts[which][0], item) for item in items]

    def use(self) -> None:
        if not self.selected:
            return
        identity, item = self.selected.pop(self.draw.randrange(len(self.selected)))
        start = item.place.offset
        for at in range(item.cut.blocks):
            read = self.memory[item.place.tier][start + at * UNIT:start + (at + 1) * UNIT]
            assert bytes(read) == bytes(self.stamp(identity, item.cut.region, item.cut.first + at)), "another's bytes"
        self.buffer.free(item.place)

    def lose(self) -> None:
        if (which := self.some()) is not None and self.draw.random() < 0.4:
            known = which in self.buffer
            assert self.buffer.drop_unfinished(which) == (known and which not in self.buffer)

    def wait(self) -> None:
        self.now += self.draw.random() * 3
        self.gone(self.buffer.tick(self.now))


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_events_loses_a_place_or_gives_anothers_bytes(seed: int) -> None:
    Judge(seed).run(300)
