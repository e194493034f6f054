"""What is asked of the planner, and whether the scenarios show it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from planner_scenarios import FAMILIES, STEADY

POINT = 0.01


def share(rows: list[dict[str, Any]], holds: Callable[[dict[str, Any]], bool]) -> float:
    """The share of scenarios of which it holds; 1 where there are none."""
    return round(sum(map(holds, rows)) / len(rows), 4) if rows else 1.0


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """All that is asked, from a row for each scenario. Attainment in shares, ``…_points`` in hundredths of it."""
    steady = [each for each in rows if each["family"] in STEADY]
    sudden = [each for each in rows if each["family"] not in STEADY]
    flat = [each for each in rows if each["family"] == "flat"]
    compared = [(each["family"], each["attained"] - other) for each in rows for other in each["rivals"].values()
                if other is not None]
    leads = {family: [lead for name, lead in compared if name == family] for family in FAMILIES}
    starts = [lead for each in rows for lead in each["starts"].values()]
    return {
        "scenarios": len(rows),
        "fewest_of_a_family": min(sum(each["family"] == family for each in rows) for family in FAMILIES),
        "steady_within_half_a_point": share(steady, lambda each: each["over_hull"] >= -0.5 * POINT),
        "steady_within_two_points": share(steady, lambda each: each["over_hull"] >= -2 * POINT),
        "flat_within_a_fifth": share(flat, lambda each: each["over_hull"] >= -0.2 * POINT),
        "flat_changes_per_h_most": max((each["changes_per_h"] for each in flat), default=0.0),
        "lost_by_oracle_median": _median([each["lost_by_oracle"] for each in sudden]),
        "lost_by_oracle": {family: _median([each["lost_by_oracle"] for each in sudden if each["family"] == family])
                           for family in FAMILIES if family not in STEADY},
        "over_hull_points": {family: _quartiles([each["over_hull"] / POINT for each in rows if each["family"] == family])
                             for family in FAMILIES},
        "rivals_compared": len(compared),
        "rivals_dearer": sum(other is None for each in rows for other in each["rivals"].values()),
        "rivals_within_a_third": round(sum(lead >= -0.3 * POINT for _, lead in compared) / max(1, len(compared)), 4),
        "lead_points_median": {family: _median([lead / POINT for lead in found]) for family, found in leads.items()},
        "fewest_lead_points_of_what_varies": min(
            (_median([lead / POINT for lead in found]) for family, found in leads.items()
             if found and family not in {"flat", "agents"}), default=0.0),
        "starts_worst_points": round(min(starts, default=0.0) / POINT, 2),
    }


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3) if values else 0.0


def _quartiles(values: list[float]) -> list[float]:
    """The least, the quartiles, and the most."""
    if len(values) < 2:
        return [round(each, 2) for each in values]
    return [round(each, 2) for each in (min(values), *statistics.quantiles(values, n=4), max(values))]
