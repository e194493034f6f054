"""Loads that go up and down for ever, of any period: the planner loses the first rises, and then no more than static counts
lose at the same hours. And loads that do not, whose prompts are cached."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from more_cases import more

from xpyd_operator.plan.planner.figures import Bounds, Goals
from xpyd_operator.simulation.controllers import PlannerController, Static
from xpyd_operator.simulation.engine import EngineModel
from xpyd_operator.simulation.families import make_trace
from xpyd_operator.simulation.hardware import preset
from xpyd_operator.simulation.outcome import Run
from xpyd_operator.simulation.trace import Arrival, Trace
from xpyd_operator.simulation.world import World

MODEL = EngineModel(prefill_rate=4000, step_base=0.02, step_per_request=0.001, kv_tokens=300_000, cold_start=180.0)
TTFT_S, TPOT_S = 6.0, 0.06
HOUR_S = 3600
SLO = {"ttft_s": TTFT_S, "tpot_s": TPOT_S}
GOALS = Goals(**SLO, cold_start_s=MODEL.cold_start)
BOUNDS = Bounds((1, 12), (1, 12))
START = (6, 2)


def square(low_s: float, high_s: float, *, hours: float, seed: int = 1) -> Trace:
    """One request a second, then three; Poisson arrivals, lengths that vary."""
    draw = Random(seed)
    found: Trace = []
    at = 0.0
    while (at := at + draw.expovariate(3.0)) < hours * HOUR_S:
        if at % (low_s + high_s) >= low_s or draw.random() < 1 / 3:
            found.append(Arrival(at, int(draw.uniform(1000, 7000)), int(draw.uniform(20, 180))))
    return found


def lost_after(run: Run, begin_s: float) -> float:
    """The share of later requests that missed a goal."""
    met = [a <= TTFT_S and b <= TPOT_S for each, a, b in zip(run.trace, run.ttft, run.tpot, strict=True)
           if each.at >= begin_s]
    return 1 - sum(met) / len(met)


def static_loss(trace: Trace, begin_s: float, hours: float) -> float:
    """Of the best counts that stay and cost no more."""
    total = int(hours / (trace[-1].at / HOUR_S) + 1e-9)
    runs = [World(trace, MODEL, (total - decode, decode), Static()).play() for decode in (1, 2)]
    return min(lost_after(run, begin_s) for run in runs)


PERIODS = [(60, 60), (620, 400)]
MORE_PERIODS = [(1200, 1200), (30, 30), (150, 150), (300, 300), (700, 400), (600, 600), (1600, 400)]
"""Seconds low and high: one to forty minutes, and those that rise again just after a removal."""


@pytest.mark.parametrize(("low_s", "high_s"), [*PERIODS, *more(MORE_PERIODS)])
def test_after_the_first_rises_a_square_wave_loses_no_more_than_static_counts_at_equal_hours(
    low_s: int, high_s: int
) -> None:
    trace = square(low_s, high_s, hours=3)
    planner = PlannerController(GOALS, BOUNDS)
    run = World(trace, MODEL, START, planner).play()
    assert lost_after(run, 2 * HOUR_S) <= static_loss(trace, 2 * HOUR_S, run.hours) + 0.005
    # Until help has come and what waits is gone, all that comes is late.
    rise = (MODEL.cold_start + 120) * 3.0 / len(trace)
    regrets = max(each.regrets for each in planner.memory.patience)
    assert regrets <= 3
    assert lost_after(run, 0.0) <= static_loss(trace, 0.0, run.hours) + 0.005 + regrets * rise


def test_instances_whose_caches_are_needed_stay() -> None:
    """Conversations that fill the caches of five: of four, half as much is cached, and what waits makes that worse."""
    trace = make_trace("agents:rate=2.9,prompt=12000,output=150,hours=1", 5)
    model = msgspec.structs.replace(preset("h200-32b"), cold_start=MODEL.cold_start)
    planner = World(trace, model, (5, 2), PlannerController(GOALS, BOUNDS)).play()
    static = World(trace, model, (5, 2), Static()).play()
    assert lost_after(planner, 0.0) <= lost_after(static, 0.0) + 0.005
    assert all(after[0] >= 5 for _, _, after in planner.changes)


def test_counts_do_not_follow_a_wave_that_is_faster_than_a_cold_start() -> None:
    run = World(square(60, 60, hours=2), MODEL, START, PlannerController(GOALS, BOUNDS)).play()
    assert len(run.changes) <= 10
    assert lost_after(run, 0.0) <= 0.005


def test_whoever_prices_hours_higher_pays_fewer_and_loses_more() -> None:
    trace = square(1200, 400, hours=3)
    found = {}
    for cost in (1.0, 10.0, 100.0):
        goals = Goals(**SLO, cold_start_s=MODEL.cold_start, late_cost=cost)
        found[cost] = World(trace, MODEL, START, PlannerController(goals, BOUNDS)).play()
    assert found[1.0].hours < found[10.0].hours < found[100.0].hours
    assert lost_after(found[1.0], 0.0) > lost_after(found[10.0], 0.0) >= lost_after(found[100.0], 0.0)
