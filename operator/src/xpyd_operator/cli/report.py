"""What a simulation found, as text, JSON and a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from xpyd_operator.cli.plot import Line, panels
from xpyd_operator.simulation.outcome import Run, p95
from xpyd_operator.simulation.statics import ENOUGH, Point, at_equal_hours, hull
from xpyd_operator.simulation.study import Study

BUCKET_S = 60.0
T = TypeVar("T")


def rivals(found: Study) -> dict[str, Point | None]:
    """The planner, and the best of each rival that costs no more; None where all of a kind cost more."""
    hours = found.planner.hours
    shown: dict[str, Point | None] = {"planner": found.planner}
    for name, points in _kinds(found).items():
        best = hull(points, hours) if name == "static" else at_equal_hours(points, hours)
        if best is not None:
            words = best.choice if name == "static" else best.detail
            best = msgspec.structs.replace(best, choice=name, detail=words)
        shown[name] = best
    return shown


def cheapest(found: Study, name: str) -> Point:
    """Of one rival."""
    return min(_kinds(found)[name], key=lambda each: (each.hours, -each.attained))


def _kinds(found: Study) -> dict[str, list[Point]]:
    return {
        "hpa": [each for each, _ in found.hpa], "hpa+switch": [each for each, _ in found.hpa_switching],
        "law": [each for each, _ in found.law], "threshold": [each for each, _ in found.threshold],
        "static": found.statics, "foresight": [each for each, _ in found.foresight],
    }


def table(found: Study, ttft_s: float, tpot_s: float) -> str:
    """For a person."""
    lines = [f"{'':14} {'attained':>9} {'GPU-hours':>9} {'TTFT p95':>9} {'TPOT p95':>9} {'changes/h':>10} {'switches':>9}"]
    for name, each in rivals(found).items():
        if each is None:
            lines.append(f"{name:14} costs more, {cheapest(found, name).hours:.2f} GPU-hours at least")
        else:
            lines.append(_line(each))
        if name == "planner":
            lines += [_line(one) for one in found.starts]
    best = found.recommended
    lines += [
        "",
        f"attained: share of requests with TTFT <= {ttft_s:g} s and TPOT <= {tpot_s * 1e3:g} ms",
        "Of each rival: its best that costs no more than the planner. hpa: on requests per instance; law: on the service",
        "level; threshold: on load; static and foresight know the trace beforehand, static mixes two choices over time.",
        "",
        "Without a planner, from the cheapest to the best:",
        (f"{'':14} {'GPUs':>5} {'GPU-hours':>9} {'attained':>9} {'into a decode':>14} {'1P dead':>8} {'1D dead':>8}"
         "  the same GPUs as plain engines"),
    ]
    for row in found.frontier:
        plain = f"{row.plain}: {row.plain_attained:.2%}" if row.plain else "too few"
        lines.append(
            f"{row.choice:14} {row.gpus:5} {row.hours:9.2f} {row.attained:9.2%} {row.link / 1e9:9.2f} GB/s "
            f"{row.without_prefill:8.2%} {row.without_decode:8.2%}  {plain}")
    words = "the fewest GPUs with both goals met" if best.attained >= ENOUGH else "no choice meets both goals; the best is"
    lines.append(f"{best.choice}: {words} ({best.attained:.2%}, {best.hours:.2f} GPU-hours).")
    return "\n".join(lines)


def _line(each: Point) -> str:
    return (
        f"{each.choice:14} {each.attained:9.2%} {each.hours:9.2f} {_p95_words(each.ttft_p95, 1, 's')} "
        f"{_p95_words(each.tpot_p95, 1e3, 'ms')} {each.changes_per_h:10.1f} {each.switches:9}  {each.detail}".rstrip())


def _p95_words(seconds: float, times: float, unit: str) -> str:
    """Where more than 5 % were never answered there is no percentile."""
    return f"{f'{seconds * times:.4g}{unit}' if seconds < math.inf else 'never':>9}"


def as_json(found: Study) -> dict[str, Any]:
    """For a program."""
    return {
        "choices": {name: msgspec.to_builtins(each) for name, each in rivals(found).items()},
        "starts": [msgspec.to_builtins(each) for each in found.starts],
        "recommended": msgspec.to_builtins(found.recommended),
        "frontier": [msgspec.to_builtins(each) for each in found.frontier],
        "statics": [msgspec.to_builtins(each) for each in found.statics],
        "decisions": [{"at_s": at, "why": words} for at, words in found.sentences],
    }


def picture(title: str, found: Study, ttft_s: float, tpot_s: float) -> str:
    """Counts and queue of the planner over time; TTFT, TPOT and what was attained beside HPA and foresight."""
    run = found.planner_run
    marks = [(mark.at / 60, mark) for mark in run.marks]
    shown = rivals(found)
    runs = {"planner": run}
    for name, points in (("hpa", found.hpa), ("foresight", found.foresight)):
        best = shown[name]
        if best is not None:
            runs[name] = _run_of(points, best)
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
