"""Someone who knows how many requests come now, and the counts that it takes, but not what will come.

A rise is known when it comes, so what is added serves a cold start later, as it does for the planner. After a fall
instances are kept for a time. Which time is best is chosen afterwards, among those that cost no more than the planner did.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from planner_scenarios import Scenario, counts_for, measured

from xpyd_operator.simulation.chance import Chance
from xpyd_operator.simulation.controllers import ScheduleController
from xpyd_operator.simulation.families import Rate, rate_over_time, shape_of
from xpyd_operator.simulation.outcome import ControllerLook, Pair
from xpyd_operator.simulation.statics import SAME, Point
from xpyd_operator.simulation.trace import Trace
from xpyd_operator.simulation.world import World

HOLDS_S = (0.0, 300.0, 600.0, 1200.0, 2400.0, math.inf)
"""For so long instances are kept after a fall."""


class OnsetOracle:
    """Counts for the present rate, at once; the most of the last ``hold_s`` seconds."""

    interval_s = 5.0
    switching = True

    def __init__(self, rate: Rate, counts: dict[float, Pair], hold_s: float) -> None:
        self._rate, self._counts, self._hold_s = rate, counts, hold_s
        self._seen: deque[tuple[float, Pair]] = deque()

    def want(self, look: ControllerLook) -> Pair:
        """The most that one of the last moments asked for, by role."""
        now = self._counts[self._rate(look.now)]
        if not self._seen or self._seen[-1][1] != now:
            self._seen.append((look.now, now))
        # A pair holds until the next one came.
        while len(self._seen) > 1 and self._seen[1][0] <= look.now - self._hold_s:
            self._seen.popleft()
        return max(each[0] for _, each in self._seen), max(each[1] for _, each in self._seen)


class OracleFigures(NamedTuple):
    """The best that it could do at the planner's hours."""

    lost: float
    """Requests that were not within the goals."""
    hours: float
    hold_s: float


def best_oracle(scenario: Scenario, trace: Trace, start: Pair, planner: Point) -> OracleFigures:
    """The hold with the fewest late requests of those that cost no more than the planner; the cheapest where none does."""
    _, shape = shape_of(scenario.traffic)
    counts = {rate: counts_for(scenario, rate) for rate in (shape.rate, shape.rate * shape.times)}
    found = []
    for hold_s in HOLDS_S:
        rate = rate_over_time(scenario.traffic, Chance(scenario.seed))
        run = World(trace, scenario.model(), start, OnsetOracle(rate, counts, hold_s), seed=scenario.seed).play()
        each = measured("oracle", run, scenario)
        found.append(OracleFigures((1 - each.attained) * len(trace), each.hours, hold_s))
    equal = [each for each in found if each.hours <= planner.hours * SAME]
    return min(equal) if equal else min(found, key=lambda each: each.hours)


def from_another_start(scenario: Scenario, trace: Trace, counts: Pair, start: Pair) -> Point:
    """Counts that it takes, asked for at once from ``start`` on."""
    at_once = ScheduleController([(0.0, counts)], OnsetOracle.interval_s)
    return measured("oracle", World(trace, scenario.model(), start, at_once, seed=scenario.seed).play(), scenario)
