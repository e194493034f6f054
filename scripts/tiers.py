"""``make test``: runs the tiers in two lanes, prints each one's output whole when it ends, then what each cost.

    python scripts/tiers.py [TIER…]        all tiers, or these
    CI_TIMES=FILE …                        the same figures as JSON
    LANES=1 …                              one after the other

A tier is a target of the Makefile, so ``make test-unit`` runs the same by itself. Its output is kept in .cache/tiers. One
lane has the tiers of Kubernetes, which wait much, and the other one those that compute. What a tier needs built is a row of
its own: on a new machine that says what the builds cost. The exit code is that of the worst tier. The last line is pytest's
closing line, summed over all.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import tier_report
from tier_report import Times

ROOT = Path(__file__).resolve().parent.parent
LANES = (("lint", "test-component", "test-versions", "test-nixl", "test-unit", "test-browser", "test-sanitize"),
         ("build-light", "test-kube", "build-full", "build-images", "test-e2e"))
TIERS = tuple(tier for lane in LANES for tier in lane)
OUTPUTS = ROOT / ".cache" / "tiers"
_printing = threading.Lock()


def run(tier: str) -> Times:
    """Run one, and print what it said."""
    figures, log, junit = (OUTPUTS / f"{tier}.{kind}" for kind in ("json", "log", "xml"))
    with _printing:
        print(f"── {tier} begins", flush=True)
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "tier_watch.py"), str(figures), str(log), os.environ.get("MAKE", "make"),
         "--no-print-directory", tier], check=False, cwd=ROOT,
        env={**os.environ, "PYTEST_ADDOPTS": f"{os.environ.get('PYTEST_ADDOPTS', '')} --junitxml={junit}"})
    output = log.read_text("utf-8", "replace") if log.exists() else ""
    known = json.loads(figures.read_text("utf-8")) if figures.exists() else {}
    times = tier_report.times_of(tier, done.returncode, known, output, junit)
    with _printing:
        said = "passed" if times.code == 0 else "FAILED"
        print(f"── {tier}\n{output}── {tier} {said} after {times.wall_s:.0f} s", flush=True)
    return times


def run_lane(tiers: list[str]) -> list[Times]:
    """Run tiers one after the other. What could not be built leaves its tiers to say so themselves."""
    return [run(tier) for tier in tiers]


def commit() -> str:
    """What is checked out; empty outside a repository."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main(wanted: list[str]) -> int:
    """Run them."""
    unknown = set(wanted) - set(TIERS)
    if unknown:
        print(f"no tiers: {', '.join(sorted(unknown))}; there are {', '.join(TIERS)}", file=sys.stderr)
        return 2
    began = time.monotonic()
    shutil.rmtree(OUTPUTS, ignore_errors=True)
    OUTPUTS.mkdir(parents=True)
    lanes = [[tier for tier in lane if not wanted or tier in wanted] for lane in LANES]
    with ThreadPoolExecutor(1 if os.environ.get("LANES") == "1" else len(lanes)) as pool:
        times = [one for ended in pool.map(run_lane, lanes) for one in ended]
    wall_s = time.monotonic() - began
    print("\n".join(tier_report.table(times, wall_s)))
    if path := os.environ.get("CI_TIMES"):
        Path(path).write_text(json.dumps({
            "commit": commit(), "processors": os.cpu_count(), "python": platform.python_version(),
            "wall_s": round(wall_s, 1), "processor_s": round(sum(one.processor_s for one in times), 1),
            "tiers": [asdict(one) for one in times]}, indent=1) + "\n", "utf-8")
    print(tier_report.closing(times, wall_s), flush=True)
    return tier_report.worst(times)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
