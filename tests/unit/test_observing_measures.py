"""Formulas over records, by hand-made requests."""

from __future__ import annotations

import math

import pytest
from records import D1, P1, leg, record

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.observing.record import FAILED, Record


def tpot(of: Record) -> float | None:
    return of.measures()[2]


def duration(of: Record) -> float:
    return of.measures()[0]


def test_ttft_is_from_arrival_to_the_first_event_of_a_stream() -> None:
    assert record(P1, D1).measures()[1] == 0.5
    assert record(P1, D1, stream=False).measures()[1] is None, "a whole answer has no first token"
    assert record(first_at=math.nan).measures()[1] is None
    assert record(status=400).measures()[1] is None


def test_tpot_is_over_the_gaps_between_tokens() -> None:
    assert tpot(record(P1, D1)) == pytest.approx(0.2)
    assert tpot(record(P1, D1, tokens=1)) is None
    assert tpot(record(P1, D1, tokens=-1)) is None
    assert tpot(record(P1, D1, outcome="broken")) is None


def test_a_lingering_prefill_leg_does_not_lengthen_the_answer() -> None:
    late = record(P1, D1, last_at=14.4)
    assert duration(late) == 2.5
    assert tpot(late) == pytest.approx(0.2)
    assert duration(record(P1, D1, last_at=14.4, outcome="broken")) == pytest.approx(4.4)


def test_the_handover_of_the_pair_that_worked() -> None:
    assert record(P1, D1).handovers() == [("p1", "d1", pytest.approx(0.2))]


def test_a_second_prefill_feeds_the_decode_that_waits() -> None:
    lost = leg(Role.PREFILL, "p1", 1, 10.0, math.nan, 10.1, "lost")
    again = leg(Role.PREFILL, "p2", 2, 10.1, 10.4, 10.4)
    assert [pair for *pair, _ in record(lost, D1, again).handovers()] == [["p2", "d1"]]


def test_a_new_pair_counts_the_kv_of_its_own_prefill() -> None:
    dead = leg(Role.DECODE, "d1", 1, 10.0, math.nan, 10.4, "lost")
    again, other = leg(Role.PREFILL, "p2", 2, 10.4, 10.45, 10.45), leg(Role.DECODE, "d2", 2, 10.4, 10.5, 12.5)
    assert [pair for *pair, _ in record(P1, dead, again, other).handovers()] == [["p2", "d2"]]


def test_a_continued_stream_has_two_handovers() -> None:
    cut = leg(Role.DECODE, "d1", 1, 10.0, 10.5, 11.0, "lost")
    again, other = leg(Role.PREFILL, "p2", 2, 11.0, 11.2, 11.2), leg(Role.DECODE, "d2", 2, 11.0, 11.3, 12.5)
    found = record(P1, cut, again, other).handovers()
    assert [pair for *pair, _ in found] == [["p1", "d1"], ["p2", "d2"]]


def test_decode_alone_is_no_pair() -> None:
    cancelled = leg(Role.PREFILL, "p1", 1, 10.0, math.nan, 10.2, "cancelled")
    gone, alone = leg(Role.DECODE, "d1", 1, 10.0, math.nan, 10.2, "cancelled"), leg(Role.DECODE, "d1", 0, 10.2, 10.5, 12.5)
    assert record(cancelled, gone, alone).handovers() == []
    assert record(alone).handovers() == []


def test_kv_that_comes_before_the_prefill_leg_ends_took_no_time() -> None:
    slow = leg(Role.PREFILL, "p1", 1, 10.0, 10.6, 10.6)
    assert record(slow, D1).handovers()[0][2] == 0.0


@pytest.mark.parametrize(("outcome", "counts"), [("ok", False), ("client_gone", False), ("client_error", False),
                                                 ("refused", False), ("failed", True), ("broken", True),
                                                 ("timeout", True), ("unavailable", True)])
def test_failures_are_what_the_client_is_not_to_blame_for(outcome: str, counts: bool) -> None:
    assert (outcome in FAILED) is counts
