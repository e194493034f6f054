"""What a simulation found, as text, JSON and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from xpyd_operator.cli.plot import Line, panels
from xpyd_operator.simulation.outcome import Run, p95
from xpyd_operator.simulation.study import Point, Study, at_equal_hours

BUCKET_S = 60.0
T = TypeVar("T")


def rivals(found: Study) -> list[Point]:
    """The planner, and the best of each rival that costs no more; where all of a kind cost more, the cheapest."""
    kinds = {
        "hpa": [each for each, _ in found.hpa], "hpa+switch": [each for each, _ in found.hpa_switching],
        "static": found.statics, "foresight": [each for each, _ in found.foresight],
    }
    shown = [found.planner]
    for name, points in kinds.items():
        best = at_equal_hours(points, found.planner.hours) or min(points, key=lambda each: (each.hours, -each.attained))
        words = best.choice if name == "static" else best.detail
        shown.append(msgspec.structs.replace(best, choice=name, detail=words))
    return shown


def table(found: Study, ttft_s: float, tpot_s: float) -> str:
    """For a person."""
    lines = [
        f"{'':12} {'attained':>9} {'inst.-hours':>12} {'TTFT p95':>9} {'TPOT p95':>9} {'changes/h':>10} {'switches':>9}",
    ]
    lines += [
        f"{each.choice:12} {each.attained:9.2%} {each.hours:12.2f} {each.ttft_p95:8.2f}s {each.tpot_p95 * 1e3:7.1f}ms "
        f"{each.changes_per_h:10.1f} {each.switches:9}  {each.detail}".rstrip()
        for each in rivals(found)
    ]
    best = found.recommended
    lines += [
        "",
        f"attained: share of requests with TTFT <= {ttft_s:g} s and TPOT <= {tpot_s * 1e3:g} ms",
        "Of each rival: its best that costs no more than the planner; if all cost more, the cheapest.",
        f"Recommended without a planner: {best.choice} ({best.attained:.2%}, {best.hours:.2f} instance-hours).",
    ]
    return "\n".join(lines)


def as_json(found: Study) -> dict[str, Any]:
    """For a program."""
    return {
        "choices": {each.choice: msgspec.to_builtins(each) for each in rivals(found)},
        "recommended": msgspec.to_builtins(found.recommended),
        "statics": [msgspec.to_builtins(each) for each in found.statics],
        "decisions": [{"at_s": at, "why": words} for at, words in found.sentences],
    }


def picture(title: str, found: Study, ttft_s: float, tpot_s: float) -> str:
    """Counts and queue of the planner over time; TTFT, TPOT and what was attained beside the best HPA and foresight."""
    run = found.planner_run
    marks = [(mark.at / 60, mark) for mark in run.marks]
    shown = {each.choice: each for each in rivals(found)}
    runs = {
        "planner": run,
        "hpa": _run_of(found.hpa, shown["hpa"]),
        "foresight": _run_of(found.foresight, shown["foresight"]),
    }
    return panels(title, [
        ("instances (planner)", {
            "prefill wanted": [(at, mark.prefill) for at, mark in marks],
            "decode wanted": [(at, mark.decode) for at, mark in marks],
            "prefill ready": [(at, mark.ready_prefill) for at, mark in marks],
            "decode ready": [(at, mark.ready_decode) for at, mark in marks],
        }),
        ("instances, both roles", {
            name: [(mark.at / 60, mark.prefill + mark.decode) for mark in each.marks] for name, each in runs.items()
        }),
        ("requests that wait for prefill (planner)", {"waiting": [(at, mark.queued) for at, mark in marks]}),
        ("TTFT p95 of a minute, seconds, up to 4 times the goal", {
            **{name: _p95(each, each.ttft, 4 * ttft_s) for name, each in runs.items()},
            "goal": [(0, ttft_s), (run.ends_at / 60, ttft_s)],
        }),
        ("TPOT p95 of a minute, ms, up to twice the goal", {
            **{name: _p95(each, [tpot * 1e3 for tpot in each.tpot], 2e3 * tpot_s) for name, each in runs.items()},
            "goal": [(0, tpot_s * 1e3), (run.ends_at / 60, tpot_s * 1e3)],
        }),
        ("requests within both goals, % of a minute", {
            name: [(at, 100 * sum(met) / len(met)) for at, met in _by_minute(
                each, [a <= ttft_s and b <= tpot_s for a, b in zip(each.ttft, each.tpot, strict=True)])]
            for name, each in runs.items()
        }),
    ])


def _run_of(points: list[tuple[Point, Run]], shown: Point) -> Run:
    return next(run for each, run in points if (each.hours, each.attained) == (shown.hours, shown.attained))


def _by_minute(run: Run, values: Sequence[T]) -> list[tuple[float, list[T]]]:
    """Of each minute, by arrival: its middle, in minutes, and the values of its requests."""
    buckets: dict[int, list[T]] = {}
    for each, value in zip(run.trace, values, strict=True):
        buckets.setdefault(int(each.at // BUCKET_S), []).append(value)
    return [((minute + 0.5) * BUCKET_S / 60, found) for minute, found in sorted(buckets.items())]


def _p95(run: Run, values: Sequence[float], most: float) -> Line:
    return [(at, min(most, p95(found))) for at, found in _by_minute(run, values)]
