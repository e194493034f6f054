"""Receiving, rule by rule: placed only where wanted, committed only when whole, reported once."""

from __future__ import annotations

from typing import Literal, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, TransferId
from xpyd_sidecar.kv.array_layout import ArrayLayout, ArrayPart
from xpyd_sidecar.kv.fetch_steps import FetchPlan
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.leases import LOOKS
from xpyd_sidecar.kv.reach import TableSpan
from xpyd_sidecar.kv.receiving import Cancel, Confirm, LoadFinished, LoadSource, Order, Receiving, WantTry

P1, P2 = HostPort("10.0.0.1:1"), HostPort("10.0.0.2:1")
INC = Incarnation("p" * 32)
LAYOUTS = (ArrayLayout(2, 16, 1),) * 4


def plan(parts: dict[int, ArrayPart], takers: int = 1) -> FetchPlan:
    return FetchPlan(LAYOUTS, parts, takers)


WHOLE = plan({0: ArrayPart(0, 0, 2, 0), 1: ArrayPart(1, 0, 2, 0)})
TABLES = (TableSpan(2, (40, 41, 42)),)


def key(attempt: int = 1) -> Key:
    return Key(TransferId("a" * 32), Attempt(attempt), 1)


def order(attempt: int = 1, address: HostPort = P1, ids: tuple[int, ...] = (40, 41, 42)) -> Order:
    return Order("r", key(attempt), (TableSpan(2, ids),), (LoadSource(address, INC, WHOLE),))


def machine() -> Receiving:
    return Receiving(load_s=30, grace_s=1)


def begun() -> Receiving:
    receiving = machine()
    assert receiving.load(order(), 0.0) == [WantTry("r", key(), 0, P1, INC, WHOLE, TABLES)]
    return receiving


def silence(receiving: Receiving, start: float, end: float) -> list[object]:
    """Nothing comes, and this side looks every second: what it says at ``end``, having said nothing before."""
    while (start := start + 1.0) < end:
        assert receiving.tick(start) == []
    return [*receiving.tick(end)]


def fill(receiving: Receiving, attempt: int = 1) -> list[object]:
    out: list[object] = []
    for region in range(2):
        out += receiving.on_arrived(key(attempt), 0, [(region, 2, 3)], 100)
    return out


def test_a_load_is_committed_when_every_block_of_every_region_is_placed() -> None:
    receiving = begun()
    assert receiving.on_arrived(key(), 0, [(0, 2, 3)], 30) == []
    assert receiving.on_arrived(key(), 0, [(1, 4, 1)], 10) == []
    assert receiving.on_arrived(key(), 0, [(1, 2, 2)], 20) == [Confirm(key(), 0, 60),
                                                               LoadFinished("r", key(), Outcome.OK, "", 60)]
    assert receiving.open == 0
    assert receiving.on_arrived(key(), 0, [(0, 2, 3)], 30) == []


def test_blocks_of_several_arrays_come_at_once() -> None:
    receiving = begun()
    assert receiving.on_arrived(key(), 0, [(0, 2, 3), (1, 2, 3)], 60) == [
        Confirm(key(), 0, 60), LoadFinished("r", key(), Outcome.OK, "", 60)]


def test_of_a_run_only_the_blocks_count_that_were_wanted() -> None:
    receiving = begun()
    assert receiving.on_arrived(key(), 0, [(0, 0, 16), (1, 0, 4)], 60) == []
    assert receiving.on_arrived(key(), 0, [(1, 4, 9)], 60) == [
        Confirm(key(), 0, 120), LoadFinished("r", key(), Outcome.OK, "", 120)]


def test_a_block_that_comes_twice_counts_once() -> None:
    receiving = begun()
    for _ in range(6):
        assert receiving.on_arrived(key(), 0, [(0, 2, 1)], 10) == []


def test_nothing_outside_the_load_counts() -> None:
    receiving = begun()
    for region, first, blocks in ((2, 2, 3), (0, 1, 1), (0, 5, 1), (-1, 2, 3)):
        assert receiving.on_arrived(key(), 0, [(region, first, blocks)], 10) == []
    assert receiving.on_arrived(key(2), 0, [(0, 2, 3), (1, 2, 3)], 10) == []
    assert receiving.on_arrived(key(), 0, [(0, 2, 3)], 10) == []
    assert [type(one) for one in receiving.on_arrived(key(), 0, [(1, 2, 3)], 10)] == [Confirm, LoadFinished]


def test_a_newer_try_starts_over_in_the_same_blocks() -> None:
    receiving = begun()
    receiving.on_arrived(key(), 0, [(0, 2, 3)], 30)
    steps = receiving.load(order(2, P2, ids=()), 5.0)
    assert steps == [Cancel(key(), 0, Outcome.STALE, "a newer try has taken its place"),
                     WantTry("r", key(2), 0, P2, INC, WHOLE, TABLES)]
    assert receiving.on_arrived(key(1), 0, [(1, 2, 3)], 30) == []  # stale
    assert receiving.on_arrived(key(2), 0, [(1, 2, 3)], 30) == []  # array 0 is there of the old try only
    receiving.load(order(3, P2, ids=()), 6.0)
    assert fill(receiving, 3) == [Confirm(key(3), 0, 200), LoadFinished("r", key(3), Outcome.OK, "", 200)]


def test_a_newer_try_alone_can_be_committed() -> None:
    receiving = begun()
    receiving.load(order(2, P2, ids=()), 5.0)
    assert fill(receiving, 2) == [Confirm(key(2), 0, 200), LoadFinished("r", key(2), Outcome.OK, "", 200)]


def test_an_older_try_changes_nothing() -> None:
    receiving = machine()
    receiving.load(order(2), 0.0)
    assert receiving.load(order(1), 0.0) == []


def test_a_lost_source_is_waited_for_shortly() -> None:
    receiving = begun()
    assert receiving.on_source_lost(key(), 0, (Outcome.PEER_LOST, "reset"), 10.0, final=False) == []
    assert receiving.tick(10.9) == []
    assert receiving.tick(11.0) == [LoadFinished("r", key(), Outcome.PEER_LOST, "reset", 0)]


def test_another_try_in_time_rescues_a_load_that_has_lost_its_source() -> None:
    receiving = begun()
    receiving.on_source_lost(key(), 0, (Outcome.PEER_LOST, "reset"), 10.0, final=False)
    assert receiving.load(order(2, P2), 10.5) == [WantTry("r", key(2), 0, P2, INC, WHOLE, TABLES)]
    assert receiving.tick(12.0) == []


def test_a_source_that_was_aborted_is_replaced_by_the_router_so_the_deadline_stays() -> None:
    receiving = begun()
    silence(receiving, 0.0, 10.0)
    receiving.on_source_lost(key(), 0, (Outcome.ABORTED, "leg ended"), 10.0, final=False)
    assert silence(receiving, 10.0, 29.0) == []
    assert receiving.tick(30.0) == [LoadFinished("r", key(), Outcome.ABORTED, "leg ended", 0)]


def test_a_final_failure_is_reported_at_once() -> None:
    receiving = begun()
    assert receiving.on_source_lost(key(), 0, (Outcome.CHECKSUM, "bad"), 1.0, final=True) == [
        LoadFinished("r", key(), Outcome.CHECKSUM, "bad", 0)]
    assert receiving.on_source_lost(key(), 0, (Outcome.CHECKSUM, "bad"), 1.0, final=True) == []


def test_what_others_call_well_is_no_end_of_a_load_whose_blocks_have_not_come() -> None:
    assert begun().on_source_lost(key(), 0, (Outcome.OK, "fine"), 1.0, final=True) == [
        LoadFinished("r", key(), Outcome.PROTOCOL, "fine", 0)]
    assert begun().fail("r", key(), Outcome.OK, "fine")[-1] == LoadFinished("r", key(), Outcome.PROTOCOL, "fine", 0)
    assert machine().fail("r", key(), Outcome.OK, "fine") == [LoadFinished("r", key(), Outcome.PROTOCOL, "fine", 0)]
    orphan = begun()
    assert orphan.on_source_lost(key(), 0, (Outcome.OK, "fine"), 1.0, final=False) == []
    said = [one for now in range(2, 60) for one in orphan.tick(float(now))]
    assert said == [LoadFinished("r", key(), Outcome.PROTOCOL, "fine", 0)]


SILENT = "no progress for 30 s"
TOO_LONG = "it took longer than a load may"


def ended(reason: str) -> list[object]:
    return [Cancel(key(), 0, Outcome.DEADLINE, reason), LoadFinished("r", key(), Outcome.DEADLINE, reason, 0)]


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
        out = receiving.on_arrived(key(), 0, [(region, block, 1)], 16)
    assert out == [Confirm(key(), 0, 96), LoadFinished("r", key(), Outcome.OK, "", 96)]


def test_a_prefill_whose_work_grows_is_waited_for() -> None:
    receiving = begun()
    for word in range(10):
        assert silence(receiving, word * 29.0, word * 29.0 + 29.0) == []
        receiving.on_progress(key())
        assert receiving.tick(word * 29.0 + 29.0) == []
    assert silence(receiving, 290.0, 319.0) == []
    assert receiving.tick(320.0) == ended(SILENT)


def test_the_limit_ends_a_load_however_much_comes() -> None:
    for limit_s, own in ((100.0, 600.0), (600.0, 100.0)):
        receiving = Receiving(load_s=30, grace_s=1, limit_s=limit_s)
        receiving.load(order()._replace(limit_s=own), 0.0)
        for second in range(1, 100):
            receiving.on_progress(key())
            assert receiving.tick(float(second)) == []
        receiving.on_progress(key())
        assert receiving.tick(100.0) == ended(TOO_LONG)


def test_a_newer_try_has_no_limit_of_its_own() -> None:
    receiving = Receiving(load_s=30, grace_s=1, limit_s=50)
    receiving.load(order(), 0.0)
    receiving.load(order(2, P2), 40.0)
    assert silence(receiving, 40.0, 49.0) == []
    assert [type(one) for one in silence(receiving, 49.0, 50.0)] == [Cancel, LoadFinished]


def test_what_is_no_news_renews_nothing() -> None:
    receiving = begun()
    receiving.on_arrived(key(), 0, [(0, 2, 1)], 16)
    for second in range(1, 30):
        assert receiving.on_arrived(key(), 0, [(0, 2, 1)], 16) == []  # again
        assert receiving.on_arrived(key(2), 0, [(0, 3, 1)], 16) == []  # of another try
        assert receiving.on_arrived(key(), 0, [(0, 1, 1)], 16) == []  # not asked for
        receiving.on_progress(key(2))
        assert receiving.tick(float(second)) == []
    assert silence(receiving, 29.0, 31.0) == ended(SILENT)  # the first block was seen at 1.0


def test_a_clock_that_jumps_is_no_silence_and_no_reason_to_wait_for_ever() -> None:
    receiving = begun()
    assert receiving.tick(1.0) == []
    assert receiving.tick(500.0) == []
    receiving.on_arrived(key(), 0, [(0, 2, 1)], 16)
    assert receiving.tick(499.0) == []
    assert silence(receiving, 499.0, 529.0 - 0.5) == []
    assert silence(receiving, 528.5, 529.0) == ended(SILENT)
    held_up = begun()
    looks = [held_up.tick(at * 1000.0) for at in range(1, 6)]
    assert looks == [[], [], [], ended(SILENT), []], "four looks that find nothing are enough"


def test_a_load_that_has_lost_a_source_is_not_kept_by_the_other_one() -> None:
    receiving = two()
    lost = Outcome.PEER_LOST, "reset"
    receiving.on_source_lost(key(), 1, lost, 1.0, final=False)
    receiving.on_arrived(key(), 0, [(0, 2, 1)], 16)
    receiving.on_progress(key())
    assert receiving.tick(2.0) == [LoadFinished("r", key(), *lost, 0)]


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
    receiving = Receiving(load_s=load_s, grace_s=1, limit_s=limit_s)
    one = plan({0: ArrayPart(0, 0, 2, 0)})
    receiving.load(Order("r", key(), (TableSpan(0, tuple(range(blocks))),), (LoadSource(P1, INC, one),)), 0.0)
    now, sent, silent, waited = 0.0, 0, 0.0, 0
    for what, gap in [*course, *[Course("nothing")] * load_s]:
        now += gap
        if what == "block":
            assert receiving.on_arrived(key(), 0, [(0, sent, 1)], 16) == []
            sent += 1
        elif what == "word":
            receiving.on_progress(key())
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
    assert isinstance(finished, LoadFinished)
    assert receiving.abandon("r") == []
    assert receiving.on_arrived(key(), 0, [(0, 2, 3)], 30) == []


def test_a_load_that_was_never_begun_can_be_failed() -> None:
    assert machine().fail("r", key(), Outcome.DEADLINE, "x") == [LoadFinished("r", key(), Outcome.DEADLINE, "x", 0)]


def test_a_load_that_was_reported_is_not_opened_again_by_a_newer_try_for_other_ranks() -> None:
    receiving = begun()
    fill(receiving)
    assert receiving.load(order(2, P2), 1.0) == []
    assert receiving.on_arrived(key(2), 0, [(0, 2, 3)], 30) == []
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
    assert [type(one) for one in receiving.load(order()._replace(key=other), 1.0)] == [WantTry]
    assert [type(one) for one in receiving.abandon("r")] == [Cancel, LoadFinished]
    assert receiving.fail("r", other, Outcome.DEADLINE, "x") == []
    third = other._replace(transfer=TransferId("c" * 32))
    assert receiving.fail("r", third, Outcome.DEADLINE, "x") == [LoadFinished("r", third, Outcome.DEADLINE, "x", 0)]


TWO = (LoadSource(P1, INC, plan({0: ArrayPart(0, 0, 1, 0), 1: ArrayPart(1, 0, 1, 0)})),
       LoadSource(P2, INC, plan({0: ArrayPart(0, 1, 1, 1), 1: ArrayPart(1, 1, 1, 1)}, takers=2)))


def two() -> Receiving:
    """Two sources with one of two heads each; the second has another taker too."""
    receiving = machine()
    assert receiving.load(Order("r", key(), TABLES, TWO), 0.0) == [
        WantTry("r", key(), at, one.address, INC, one.plan, TABLES) for at, one in enumerate(TWO)]
    return receiving


def fill_two(receiving: Receiving, source: int) -> list[object]:
    return [*receiving.on_arrived(key(), source, [(0, 2, 3)], 48), *receiving.on_arrived(key(), source, [(1, 2, 3)], 48)]


def test_a_load_of_two_sources_is_committed_when_both_have_sent_all_and_both_are_told() -> None:
    receiving = two()
    assert fill_two(receiving, 1) == fill_two(receiving, 1) == []
    assert fill_two(receiving, 0) == [
        Confirm(key(), 0, 96), Confirm(key(), 1, 192), LoadFinished("r", key(), Outcome.OK, "", 288)]


def test_a_rank_that_was_reported_keeps_nobody_waiting_who_takes_from_the_same_source_of_a_newer_try() -> None:
    receiving = two()
    fill_two(receiving, 0)
    fill_two(receiving, 1)
    assert receiving.load(Order("r", key(2), TABLES, TWO), 1.0) == [WantTry("r", key(2), 1, P2, INC, plan({}, 2), TABLES)]
    assert receiving.on_arrived(key(2), 1, [(0, 2, 3)], 48) == []
    lost = Outcome.STALE, "released"
    assert receiving.on_source_lost(key(2), 1, lost, 2.0, final=True) == receiving.tick(99.0) == []


def test_what_a_rank_that_was_reported_asks_for_others_is_asked_again_where_its_source_is_lost() -> None:
    receiving = two()
    fill_two(receiving, 0)
    fill_two(receiving, 1)
    asks = receiving.load(Order("r", key(2), TABLES, TWO), 1.0)
    lost = Outcome.PEER_LOST, "gone"
    assert receiving.on_source_lost(key(2), 1, lost, 2.0, final=False) == asks
    assert receiving.on_source_lost(key(2), 1, lost, 2.1, final=False) == receiving.tick(2.9) == []
    assert receiving.tick(3.0) == asks
    assert receiving.tick(5.0) == []
    assert receiving.on_source_lost(key(2), 1, lost, 30.5, final=False) == asks
    assert receiving.on_source_lost(key(2), 1, lost, 31.0, final=False) == receiving.tick(99.0) == []


def test_when_one_of_two_sources_is_lost_the_other_is_told_and_the_load_waits_for_another_try() -> None:
    receiving = two()
    fill_two(receiving, 0)
    lost = Outcome.PEER_LOST, "reset"
    assert receiving.on_source_lost(key(), 1, lost, 10.0, final=False) == [Cancel(key(), 0, *lost)]
    assert receiving.on_source_lost(key(), 0, lost, 10.5, final=False) == []
    assert receiving.tick(11.0) == [LoadFinished("r", key(), *lost, 0)]


def test_a_source_that_refuses_for_good_ends_the_load_at_once() -> None:
    receiving = two()
    bad = Outcome.CHECKSUM, "bad"
    assert receiving.on_source_lost(key(), 0, bad, 1.0, final=True) == [Cancel(key(), 1, *bad),
                                                                        LoadFinished("r", key(), *bad, 0)]


def test_a_newer_try_with_other_sources_cancels_all_old_ones() -> None:
    receiving = two()
    steps = receiving.load(order(2), 1.0)
    assert [(type(one), one.key, one.source) for one in steps if not isinstance(one, LoadFinished)] == [
        (Cancel, key(), 0), (Cancel, key(), 1), (WantTry, key(2), 0)]
    assert receiving.on_arrived(key(), 0, [(0, 2, 3)], 48) == []


def test_a_source_that_nothing_is_wanted_of_is_asked_and_told_all_the_same() -> None:
    receiving = machine()
    wants = receiving.load(Order("r", key(), TABLES, (LoadSource(P1, INC, WHOLE), LoadSource(P2, INC, plan({})))), 0.0)
    assert [one.plan.parts for one in wants if isinstance(one, WantTry)] == [WHOLE.parts, {}]
    assert receiving.on_arrived(key(), 1, [(0, 2, 3)], 48) == []
    assert receiving.on_arrived(key(), 2, [(0, 2, 3)], 48) == []
    assert fill(receiving) == [Confirm(key(), 0, 200), Confirm(key(), 1, 0), LoadFinished("r", key(), Outcome.OK, "", 200)]


SEVERAL = (TableSpan(0, (40, 41, 42)), TableSpan(1, (50, 51)), TableSpan(0, (60,)))
"""Of arrays that reach over all, over a window, and of a state."""
FOUR = plan({at: ArrayPart(at, 0, 2, 0, table) for at, table in enumerate((0, 1, 1, 2))})


def test_arrays_of_several_groups_have_their_own_blocks() -> None:
    receiving = machine()
    assert receiving.load(Order("r", key(), SEVERAL, (LoadSource(P1, INC, FOUR),)), 0.0) == [
        WantTry("r", key(), 0, P1, INC, FOUR, SEVERAL)]
    for region, first, count in ((1, 0, 1), (1, 3, 2), (3, 1, 1), (4, 0, 1)):
        assert receiving.on_arrived(key(), 0, [(region, first, count)], 32) == []
    for region, first, count in ((0, 0, 3), (1, 1, 2), (2, 2, 1), (3, 0, 1)):
        assert receiving.on_arrived(key(), 0, [(region, first, count)], 32) == []
    assert receiving.on_arrived(key(), 0, [(2, 1, 1)], 32) == [
        Confirm(key(), 0, 256), LoadFinished("r", key(), Outcome.OK, "", 256)]


def test_a_source_whose_arrays_stand_in_another_order_counts_by_its_own() -> None:
    receiving = machine()
    parts = plan({0: ArrayPart(2, 0, 2, 0, 1), 1: ArrayPart(0, 0, 2, 0), 2: ArrayPart(1, 0, 2, 0)})
    tables = (TableSpan(0, (4, 5)), TableSpan(1, (9,)))
    receiving.load(Order("r", key(), tables, (LoadSource(P1, INC, parts),)), 0.0)
    assert receiving.on_arrived(key(), 0, [(0, 1, 1), (1, 0, 2)], 32) == []
    assert [type(one) for one in receiving.on_arrived(key(), 0, [(2, 0, 2)], 32)] == [Confirm, LoadFinished]
