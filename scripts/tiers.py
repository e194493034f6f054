"""``make test``: runs the tiers, prints each one's output whole when it ends, and at the end what each cost.

    python scripts/tiers.py [TIER…]        all tiers, or these
    CI_TIMES=FILE …                        the same figures as JSON

A tier is a target of the Makefile, so ``make test-unit`` runs the same by itself. What a tier needs built (a Kubernetes)
is a row of its own. The exit code is that of the worst tier: 0 where all passed. The last line is pytest's closing line,
summed over the tiers.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parent.parent
TIERS = ("lint", "test-unit", "test-browser", "test-component", "test-kube", "test-e2e")
SLOWEST = 10
WORDS = ("passed", "failed", "errors", "skipped", "xfailed", "xpassed")


@dataclass
class Times:
    """What one tier did and cost; seconds."""

    tier: str
    code: int = 0
    wall_s: float = 0.0
    processor_s: float = 0.0
    tests: dict[str, int] = field(default_factory=dict)
    engines: int = 0
    starts_s: float = 0.0
    """From their begin until they listened, summed over engines."""
    starts_processor_s: float = 0.0
    slowest: list[tuple[float, str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def cases(path: Path) -> list[tuple[str, float]]:
    """Tests of a JUnit file, with their seconds: setup, call and teardown."""
    if not path.exists():
        return []
    found = ET.parse(path).iter("testcase")  # noqa: S314 (pytest has just written it)
    return [(f"{one.get('classname')}::{one.get('name')}", float(one.get("time", 0))) for one in found]


def counted(output: str) -> dict[str, int]:
    """What the last closing line of pytest says: tests by outcome."""
    lines = re.findall(r"^=*\s?((?:\d+ \w+(?:, )?)+) in [\d.]+s", output, re.MULTILINE)
    if not lines:
        return {}
    found = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", lines[-1])}
    return {word: found.get(word, 0) + (found.get("error", 0) if word == "errors" else 0) for word in WORDS
            if found.get(word) or (word == "errors" and found.get("error"))}


def run(tier: str, folder: Path) -> Times:
    """Run one, and print what it said."""
    figures, log, junit = (folder / f"{tier}.{kind}" for kind in ("json", "log", "xml"))
    print(f"── {tier} begins", flush=True)
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "tier_watch.py"), str(figures), str(log), os.environ.get("MAKE", "make"),
         "--no-print-directory", tier], check=False, cwd=ROOT,
        env={**os.environ, "PYTEST_ADDOPTS": f"{os.environ.get('PYTEST_ADDOPTS', '')} --junitxml={junit}"})
    output = log.read_text("utf-8", "replace")
    print(output, flush=True)
    known = json.loads(figures.read_text("utf-8")) if figures.exists() else {}
    engines = known.get("engines", [])
    return Times(tier, done.returncode, known.get("wall_s", 0.0), known.get("processor_s", 0.0), counted(output),
                 len(engines), round(sum(one["wall_s"] for one in engines), 1),
                 round(sum(one["processor_s"] for one in engines), 1),
                 sorted(((s, name) for name, s in cases(junit)), reverse=True)[:SLOWEST], known.get("left", []))


def table(times: list[Times], wall_s: float) -> list[str]:
    """For people."""
    whole = Times("all", max(one.code for one in times), wall_s, sum(one.processor_s for one in times), _summed(times),
                  sum(one.engines for one in times), sum(one.starts_s for one in times),
                  sum(one.starts_processor_s for one in times))
    lines = ["seconds               tests    wall  processor  engines  starting them: wall  processor"]
    for one in (*times, whole):
        lines.append(f"{one.tier:<15}{'ok' if one.code == 0 else 'FAILED':<6}{sum(one.tests.values()):>6}{one.wall_s:>8.0f}"
                     f"{one.processor_s:>11.0f}{one.engines:>9}{one.starts_s:>21.0f}{one.starts_processor_s:>11.0f}")
        lines += [f"    left behind and killed: {command}" for command in one.left]
    slow = sorted(((s, name, one.tier) for one in times for s, name in one.slowest), reverse=True)[:SLOWEST]
    return [*lines, "", "the slowest tests", *(f"{s:>8.1f}  {tier:<15}{name}" for s, name, tier in slow), ""]


def _summed(times: list[Times]) -> dict[str, int]:
    """Tests by outcome."""
    return sum((Counter(one.tests) for one in times), Counter())


def closing(times: list[Times], wall_s: float) -> str:
    """Pytest's closing line, over all tiers."""
    total = _summed(times)
    said = ", ".join(f"{total[word]} {word}" for word in WORDS if total.get(word)) or "no tests ran"
    return f"{said} in {wall_s:.2f}s"


def main(wanted: list[str]) -> int:
    """Run them."""
    unknown = set(wanted) - set(TIERS)
    if unknown:
        print(f"no tiers: {', '.join(sorted(unknown))}; there are {', '.join(TIERS)}", file=sys.stderr)
        return 2
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="xpyd-tiers-"))
    times = [run(tier, folder) for tier in wanted or TIERS]
    wall_s = time.monotonic() - began
    print("\n".join(table(times, wall_s)))
    if path := os.environ.get("CI_TIMES"):
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        Path(path).write_text(json.dumps({
            "commit": commit.stdout.strip(), "processors": os.cpu_count(), "python": platform.python_version(),
            "wall_s": round(wall_s, 1), "processor_s": round(sum(one.processor_s for one in times), 1),
            "tiers": [asdict(one) for one in times]}, indent=1) + "\n", "utf-8")
    print(closing(times, wall_s), flush=True)
    return max(one.code for one in times)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
