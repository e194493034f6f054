"""Rivals: each is tuned on other seeds of a family, and then compared with the planner at equal hours.

A setting costs what it costs, so two are kept of each rival: the best of those that cost no more than the planner, and the
best of those that cost up to half as much again. A mix of both in time costs what the planner does.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from planner_scenarios import BOUNDS, TPOT_S, Scenario, fewest_pair, measured, play_planner

from xpyd_operator.plan.planner.figures import Goals
from xpyd_operator.simulation.controllers import ControlLaw, Hpa, LoadThreshold
from xpyd_operator.simulation.outcome import Controller, Pair
from xpyd_operator.simulation.statics import Point, batch_of, hull
from xpyd_operator.simulation.trace import Trace
from xpyd_operator.simulation.world import World

QUEUES: Final = (1.0, 2.0, 4.0, 10.0)
SHARES: Final = (0.25, 0.5, 0.9, 1.5)
HPA: Final = tuple((queue, share) for queue in QUEUES for share in SHARES)
"""HPA's targets: requests of a prefill instance, and shares of the batch with which decode just meets its goal."""
SETTINGS: Final[dict[str, tuple[tuple[float, ...], ...]]] = {
    "hpa": HPA,
    "hpa_switch": HPA,
    "law": ((0.5,), (0.8,), (1.2,), (2.0,)),
    "threshold": ((0.4,), (0.8,), (1.6,), (3.0,)),
}
DEARER = 1.5
"""Times the planner's hours: what costs more is no setting that anybody compares with."""


class TunedRival(NamedTuple):
    """The settings that did best on other seeds; None: none of that price."""

    cheap: tuple[float, ...] | None
    dear: tuple[float, ...] | None


class TuningRun(NamedTuple):
    """One setting of a rival on one scenario: hours over the planner's, and attainment."""

    rival: str
    setting: tuple[float, ...]
    hours: float
    attained: float


def controller_of(rival: str, setting: tuple[float, ...], goals: Goals, batch: float) -> Controller:
    """A rival that has decided nothing yet. ``batch``: requests with which decode just meets its goal."""
    if rival == "law":
        return ControlLaw(setting[0], goals, BOUNDS, switching=True)
    if rival == "threshold":
        return LoadThreshold(setting[0], batch, goals, BOUNDS, switching=True)
    return Hpa((setting[0], max(1.0, setting[1] * batch)), BOUNDS, switching=rival == "hpa_switch")


def play(scenario: Scenario, trace: Trace, start: Pair, rival: str, setting: tuple[float, ...]) -> Point:
    """What a rival attains and costs."""
    goals, model = scenario.goals(), scenario.model()
    controller = controller_of(rival, setting, goals, batch_of(trace, model, TPOT_S))
    return measured(rival, World(trace, model, start, controller, seed=scenario.seed).play(), scenario)


def tune_on(scenario: Scenario) -> list[TuningRun]:
    """All settings of all rivals on one scenario."""
    trace = scenario.trace()
    start = fewest_pair(scenario, trace)
    planner = play_planner(scenario, trace, start)
    found = []
    for rival, settings in SETTINGS.items():
        for setting in settings:
            each = play(scenario, trace, start, rival, setting)
            found.append(TuningRun(rival, setting, each.hours / planner.hours, each.attained))
    return found


def choose(runs: list[TuningRun]) -> dict[str, TunedRival]:
    """The best settings of each rival, on average over the scenarios of a family that it was tuned on."""
    found = {}
    for rival, settings in SETTINGS.items():
        means: list[tuple[float, float, tuple[float, ...]]] = []
        for setting in settings:
            alike = [each for each in runs if (each.rival, each.setting) == (rival, setting)]
            means.append((sum(each.attained for each in alike) / len(alike),
                          sum(each.hours for each in alike) / len(alike), setting))
        cheap = max((each for each in means if each[1] <= 1), default=None)
        dear = max((each for each in means if 1 < each[1] <= DEARER), default=None)
        found[rival] = TunedRival(cheap and cheap[2], dear and dear[2])
    return found


def at_equal_hours(
    scenario: Scenario, trace: Trace, start: Pair, planner: Point, tuned: dict[str, TunedRival]
) -> dict[str, Any]:
    """The attainment of each rival at the planner's hours; None where it costs more."""
    found: dict[str, Any] = {}
    for rival, settings in tuned.items():
        points = [play(scenario, trace, start, rival, setting) for setting in settings if setting is not None]
        best = hull(points, planner.hours)
        found[rival] = best and best.attained
    return found
