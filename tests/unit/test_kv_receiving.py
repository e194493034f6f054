"""Receiving, rule by rule: placed only where wanted, committed only when whole, reported once."""

from __future__ import annotations

from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, TransferId
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.mapping import Cut, Part, units
from xpyd_sidecar.kv.messages import Ready
from xpyd_sidecar.kv.receiving import Ask, Cancel, Confirm, Finished, From, Order, Place, Pull, Receiving

P1, P2 = HostPort("10.0.0.1:1"), HostPort("10.0.0.2:1")
INC = Incarnation("p" * 32)
WHOLE = (Part(Cut(0, 2, 0, 0, 32), 0, 0),)


def key(attempt: int = 1) -> Key:
    return Key(TransferId("a" * 32), Attempt(attempt), 1)


def order(attempt: int = 1, address: HostPort = P1, ids: tuple[int, ...] = (40, 41, 42)) -> Order:
    return Order("r", key(attempt), 2, ids, (From(address, INC, WHOLE),))


def machine() -> Receiving:
    return Receiving(load_s=30, grace_s=1, regions=2, cover=True)


def begun() -> Receiving:
    receiving = machine()
    ready = Ready(2, 3, 2, 64, checksum=True)
    assert receiving.load(order(), 0.0) == [Ask(P1, INC, key(), ready, "r", (40, 41, 42), 0, units(WHOLE))]
    return receiving


def fill(receiving: Receiving, attempt: int = 1) -> list[object]:
    out: list[object] = []
    for region in range(2):
        assert receiving.arrived(key(attempt), 0, region, (2, 3), 100) == Place("r", region, (40, 41, 42))
        out += receiving.placed(key(attempt))
    return out


def test_a_load_is_committed_when_every_block_of_every_region_is_placed() -> None:
    receiving = begun()
    assert receiving.arrived(key(), 0, 0, (2, 3), 30) == Place("r", 0, (40, 41, 42))
    assert receiving.arrived(key(), 0, 1, (4, 1), 10) == Place("r", 1, (42,))
    assert receiving.placed(key()) == []
    assert receiving.arrived(key(), 0, 1, (2, 2), 20) == Place("r", 1, (40, 41))
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
                     Ask(P2, INC, key(2), Ready(2, 3, 2, 64, checksum=True), "r", (40, 41, 42), 0, units(WHOLE))]
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
    assert receiving.load(order(2, P2), 10.5) == [Ask(P2, INC, key(2), ready, "r", (40, 41, 42), 0, units(WHOLE))]
    assert receiving.tick(12.0) == []


def test_a_source_that_was_aborted_is_replaced_by_the_router_so_the_deadline_stays() -> None:
    receiving = begun()
    receiving.broken(key(), 0, (Outcome.ABORTED, "leg ended"), 10.0, final=False)
    assert receiving.tick(29.0) == []
    assert receiving.tick(30.0) == [Finished("r", key(), Outcome.ABORTED, "leg ended", 0)]


def test_a_final_failure_is_reported_at_once() -> None:
    receiving = begun()
    assert receiving.broken(key(), 0, (Outcome.CHECKSUM, "bad"), 1.0, final=True) == [
        Finished("r", key(), Outcome.CHECKSUM, "bad", 0)]
    assert receiving.broken(key(), 0, (Outcome.CHECKSUM, "bad"), 1.0, final=True) == []


def test_the_deadline_ends_a_load() -> None:
    receiving = begun()
    assert receiving.tick(29.9) == []
    assert receiving.tick(30.0) == [Cancel(key(), 0, Outcome.DEADLINE, "not everything arrived in time"),
                                    Finished("r", key(), Outcome.DEADLINE, "not everything arrived in time", 0)]


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


TWO = (From(P1, INC, (Part(Cut(0, 2, 0, 1, 16), 0, 0),)), From(P2, INC, (Part(Cut(0, 2, 1, 1, 16), 0, 1),), takers=2))


def two() -> Receiving:
    """Two sources with one of two heads each; the second has another taker too."""
    receiving = machine()
    asks = receiving.load(Order("r", key(), 2, (40, 41, 42), TWO), 0.0)
    assert [(one.address, one.source, one.ready, one.plain) for one in asks if isinstance(one, Ask)] == [
        (P1, 0, Ready(2, 3, 2, 32, checksum=True, cuts=(Cut(0, 2, 0, 1, 16),)), False),
        (P2, 1, Ready(2, 3, 2, 32, checksum=True, cuts=(Cut(0, 2, 1, 1, 16),), takers=2), False)]
    return receiving


def fill_two(receiving: Receiving, source: int) -> list[object]:
    out: list[object] = []
    for region in range(2):
        assert receiving.arrived(key(), source, region, (2, 3), 48) == Place("r", region, (40, 41, 42), source, 1)
        out += receiving.placed(key())
    return out


def test_a_load_of_two_sources_is_committed_when_both_have_sent_all_and_both_are_told() -> None:
    receiving = two()
    assert fill_two(receiving, 1) == fill_two(receiving, 1) == []
    assert fill_two(receiving, 0) == [Confirm(key(), 0), Confirm(key(), 1), Finished("r", key(), Outcome.OK, "", 288)]


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
    one, none = receiving.load(Order("r", key(), 2, (40, 41, 42), (From(P1, INC, WHOLE), From(P2, INC, ()))), 0.0)
    assert isinstance(none, Ask)
    assert (none.ready, none.plain) == (Ready(2, 3, 0, 0, checksum=True), False)
    assert isinstance(one, Ask)
    assert one.plain
    assert receiving.arrived(key(), 1, 0, (2, 3), 48) is None
    assert receiving.arrived(key(), 2, 0, (2, 3), 48) is None
    assert fill(receiving) == [Confirm(key(), 0), Confirm(key(), 1), Finished("r", key(), Outcome.OK, "", 200)]


def test_pulling_asks_every_source_for_what_follows_the_blocks_that_all_have_sent() -> None:
    receiving = Receiving(load_s=30, grace_s=1, regions=2, cover=True, window=1)
    asks = receiving.load(Order("r", key(), 2, (40, 41, 42), TWO), 0.0)
    assert [one.ready.window for one in asks if isinstance(one, Ask)] == [1, 1]
    for source, region in ((0, 0), (0, 1), (1, 0)):
        receiving.arrived(key(), source, region, (2, 1), 16)
        assert receiving.placed(key()) == []
    receiving.arrived(key(), 1, 1, (2, 1), 16)
    assert receiving.placed(key()) == [Pull(key(), 0, 4), Pull(key(), 1, 4)]
