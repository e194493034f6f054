"""What ``make test`` costs beside another commit: ``python -m lab compare-times --before FILE… --now FILE…``

The files are those that CI_TIMES named, some runs of each commit on the same machine. Medians are compared: seconds of wall
and processor time of each tier and of the whole, without builds and without tiers that only one side has (they are listed).
A tier that failed in a run is left out of that run: what it cost says nothing.
``--write FILE`` leaves both sides and the ratios as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any


def medians(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each tier, builds and failures left out."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for tier in run["tiers"]:
            if not tier["tier"].startswith("build-") and not tier["code"]:
                for name in ("wall_s", "processor_s", "engines", "starts_processor_s"):
                    found.setdefault(tier["tier"], {}).setdefault(name, []).append(tier[name])
    return {tier: {name: statistics.median(values) for name, values in row.items()} for tier, row in found.items()}


def compared(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> dict[str, Any]:
    """Both sides and their ratios. Raises ValueError where a side has no run, runs of two commits, or another machine."""
    for side in (before, now):
        if len({run["commit"] for run in side}) != 1:
            raise ValueError("each side needs runs of one commit")
    if len({run["processors"] for run in (*before, *now)}) != 1:
        raise ValueError("the runs are of machines with different numbers of processors")
    old, new = medians(before), medians(now)
    both = [tier for tier in old if tier in new]
    sums = {"all": [sum(side[tier]["processor_s"] for tier in both) for side in (old, new)],
            **{tier: [side[tier]["processor_s"] for side in (old, new)] for tier in both}}
    return {"before": {"commit": before[0]["commit"], "runs": len(before), "tiers": old},
            "now": {"commit": now[0]["commit"], "runs": len(now), "tiers": new,
                    "wall_s": statistics.median(run["wall_s"] for run in now)},
            "processor_s": {tier: {"before": round(one, 1), "now": round(other, 1), "ratio": round(other / one, 3)}
                            for tier, (one, other) in sums.items()},
            "left_out": sorted(old.keys() ^ new.keys())}


def main() -> int:
    """Print, and write where that is asked for."""
    parser = argparse.ArgumentParser(description="what make test costs beside another commit")
    parser.add_argument("--before", nargs="+", type=Path, required=True)
    parser.add_argument("--now", nargs="+", type=Path, required=True)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    try:
        found = compared(*([json.loads(path.read_text("utf-8")) for path in paths]
                           for paths in (arguments.before, arguments.now)))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print("processor seconds        before      now    ratio")
    for tier, row in found["processor_s"].items():
        print(f"{tier:<20}{row['before']:>11.0f}{row['now']:>9.0f}{row['ratio']:>9.2f}")
    print(f"left out, since only one side has them: {', '.join(found['left_out']) or 'none'}")
    if arguments.write is not None:
        arguments.write.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
