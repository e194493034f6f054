"""What ``make test`` may cost, held against a run that has passed.

Two budgets. The whole may take ``LIMIT_S`` of wall time, or ``LIMIT_BUILDING_S`` where a Kubernetes had to be built, on a
machine of the recorded runs' pace; and each tier what these runs say (bench/results/tiers.json), with some slack:

    limit of a tier  = median of its records · pace · SLACK + ROOM_S       pace = max(1, median over tiers of now / record)
    limit of a whole = LIMIT_S · min(pace of processor seconds, MOST_PACE)

So a slower machine, on which all tiers take longer, exceeds nothing, and a tier that has grown beside the others does. The
recorded runs themselves keep to the limits without a pace, as lint holds. In
processor seconds this holds whatever else the machine does. Wall time counts only where others took less than ``QUIET`` of
the processors, and both only on as many processors as the records are of. Records are of both speeds, since a run of
``make test`` lacks what its change did not touch. A tier without any exceeds its budget: a new tier, or one that is to take
longer, is recorded in the commit that makes it so, where lint holds the records against the budget of the whole.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any, NamedTuple

LIMIT_S = 30 * 60.0
LIMIT_BUILDING_S = 45 * 60.0
BUILDING_S = 120.0
"""What builds take together where all is there already, and images are made."""
PROCESSORS = 2
"""Of the machine that the limits are for."""
MOST_PACE = 1.5
"""Of a machine that is believed to be slow; what takes longer has grown."""
SLACK = 1.3
ROOM_S = 60.0
QUIET = 0.1
EXCEEDED = 3
"""The exit code."""
TICK = os.sysconf("SC_CLK_TCK")
COSTS = (("processor_s", "processor seconds", False), ("wall_s", "seconds", True))
"""What is held of each tier, and whether only a quiet machine can show it."""


class Machine(NamedTuple):
    """Processor seconds of this machine since its start: those used, and those taken from it by its host."""

    used_s: float
    all_s: float


def machine() -> Machine:
    """As /proc/stat says."""
    user, nice, system, idle, wait, irq, soft, steal = map(
        int, Path("/proc/stat").read_text("ascii").splitlines()[0].split()[1:9])
    used = user + nice + system + irq + soft + steal
    return Machine(used / TICK, (used + idle + wait) / TICK)


def elsewhere(before: Machine, after: Machine, ours_s: float) -> float:
    """Which part of the processors others had meanwhile."""
    return round(max(0.0, after.used_s - before.used_s - ours_s) / max(after.all_s - before.all_s, 1.0), 3)


def processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def is_build(tier: str) -> bool:
    """Whether a row builds or fetches what others need."""
    return tier.startswith(("build-", "get-"))


def has_built(run: dict[str, Any]) -> bool:
    """Whether a run had to build a Kubernetes."""
    return sum(one["wall_s"] for one in run["tiers"] if is_build(one["tier"])) > BUILDING_S


def limit_s(run: dict[str, Any], records: list[dict[str, Any]]) -> float:
    """What a run may take: more, where it had to build, and on a machine that is slower than those of the records."""
    slower = pace_of(medians([run], "processor_s"), medians(records, "processor_s"))
    return (LIMIT_BUILDING_S if has_built(run) else LIMIT_S) * min(slower, MOST_PACE)


def verdict(run: dict[str, Any], records: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """What is to be said, and whether the budget holds. ``records``: runs that passed, of both speeds."""
    quiet = run["elsewhere"] < QUIET
    said, held = [], True
    alike = [one for one in records if one["processors"] == run["processors"]]
    most = limit_s(run, alike)
    late = run["wall_s"] > most
    said.append(f"budget: {run['wall_s'] / 60:.1f} of {most / 60:.0f} minutes on {run['processors']} processors, "
                f"of which others had {run['elsewhere']:.0%}")
    if late and run["processors"] >= PROCESSORS:
        held = not quiet
        said.append("OVER BUDGET: the whole takes too long" if quiet else
                    "too long, which says nothing: others had the processors")
    if not alike:
        return [*said, f"no run on {run['processors']} processors is recorded, so no tier is held against one"], held
    for cost, unit, needs_quiet in COSTS:
        if quiet or not needs_quiet:
            over = grown_tiers(run, alike, cost)
            said += [f"OVER BUDGET: {tier} took {now:.0f} {unit}, {why}" for tier, now, why in over]
            held = held and not over
    if not held:
        said.append("make it cheaper, move repetition to test-all, or record what it costs now (RECORD=1 make test)")
    return said, held


def medians(records: list[dict[str, Any]], cost: str) -> dict[str, float]:
    """Of each tier over the runs that had it, builds left out."""
    found: dict[str, list[float]] = {}
    for run in records:
        for one in run["tiers"]:
            if not is_build(one["tier"]):
                found.setdefault(one["tier"], []).append(one[cost])
    return {tier: statistics.median(values) for tier, values in found.items()}


def pace_of(now: dict[str, float], known: dict[str, float]) -> float:
    """How much longer tiers take than recorded, in the median; 1 at least."""
    paces = [now[tier] / known[tier] for tier in now if known.get(tier, 0.0) >= 1.0]
    return max(1.0, statistics.median(paces)) if paces else 1.0


def grown_tiers(run: dict[str, Any], records: list[dict[str, Any]], cost: str) -> list[tuple[str, float, str]]:
    """Tiers that took more than their limit, or have no record: name, what it took, and why that is too much."""
    known, now = medians(records, cost), medians([run], cost)
    pace, over = pace_of(now, known), []
    for tier, took in now.items():
        most = known.get(tier, 0.0) * pace * SLACK + ROOM_S
        if tier not in known:
            over.append((tier, took, "which no recorded run has"))
        elif took > most:
            over.append((tier, took, f"recorded {known[tier]:.0f}, at most {most:.0f} at this machine's pace"))
    return over
