"""What is next, what the figures say, and the table: plain values in, plain values out.

A run is kept by the code that it ran on. Laws:

    1. A campaign that has ended on this code, well or not, does not run again; ``forget`` makes it new.
    2. One that was begun and has not ended goes on: it is told so, and keeps what it has done.
    3. On other code nothing of before counts.
    4. Figures count only if the campaign wrote its file: else they are of an earlier run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypedDict

from lab.campaigns.campaign_rows import Goal, Row

NOT_TO_END = "not run to its end"
NOT_WRITTEN = "not written"
MISSING = "not there"


class Figure(NamedTuple):
    """One goal, what was found, and whether that meets it."""

    path: str
    found: str
    goal: str
    met: bool


class Run(TypedDict, total=False):
    """What is kept of one campaign. ``code``: what it ran on; ``before``: when its file had been written, as it began;
    ``ended``: why, where it was not by itself.
    """

    code: str
    before: int
    seconds: float
    done: bool
    exit: int
    ended: str
    figures: list[list[Any]]


State = dict[str, Run]


def of_code(state: State, code: str) -> State:
    """What counts: runs on this code (law 3)."""
    return {name: run for name, run in state.items() if run.get("code") == code}


def forget(state: State, rows: Sequence[Row]) -> State:
    """The state without these campaigns."""
    names = {row.name for row in rows}
    return {name: run for name, run in state.items() if name not in names}


def chosen(rows: Sequence[Row], only: str) -> tuple[Row, ...]:
    """The rows that are asked for: all, or those whose names (or targets) are given, with commas or blanks between.

    Raises:
        ValueError: there is no campaign of that name.
    """
    names = only.replace(",", " ").split()
    known = {key: row for row in rows for key in (row.name, row.target)}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no such campaign: {', '.join(unknown)}; there are: {', '.join(row.name for row in rows)}")
    return tuple(row for row in rows if not names or row.name in names or row.target in names)


def to_run(rows: Sequence[Row], state: State, *, root: bool) -> tuple[Row, ...]:
    """What has not ended yet and may run, in order; what was begun comes first (laws 1 and 2)."""
    open_ones = [row for row in rows if not state.get(row.name, {}).get("done") and (root or not row.root)]
    return tuple(sorted(open_ones, key=lambda row: row.name not in state))


def judge(goals: Sequence[Goal], found: Any) -> list[Figure]:
    """Each goal beside what the file of figures says."""
    return [_judge(goal, list(_at(found, goal.path.split("/")))) for goal in goals]


def unwritten(goals: Sequence[Goal], why: str = NOT_WRITTEN) -> list[Figure]:
    """Each goal, where there are no figures of this run (law 4)."""
    return [Figure(goal.path, why, _wanted(goal), met=False) for goal in goals]


def _at(value: Any, path: Sequence[str]) -> Iterator[Any]:
    if not path:
        yield value
        return
    inner: Mapping[str, Any] = value if isinstance(value, dict) else {str(at): each for at, each in enumerate(value)} \
        if isinstance(value, list) else {}
    for key, each in inner.items():
        if fnmatchcase(key, path[0]):
            yield from _at(each, path[1:])


def _judge(goal: Goal, values: list[Any]) -> Figure:
    wanted = _wanted(goal)
    if not values:
        return Figure(goal.path, MISSING, wanted, met=False)
    if goal.compare == "shown":
        return Figure(goal.path, ", ".join(_told(value) for value in values), wanted, met=True)
    bad = [value for value in values if not _holds(value, goal)]
    pool = bad or values
    ordered = goal.compare != "=" and all(isinstance(value, int | float) for value in pool)
    worst = (min if goal.compare == ">=" else max)(pool) if ordered else pool[0]
    of = ""
    if len(values) > 1:
        of = f" ({len(bad)} of {len(values)} miss it)" if bad else f" (all {len(values)})" if goal.compare == "=" \
            else f" (the worst of {len(values)})"
    return Figure(goal.path, _told(worst) + of, wanted, met=not bad)


def _holds(value: Any, goal: Goal) -> bool:
    if goal.compare == "=":
        return bool(value == goal.goal)
    if not isinstance(value, int | float) or not isinstance(goal.goal, int | float):
        return False
    return value <= goal.goal if goal.compare == "<=" else value >= goal.goal


def _wanted(goal: Goal) -> str:
    return "" if goal.compare == "shown" else f"{goal.compare} {_told(goal.goal)}"


def _told(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def outcome(row: Row, run: Run | None, *, root: bool) -> str:
    """In a few words."""
    if run is None:
        return "left out (root only)" if row.root and not root else "not run"
    if not run.get("done"):
        return NOT_TO_END
    if run.get("ended"):
        return str(run["ended"])
    if run.get("exit"):
        return f"failed (exit code {run['exit']})"
    missed = sum(not figure.met for figure in figures(run))
    return f"{missed} goal{'s' if missed > 1 else ''} missed" if missed else "ok"


def figures(run: Run) -> list[Figure]:
    """As they were kept."""
    return [Figure(*each) for each in run.get("figures", [])]


def good(rows: Sequence[Row], state: State, *, root: bool) -> bool:
    """Whether all that may run here has ended well and met its goals."""
    return all(outcome(row, state.get(row.name), root=root) == "ok" for row in rows if root or not row.root)


def clock(seconds: float) -> str:
    """A length of time."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def table(rows: Sequence[Row], state: State, *, root: bool) -> str:
    """A line for each campaign, or for each of its figures."""
    lines = [("campaign", "outcome", "time", "figure", "found", "goal", "")]
    for row in rows:
        run = state.get(row.name)
        time = clock(run["seconds"]) if run is not None and "seconds" in run else ""
        first: tuple[str, ...] = (row.name, outcome(row, run, root=root), time)
        for path, found, goal, met in (figures(run) if run is not None else []) or [Figure("", "", "", met=True)]:
            lines.append((*first, path, found, goal, "" if met else "MISSED"))
            first = ("", "", "")
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)
