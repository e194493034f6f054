"""When a role may have fewer: patience that regrets lengthen, a rise that was seen, a descent in parts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_operator.plan.planner import worth
from xpyd_operator.plan.planner.worth import CALM_S, FIRST_GROWTH, LOOKS, MOST_CALM_S, MOST_PATIENCE, PRIOR, RemovalPatience

PAYS_S = 1800.0


def regretted(patience: RemovalPatience, at: float) -> RemovalPatience:
    """Some of four went, and four were needed a minute later."""
    return patience.with_removal(at, 4).with_interval(at + 60, 3, 4, PAYS_S)


def test_a_removal_that_was_soon_needed_again_doubles_the_patience_once() -> None:
    once = regretted(RemovalPatience(), 1000.0)
    assert (once.times, once.regrets, once.regretted_s) == (2.0, 1, 1060.0)
    assert once.seconds(10.0, 180.0) == 2 * RemovalPatience().seconds(10.0, 180.0) == pytest.approx(1200.0)
    assert once.with_interval(1090.0, 3, 4, PAYS_S) == once, "the same shortage is one regret"


def test_an_absence_that_has_paid_for_itself_is_no_regret() -> None:
    gone = RemovalPatience().with_removal(1000.0, 4)
    assert gone.with_interval(1000.0 + PAYS_S + 1, 3, 4, PAYS_S).regrets == 0
    assert gone.with_interval(1000.0 + PAYS_S - 1, 3, 4, PAYS_S).regrets == 1


def test_instances_that_are_back_before_they_are_needed_are_no_regret() -> None:
    back = RemovalPatience().with_removal(1000.0, 4).with_interval(1100.0, 4, 2, PAYS_S)
    assert back.before == 0
    assert back.with_interval(1130.0, 3, 4, PAYS_S).regrets == 0


def test_a_descent_in_parts_is_regretted_by_what_there_was_before_its_first_part() -> None:
    gone = RemovalPatience().with_removal(1000.0, 8).with_removal(1100.0, 6)
    assert gone.with_interval(1200.0, 5, 5, PAYS_S).regrets == 0
    assert gone.with_interval(1200.0, 5, 7, PAYS_S).regrets == 1


def test_patience_is_halved_after_a_calm_and_each_regret_doubles_the_calm() -> None:
    twice = regretted(regretted(RemovalPatience(), 0.0), 600.0)
    assert (twice.times, twice.calm_s) == (4.0, 4 * CALM_S)
    assert twice.with_interval(660.0 + twice.calm_s - 1, 3, 3, PAYS_S).times == 4.0
    eased = twice.with_interval(660.0 + twice.calm_s, 3, 3, PAYS_S)
    assert (eased.times, eased.calm_s) == (2.0, 4 * CALM_S)
    assert eased.with_interval(10 * MOST_CALM_S, 3, 3, PAYS_S).times == 1.0


def test_patience_and_calm_have_bounds() -> None:
    patience = RemovalPatience()
    for index in range(40):
        patience = regretted(patience, 600.0 * index)
    assert (patience.times, patience.calm_s) == (MOST_PATIENCE, MOST_CALM_S)


def test_what_repeats_itself_is_regretted_as_often_as_the_logarithm_of_time_has_it() -> None:
    """A role that is short a minute after its patience is over, whenever it dares to remove."""
    patience, now, regrets = RemovalPatience(), 0.0, []
    period_s = 2.5 * patience.seconds(10.0, 180.0)  # beyond this patience nothing is ever removed
    while now < 1e6:
        now += period_s
        if patience.seconds(10.0, 180.0) < period_s:
            patience = regretted(patience, now)
            regrets.append(now)
        patience = patience.with_interval(now + 120.0, 4, 4, PAYS_S)
    assert len(regrets) <= 2 + math.log2(now / CALM_S)


def test_a_rise_is_kept_in_hand_where_it_came_often_enough_to_be_worth_it() -> None:
    often, seldom = ([1.0] * 30 + [3.0] * 20) * 4 + [1.0] * 10, ([1.0] * 300 + [3.0] * 20) * 2 + [1.0] * 10
    assert worth.growth(tuple(often), 7, 10.0) == pytest.approx(2.0)
    assert worth.growth(tuple(seldom), 7, 10.0) < 1.0
    assert worth.growth(tuple(seldom), 7, 100.0) == pytest.approx(2.0), "who pays more for a late request keeps more"


def test_a_rise_counts_from_demands_much_as_now_alone() -> None:
    waves = ([1.0] * 30 + [3.0] * 20) * 4
    assert worth.growth(tuple(waves), 7, 10.0) <= 3.0 * FIRST_GROWTH, "from three it never rose"


def test_what_was_never_seen_is_a_guess_that_evidence_outweighs() -> None:
    assert worth.growth((1.0,), 7, 10.0) == pytest.approx(FIRST_GROWTH)
    assert worth.growth((1.0,) * (12 * PRIOR), 7, 10.0) == 0.0
    assert worth.growth((), 7, 10.0) == 0.0


@given(st.lists(st.floats(0, 1e9), max_size=40), st.integers(0, 50), st.floats(1, 100))
def test_a_rise_is_a_number_from_zero_on(looks: list[float], steps: int, late_cost: float) -> None:
    assert 0 <= worth.growth(tuple(looks), steps, late_cost) < math.inf


def test_what_is_remembered_has_a_bound() -> None:
    looks: tuple[float, ...] = ()
    for index in range(LOOKS + 50):
        looks = worth.append_demand(looks, float(index))
    assert len(looks) == LOOKS
    assert looks[-1] == LOOKS + 49


@given(st.integers(0, 500), st.integers(0, 500))
def test_a_descent_takes_half_of_what_is_spare_at_most_and_ends_at_its_floor(count: int, floor: int) -> None:
    left = worth.part(count, floor)
    assert min(count, floor) <= left <= count
    assert (left < count) == (floor < count)
    assert count - left <= max(1, (count - floor) / 2)


def test_between_two_parts_of_a_descent_there_is_time_to_look() -> None:
    gone = RemovalPatience().with_removal(1000.0, 8)
    assert gone.is_resting(1060.0, 30.0)
    assert not gone.is_resting(1089.0, 30.0), "an interval may be a second shorter"
    assert not RemovalPatience().is_resting(1.0, 30.0)
