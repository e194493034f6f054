"""Receiving, rule by rule: placed only where wanted, committed only when whole, reported once."""

from __future__ import annotations

from typing import Literal, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, TransferId
from xpyd_sidecar.kv.bodies import Ready
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.leases import LOOKS
from xpyd_sidecar.kv.mapping import Cut, PlacedCut, units
from xpyd_sidecar.kv.reach import ArraySpan, TableSpan
from xpyd_sidecar.kv.receiving import Ask, Cancel, Confirm, Finished, From, Order, PlaceBlocks, Pull, Receiving

P1, P2 = HostPort("10.0.0.1:1"), HostPort("10.0.0.2:1")
INC = Incarnation("p" * 32)
WHOLE = (PlacedCut(Cut(0, 2, 0, 0, 32), 0, 0),)
TABLES = (TableSpan(2, (40, 41, 42)),)


def key(attempt: int = 1) -> Key:
    return Key(TransferId("a" * 32), Attempt(attempt), 1)


def order(attempt: int = 1, address: HostPort = P1, ids: tuple[int, ...] = (40, 41, 42)) -> Order:
    return Order("r", key(attempt), (TableSpan(2, ids),), (From(address, INC, WHOLE),))


def machine() -> Receiving:
    return Receiving(load_s=30, grace_s=1, regions=2, cover=True)


def begun() -> Receiving:
    receiving = machine()
    ready = Ready(2, 3, 2, 64, checksum=True)
    assert receiving.load(order(), 0.0) == [Ask(P1, INC, key(), ready, "r", TABLES, 0, units(WHOLE))]
    return receiving


def silence(receiving: Receiving, start: float, end: float) -> list[object]:
    """Nothing comes, and this side looks every second: what it says at ``end``, having said nothing before."""
    while (start := start + 1.0) < end:
        assert receiving.tick(start) == []
    return [*receiving.tick(end)]


def fill(receiving: Receiving, attempt: int = 1) -> list[object]:
    out: list[object] = []
    for region in range(2):
        assert receiving.arrived(key(attempt), 0, region, (2, 3), 100) == PlaceBlocks("r", region, (40, 41, 42))
        out += receiving.placed(key(attempt))
    return out


def test_a_load_is_committed_when_every_block_of_every_region_is_placed() -> None:
    receiving = begun()
    assert receiving.arrived(key(), 0, 0, (2, 3), 30) == PlaceBlocks("r", 0, (40, 41, 42))
    assert receiving.arrived(key(), 0, 1, (4, 1), 10) == PlaceBlocks("r", 1, (42,))
    assert receiving.placed(key()) == []
    assert receiving.arrived(key(), 0, 1, (2, 2), 20) == PlaceBlocks("r", 1, (40, 41))
    assert receiving.placed(key()) == [Confirm(key(), 0), Finished("r", key(), Outcome.OK, "", 60)]
    assert receiving.open == 0
    assert receiving.arrived(key(), 0, 0, (2, 3), 30) is None


def test_a_block_that_comes_twice_counts_once() -> None:
    receiving = begun()
    for _ in range(6):
        receiving.arrived(key(), 0, 0, (2, 1), 10)
    assert receiving.placed(key()) == []


def test_nothing_outside_the_load_is_placed() -> None:
    receiving = begun()
    for region, first, blocks in ((2, 2, 1), (0, 1, 1), (0, 4, 2), (0, 5, 1), (0, 2, 0), (-1, 2, 1)):
        assert receiving.arrived(key(), 0, region, (first, blocks), 10) is None
    assert receiving.arrived(key(2), 0, 0, (2, 1), 10) is None


def test_a_newer_try_starts_over_in_the_same_blocks() -> None:
    receiving = begun()
    receiving.arrived(key(), 0, 0, (2, 3), 30)
    steps = receiving.load(order(2, P2, ids=()), 5.0)
    assert steps == [Cancel(key(), 0, Outcome.STALE, "a newer try has taken its place"),
                     Ask(P2, INC, key(2), Ready(2, 3, 2, 64, checksum=True), "r", TABLES, 0, units(WHOLE))]
    assert receiving.arrived(key(1), 0, 1, (2, 3), 30) is None  # stale
    receiving.arrived(key(2), 0, 1, (2, 3), 30)
    assert receiving.placed(key(2)) == []  # region 0 is there of the old try only
    receiving.load(order(3, P2, ids=()), 6.0)
    assert fill(receiving, 3) == [Confirm(key(3), 0), Finished("r", key(3), Outcome.OK, "", 200)]


def test_a_newer_try_alone_can_be_committed() -> None:
    receiving = begun()
    receiving.load(order(2, P2, ids=()), 5.0)
    assert fill(receiving, 2) == [Confirm(key(2), 0), Finished("r", key(2), Outcome.OK, "", 200)]


def test_an_older_try_changes_nothing() -> None:
    receiving = machine()
    receiving.load(order(2), 0.0)
    assert receiving.load(order(1), 0.0) == []


def test_a_lost_source_is_waited_for_shortly() -> None:
    receiving = begun()
    assert receiving.broken(key(), 0, (Outcome.PEER_LOST, "reset"), 10.0, final=False) == []
    assert receiving.tick(10.9) == []
    assert receiving.tick(11.0) == [Finished("r", key(), Outcome.PEER_LOST, "reset", 0)]


def test_another_try_in_time_rescues_a_load_that_has_lost_its_source() -> None:
    receiving = begun()
    receiving.broken(key(), 0, (Outcome.PEER_LOST, "reset"), 10.0, final=False)
    ready = Ready(2, 3, 2, 64, checksum=True)
    assert receiving.load(order(2, P2), 10.5) == [Ask(P2, INC, key(2), ready, "r", TABLES, 0, units(WHOLE))]
    assert receiving.tick(12.0) == []


def test_a_source_that_was_aborted_is_replaced_by_the_router_so_the_deadline_stays() -> None:
    receiving = begun()
    silence(receiving, 0.0, 10.0)
    receiving.broken(key(), 0, (Outcome.ABORTED, "leg ended"), 10.0, final=False)
    assert silence(receiving, 10.0, 29.0) == []
    assert receiving.tick(30.0) == [Finished("r", key(), Outcome.ABORTED, "leg ended", 0)]


def test_a_final_failure_is_reported_at_once() -> None:
    receiving = begun()
    assert receiving.broken(key(), 0, (Outcome.CHECKSUM, "bad"), 1.0, final=True) == [
        Finished("r", key(), Outcome.CHECKSUM, "bad", 0)]
    assert receiving.broken(key(), 0, (Outcome.CHECKSUM, "bad"), 1.0, final=True) == []


SILENT = "no progress for 30 s"
TOO_LONG = "it took longer than a load may"


def ended(reason: str) -> list[object]:
    return [Cancel(key(), 0, Outcome.DEADLINE, reason), Finished("r", key(), Outcome.DEADLINE, reason, 0)]


def test_silence_ends_a_load() -> None:
    receiving = begun()
    assert silence(receiving, 0.0, 29.9) == []
    assert receiving.tick(30.0) == ended(SILENT)


def test_a_block_per_29_seconds_is_progress_and_the_load_lasts_until_all_are_there() -> None:
    receiving = begun()
    now = 0.0
    blocks = [(region, 2 + at) for region in range(2) for at in range(3)]
    for region, block in blocks:
        assert silence(receiving, now, now + 29.0) == []
        now += 29.0
        receiving.arrived(key(), 0, region, (block, 1), 16)
        out = receiving.placed(key())
    assert out == [Confirm(key(), 0), Finished("r", key(), Outcome.OK, "", 96)]


def test_a_prefill_whose_work_grows_is_waited_for() -> None:
    receiving = begun()
    for word in range(10):
        assert silence(receiving, word * 29.0, word * 29.0 + 29.0) == []
        receiving.progressed(key())
        assert receiving.tick(word * 29.0 + 29.0) == []
    assert silence(receiving, 290.0, 319.0) == []
    assert receiving.tick(320.0) == ended(SILENT)


def test_the_limit_ends_a_load_however_much_comes() -> None:
    for limit_s, own in ((100.0, 600.0), (600.0, 100.0)):
        receiving = Receiving(load_s=30, grace_s=1, regions=2, cover=True, limit_s=limit_s)
        receiving.load(order()._replace(limit_s=own), 0.0)
        for second in range(1, 100):
            receiving.progressed(key())
            assert receiving.tick(float(second)) == []
        receiving.progressed(key())
        assert receiving.tick(100.0) == ended(TOO_LONG)


def test_a_newer_try_has_no_limit_of_its_own() -> None:
    receiving = Receiving(load_s=30, grace_s=1, regions=2, cover=True, limit_s=50)
    receiving.load(order(), 0.0)
    receiving.load(order(2, P2), 40.0)
    assert silence(receiving, 40.0, 49.0) == []
    assert [type(one) for one in silence(receiving, 49.0, 50.0)] == [Cancel, Finished]


def test_what_is_no_news_renews_nothing() -> None:
    receiving = begun()
    receiving.arrived(key(), 0, 0, (2, 1), 16)
    for second in range(1, 30):
        assert receiving.arrived(key(), 0, 0, (2, 1), 16) is not None  # again
        assert receiving.arrived(key(2), 0, 0, (3, 1), 16) is None  # of another try
        assert receiving.arrived(key(), 0, 0, (1, 1), 16) is None  # not asked for
        receiving.progressed(key(2))
        assert receiving.tick(float(second)) == []
    assert silence(receiving, 29.0, 31.0) == ended(SILENT)  # the first block was seen at 1.0


def test_a_clock_that_jumps_is_no_silence_and_no_reason_to_wait_for_ever() -> None:
    receiving = begun()
    assert receiving.tick(1.0) == []
    assert receiving.tick(500.0) == []
    receiving.arrived(key(), 0, 0, (2, 1), 16)
    assert receiving.tick(499.0) == []
    assert silence(receiving, 499.0, 529.0 - 0.5) == []
    assert silence(receiving, 528.5, 529.0) == ended(SILENT)
    held_up = begun()
    looks = [held_up.tick(at * 1000.0) for at in range(1, 6)]
    assert looks == [[], [], [], ended(SILENT), []], "four looks that find nothing are enough"


def test_a_load_that_has_lost_a_source_is_not_kept_by_the_other_one() -> None:
    receiving = two()
    lost = Outcome.PEER_LOST, "reset"
    receiving.broken(key(), 1, lost, 1.0, final=False)
    receiving.arrived(key(), 0, 0, (2, 1), 16)
    receiving.progressed(key())
    assert receiving.tick(2.0) == [Finished("r", key(), *lost, 0)]


class Course(NamedTuple):
    """What happens at a second: a block, words of prefill, nothing; or this side is held up for so long."""

    what: Literal["block", "word", "nothing", "gap"]
    gap: int = 1


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.builds(Course, st.sampled_from(["block", "word", "nothing"]), st.just(1)),
                          st.builds(Course, st.just("gap"), st.integers(1, 400))), max_size=60),
       st.integers(LOOKS, 40), st.integers(1, 2000))
def test_a_load_ends_by_silence_or_by_its_limit_and_by_nothing_else(course: list[Course], load_s: int,
                                                                    limit_s: int) -> None:
    """Law 4: progress within ``load_s`` of listening keeps it, silence of that ends it, and the limit always does."""
    blocks = 80
    receiving = Receiving(load_s=load_s, grace_s=1, regions=1, cover=True, limit_s=limit_s)
    part = (PlacedCut(Cut(0, 1, 0, 0, 16), 0, 0),)
    receiving.load(Order("r", key(), (TableSpan(0, tuple(range(blocks))),), (From(P1, INC, part),)), 0.0)
    now, sent, silent, waited = 0.0, 0, 0.0, 0
    for what, gap in [*course, *[Course("nothing")] * load_s]:
        now += gap
        if what == "block":
            receiving.arrived(key(), 0, 0, (sent, 1), 16)
            assert receiving.placed(key()) == []
            sent += 1
        elif what == "word":
            receiving.progressed(key())
        silent, waited = (0.0, 0) if what in {"block", "word"} else (silent + min(gap, load_s / LOOKS), waited + gap)
        out = receiving.tick(now)
        if now >= limit_s:
            assert out == ended(TOO_LONG)
            return
        if silent >= load_s:
            assert waited >= load_s
            assert out == ended(f"no progress for {load_s} s")
            return
        assert out == []
    raise AssertionError("it never ended")


def test_an_abandoned_load_is_reported_once_and_places_nothing_more() -> None:
    receiving = begun()
    cancel, finished = receiving.abandon("r")
    assert isinstance(cancel, Cancel)
    assert isinstance(finished, Finished)
    assert receiving.abandon("r") == []
    assert receiving.arrived(key(), 0, 0, (2, 3), 30) is None


def test_a_load_that_was_never_begun_can_be_failed() -> None:
    assert machine().fail("r", key(), Outcome.DEADLINE, "x") == [Finished("r", key(), Outcome.DEADLINE, "x", 0)]


def test_a_load_that_was_reported_is_not_opened_again_by_a_newer_try_for_other_ranks() -> None:
    receiving = begun()
    fill(receiving)
    assert receiving.load(order(2, P2), 1.0) == []
    assert receiving.arrived(key(2), 0, 0, (2, 3), 30) is None
    assert receiving.fail("r", key(2), Outcome.DEADLINE, "x") == receiving.abandon("r") == receiving.tick(99.0) == []


def test_a_load_that_has_failed_is_not_opened_again() -> None:
    receiving = machine()
    receiving.fail("r", key(), Outcome.DEADLINE, "x")
    assert receiving.load(order(2), 0.0) == receiving.fail("r", key(), Outcome.DEADLINE, "x") == []


def test_a_name_that_comes_again_with_another_transfer_is_another_load() -> None:
    """vLLM waits for its report for ever, and keeps its blocks."""
    receiving = begun()
    fill(receiving)
    other = Key(TransferId("b" * 32), Attempt(1), 1)
    assert [type(one) for one in receiving.load(order()._replace(key=other), 1.0)] == [Ask]
    assert [type(one) for one in receiving.abandon("r")] == [Cancel, Finished]
    assert receiving.fail("r", other, Outcome.DEADLINE, "x") == []
    third = other._replace(transfer=TransferId("c" * 32))
    assert receiving.fail("r", third, Outcome.DEADLINE, "x") == [Finished("r", third, Outcome.DEADLINE, "x", 0)]


TWO = (From(P1, INC, (PlacedCut(Cut(0, 2, 0, 1, 16), 0, 0),)),
       From(P2, INC, (PlacedCut(Cut(0, 2, 1, 1, 16), 0, 1),), takers=2))


def two() -> Receiving:
    """Two sources with one of two heads each; the second has another taker too."""
    receiving = machine()
    asks = receiving.load(Order("r", key(), TABLES, TWO), 0.0)
    assert [(one.address, one.source, one.ready, one.plain) for one in asks if isinstance(one, Ask)] == [
        (P1, 0, Ready(2, 3, 2, 32, checksum=True, cuts=(Cut(0, 2, 0, 1, 16),)), False),
        (P2, 1, Ready(2, 3, 2, 32, checksum=True, cuts=(Cut(0, 2, 1, 1, 16),), takers=2), False)]
    return receiving


def fill_two(receiving: Receiving, source: int) -> list[object]:
    out: list[object] = []
    for region in range(2):
        assert receiving.arrived(key(), source, region, (2, 3), 48) == PlaceBlocks("r", region, (40, 41, 42), source, 1)
        out += receiving.placed(key())
    return out


def test_a_load_of_two_sources_is_committed_when_both_have_sent_all_and_both_are_told() -> None:
    receiving = two()
    assert fill_two(receiving, 1) == fill_two(receiving, 1) == []
    assert fill_two(receiving, 0) == [Confirm(key(), 0), Confirm(key(), 1), Finished("r", key(), Outcome.OK, "", 288)]


def test_a_rank_that_was_reported_keeps_nobody_waiting_who_takes_from_the_same_source_of_a_newer_try() -> None:
    receiving = two()
    fill_two(receiving, 0)
    fill_two(receiving, 1)
    nothing = Ready(2, 3, 0, 0, checksum=True, takers=2)
    assert receiving.load(Order("r", key(2), TABLES, TWO), 1.0) == [Ask(P2, INC, key(2), nothing, "r", TABLES, 1, {})]
    assert receiving.arrived(key(2), 1, 0, (2, 3), 48) is None
    lost = Outcome.STALE, "released"
    assert receiving.broken(key(2), 1, lost, 2.0, final=True) == receiving.tick(99.0) == []


def test_what_a_rank_that_was_reported_asks_for_others_is_asked_again_where_its_source_is_lost() -> None:
    receiving = two()
    fill_two(receiving, 0)
    fill_two(receiving, 1)
    asks = receiving.load(Order("r", key(2), TABLES, TWO), 1.0)
    lost = Outcome.PEER_LOST, "gone"
    assert receiving.broken(key(2), 1, lost, 2.0, final=False) == asks
    assert receiving.broken(key(2), 1, lost, 2.1, final=False) == receiving.tick(2.9) == []
    assert receiving.tick(3.0) == asks
    assert receiving.tick(5.0) == []
    assert receiving.broken(key(2), 1, lost, 30.5, final=False) == asks
    assert receiving.broken(key(2), 1, lost, 31.0, final=False) == receiving.tick(99.0) == []


def test_when_one_of_two_sources_is_lost_the_other_is_told_and_the_load_waits_for_another_try() -> None:
    receiving = two()
    fill_two(receiving, 0)
    lost = Outcome.PEER_LOST, "reset"
    assert receiving.broken(key(), 1, lost, 10.0, final=False) == [Cancel(key(), 0, *lost)]
    assert receiving.broken(key(), 0, lost, 10.5, final=False) == []
    assert receiving.tick(11.0) == [Finished("r", key(), *lost, 0)]


def test_a_source_that_refuses_for_good_ends_the_load_at_once() -> None:
    receiving = two()
    bad = Outcome.CHECKSUM, "bad"
    assert receiving.broken(key(), 0, bad, 1.0, final=True) == [Cancel(key(), 1, *bad), Finished("r", key(), *bad, 0)]


def test_a_newer_try_with_other_sources_cancels_all_old_ones() -> None:
    receiving = two()
    steps = receiving.load(order(2), 1.0)
    assert [(type(one), one.key, one.source) for one in steps if not isinstance(one, Finished)] == [
        (Cancel, key(), 0), (Cancel, key(), 1), (Ask, key(2), 0)]
    assert receiving.arrived(key(), 0, 0, (2, 3), 48) is None


def test_a_source_that_nothing_is_wanted_of_is_asked_and_told_all_the_same() -> None:
    receiving = machine()
    one, none = receiving.load(Order("r", key(), TABLES, (From(P1, INC, WHOLE), From(P2, INC, ()))), 0.0)
    assert isinstance(none, Ask)
    assert (none.ready, none.plain) == (Ready(2, 3, 0, 0, checksum=True), False)
    assert isinstance(one, Ask)
    assert one.plain
    assert receiving.arrived(key(), 1, 0, (2, 3), 48) is None
    assert receiving.arrived(key(), 2, 0, (2, 3), 48) is None
    assert fill(receiving) == [Confirm(key(), 0), Confirm(key(), 1), Finished("r", key(), Outcome.OK, "", 200)]


def test_a_source_some_of_whose_arrays_stay_is_asked_for_the_others_by_name_of_their_place() -> None:
    (ask,) = machine().load(order()._replace(sources=(From(P1, INC, WHOLE, whole=False),)), 0.0)
    assert isinstance(ask, Ask)
    assert ask.ready.cuts == tuple(part.cut for part in WHOLE)
    assert not ask.plain


def test_pulling_asks_every_source_for_what_follows_the_blocks_that_all_have_sent() -> None:
    receiving = Receiving(load_s=30, grace_s=1, regions=2, cover=True, window=1)
    asks = receiving.load(Order("r", key(), TABLES, TWO), 0.0)
    assert [one.ready.window for one in asks if isinstance(one, Ask)] == [1, 1]
    for source, region in ((0, 0), (0, 1), (1, 0)):
        receiving.arrived(key(), source, region, (2, 1), 16)
        assert receiving.placed(key()) == []
    receiving.arrived(key(), 1, 1, (2, 1), 16)
    assert receiving.placed(key()) == [Pull(key(), 0, 4), Pull(key(), 1, 4)]


SEVERAL = (TableSpan(0, (40, 41, 42)), TableSpan(1, (50, 51)), TableSpan(0, (60,)))
"""Of arrays that reach over all, over a window, and of a state."""
FOUR = (PlacedCut(Cut(0, 4, 0, 0, 32), 0, 0),)


def test_arrays_of_several_groups_are_asked_for_with_their_own_blocks_and_placed_into_them() -> None:
    receiving = Receiving(load_s=30, grace_s=1, regions=4, cover=True, groups=(0, 1, 1, 2))
    (ask,) = receiving.load(Order("r", key(), SEVERAL, (From(P1, INC, FOUR),)), 0.0)
    assert isinstance(ask, Ask)
    assert ask.ready == Ready(0, 3, 4, 128, checksum=True, spans=(ArraySpan(1, 2, 1, 2), ArraySpan(3, 1, 0, 1)))
    assert ask.plain
    assert [ask.slot(*what) for what in ((0, 0, 3), (1, 1, 2), (2, 2, 1), (3, 0, 1))] == [0, 3, 7, 9]
    assert [ask.slot(*what) for what in ((0, 0, 4), (1, 0, 1), (1, 2, 2), (3, 1, 1), (4, 0, 1), (0, 0, 0))] == [None] * 6
    assert ask.slots == 12
    for outside in ((1, (0, 1)), (1, (2, 2)), (3, (1, 1)), (3, (0, 2)), (0, (2, 2))):
        assert receiving.arrived(key(), 0, outside[0], outside[1], 32) is None
    assert receiving.arrived(key(), 0, 0, (0, 3), 96) == PlaceBlocks("r", 0, (40, 41, 42))
    assert receiving.arrived(key(), 0, 1, (1, 2), 64) == PlaceBlocks("r", 1, (50, 51))
    assert receiving.arrived(key(), 0, 2, (2, 1), 32) == PlaceBlocks("r", 2, (51,))
    assert receiving.arrived(key(), 0, 3, (0, 1), 32) == PlaceBlocks("r", 3, (60,))
    assert receiving.placed(key()) == [], "a block of the second window layer is missing"
    assert receiving.arrived(key(), 0, 2, (1, 1), 32) == PlaceBlocks("r", 2, (50,))
    assert receiving.placed(key()) == [Confirm(key(), 0), Finished("r", key(), Outcome.OK, "", 256)]


def test_a_source_whose_arrays_are_grouped_otherwise_is_asked_by_its_own_order() -> None:
    receiving = Receiving(load_s=30, grace_s=1, regions=3, cover=True, groups=(0, 0, 1))
    # Its first array is this rank's last.
    parts = (PlacedCut(Cut(0, 1, 0, 0, 32), 2, 0), PlacedCut(Cut(1, 2, 0, 0, 32), 0, 0))
    (ask,) = receiving.load(Order("r", key(), (TableSpan(0, (4, 5)), TableSpan(1, (9,))), (From(P1, INC, parts),)), 0.0)
    assert isinstance(ask, Ask)
    assert (ask.ready.first, ask.ready.count, ask.ready.spans) == (0, 2, (ArraySpan(0, 1, 1, 1),))
    assert not ask.plain
    assert receiving.arrived(key(), 0, 0, (1, 1), 32) == PlaceBlocks("r", 2, (9,))
