"""Scenarios that nobody has looked at: a family of traffic, its shape, an engine and its starts, all drawn from a seed."""

from __future__ import annotations

import math
import random
from typing import Any, Final, NamedTuple

import msgspec

from xpyd_operator.plan.planner.figures import Bounds, Goals
from xpyd_operator.simulation import study
from xpyd_operator.simulation.engine import EngineModel
from xpyd_operator.simulation.families import DEFAULTS, make_trace, shape_of
from xpyd_operator.simulation.hardware import preset
from xpyd_operator.simulation.outcome import Pair, Run
from xpyd_operator.simulation.statics import Point, Statics, load, point
from xpyd_operator.simulation.trace import Trace

STEADY: Final = ("flat", "agents", "diurnal", "ramp", "step", "mix")
"""What a planner can see coming: held against fixed counts at equal hours. The others rise at once, and fall again."""
FAMILIES: Final = (*STEADY, "spike", "quiet", "onoff", "square")
TTFT_S, TPOT_S = 3.0, 0.06
BOUNDS = Bounds((1, 24), (1, 24))
ENGINES: Final = {"h200-32b": 1, "h200-70b-fp8": 1, "h200-8b": 3}
"""Models, and how much longer prompts and answers are with them, so that counts are alike."""
SPREAD = 0.2
"""Of the time that a start takes."""
FLAT = 6000
"""Requests, at most, with which it is found out what a level takes."""


class Scenario(NamedTuple):
    """One of a family. ``traffic``: as ``xpyd simulate`` takes it, with ``seed``."""

    family: str
    number: int
    traffic: str
    seed: int
    engine: str
    cold_start_s: int

    def model(self) -> EngineModel:
        """An instance."""
        return msgspec.structs.replace(preset(self.engine), cold_start=float(self.cold_start_s), cold_spread=SPREAD)

    def goals(self) -> Goals:
        """The service level, and what the planner knows of starts."""
        return Goals(ttft_s=TTFT_S, tpot_s=TPOT_S, cold_start_s=float(self.cold_start_s))

    def trace(self) -> Trace:
        """Its requests."""
        return make_trace(self.traffic, self.seed)


def draw_scenario(seed: int, family: str, number: int) -> Scenario:
    """The ``number``-th scenario of a family; the same for the same seed."""
    draw = random.Random(f"{seed} {family} {number}")
    usual, engine = DEFAULTS[family], draw.choice(list(ENGINES))
    longer = ENGINES[engine]
    shape: dict[str, Any] = {
        "rate": round(usual.rate * 0.3 * (1 / 0.3) ** draw.random(), 3),
        "prompt": round(usual.prompt * longer * draw.uniform(0.7, 1.3)),
        "output": round(usual.output * longer * draw.uniform(0.7, 1.3)),
        "spread": round(usual.spread * draw.uniform(0.7, 1.3), 3),
    }
    if usual.times > 1:
        shape["times"] = round(max(1.5, usual.times * draw.uniform(0.6, 1.3)), 3)
    if family == "diurnal":
        shape |= {"period": f"{round(draw.uniform(60, 240))}m", "phase": round(draw.random(), 3)}
    elif family == "quiet":
        shape |= {"period": f"{round(draw.uniform(40, 90))}m", "share": round(draw.uniform(0.4, 0.7), 2),
                  "phase": round(draw.random(), 3)}
    elif family == "onoff":
        shape["period"] = f"{_even_by_logarithm(draw, 120, 2400)}s"
    elif family == "spike":
        shape["phase"] = round(draw.uniform(0.3, 0.8), 3)
    traffic = f"{family}:{','.join(f'{key}={value}' for key, value in shape.items())}"
    return Scenario(family, number, traffic, draw.randrange(1 << 30), engine, _even_by_logarithm(draw, 60, 300))


def fewest_pair(scenario: Scenario, trace: Trace) -> Pair:
    """Counts that carry the mean load with an instance to spare, within the bounds."""
    needed = load(trace, scenario.model(), TPOT_S)
    prefill, decode = (min(BOUNDS.prefill[1], math.ceil(each) + 1) for each in needed)
    return prefill, decode


def counts_for(scenario: Scenario, rate: float) -> Pair:
    """The cheapest counts that attain what more of them would, within 0.2 points, where ``rate`` requests a second come."""
    _, shape = shape_of(scenario.traffic)
    hours = min(0.5, FLAT / rate / 3600)
    alike = f"prompt={shape.prompt},output={shape.output},spread={shape.spread}"
    trace = make_trace(f"flat:rate={rate},times=1,hours={hours},{alike}", scenario.seed)
    statics = Statics(trace, scenario.model(), scenario.goals(), BOUNDS)
    statics.sweep()
    best = max(each.attained for each in statics.points.values())
    return min((counts for counts, each in statics.points.items() if each.attained >= best - 0.002),
               key=lambda counts: (sum(counts), -statics.points[counts].attained))


def measured(name: str, run: Run, scenario: Scenario) -> Point:
    """A run as a point of hours and attainment."""
    return point(name, run, scenario.goals())


def play_planner(scenario: Scenario, trace: Trace, start: Pair) -> Point:
    """What the planner attains and costs from these counts on."""
    run, _ = study.play_planner(trace, scenario.model(), scenario.goals(), BOUNDS, start, seed=scenario.seed)
    return measured("planner", run, scenario)


def _even_by_logarithm(draw: random.Random, least: float, most: float) -> int:
    return round(least * (most / least) ** draw.random())
