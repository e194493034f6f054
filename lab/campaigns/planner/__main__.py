"""The planner on scenarios that nobody has looked at, beside fixed counts, an oracle, and rivals that were tuned before.

    python -m lab campaign-planner                      20 of each of ten families: bench/results/campaign_planner.json
    python -m lab campaign-planner --each 1 --days 0    a look

The seed is drawn and written down. Rivals are tuned on two scenarios of each family that have other seeds. Then each
scenario is played: fixed counts (the best split of each number of instances), the planner from the counts that fixed counts
would recommend, rivals; where loads rise at once, an oracle that learns of a rise when it comes; and on flat loads the
planner from the fewest instances, half and twice as many. At last square waves of every period go on for a day, and the
planner's regrets are counted at each doubling of the time.

All of it is simulated (``xpyd_operator.simulation``), so the machine has no part in it but the time that it takes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

from onset_oracle import best_oracle, from_another_start
from planner_figures import figures
from planner_scenarios import BOUNDS, FAMILIES, STEADY, Scenario, draw_scenario, measured, play_planner
from scenario_plot import picture
from tuned_rivals import TunedRival, at_equal_hours, choose, tune_on

from xpyd_operator.simulation.controllers import PlannerController
from xpyd_operator.simulation.outcome import ControllerLook, Pair
from xpyd_operator.simulation.statics import Statics, hull
from xpyd_operator.simulation.study import other_starts
from xpyd_operator.simulation.world import World

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "bench/results/campaign_planner.json"
PICTURE = ROOT / "docs/pictures/planner-scenarios.svg"
TUNING = 2
"""Scenarios of a family that rivals are tuned on."""
PERIODS_MIN: Final = (1, 2, 4, 7, 12, 18, 28, 40)
DOUBLINGS_H: Final = (1.5, 3, 6, 12, 24)


class CountingPlanner(PlannerController):
    """The planner, with the times at which it regretted a removal, in seconds."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.regretted: list[float] = []

    def want(self, look: ControllerLook) -> Pair:
        """What the planner says."""
        before = sum(each.regrets for each in self.memory.patience)
        wanted = super().want(look)
        self.regretted += [look.now] * (sum(each.regrets for each in self.memory.patience) - before)
        return wanted


def evaluate(scenario: Scenario, tuned: dict[str, TunedRival]) -> dict[str, Any]:
    """One scenario: a row of figures."""
    trace = scenario.trace()
    statics = Statics(trace, scenario.model(), scenario.goals(), BOUNDS, seed=scenario.seed)
    start = statics.sweep()
    planner = play_planner(scenario, trace, start)
    fixed = hull(list(statics.points.values()), planner.hours)
    row: dict[str, Any] = scenario._asdict() | {
        "requests": len(trace), "start": start, "attained": planner.attained, "hours": planner.hours,
        "changes_per_h": planner.changes_per_h, "fixed": fixed and fixed.attained,
        "over_hull": round(planner.attained - (fixed.attained if fixed else 0.0), 5),
        "rivals": at_equal_hours(scenario, trace, start, planner, tuned), "starts": {},
    }
    if scenario.family == "flat":
        for counts in other_starts(start, BOUNDS):
            known = from_another_start(scenario, trace, start, counts)
            lead = play_planner(scenario, trace, counts).attained - known.attained
            row["starts"][f"{counts[0]}P{counts[1]}D"] = round(lead, 5)
    if scenario.family not in STEADY:
        best = best_oracle(scenario, trace, start, planner)
        lost = (1 - planner.attained) * len(trace)
        row |= {"lost": round(lost), "oracle": best._asdict(), "lost_by_oracle": round(lost / max(1.0, best.lost), 3)}
    return row


def play_day(period_min: int, seed: int) -> dict[str, Any]:
    """A square wave for a day: regrets until each doubling of the time."""
    draw = random.Random(f"{seed} day {period_min}")
    traffic = f"square:hours=24,rate=1.5,period={period_min}m,phase={draw.random():.3f}"
    scenario = Scenario("square", period_min, traffic, draw.randrange(1 << 30), "h200-32b", 180)
    trace = scenario.trace()
    controller = CountingPlanner(scenario.goals(), BOUNDS)
    found = measured("planner", World(trace, scenario.model(), (4, 2), controller, seed=scenario.seed).play(), scenario)
    until = [sum(at <= hours * 3600 for at in controller.regretted) for hours in DOUBLINGS_H]
    return {"period_min": period_min, "attained": found.attained, "regrets_until": until,
            "most_in_a_doubling": max(after - before for before, after in itertools.pairwise(until))}


def play_all(seed: int, each: int, days: int, workers: int) -> dict[str, Any]:
    """Tune, play, judge."""
    began = time.monotonic()
    with ProcessPoolExecutor(workers) as pool:
        tuning = {family: [pool.submit(tune_on, draw_scenario(seed + 1, family, number)) for number in range(TUNING)]
                  for family in FAMILIES}
        tuned = {family: choose([run for future in futures for run in future.result()])
                 for family, futures in tuning.items()}
        _say(began, f"rivals are tuned: {tuned}")
        playing = [pool.submit(evaluate, draw_scenario(seed, family, number), tuned[family])
                   for number in range(each) for family in FAMILIES]
        rows = []
        for future in as_completed(playing):
            rows.append(future.result())
            last = rows[-1]
            _say(began, f"{len(rows)} of {len(playing)}: {last['traffic']} {100 * last['over_hull']:+.2f} points")
        squares = [future.result() for future in [pool.submit(play_day, period, seed) for period in PERIODS_MIN[:days]]]
    rows.sort(key=lambda row: (FAMILIES.index(row["family"]), row["number"]))
    return figures(rows) | {
        "days": squares, "regrets_in_a_doubling_most": max((day["most_in_a_doubling"] for day in squares), default=0),
        "tuned": {family: {name: pair._asdict() for name, pair in found.items()} for family, found in tuned.items()},
        "minutes": round((time.monotonic() - began) / 60, 1), "rows": rows,
    }


def main() -> int:
    """Play, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=20, help="scenarios of each family")
    parser.add_argument("--days", type=int, default=len(PERIODS_MIN), help="square waves of a day")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)} and a picture")
    args = parser.parse_args()
    told = {"seed": args.seed, "load": os.getloadavg()[0]} | play_all(args.seed, args.each, args.days, args.workers)
    if args.write:
        RESULTS.write_text(json.dumps(told, indent=1) + "\n")
        PICTURE.write_text(picture(told["rows"]))
    print(json.dumps({key: value for key, value in told.items() if key != "rows"}, indent=1))
    return 0


def _say(began: float, words: str) -> None:
    print(f"{time.monotonic() - began:.0f} s: {words}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
