"""One trace, one service level: the planner beside its rivals, every static choice and perfect foresight.

Choices are compared at equal hours, of GPUs: a rival is shown by the best of its points that cost no more than the planner,
and not at all where all of them cost more. Static choices are mixed: part of the time with one and part with another costs
and attains what lies between them, so they are compared by the hull of their points, which takes knowing the trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from xpyd_operator.plan.planner.figures import Bounds, Goals
from xpyd_operator.simulation import foresight, frontier
from xpyd_operator.simulation.controllers import ControlLaw, Hpa, LoadThreshold, PlannerController
from xpyd_operator.simulation.engine import Engines, pools_of
from xpyd_operator.simulation.frontier import FrontierRow
from xpyd_operator.simulation.outcome import Controller, Pair, Run
from xpyd_operator.simulation.rules import RouterRules
from xpyd_operator.simulation.statics import Point, Statics, batch_of, limits, point
from xpyd_operator.simulation.trace import Trace
from xpyd_operator.simulation.world import World

PREFILL_TARGETS = (0.5, 1.0, 1.5, 2.0, 3.0)
DECODE_SHARES = (0.15, 0.25, 0.35, 0.5, 0.8)
"""HPA's targets for decode, as shares of the batch with which a step just meets the goal."""
PRICES = (5.0, 20.0, 80.0, 320.0)
THOROUGH_PREFILL_TARGETS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
THOROUGH_DECODE_SHARES = (0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.65, 0.8, 1.0)
THOROUGH_PRICES = (1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0)
LAW_TARGETS = (0.3, 0.5, 0.7, 0.9)
THRESHOLDS = (0.25, 0.4, 0.6, 0.8)
Tell = Callable[[str], None]


class Study(msgspec.Struct):
    """Everything that was found."""

    planner: Point
    planner_run: Run
    sentences: list[tuple[float, str]]
    starts: list[Point]
    """The planner from the fewest instances, from half and from twice as many as recommended."""
    statics: list[Point]
    hpa: list[tuple[Point, Run]]
    hpa_switching: list[tuple[Point, Run]]
    law: list[tuple[Point, Run]]
    threshold: list[tuple[Point, Run]]
    foresight: list[tuple[Point, Run]]
    recommended: Point
    """The cheapest static choice that meets the goals, or the best one where none does."""
    frontier: list[FrontierRow]


def play_planner(
    trace: Trace, engines: Engines, goals: Goals, bounds: Bounds, start: Pair, *, rules: RouterRules | None = None,
    seed: int = 1,
) -> tuple[Run, PlannerController]:
    """Simulate the trace under the planner; the run, and the planner as it is then."""
    controller = PlannerController(goals, bounds)
    return World(trace, engines, start, controller, rules=rules, seed=seed).play(), controller


def study(
    trace: Trace, engines: Engines, goals: Goals, bounds: Bounds, *, tell: Tell, start: Pair | None = None,
    thorough: bool = False, rules: RouterRules | None = None, seed: int = 1,
) -> Study:
    """Everything.

    Args:
        trace: of requests.
        engines: one instance, of each role where they differ.
        goals: the service level, and how the planner works.
        bounds: which counts may be chosen.
        tell: hears what is being done.
        start: what the planner, its rivals and foresight start with; default: the recommended static choice.
        thorough: more targets of the HPA and more prices of foresight, which takes twice as long.
        rules: of the routers.
        seed: of what varies: how long starts take, and which fail.
    """
    tell("static choices")
    statics = Statics(trace, engines, goals, bounds, rules=rules, seed=seed)
    recommended = statics.sweep()
    start = start or recommended
    tell("frontier")
    rows = frontier.rows(statics)
    play = _Play(trace, engines, goals, bounds, start, rules, seed)
    tell("planner")
    run, controller = play_planner(trace, engines, goals, bounds, start, rules=rules, seed=seed)
    starts = []
    for each in other_starts(start, bounds):
        tell(f"planner from {each[0]}P{each[1]}D")
        other, _ = play_planner(trace, engines, goals, bounds, each, rules=rules, seed=seed)
        starts.append(point(f"from {each[0]}P{each[1]}D", other, goals))
    hpas = []
    batch = batch_of(trace, pools_of(engines).decode, limits(goals)[1])
    queues = THOROUGH_PREFILL_TARGETS if thorough else PREFILL_TARGETS
    shares = THOROUGH_DECODE_SHARES if thorough else DECODE_SHARES
    targets = [(prefill, max(1.0, share * batch)) for prefill in queues for share in shares]
    for switching in (False, True):
        tell(f"HPA, {len(targets)} targets{', with switching' if switching else ''}")
        name = "hpa+switch" if switching else "hpa"
        found = [(pair, *play.of(name, Hpa(pair, bounds, switching=switching), f"targets {pair[0]:g} and {pair[1]:.0f}"))
                 for pair in targets]
        hpas.append([(each, run_) for _, each, run_ in found])
        targets = [pair for pair, each, _ in found if _worth(each, [other for _, other, _ in found])]
    tell(f"control law, {len(LAW_TARGETS)} targets; threshold, {len(THRESHOLDS)}")
    switching = goals.switching
    law = [play.of("law", ControlLaw(target, goals, bounds, switching=switching), f"target {target:g}")
           for target in LAW_TARGETS]
    threshold = [
        play.of("threshold", LoadThreshold(level, batch, goals, bounds, switching=switching), f"threshold {level:g}")
        for level in THRESHOLDS
    ]
    tell("perfect foresight")
    seen = [(mark.prefill, mark.decode) for mark in run.marks] + [start]
    ranges = (
        _around([each[0] for each in seen], bounds.prefill),
        _around([each[1] for each in seen], bounds.decode),
    )
    ttft, tpot = limits(goals)
    both = foresight.tables(trace, engines, ttft, tpot, ranges, rules=rules)
    known: list[tuple[Point, Run]] = []
    for price in THOROUGH_PRICES if thorough else PRICES:
        replayed = foresight.replay(trace, engines, foresight.schedule(both, engines, price, bounds), rules, seed=seed)
        known.append((point("foresight", replayed, goals, f"price {price:g}"), replayed))
    return Study(
        planner=point("planner", run, goals), planner_run=run,
        sentences=[(at, each.sentence) for at, each in controller.decisions if each.changes], starts=starts,
        statics=sorted(statics.points.values(), key=lambda each: (each.hours, -each.attained)),
        hpa=hpas[0], hpa_switching=hpas[1], law=law, threshold=threshold, foresight=known,
        recommended=statics.point_of(recommended), frontier=rows,
    )


def other_starts(start: Pair, bounds: Bounds) -> list[Pair]:
    """The fewest, half of ``start``, and twice as many, within the bounds and each once."""
    least = (bounds.prefill[0], bounds.decode[0])
    wanted = [least, (math.ceil(start[0] / 2), math.ceil(start[1] / 2)), (2 * start[0], 2 * start[1])]
    found = [
        (min(bounds.prefill[1], max(least[0], prefill)), min(bounds.decode[1], max(least[1], decode)))
        for prefill, decode in wanted
    ]
    return [each for each in dict.fromkeys(found) if bounds.total is None or sum(each) <= bounds.total]


def _around(counts: list[int], bounds: Pair) -> Pair:
    return max(bounds[0], min(counts) - 1), min(bounds[1], max(counts) + 1)


def _worth(point_: Point, others: list[Point]) -> bool:
    """No other costs less and attains more."""
    return not any(each.hours < point_.hours and each.attained > point_.attained for each in others)


class _Play(NamedTuple):
    """All that rivals have in common."""

    trace: Trace
    engines: Engines
    goals: Goals
    bounds: Bounds
    start: Pair
    rules: RouterRules | None
    seed: int

    def of(self, name: str, controller: Controller, detail: str) -> tuple[Point, Run]:
        run = World(self.trace, self.engines, self.start, controller, rules=self.rules, seed=self.seed).play()
        return point(name, run, self.goals, detail), run
