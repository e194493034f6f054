"""Runs tiers of tests: what a change needs, everything, or some by name.

    python scripts/tiers.py test | test-all        as make does: in two lanes, each tier's output whole when it has ended,
                                                   then what each cost, and whether that is within the budget
    python scripts/tiers.py NAME… [-- WORDS…]      these, one after the other, with their output as it comes; further words
                                                   go to pytest
    CI_TIMES=FILE …                                a whole run's figures as JSON
    RECORD=1 …                                     … added to bench/results/tiers.json, if all of it passed
    LANES=1 …                                      one after the other

``tier_table`` has the rows, ``tier_paths`` says which a change may touch. Output is kept in .cache/tiers. A failure of lint
or of the laws ends the run. The exit code is that of the worst tier, or 3 where all passed and the budget is exceeded. The
last line is pytest's closing line, summed over all.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tier_budget
import tier_minutes
import tier_paths
import tier_report
from tier_report import Times
from tier_table import PYTEST, PYTHON, ROOT, ROWS, SPEEDS, TIERS, Lane, Tier, of_speed, with_needs

OUTPUTS = ROOT / ".cache" / "tiers"
_printing = threading.Lock()


def alone(tier: Tier, words: list[str]) -> int:
    """Run one here, with its output as it comes; the exit code of its first command that fails."""
    if tier.root and os.geteuid() != 0:
        print(f"left out: {tier.name} (it needs root)")
        return 0
    env = os.environ | tier.env
    if "PYTHONPATH" in tier.env and "PYTHONPATH" in os.environ:
        env["PYTHONPATH"] = f"{tier.env['PYTHONPATH']}{os.pathsep}{os.environ['PYTHONPATH']}"
    for command in tier.commands:
        more = words if command[:len(PYTEST)] == PYTEST else []
        if code := subprocess.run([*command, *more], cwd=ROOT, env=env, check=False).returncode:
            return code if code > 0 else 128 - code  # of a signal, as a shell says it
    return 0


def run_watched(tier: Tier) -> Times:
    """Run one under the watch, and print what it said."""
    figures, log, junit = (OUTPUTS / f"{tier.name}.{kind}" for kind in ("json", "log", "xml"))
    with _printing:
        print(f"── {tier.name} begins", flush=True)
    done = subprocess.run(
        [PYTHON, str(ROOT / "scripts" / "tier_watch.py"), str(figures), str(log), PYTHON, str(Path(__file__).resolve()),
         "--alone", tier.name], check=False, cwd=ROOT,
        env={**os.environ, "PYTEST_ADDOPTS": f"{os.environ.get('PYTEST_ADDOPTS', '')} --junitxml={junit}"})
    output = log.read_text("utf-8", "replace") if log.exists() else ""
    known = json.loads(figures.read_text("utf-8")) if figures.exists() else {}
    times = tier_report.times_of(tier.name, done.returncode, known, output, junit)
    with _printing:
        said = "passed" if times.code == 0 else "FAILED"
        print(f"── {tier.name}\n{output}── {tier.name} {said} after {times.wall_s:.0f} s", flush=True)
    return times


def in_lanes(tiers: tuple[Tier, ...], run: Callable[[Tier], Times] = run_watched) -> list[Times]:
    """Run those of the first lane, then two lanes, each row after what it needs built. What could not be built leaves its
    tiers to say so themselves.
    """
    lanes: dict[Lane, deque[tuple[Tier, ...]]] = {lane: deque() for lane in Lane}
    built: set[str] = set()
    for tier in tiers:
        needs = tuple(ROWS[name] for name in tier.needs if name not in built)
        built |= {one.name for one in needs}
        lanes[tier.lane].append((*needs, tier))

    def of_lane(own: deque[tuple[Tier, ...]]) -> list[Times]:
        found = []
        while True:
            try:  # popleft of a deque is atomic
                group = own.popleft() if own else lanes[Lane.EITHER].popleft()
            except IndexError:
                return found
            found += [run(one) for one in group]

    with ThreadPoolExecutor(1 if os.environ.get("LANES") == "1" else 2) as pool:
        ended = list(pool.map(run, [one for (one,) in lanes[Lane.FIRST]]))
        if tier_report.worst(ended):
            return ended
        return ended + [one for lane in pool.map(of_lane, (lanes[Lane.COMPUTE], lanes[Lane.CLUSTER])) for one in lane]


def select_tiers(everything: bool) -> tuple[Tier, ...]:
    """The tiers of a speed, without those that no change touches, which are named."""
    wanted = of_speed(everything)
    if everything:
        return wanted
    found = tier_paths.change(ROOT)
    why = tier_paths.touched_tiers(found, tuple(one.name for one in wanted if one.touched))
    for one in wanted:
        if one.touched:
            print(f"{one.name}: " + (f"runs, since {why[one.name]}" if one.name in why
                                     else f"left out, nothing of it changed since {found.base[:12]}"), flush=True)
    return tuple(one for one in wanted if not one.touched or one.name in why)


def whole(speed: str) -> int:
    """Run one of the two speeds."""
    before, began = tier_budget.machine(), time.monotonic()
    shutil.rmtree(OUTPUTS, ignore_errors=True)
    OUTPUTS.mkdir(parents=True)
    tiers = select_tiers(SPEEDS[speed])
    times = in_lanes(tiers)
    wall_s = time.monotonic() - began
    print("\n".join(tier_report.table(times, wall_s)))
    run = {"speed": speed, "commit": tier_minutes.commit(ROOT), "processors": tier_budget.processors(),
           "python": platform.python_version(), "wall_s": round(wall_s, 1),
           "processor_s": round(sum(one.processor_s for one in times), 1),
           "tiers": [asdict(one) for one in times]}
    run |= {"elsewhere": tier_budget.elsewhere(before, tier_budget.machine(), run["processor_s"])}
    if path := os.environ.get("CI_TIMES"):
        Path(path).write_text(json.dumps(run, indent=1) + "\n", "utf-8")
    code = tier_report.worst(times)
    if not code and os.environ.get("RECORD") == "1":
        print(record_run(run, tiers))
    if not code and speed == "test":
        said, held = tier_budget.verdict(run, tier_minutes.runs())
        print("\n".join(said))
        code = code if held else tier_budget.EXCEEDED
    print(tier_report.closing(times, wall_s), flush=True)
    return code


def record_run(run: dict[str, Any], tiers: tuple[Tier, ...], path: Path = tier_minutes.RECORD) -> str:
    """Record a run that has passed, unless tiers were left out without root: no other run could keep to what these cost.
    Returns what became of it.
    """
    left = [one.name for one in tiers if one.root] if os.geteuid() != 0 else []
    if left:
        return f"not recorded: {', '.join(left)} did not run, for want of root"
    tier_minutes.add(run, path)
    return f"recorded in {path}"


def main(arguments: list[str]) -> int:
    """Run what is asked for."""
    if arguments in [[speed] for speed in SPEEDS]:
        return whole(arguments[0])
    at = arguments.index("--") if "--" in arguments else len(arguments)
    names, words = arguments[:at], arguments[at + 1:]
    by_itself = names[:1] == ["--alone"]
    names = names[1:] if by_itself else names
    if not names or set(names) - ROWS.keys():
        print(f"tiers: {', '.join(one.name for one in TIERS)}; or {', '.join(SPEEDS)}", file=sys.stderr)
        return 2
    wanted = tuple(ROWS[name] for name in names)
    return max(alone(one, words) for one in (wanted if by_itself else with_needs(wanted)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
