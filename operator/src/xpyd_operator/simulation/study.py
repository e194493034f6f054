"""One trace, one engine model, one service level: the planner beside the HPA, every static choice and perfect foresight.

Two choices are compared at equal instance-hours: a rival's best attainment among its points that cost no more than the
planner.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from xpyd_operator.plan.planner.figures import Bounds, Goals
from xpyd_operator.simulation import foresight
from xpyd_operator.simulation.controllers import Hpa, Planned, Static
from xpyd_operator.simulation.engine import EngineModel
from xpyd_operator.simulation.outcome import Run, p95
from xpyd_operator.simulation.trace import Trace
from xpyd_operator.simulation.world import World

PREFILL_TARGETS = (0.5, 1.0, 1.5, 2.0, 3.0)
DECODE_SHARES = (0.15, 0.25, 0.35, 0.5, 0.8)
"""HPA's targets for decode, as shares of the batch with which a step just meets the goal."""
PRICES = (5.0, 20.0, 80.0, 320.0)
THOROUGH_PREFILL_TARGETS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
THOROUGH_DECODE_SHARES = (0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.65, 0.8, 1.0)
THOROUGH_PRICES = (1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0)
SAME = 1.0 + 1e-9
ENOUGH = 0.95
"""The 95th percentile of a goal."""
Pair = tuple[int, int]
Tell = Callable[[str], None]


class Point(msgspec.Struct, frozen=True):
    """One choice and what came of it."""

    choice: str
    hours: float
    attained: float
    ttft_p95: float
    tpot_p95: float
    changes_per_h: float
    switches: int
    detail: str = ""


class Study(msgspec.Struct):
    """Everything that was found."""

    planner: Point
    planner_run: Run
    sentences: list[tuple[float, str]]
    statics: list[Point]
    hpa: list[tuple[Point, Run]]
    hpa_switching: list[tuple[Point, Run]]
    foresight: list[tuple[Point, Run]]
    recommended: Point
    """The cheapest static choice that meets the goals, or the best one where none does."""


def point(choice: str, run: Run, goals: Goals, detail: str = "") -> Point:
    """Measure a run."""
    ttft, tpot = limits(goals)
    hours = max(run.ends_at, 1.0) / 3600
    return Point(
        choice, round(run.hours, 4), round(run.attained(ttft, tpot), 5), p95(run.ttft), p95(run.tpot),
        round(len(run.changes) / hours, 2), run.switches, detail,
    )


def limits(goals: Goals) -> tuple[float, float]:
    """Both goals, infinite where none is set."""
    return goals.ttft_s or math.inf, goals.tpot_s or math.inf


def at_equal_hours(points: list[Point], hours: float) -> Point | None:
    """The best that costs no more; None where all cost more."""
    fit = [each for each in points if each.hours <= hours * SAME]
    return max(fit, key=lambda each: (each.attained, -each.hours), default=None)


class Statics:
    """Static choices, each simulated once."""

    def __init__(self, trace: Trace, model: EngineModel, goals: Goals, bounds: Bounds) -> None:
        self._trace, self._model, self._goals, self._bounds = trace, model, goals, bounds
        self.points: dict[Pair, Point] = {}

    def of(self, counts: Pair) -> Point:
        """One choice."""
        if counts not in self.points:
            run = World(self._trace, self._model, counts, Static()).play()
            self.points[counts] = point(f"{counts[0]}P{counts[1]}D", run, self._goals)
        return self.points[counts]

    def best(self, total: int, near: Pair) -> Pair | None:
        """The best split of a total, looked for from ``near`` on in both directions."""
        (low, high), (least, most) = self._bounds.prefill, self._bounds.decode
        low, high = max(low, total - most), min(high, total - least)
        if low > high:
            return None
        prefill = min(high, max(low, near[0]))
        while True:
            around = [p for p in (prefill - 1, prefill, prefill + 1) if low <= p <= high]
            better = max(around, key=lambda p: (self.of((p, total - p)).attained, -abs(p - prefill)))
            if better == prefill:
                return prefill, total - prefill
            prefill = better

    def sweep(self) -> Pair:
        """The best split of every total, until more instances help no more; the recommended one."""
        (low, _), (least, _) = self._bounds.prefill, self._bounds.decode
        most = min(self._bounds.total or 10**6, self._bounds.prefill[1] + self._bounds.decode[1])
        prefill, decode = load(self._trace, self._model, limits(self._goals)[1])
        total = max(low + least, math.ceil(prefill + decode))
        near = (max(1, round(prefill)), 1)
        found: Pair | None = None
        chosen: Pair | None = None
        idle, last = 0, -1.0
        while total <= most and idle < 2:
            split = self.best(total, near)
            total += 1
            if split is None:
                continue
            near = split
            reached = self.of(split).attained
            idle = idle + 1 if reached <= last + 0.0005 and reached > 0.5 else 0
            if reached > last:
                last, found = reached, split
            if chosen is None and reached >= ENOUGH:
                chosen = split
        return chosen or found or (low, least)


def load(trace: Trace, model: EngineModel, tpot_s: float) -> tuple[float, float]:
    """Mean load in instances of each role: fewer can never do."""
    length = max(trace[-1].at, 1.0)
    batch = batch_of(trace, model, tpot_s)
    context = sum(each.prompt + each.output / 2 for each in trace) / len(trace)
    rate = batch / model.step_s(int(batch), batch * context)
    prefill = sum(model.prefill_s(each.prompt) for each in trace) / length
    return prefill, sum(each.output for each in trace) / length / rate


def batch_of(trace: Trace, model: EngineModel, tpot_s: float) -> float:
    """Requests with which a step takes ``tpot_s``, or that KV has room for."""
    context = sum(each.prompt + each.output / 2 for each in trace) / len(trace)
    slope = model.step_per_request + context * model.step_per_token
    by_time = (tpot_s - model.step_base) / slope if slope > 0 and tpot_s < math.inf else model.max_requests
    return max(1.0, min(by_time, model.kv_tokens / context, model.max_requests))


def planned(trace: Trace, model: EngineModel, goals: Goals, bounds: Bounds, start: Pair) -> tuple[Run, Planned]:
    """The planner on the trace."""
    controller = Planned(goals, bounds)
    return World(trace, model, start, controller).play(), controller


def study(
    trace: Trace, model: EngineModel, goals: Goals, bounds: Bounds, *, tell: Tell, start: Pair | None = None,
    thorough: bool = False,
) -> Study:
    """Everything.

    Args:
        trace: of requests.
        model: of one instance.
        goals: the service level, and how the planner works.
        bounds: which counts may be chosen.
        tell: hears what is being done.
        start: what the planner, HPA and foresight start with; default: the recommended static choice.
        thorough: more targets of the HPA and more prices of foresight, which takes twice as long.
    """
    tell("static choices")
    statics = Statics(trace, model, goals, bounds)
    recommended = statics.sweep()
    start = start or recommended
    tell("planner")
    run, controller = planned(trace, model, goals, bounds, start)
    hpas = []
    batch = batch_of(trace, model, limits(goals)[1])
    queues = THOROUGH_PREFILL_TARGETS if thorough else PREFILL_TARGETS
    shares = THOROUGH_DECODE_SHARES if thorough else DECODE_SHARES
    targets = [(prefill, max(1.0, share * batch)) for prefill in queues for share in shares]
    for switching in (False, True):
        tell(f"HPA, {len(targets)} targets{', with switching' if switching else ''}")
        found = [(pair, *_hpa(trace, model, goals, bounds, pair, start=start, switching=switching)) for pair in targets]
        hpas.append([(each, run) for _, each, run in found])
        targets = [pair for pair, each, _ in found if _worth(each, [other for _, other, _ in found])]
    tell("perfect foresight")
    seen = [(mark.prefill, mark.decode) for mark in run.marks] + [start]
    ranges = (
        _around([each[0] for each in seen], bounds.prefill),
        _around([each[1] for each in seen], bounds.decode),
    )
    ttft, tpot = limits(goals)
    both = foresight.tables(trace, model, ttft, tpot, ranges)
    known: list[tuple[Point, Run]] = []
    for price in THOROUGH_PRICES if thorough else PRICES:
        replayed = foresight.replay(trace, model, foresight.schedule(both, model, price, bounds))
        known.append((point("foresight", replayed, goals, f"price {price:g}"), replayed))
    return Study(
        planner=point("planner", run, goals), planner_run=run,
        sentences=[(at, each.sentence) for at, each in controller.decisions if each.changes],
        statics=sorted(statics.points.values(), key=lambda each: (each.hours, -each.attained)),
        hpa=hpas[0], hpa_switching=hpas[1], foresight=known, recommended=statics.of(recommended),
    )


def _around(counts: list[int], bounds: Pair) -> Pair:
    return max(bounds[0], min(counts) - 1), min(bounds[1], max(counts) + 1)


def _worth(point_: Point, others: list[Point]) -> bool:
    """No other costs less and attains more."""
    return not any(each.hours < point_.hours and each.attained > point_.attained for each in others)


def _hpa(
    trace: Trace, model: EngineModel, goals: Goals, bounds: Bounds, targets: tuple[float, float], *, start: Pair,
    switching: bool,
) -> tuple[Point, Run]:
    run = World(trace, model, start, Hpa(targets, bounds, switching=switching)).play()
    name = "hpa+switch" if switching else "hpa"
    return point(name, run, goals, f"targets {targets[0]:g} and {targets[1]:.0f}"), run
