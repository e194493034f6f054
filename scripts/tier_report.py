"""What the tiers of ``make test`` did and cost, for people and as JSON; pure."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

SLOWEST = 10
WORDS = ("passed", "failed", "errors", "skipped", "xfailed", "xpassed")


@dataclass
class Times:
    """One tier, or what it needs built; seconds."""

    tier: str
    code: int = 0
    wall_s: float = 0.0
    processor_s: float = 0.0
    tests: dict[str, int] = field(default_factory=dict)
    """By outcome."""
    engines: int = 0
    starts_s: float = 0.0
    """From their begin until they listened, summed over engines."""
    starts_processor_s: float = 0.0
    slowest: list[tuple[float, str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Commands that had to be killed at the end."""


def cases(junit: Path) -> list[tuple[str, float]]:
    """Tests of a JUnit file with their seconds of setup, call and teardown; none where the tier has no tests."""
    if not junit.exists():
        return []
    found = ET.parse(junit).iter("testcase")  # noqa: S314 (pytest has just written it)
    return [(f"{one.get('classname')}::{one.get('name')}", float(one.get("time", 0))) for one in found]


def counted(output: str) -> dict[str, int]:
    """Tests by outcome, as the last closing line of pytest in ``output`` says; empty where there is none."""
    lines = re.findall(r"^=* ?((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s", output, re.MULTILINE)
    said = {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", lines[-1])} if lines else {}
    said["errors"] = said.get("errors", 0) + said.pop("error", 0)
    return {word: said[word] for word in WORDS if said.get(word)}


def times_of(tier: str, code: int, figures: dict[str, Any], output: str, junit: Path) -> Times:
    """Of a tier that has ended. ``figures``: what ``tier_watch`` has measured, empty where it could not."""
    engines = figures.get("engines", [])
    return Times(tier, code, figures.get("wall_s", 0.0), figures.get("processor_s", 0.0), counted(output), len(engines),
                 round(sum(one["wall_s"] for one in engines), 1), round(sum(one["processor_s"] for one in engines), 1),
                 sorted(((s, name) for name, s in cases(junit)), reverse=True)[:SLOWEST], figures.get("left", []))


def _summed(times: list[Times]) -> dict[str, int]:
    return dict(sum((Counter(one.tests) for one in times), Counter()))


def table(times: list[Times], wall_s: float) -> list[str]:
    """One line per tier, the sum (its wall time is that of the run: tiers overlap), and the slowest tests."""
    whole = Times("all", worst(times), wall_s, sum(one.processor_s for one in times), _summed(times),
                  sum(one.engines for one in times), sum(one.starts_s for one in times),
                  sum(one.starts_processor_s for one in times))
    lines = ["seconds               tests    wall  processor  engines  starting them: wall  processor"]
    for one in (*times, whole):
        lines.append(f"{one.tier:<15}{'ok' if one.code == 0 else 'FAILED':<6}{sum(one.tests.values()):>6}{one.wall_s:>8.0f}"
                     f"{one.processor_s:>11.0f}{one.engines:>9}{one.starts_s:>21.0f}{one.starts_processor_s:>11.0f}")
        lines += [f"    left behind and killed: {command}" for command in one.left]
    slow = sorted(((s, name, one.tier) for one in times for s, name in one.slowest), reverse=True)[:SLOWEST]
    return [*lines, "", "the slowest tests", *(f"{s:>8.1f}  {tier:<15}{name}" for s, name, tier in slow), ""]


def closing(times: list[Times], wall_s: float) -> str:
    """Pytest's closing line, over all tiers."""
    total = _summed(times)
    said = ", ".join(f"{total[word]} {word}" for word in WORDS if total.get(word)) or "no tests ran"
    return f"{said} in {wall_s:.2f}s"


def worst(times: list[Times]) -> int:
    """The exit code of all of them."""
    return max((one.code for one in times), default=0)
