"""Prefill's half of the lookup buffer and of pulling: what is offered, stored, fetched, and let go once."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.kv.bodies import Ready
from xpyd_sidecar.kv.copies import Copy, Free, OfferCopy, RefuseTransfer, Send, Step, StoreCopy, TransferEnded
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.sending import Sending
from xpyd_sidecar.kv.stores import Expect

KEY, OTHER = Key(TransferId("a" * 32), Attempt(1), 1), Key(TransferId("b" * 32), Attempt(1), 1)
EXPECT = Expect(2, 20, checksum=False)


def machine(cover: bool = False) -> Sending[str]:
    return Sending[str](keep_s=10, send_s=5, regions=2, block_bytes=20, cover=cover)


def copy(data: str = "x", region: int = 0, first: int = 0, blocks: int = 4) -> Copy[str]:
    return Copy(region, first, blocks, data)


def ready(first: int = 0, count: int = 4, window: int = 0) -> Ready:
    return Ready(first, count, 2, 20, checksum=False, window=window)


def weigh(data: str) -> int:
    return 10 * len(data)


def test_nothing_is_offered_unless_decode_expects_it() -> None:
    m = machine()
    m.copy(KEY, copy(), 0)
    assert m.spill(100, weigh, 0) == []
    assert m.expect(1, KEY, EXPECT) == []
    assert m.spill(100, weigh, 0) == [OfferCopy(1, KEY, copy())]
    assert [one for one, _ in m._open[KEY].offered.values()] == [copy()]
    assert m.spill(100, weigh, 0) == []


def test_the_oldest_transfers_are_offered_first_and_no_more_than_is_wanted() -> None:
    m = machine()
    for key in (KEY, OTHER):
        m.expect(1, key, EXPECT)
        for region in range(2):
            m.copy(key, copy(region=region), 0)
    assert m.spill(11, weigh, 0) == [OfferCopy(1, KEY, copy(region=0)), OfferCopy(1, KEY, copy(region=1))]
    assert m.spill(10, weigh, 0) == [OfferCopy(1, OTHER, copy(region=0))]


@pytest.mark.parametrize("cover", [True, False])
def test_what_decode_has_room_for_is_stored_once(cover: bool) -> None:
    m = machine(cover)
    m.copy(KEY, copy(), 0)
    m.expect(1, KEY, EXPECT)
    m.spill(1, weigh, 0)
    assert m.room(2, KEY, 0, 0) == []
    assert m.room(1, KEY, 1, 0) == []
    assert m.room(1, KEY, 0, 0) == [StoreCopy(1, KEY, copy(), cover)]
    assert m.room(1, KEY, 0, 0) == []
    assert m.ready(1, KEY, ready(), 1) == []
    assert m.done(1, KEY) == [TransferEnded(KEY, Outcome.OK, "", confirmed=True)]


def test_a_link_over_which_decode_only_waits_is_not_silent() -> None:
    m = machine()
    assert not m.busy(1)
    m.expect(1, KEY, EXPECT)
    assert m.busy(1)
    assert not m.busy(2)
    m.copy(KEY, copy(), 0)
    assert m.busy(1)
    m.release(KEY, Outcome.ABORTED, "enough")
    assert not m.busy(1)


def test_what_decode_has_of_another_try_is_not_waited_for_any_more() -> None:
    m = machine()
    m.expect(1, KEY, EXPECT)
    assert m.ready(1, KEY, ready(), 0) == []
    assert m.done(1, KEY) == [TransferEnded(KEY, Outcome.OK, "", confirmed=True)]
    assert not m.busy(1)


@pytest.mark.parametrize("begun", [True, False])
def test_what_was_pushed_ahead_over_a_lost_link_is_not_waited_for_by_a_load_over_another(begun: bool) -> None:
    """Prefill may hear of the new connection before it sees the end of the old one."""
    m = machine()
    m.expect(1, KEY, EXPECT)
    m.copy(KEY, copy(), 0)
    m.spill(1, weigh, 0)
    m.copy(KEY, copy(region=1), 0)
    if not begun:  # offered, and not sent
        assert m.ready(2, KEY, ready(), 1) != []
        assert m.lost(1, Outcome.PEER_LOST, "gone") == []
        assert m.open == 1
        return
    m.room(1, KEY, 0, 0)
    told, freed, ended = m.ready(2, KEY, ready(), 1)
    assert isinstance(told, RefuseTransfer)
    assert (told.link, told.outcome, told.retry) == (2, Outcome.PEER_LOST, True)
    assert freed == Free(copy(region=1))
    assert isinstance(ended, TransferEnded)
    assert ended.outcome is Outcome.PEER_LOST
    assert m.lost(1, Outcome.PEER_LOST, "gone") == []


def test_a_busy_decode_is_asked_again_when_it_says_and_until_the_lease_is_over() -> None:
    m = machine()
    m.copy(KEY, copy(), 0)
    m.expect(1, KEY, EXPECT)
    m.spill(1, weigh, 0)
    m.full(1, KEY, 0, 0, until=3)
    assert m.spill(1, weigh, 2.9) == []
    assert m.spill(1, weigh, 3) == [OfferCopy(1, KEY, copy())]
    m.full(1, KEY, 0, 0, until=9)
    late = "decode did not ask for it in time"
    assert m.tick(10) == [RefuseTransfer(1, KEY, Outcome.DEADLINE, late, retry=False), Free(copy()),
                          TransferEnded(KEY, Outcome.DEADLINE, late, confirmed=False)]


def test_ready_takes_back_what_was_offered_and_a_late_answer_changes_nothing() -> None:
    m = machine()
    m.copy(KEY, copy(), 0)
    m.expect(1, KEY, EXPECT)
    m.spill(1, weigh, 0)
    assert [type(one) for one in m.ready(1, KEY, ready(), 1)] == [Send]
    assert m.room(1, KEY, 0, 0) == []
    m.full(1, KEY, 0, 0, until=3)
    assert m.spill(1, weigh, 4) == []


def test_expectations_may_come_before_the_first_copy_and_after_the_end() -> None:
    m = machine()
    m.expect(1, KEY, EXPECT)
    m.copy(KEY, copy(), 0)
    assert m.busy(1)
    assert len(m.spill(1, weigh, 0)) == 1
    m.release(KEY, Outcome.ABORTED, "gone")
    assert m.expect(1, KEY, EXPECT) == [RefuseTransfer(1, KEY, Outcome.ABORTED, "gone", retry=False, ended=True)]


def test_decode_may_let_go_of_what_it_expects() -> None:
    m = machine()
    m.copy(KEY, copy(), 0)
    m.expect(1, KEY, EXPECT)
    assert m.cancel(2, KEY, Outcome.DEADLINE, "unclaimed") == []
    assert m.cancel(1, KEY, Outcome.DEADLINE, "unclaimed") == [
        Free(copy()), TransferEnded(KEY, Outcome.DEADLINE, "unclaimed", confirmed=False)]
    m.expect(1, OTHER, EXPECT)
    assert m.cancel(1, OTHER, Outcome.DEADLINE, "unclaimed") == [
        TransferEnded(OTHER, Outcome.DEADLINE, "unclaimed", confirmed=False)]


def test_another_geometry_is_offered_nothing() -> None:
    m = machine()
    m.copy(KEY, copy(), 0)
    m.expect(1, KEY, Expect(3, 20, checksum=False))
    assert m.spill(1, weigh, 0) == []


def test_a_lost_link_ends_what_was_stored_over_it_and_keeps_the_rest() -> None:
    m = machine()
    for key in (KEY, OTHER):
        m.copy(key, copy(), 0)
        m.expect(1, key, EXPECT)
    m.spill(20, weigh, 0)
    m.room(1, KEY, 0, 0)
    assert m.lost(1, Outcome.PEER_LOST, "reset") == [TransferEnded(KEY, Outcome.PEER_LOST, "reset", confirmed=False)]
    assert not m.busy(1)
    assert [type(one) for one in m.ready(2, OTHER, ready(), 1)] == [Send]


def test_decode_is_told_of_the_end_of_what_it_expects() -> None:
    m = machine()
    m.copy(KEY, copy(), 0)
    m.expect(1, KEY, EXPECT)
    assert m.release(KEY, Outcome.OVERFLOW, "full")[0] == RefuseTransfer(1, KEY, Outcome.OVERFLOW, "full", retry=False)
    m.expect(1, OTHER, EXPECT)
    assert m.release(OTHER, Outcome.STALE, "older")[0] == RefuseTransfer(1, OTHER, Outcome.STALE, "older", retry=False)


def test_what_lies_in_one_ranks_buffer_is_not_cut_for_several() -> None:
    m = machine()
    m.copy(KEY, copy(), 0)
    m.expect(1, KEY, EXPECT)
    m.spill(1, weigh, 0)
    m.room(1, KEY, 0, 0)
    steps = m.ready(1, KEY, Ready(0, 4, 2, 20, checksum=False, takers=2), 1)
    assert isinstance(steps[0], RefuseTransfer)
    assert "buffer of one decode rank" in steps[0].reason


def sends(steps: list[Step[str]]) -> list[tuple[int, int, int]]:
    return [(one.copy.region, one.first, one.blocks) for one in steps if isinstance(one, Send)]


def test_with_a_window_nothing_is_sent_beyond_what_was_fetched() -> None:
    m = machine()
    m.copy(KEY, copy(), 0)
    steps = m.ready(1, KEY, ready(1, 3, window=1), 1)
    assert sends(steps) == [(0, 1, 1)]
    assert m.fetch(2, KEY, 4) == []
    assert m.fetch(1, KEY, 2) == []
    assert sends(m.fetch(1, KEY, 3)) == [(0, 2, 1)]
    assert sends(m.copy(KEY, copy(region=1), 1)) == [(1, 1, 2)]
    assert sends(m.fetch(1, KEY, 9)) == [(0, 3, 1), (1, 3, 1)]
    assert m.fetch(1, KEY, 10) == []
    assert m.fetch(1, OTHER, 10) == []


def test_a_copy_that_is_pulled_in_parts_is_let_go_once() -> None:
    draw = random.Random(3)
    for _ in range(300):
        m, made = machine(), 0
        out: list[Step[str]] = []
        first, window = draw.randrange(0, 4), draw.randrange(1, 4)
        early = draw.random() < 0.5
        if early:
            out += m.ready(1, KEY, ready(first, 8 - first, window), 0)
        for at in (0, 4):
            for region in range(2):
                out += m.copy(KEY, copy(f"{region}.{at}", region, at), 0)
                made += 1
        if not early:
            out += m.ready(1, KEY, ready(first, 8 - first, window), 0)
        until = first + window
        while until < draw.choice((8, 8, 12)):
            until += draw.randrange(1, 4)
            out += m.fetch(1, KEY, until)
        out += m.done(1, KEY) if draw.random() < 0.5 else m.lost(1, Outcome.PEER_LOST, "reset")
        freed: Counter[str] = Counter()
        blocks: Counter[tuple[int, int]] = Counter()
        for one in out:
            if isinstance(one, Send):
                blocks.update((one.copy.region, one.first + n) for n in range(one.blocks))
            if isinstance(one, Send | Free) and (one.uses is None or one.uses.over()):
                freed[one.copy.data] += 1
        assert set(freed.values()) == {1}
        assert len(freed) == made
        assert set(blocks.values()) == {1}
        assert all(first <= block < 8 for _, block in blocks)
