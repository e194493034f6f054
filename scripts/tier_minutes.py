"""The table of tiers and their minutes, from recorded runs (bench/results/tiers.json).

    python scripts/tier_minutes.py help         for ``make help``
    python scripts/tier_minutes.py write        into README.md
    python scripts/tier_minutes.py check        whether README.md has it, and the records keep the budget of the whole

Minutes are medians of wall time on the machine that the records are of, with two lanes side by side. ``RECORD=1 make test``
and ``RECORD=1 make test-all`` add a run; the last ``KEPT`` of each are kept. Only Python's own library is imported.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import tier_budget
from tier_table import ROOT, SPEEDS, TIERS, Tier

RECORD = ROOT / "bench" / "results" / "tiers.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- tiers: python scripts/tier_minutes.py write -->", "<!-- end of tiers -->"
KEPT = 3
FIELDS = ("tier", "wall_s", "processor_s", "tests", "engines")
"""What is kept of a tier."""


def commit(root: Path) -> str:
    """What is checked out, with + where something was changed since; empty outside a repository, and without git."""
    try:
        done = subprocess.run(["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"], cwd=root,
                              capture_output=True, text=True, check=False)
    except OSError:  # no git
        return ""
    return done.stdout.strip()


def runs(speed: str | None = None, path: Path = RECORD) -> list[dict[str, Any]]:
    """Recorded runs, of one speed or of both, the newest last."""
    found: list[dict[str, Any]] = json.loads(path.read_text("utf-8")) if path.exists() else []
    return [one for one in found if speed in {None, one["speed"]}]


def add(run: dict[str, Any], path: Path = RECORD) -> None:
    """Record a run that has passed."""
    kept = run | {"tiers": [{name: one[name] for name in FIELDS} for one in run["tiers"]]}
    every = [*runs(None, path), kept]
    last = [one for speed in SPEEDS for one in [each for each in every if each["speed"] == speed][-KEPT:]]
    path.write_text(json.dumps(last, indent=1) + "\n", "utf-8")


def minutes(seconds: float | None) -> str:
    """As the table says it."""
    return "?" if seconds is None else f"{seconds / 60:.0f}" if seconds >= 60 else "<1"


def table(records: list[dict[str, Any]]) -> list[str]:
    """The table of README: a row for each tier, and what the two speeds take."""
    known = tier_budget.medians(records, "wall_s")
    lines = ["| tier | what runs | `make test` | minutes |", "|---|---|---|---|"]
    lines += [f"| {one.name} | {one.what} | {_when(one)} | {minutes(known.get(one.name))} |" for one in TIERS]
    return [*lines, "", sentence(records)]


def _when(tier: Tier) -> str:
    if not tier.in_test:
        return "no"
    return "where touched" if tier.touched else "yes"


def sentence(records: list[dict[str, Any]]) -> str:
    """What the two speeds take, as recorded."""
    said = []
    for speed in SPEEDS:
        for building in (False, True):
            of_kind = [one for one in records if one["speed"] == speed and tier_budget.has_built(one) == building]
            if of_kind:
                wall_s = statistics.median(one["wall_s"] for one in of_kind)
                building_too = " with a Kubernetes to build" if building else ""
                said.append(f"`make {speed}` {minutes(wall_s)} minutes{building_too}")
    if not said:
        return "No whole run is recorded yet."
    return f"Recorded on {records[-1]['processors']} processors: {', '.join(said)}."


def help_lines(records: list[dict[str, Any]]) -> list[str]:
    """For ``make help``."""
    known = tier_budget.medians(records, "wall_s")
    return ["", "Tiers, in minutes; * in make test-all alone, ~ where touched; scripts/tiers.py NAME… runs some:",
            *(f"  {one.name + ('' if one.in_test else '*') + ('~' if one.touched else ''):<14}"
              f"{minutes(known.get(one.name)):>3}  {one.what}" for one in TIERS), sentence(records).replace("`", "")]


def with_table(readme: str, records: list[dict[str, Any]]) -> str:
    """README with the table between its marks. Raises ValueError where it has no marks."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md has no {BEGIN} … {END}")
    return "\n".join([before + BEGIN, "", *table(records), "", END + after])


def over(records: list[dict[str, Any]]) -> list[str]:
    """Recorded runs of ``make test`` that together exceed the budget of the whole, by whether they had to build."""
    said = []
    for building, most in ((False, tier_budget.LIMIT_S), (True, tier_budget.LIMIT_BUILDING_S)):
        walls = [one["wall_s"] for one in records if one["speed"] == "test" and tier_budget.has_built(one) == building]
        if walls and statistics.median(walls) > most:
            said.append(f"make test takes {statistics.median(walls) / 60:.1f} minutes in the median of {len(walls)} "
                        f"recorded runs, and may take {most / 60:.0f}")
    return said


def main(arguments: list[str]) -> int:
    """The command; its exit code."""
    records = runs()
    if arguments == ["help"]:
        print("\n".join(help_lines(records)))
        return 0
    if arguments not in (["write"], ["check"]):
        print(__doc__, file=sys.stderr)
        return 2
    readme = README.read_text("utf-8")
    wanted = with_table(readme, records)
    if arguments == ["write"]:
        README.write_text(wanted, "utf-8")
        return 0
    wrong = over(records)
    if wanted != readme:
        wrong.append("README.md has another table of tiers than the records: python scripts/tier_minutes.py write")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
