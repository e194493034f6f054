"""Runs of drawn places as a file, which is written after each place, so that a run goes on where it was ended.

    {"runs": [{"kind": "sample", "seed": 1, "commit": …, "wanted": 200, "judged": 40, "killed": 33, "load": [1.4, 2.0],
               "processors": 2, "places": [{"function": "xpyd_sidecar.kv.pairing:Pairing.on_ready", "before": …, …}]}]}

A run is known by kind and seed, and goes on with the same commit and number of places; otherwise it begins anew in its
place. Places stand in the order of the draw, a line each; those that were not judged yet are drawn again, and not written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab.mutation.functions import Change
from lab.mutation.judge import ALIVE, GONE, KILLED, Verdict

Row = dict[str, Any]


def row_of(change: Change) -> Row:
    """A place that was not judged yet."""
    return {"function": change.name, "before": change.before, "after": change.after, "nth": change.nth}


def change_of(row: Row) -> Change:
    """The change of a place."""
    module, _, function = row["function"].partition(":")
    return Change(module, function, row["before"], row["after"], row["nth"])


class Figures:
    """The runs in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[Row] = json.loads(path.read_text("utf-8"))["runs"] if path.exists() else []

    def run(self, kind: str, seed: int | None, commit: str, changes: Sequence[Change]) -> Row:
        """The run of that name, as far as it has come, or a new one."""
        key = {"kind": kind, "seed": seed, "commit": commit, "wanted": len(changes)}
        for run in self.runs:
            if key == {name: run[name] for name in key}:
                known = {change_of(row): row for row in run["places"]}
                run["places"] = [known.get(change, row_of(change)) for change in changes]
                return run
        self.runs = [run for run in self.runs if (run["kind"], run["seed"]) != (kind, seed)]
        run = {**key, "judged": 0, "killed": 0, "alive": 0, "gone": 0, "load": [], "processors": os.cpu_count(),
               "places": [row_of(change) for change in changes]}
        self.runs.append(run)
        return run

    def judged(self, run: Row, row: Row, verdict: Verdict) -> None:
        """Note a verdict, and write the file."""
        spent = row.get("seconds", 0.0)
        row.update(asdict(verdict), seconds=round(spent + verdict.seconds, 1))
        verdicts = [one.get("verdict") for one in run["places"]]
        run.update(judged=len(verdicts) - verdicts.count(None), killed=verdicts.count(KILLED), alive=verdicts.count(ALIVE),
                   gone=verdicts.count(GONE))
        load = round(os.getloadavg()[0], 1)
        run["load"] = [min([load, *run["load"][:1]]), max([load, *run["load"][1:]])]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(text_of(self.runs), "utf-8")


def text_of(runs: Sequence[Row]) -> str:
    """The file: a line for each run's head and for each place that was judged."""
    blocks = []
    for run in runs:
        head = json.dumps({name: value for name, value in run.items() if name != "places"})
        rows = (json.dumps(row, ensure_ascii=False) for row in run["places"] if "verdict" in row)
        blocks.append(f"{head[:-1]}, \"places\": [\n" + ",\n".join(rows) + "\n]}")
    return '{"runs": [\n' + ",\n".join(blocks) + "\n]}\n"


def summary(run: Row) -> str:
    """A run in words, with each place that lives."""
    rows = [row for row in run["places"] if row.get("verdict") == ALIVE]
    head = (f"{run['kind']}, seed {run['seed']}, commit {run['commit'][:8]}: {run['killed']} killed, {run['alive']} alive, "
            f"{run['gone']} gone, {run['wanted'] - run['judged']} left of {run['wanted']}")
    lines = [f"  ALIVE {row['function']}  {_line(row['before'])}  ->  {_line(row['after'])}"
             + (f"  ({row['why']})" if row["why"] else "") for row in rows]
    return "\n".join([head, *lines])


def _line(text: str) -> str:
    return " ".join(text.split())[:100]
