"""What the tiers of ``make test`` did and cost, for people and as JSON; pure."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

SLOWEST = 10
FAILED_MAX = 40
"""Tests that failed whose names the closing lines have."""
REASON_MAX = 300
"""Characters of why."""
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
    failed: list[tuple[str, str]] = field(default_factory=list)
    """Tests that failed, or could not be run, and why in a line."""
    left: list[str] = field(default_factory=list)
    """Commands that had to be killed at the end."""


@dataclass(frozen=True)
class Case:
    """A test of a JUnit file."""

    name: str
    seconds: float
    """Of setup, call and teardown."""
    failed: str | None
    """Why it failed, or could not be run, in a line; None: it did not fail."""


def cases(junit: Path) -> list[Case]:
    """Tests of a JUnit file; none where the tier has no tests."""
    if not junit.exists():
        return []
    found = ET.parse(junit).iter("testcase")  # noqa: S314 (pytest has just written it)
    return [Case(f"{_file(one)}::{one.get('name')}", float(one.get("time", 0)), _why(one)) for one in found]


def _file(case: ET.Element) -> str:
    return case.get("classname", "").replace(".", "/") + ".py"


def _why(case: ET.Element) -> str | None:
    said = [each.get("message") or "" for each in case if each.tag in {"failure", "error"}]
    return " ".join(said[0].split())[:REASON_MAX] if said else None


def counted(output: str) -> dict[str, int]:
    """Tests by outcome, as the last closing line of pytest in ``output`` says; empty where there is none."""
    lines = re.findall(r"^=* ?((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s", output, re.MULTILINE)
    said = {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", lines[-1])} if lines else {}
    said["errors"] = said.get("errors", 0) + said.pop("error", 0)
    return {word: said[word] for word in WORDS if said.get(word)}


def times_of(tier: str, code: int, figures: dict[str, Any], output: str, junit: Path) -> Times:
    """Of a tier that has ended. ``figures``: what ``tier_watch`` has measured, empty where it could not."""
    engines, tests = figures.get("engines", []), cases(junit)
    return Times(tier, code, figures.get("wall_s", 0.0), figures.get("processor_s", 0.0), counted(output), len(engines),
                 round(sum(one["wall_s"] for one in engines), 1), round(sum(one["processor_s"] for one in engines), 1),
                 sorted(((one.seconds, one.name) for one in tests), reverse=True)[:SLOWEST],
                 [(one.name, one.failed) for one in tests if one.failed is not None], figures.get("left", []))


def _summed(times: list[Times]) -> dict[str, int]:
    return dict(sum((Counter(one.tests) for one in times), Counter()))


def table(times: list[Times], wall_s: float) -> list[str]:
    """One line per tier, the sum (its wall time is that of the run: tiers overlap), the slowest tests, and last those that
    failed: whoever sees the end of the output alone sees these.
    """
    whole = Times("all", worst(times), wall_s, sum(one.processor_s for one in times), _summed(times),
                  sum(one.engines for one in times), sum(one.starts_s for one in times),
                  sum(one.starts_processor_s for one in times))
    lines = ["seconds               tests    wall  processor  engines  starting them: wall  processor"]
    for one in (*times, whole):
        lines.append(f"{one.tier:<15}{'ok' if one.code == 0 else 'FAILED':<6}{sum(one.tests.values()):>6}{one.wall_s:>8.0f}"
                     f"{one.processor_s:>11.0f}{one.engines:>9}{one.starts_s:>21.0f}{one.starts_processor_s:>11.0f}")
        lines += [f"    left behind and killed: {command}" for command in one.left]
    slow = sorted(((s, name, one.tier) for one in times for s, name in one.slowest), reverse=True)[:SLOWEST]
    lines += ["", "the slowest tests", *(f"{s:>8.1f}  {tier:<15}{name}" for s, name, tier in slow), ""]
    failed = [f"FAILED {name} - {why}" for one in times for name, why in one.failed]
    if failed:
        more = [f"and {len(failed) - FAILED_MAX} more"] if len(failed) > FAILED_MAX else []
        lines += ["the tests that failed, as pytest names them", *failed[:FAILED_MAX], *more, ""]
    return lines


def closing(times: list[Times], wall_s: float) -> str:
    """Pytest's closing line, over all tiers."""
    total = _summed(times)
    said = ", ".join(f"{total[word]} {word}" for word in WORDS if total.get(word)) or "no tests ran"
    return f"{said} in {wall_s:.2f}s"


def worst(times: list[Times]) -> int:
    """The exit code of all of them."""
    return max((one.code for one in times), default=0)
