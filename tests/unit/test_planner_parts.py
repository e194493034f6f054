"""Forecast, capacity and need, each by itself."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_traffic import counted, instance

from xpyd_operator.plan.planner import need
from xpyd_operator.plan.planner.capacity import Capacity
from xpyd_operator.plan.planner.figures import Figures, RoleFigures
from xpyd_operator.plan.planner.forecast import HoltTrend, Series
from xpyd_operator.plan.planner.gather import Gather
from xpyd_sidecar.contract.core_steps import PromptWork
from xpyd_sidecar.contract.fleet import Fleet, FleetInstance
from xpyd_sidecar.contract.ids import Role, ServiceName, State
from xpyd_sidecar.contract.intake import Intake
from xpyd_sidecar.contract.membership import Load


def learned(batches: list[float], *, base: float = 0.01, slope: float = 0.0005, rate: float = 8000.0,
            per_step: float = 1.0, known: Capacity | None = None) -> Capacity:
    known = known or Capacity()
    for batch in batches:
        step = base + slope * batch
        figures = Figures(
            over_s=30.0, arrivals=60,
            ended=60, prompt_tokens=120_000, prompt_squares=60 * 2000.0**2 * 2, output_tokens=6000,
            tpot_mean=step / per_step, tokens_per_step=per_step, prefill=RoleFigures(ready=2, busy=0.5),
            decode=RoleFigures(ready=1, busy=1, running=batch, kv_usage=0.001 * batch),
        )
        known = known.with_interval(figures, rate * 0.5 * 30)
    return known


def test_a_ramp_is_seen_ahead() -> None:
    series = HoltTrend()
    for index in range(40):
        series = series.with_value(100.0 + 10 * index, 1.0, 30.0)
    now = 100.0 + 10 * 39
    assert series.level == pytest.approx(now, rel=0.1)
    assert series.forecast(180) > now * 1.02


def test_a_step_is_believed_at_once_and_is_no_trend() -> None:
    series = HoltTrend(100.0, 0.0, True).with_value(300.0, 2.0, 30.0)
    assert series.level > 295
    assert series.forecast(180) < 1.3 * series.level


def test_what_chance_explains_moves_the_level_little_and_what_it_does_not_moves_it_much() -> None:
    calm, startled = HoltTrend(100.0, 0.0, True), HoltTrend(100.0, 0.0, True)
    assert calm.with_value(130.0, 30.0, 30.0).level < 112
    assert startled.with_value(130.0, 2.0, 30.0).level > 125


@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=60), st.floats(1, 120), st.floats(0, 600))
def test_a_forecast_is_a_number_from_zero_on(values: list[float], over_s: float, ahead_s: float) -> None:
    series = Series()
    for value in values:
        series = series.with_value(value, math.sqrt(value), over_s, ahead_s)
    assert 0 <= series.forecast(ahead_s) < math.inf
    assert len(series.pending) <= 1001


def test_forecasts_that_fell_short_raise_the_reserve() -> None:
    steady, jumpy = Series(), Series()
    for index in range(120):
        steady = steady.with_value(100.0, 1.0, 30.0, 180.0)
        jumpy = jumpy.with_value(100.0 if index // 10 % 2 else 200.0, 1.0, 30.0, 180.0)
    assert steady.reserve < 0.05 < jumpy.reserve


def test_capacity_is_learned_from_what_instances_did() -> None:
    known = learned([4, 8, 16, 24, 12, 20] * 4)
    assert known.prefill_rate == pytest.approx(8000, rel=0.01)
    base, slope = known.line
    assert base == pytest.approx(0.01, rel=0.05)
    assert slope == pytest.approx(0.0005, rel=0.05)
    assert known.batch(0.03) == pytest.approx(40, rel=0.05)
    assert known.prompt == pytest.approx(2000)


def with_caches(share: float, ready: int = 4) -> Capacity:
    """``ready`` instances, half of which work at a time, and compute 1,000 tokens a second each."""
    known = Capacity()
    for _ in range(20):
        figures = Figures(over_s=30.0, ended=60, prompt_tokens=120_000, prompt_squares=60 * 2000.0**2 * 2,
                          cached_share=share, prefill=RoleFigures(ready=ready, busy=ready / 2))
        known = known.with_interval(figures, ready / 2 * 30 * 1000.0 / (1 - share))
    return known


def test_fewer_instances_are_expected_to_have_less_cached_and_more_to_have_as_much() -> None:
    known = with_caches(0.75)
    assert known.prefill_rate == pytest.approx(4000)
    assert [known.rate_of(count, 8000.0) for count in (3, 4, 8)] == pytest.approx([1000 / (1 - 0.75 * 0.75), 4000, 4000])
    assert known.rate_of(2, 8000.0) == pytest.approx(1000 / (1 - 0.75 / 2))
    assert known.rate_of(2, 4000.0) == pytest.approx(4000), "half as much is asked for, so there is room as before"
    assert known.rate_of(2, 16_000.0) == pytest.approx(1000 / (1 - 0.75 / 4))
    assert with_caches(0.0).rate_of(1, 8000.0) == pytest.approx(1000), "without caches counts change nothing"


def test_what_caches_have_is_followed_within_minutes_and_what_instances_compute_stays() -> None:
    known = with_caches(0.75)
    for _ in range(10):
        known = known.with_interval(Figures(over_s=30.0, prefill=RoleFigures(ready=4, busy=4.0)), 4 * 30 * 1000.0)
    assert known.cached_share < 0.3
    assert known.computed / known.busy_s == pytest.approx(1000)


def test_as_many_stay_as_have_room_for_what_is_cached() -> None:
    cached, without = with_caches(0.75), with_caches(0.0)
    assert need.prefill(8000.0, 0.0, 30.0, cached, None) == 4, "three would read 2,286 tokens a second each"
    assert need.prefill(4000.0, 0.0, 30.0, cached, None) == 2
    assert need.prefill(2000.0, 0.0, 30.0, cached, None) == 1
    assert need.prefill(4000.0, 0.0, 30.0, without, None) == 5


def test_where_batches_differ_too_little_the_line_is_cautious() -> None:
    known = learned([10.0] * 10)
    assert known.batch(0.06) <= 4 * 10 + 8
    assert known.token(10.0) == pytest.approx(0.015, rel=0.01)


def test_of_a_step_that_gives_several_tokens_the_line_is_the_same_and_the_batch_larger() -> None:
    batches = [4, 8, 16, 24, 12, 20] * 4
    plain, drafting = learned(batches), learned(batches, per_step=2.0)
    assert drafting.line == pytest.approx(plain.line)
    assert drafting.per_step == pytest.approx(2.0)
    assert drafting.token(16.0) == pytest.approx(plain.token(16.0) / 2)
    assert drafting.batch(0.015) == pytest.approx(plain.batch(0.03))
    assert need.decode(5000, drafting, 0.03) < need.decode(5000, plain, 0.03)


def test_what_drafts_are_worth_is_followed_quickly_and_the_line_stays() -> None:
    known = learned([4, 8, 16, 24, 12, 20] * 4, per_step=2.5)
    line = known.line
    worthless = learned([10.0] * 10, known=known)
    assert worthless.line == pytest.approx(line, rel=0.02), "nothing was learned that is not true of steps"
    assert worthless.per_step < 1.5, "five minutes later"
    assert learned([10.0] * 40, known=known).per_step == pytest.approx(1.0, abs=0.02)


def test_without_drafts_nothing_is_different_to_the_last_digit() -> None:
    known = learned([4, 8, 16, 24, 12, 20] * 4)
    assert known.per_step == 1.0


def test_an_instance_without_room_bounds_the_batch() -> None:
    known = learned([30.0] * 5)
    full = known.with_interval(
        Figures(over_s=30.0, ended=1, output_tokens=100, tpot_mean=0.025, handover_s=5.0,
                decode=RoleFigures(ready=1, busy=1, running=20.0)), 0.0)
    assert full.batch(0.06) == pytest.approx(20.0)


@given(st.floats(100, 1e6), st.floats(1, 1e6))
def test_more_demand_never_needs_fewer(rate: float, more: float) -> None:
    known = learned([4, 8, 16, 24])
    assert need.prefill(rate + more, 0.0, 30.0, known, 3.0) >= need.prefill(rate, 0.0, 30.0, known, 3.0)
    assert need.prefill(rate, more, 30.0, known, 3.0) >= need.prefill(rate, 0.0, 30.0, known, 3.0)
    assert need.decode(rate + more, known, 0.06) >= need.decode(rate, known, 0.06)


def test_what_is_not_known_needs_nothing() -> None:
    assert need.prefill(1000.0, 0.0, 30.0, Capacity(), 3.0) == 0
    assert need.decode(1000.0, Capacity(), 0.06) == 0


def test_a_tighter_goal_needs_more() -> None:
    known = learned([4, 8, 16, 24])
    assert need.prefill(40_000, 0.0, 30.0, known, 0.6) > need.prefill(40_000, 0.0, 30.0, known, None)
    assert need.decode(5000, known, 0.02) > need.decode(5000, known, 0.06)


@given(st.integers(1, 50), st.floats(0, 60), st.floats(0, 5), st.floats(0, 5), st.floats(0.01, 10))
def test_late_and_hopeless_are_shares(count: int, load: float, service: float, spread: float, goal_s: float) -> None:
    rooms, hopeless = need.waiting_budgets(goal_s, service, spread)
    assert 0 <= hopeless <= 1
    assert all(0 < room <= goal_s for room in rooms)
    assert 0 <= need.late(count, load, service, spread, rooms) <= 1


def test_prompts_that_are_too_long_use_up_what_may_be_late_and_ask_for_nothing_more() -> None:
    rooms, hopeless = need.waiting_budgets(3.0, 0.7, 1.7)
    assert hopeless == pytest.approx(0.03, abs=0.01)
    assert len(rooms) / 50 == pytest.approx(1 - hopeless, abs=0.02)
    assert need.waiting_budgets(3.0, 5.0, 0.0) == ((), 1.0)
    known = learned([4, 8, 16, 24], rate=100.0)
    assert need.prefill(1000.0, 0.0, 30.0, known, 0.001) == math.ceil(10 / need.FULLEST), "in time is none, so load decides"


def test_bursts_are_told_from_chance_and_ask_for_more() -> None:
    draw = Random(1)
    chance, bursty = Series(), Series()
    for _ in range(200):
        drawn = draw.gauss(0, 10)
        chance = chance.with_value(1000.0 + drawn, 10.0, 30.0, 180.0)
        bursty = bursty.with_value(1000.0 + 2 * drawn, 10.0, 30.0, 180.0)
    assert chance.burst < 1.4
    assert 2.5 < bursty.burst < 5
    known = learned([4, 8, 16, 24])
    assert need.prefill(30_000, 0.0, 30.0, known, 0.8, burst=bursty.burst) > need.prefill(30_000, 0.0, 30.0, known, 0.8)


def told(*instances: FleetInstance, many: int) -> dict[str, Fleet]:
    return {"r": Fleet(ServiceName("qwen"), "r", 1.0, settled=True, instances=instances, totals=counted(many))}


def test_instances_are_counted_by_role_where_they_serve() -> None:
    instances = [instance("p0", Role.PREFILL, 3), instance("p1", Role.PREFILL, 0), instance("d0", Role.DECODE, 4)]
    leaves = msgspec.structs.replace(instance("p2", Role.PREFILL, 9), state=State.DRAINING)
    gather = Gather()
    assert gather.figures(told(*instances, leaves, many=10), 100.0) is None
    figures = gather.figures(told(*instances, leaves, many=20), 130.0)
    assert figures is not None
    assert (figures.prefill.ready, figures.decode.ready) == (2, 1)
    assert (figures.arrivals, figures.ended, figures.over_s) == (10, 10, 30.0)
    assert figures.parked == 0
    assert figures.queued == 2, "a prefill instance computes one of three; what leaves is asked for nothing more"


@pytest.mark.parametrize(("share", "queued"), [(0, 0), (0.5, 0), (1, 0), (1.1, 1), (3.0, 2)])
def test_what_waits_at_prefill_is_counted_by_its_tokens_where_they_are_told(share: float, queued: int) -> None:
    """One prompt of 100,000 tokens is 200 of 500; the router reads the same number."""
    mean = (counted(20).prompt_tokens - counted(10).prompt_tokens) / 10
    load = Load(running=1, waiting=40, prompts=PromptWork(int(share * mean)))
    busy = msgspec.structs.replace(instance("p0", Role.PREFILL, 3), load=load)
    gather = Gather()
    assert gather.figures(told(busy, many=10), 100.0) is None
    figures = gather.figures(told(busy, many=20), 130.0)
    assert figures is not None
    assert figures.queued == queued


def test_what_prefill_did_not_compute_is_counted_since_figures_were_told_last() -> None:
    def both(first: Intake | None, second: Intake | None) -> dict[str, Fleet]:
        return told(*(msgspec.structs.replace(instance(f"p{at}", Role.PREFILL, 3), load=Load(running=1, intake=intake))
                      for at, intake in enumerate((first, second))), many=20)

    gather = Gather()
    assert gather.figures(both(Intake(), None), 100.0) is None
    shares = [figures.cached_share for at, fleets in enumerate((
        both(Intake(prompts=1000, cached=900), None),
        both(Intake(prompts=2000, cached=1100, received=300), Intake(prompts=500, cached=500)),
        both(Intake(prompts=2000, cached=1100, received=300), Intake(prompts=500, cached=500)),
        both(None, Intake(prompts=600, cached=560)),
    )) if (figures := gather.figures(fleets, 130.0 + 30 * at)) is not None]
    assert shares == pytest.approx([0.0, 0.5, 0.0, 0.6]), "of one that is new nobody knows since when"


def test_a_line_changes_gently_with_what_batches_were_seen() -> None:
    """From batches that are all equal to some that differ: no step between a guess and a fit."""
    slopes = [learned([10.0 * (1 + spread / 100 * sign) for sign in (-1, 1)] * 10).line[1] for spread in range(0, 60, 2)]
    assert slopes[0] == pytest.approx(0.5 * 0.015 / 10)
    assert slopes[-1] == pytest.approx(0.0005, rel=0.1)
    assert max(abs(after - before) for before, after in pairwise(slopes)) < 0.15 * (slopes[0] - slopes[-1])


def test_what_waits_at_decode_alone_is_parked() -> None:
    busy = msgspec.structs.replace(instance("d0", Role.DECODE, 4), load=Load(running=4, waiting=9))
    gather = Gather()
    assert gather.figures(told(instance("p0", Role.PREFILL, 3), busy, many=10), 100.0) is None
    figures = gather.figures(told(instance("p0", Role.PREFILL, 3), busy, many=20), 130.0)
    assert figures is not None
    assert figures.parked == 6, "decode has a request from its beginning, so three of nine are prefill's"
