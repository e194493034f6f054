"""The campaign of the planner: scenarios of a seed, an oracle of the present rate, tuned rivals, and a verdict."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import load

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "lab/campaigns/planner"))
import onset_oracle as oracle
import planner_figures as judge
import planner_scenarios as scenarios
import scenario_plot as plot
import tuned_rivals as rivals

from xpyd_operator.plan.planner.figures import Figures
from xpyd_operator.simulation.families import shape_of
from xpyd_operator.simulation.outcome import ControllerLook
from xpyd_operator.simulation.study import other_starts

campaign = load(Path(judge.__file__).with_name("__main__.py"))


def short(family: str, more: str) -> scenarios.Scenario:
    """Ten minutes of hardly any load."""
    traffic = f"{family}:rate=1,hours=0.17,prompt=3000,output=100,spread=1{more}"
    return scenarios.Scenario(family, 0, traffic, 5, "h200-32b", 60)


@pytest.mark.parametrize("family", scenarios.FAMILIES)
def test_a_seed_draws_the_same_scenario_again_and_another_one_for_each_number(family: str) -> None:
    one = scenarios.draw_scenario(7, family, 3)
    assert one == scenarios.draw_scenario(7, family, 3)
    assert one.traffic != scenarios.draw_scenario(7, family, 4).traffic
    assert one.traffic != scenarios.draw_scenario(8, family, 3).traffic
    assert shape_of(one.traffic)[0] == family


def test_an_oracle_follows_a_rise_at_once_and_a_fall_after_its_hold() -> None:
    rate = lambda at: 9.0 if 100 <= at < 200 else 3.0  # noqa: E731
    one = oracle.OnsetOracle(rate, {3.0: (1, 2), 9.0: (4, 1)}, 50.0)
    times = (0, 99, 100, 149, 155, 200, 249, 255)
    asked = {now: one.want(ControllerLook(now, Figures(30.0), (1, 1), (0, 0))) for now in times}
    assert asked == {0: (1, 2), 99: (1, 2), 100: (4, 2), 149: (4, 2), 155: (4, 1), 200: (4, 2), 249: (4, 2), 255: (1, 2)}


def test_two_settings_of_a_rival_are_kept_the_best_that_is_cheap_and_the_best_that_is_dear() -> None:
    runs = [rivals.TuningRun(rival, setting, 0.5 + at, 0.9 - at / 10)
            for rival, settings in rivals.SETTINGS.items() for at, setting in enumerate(settings)]
    assert rivals.choose(runs)["law"] == rivals.TunedRival((0.5,), (0.8,))


def test_a_sudden_load_is_played_beside_the_oracle_and_a_flat_one_from_other_starts() -> None:
    tuned = {"law": rivals.TunedRival((0.5,), (0.3,))}
    rows = [campaign.evaluate(short("spike", ",times=4,phase=0.4"), tuned), campaign.evaluate(short("flat", ""), tuned)]
    spike, flat = rows
    assert spike["requests"] > 500
    assert spike["lost_by_oracle"] > 0
    assert spike["oracle"]["hold_s"] in oracle.HOLDS_S
    assert set(flat["starts"]) == {f"{one}P{other}D" for one, other in other_starts(flat["start"], scenarios.BOUNDS)}
    assert "1P1D" in flat["starts"]
    assert flat["fixed"] is not None
    assert flat["over_hull"] == pytest.approx(flat["attained"] - flat["fixed"], abs=1e-5)
    found = judge.figures(rows)
    assert found["scenarios"] == 2
    assert found["fewest_of_a_family"] == 0
    assert found["lost_by_oracle_median"] == spike["lost_by_oracle"]
    assert plot.picture(rows).count("<circle") == 2


@pytest.mark.parametrize(("over", "changes", "rival", "wrong"), [
    (0.0, 3.0, 0.9, set()),
    (-0.006, 3.0, 0.9, {"steady_within_half_a_point", "flat_within_a_fifth"}),
    (-0.021, 3.0, 0.9, {"steady_within_half_a_point", "steady_within_two_points", "flat_within_a_fifth"}),
    (0.0, 5.0, 0.9, {"flat_changes_per_h_most"}),
    (0.0, 3.0, 0.96, {"rivals_within_a_third"}),
])
def test_what_falls_short_is_seen(over: float, changes: float, rival: float, wrong: set[str]) -> None:
    row: dict[str, Any] = {"family": "flat", "attained": 0.95, "over_hull": over, "changes_per_h": changes,
                           "rivals": {"hpa": rival, "law": None}, "starts": {"half": -0.001}}
    found = judge.figures([row])
    goals = {"steady_within_half_a_point": 0.9, "steady_within_two_points": 0.98, "flat_within_a_fifth": 0.95,
             "rivals_within_a_third": 0.95}
    short_of = {name for name, least in goals.items() if found[name] < least}
    assert short_of | ({"flat_changes_per_h_most"} if found["flat_changes_per_h_most"] > 4 else set()) == wrong
    assert found["rivals_dearer"] == 1
    assert found["starts_worst_points"] == -0.1
