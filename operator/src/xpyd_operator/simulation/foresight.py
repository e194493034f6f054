"""Counts chosen by someone who knows the trace: what a planner could gain at most.

The trace is cut into windows. Each window is replayed with every count of one role, the other role being ample, after a
warm-up: that tells how many of its requests miss their goals. Dynamic programming then finds the counts that make

    misses + price * GPU-hours

least, where an instance that is added costs its cold start too (it is started that much earlier, so nobody waits for
it), one that changes its role costs nothing, and one that goes costs nothing. The schedule is then replayed in whole.
Each price gives one point of hours and attainment; misses of the two roles are added, which counts a request that misses
both twice.
"""

from __future__ import annotations

import msgspec

from xpyd_operator.plan.planner.figures import Bounds
from xpyd_operator.simulation.controllers import ScheduleController, Static
from xpyd_operator.simulation.engine import Engines, Pools, pools_of
from xpyd_operator.simulation.outcome import Run
from xpyd_operator.simulation.rules import RouterRules
from xpyd_operator.simulation.trace import Trace, cut
from xpyd_operator.simulation.world import World

WINDOW_S = 120.0
WARM_S = (60.0, 180.0)
"""Before a window, by role: answers take longer than prompts."""
EARLY_S = 60.0
"""A change of role begins so early: the old work ends first."""
HOPELESS = 0.3
"""From so many misses on, still fewer instances are not tried: they would miss everything."""
STEP = 3
"""Most instances of a role that come or go between two windows."""
CHANGE = 0.05
"""Misses that a change must save, so that equal schedules are quiet."""
Pair = tuple[int, int]
Schedule = list[tuple[float, Pair]]


class Table(msgspec.Struct, frozen=True):
    """Misses of each window (first index) with each count (second index, from ``low``)."""

    low: int
    misses: tuple[tuple[int, ...], ...]


def tables(
    trace: Trace, engines: Engines, ttft_s: float, tpot_s: float, ranges: tuple[Pair, Pair], *,
    rules: RouterRules | None = None,
) -> tuple[Table, Table]:
    """What each count of each role would miss, window by window; ``ranges`` are the least and the most of each role."""
    found: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = ([], [])
    ample = (ranges[0][1] * 2, ranges[1][1] * 2)
    count = int(trace[-1].at // WINDOW_S) + 1
    for index in range(count):
        for role in (0, 1):
            begin = max(0.0, index * WINDOW_S - WARM_S[role])
            piece = cut(trace, begin, (index + 1) * WINDOW_S - begin)
            first = index * WINDOW_S - begin
            row: list[int] = []
            arrived = sum(each.at >= first for each in piece)
            for number in range(ranges[role][1], ranges[role][0] - 1, -1):
                if row and row[-1] > HOPELESS * arrived:
                    row.append(arrived)
                    continue
                counts = (number, ample[1]) if role == 0 else (ample[0], number)
                run = World(piece, engines, counts, Static(), rules=rules).play() if piece else Run([])
                row.append(sum(
                    each.at >= first and (ttft > ttft_s or tpot > tpot_s)
                    for each, ttft, tpot in zip(piece, run.ttft, run.tpot, strict=True)
                ))
            found[role].append(tuple(reversed(row)))
    return Table(ranges[0][0], tuple(found[0])), Table(ranges[1][0], tuple(found[1]))


def schedule(both: tuple[Table, Table], engines: Engines, price: float, bounds: Bounds) -> Schedule:
    """The counts of each window; ``price`` is in misses per GPU-hour."""
    pools = pools_of(engines)
    prefill, decode = both
    most = bounds.total or 10**6
    states = [
        (p, d)
        for p in range(prefill.low, prefill.low + len(prefill.misses[0]))
        for d in range(decode.low, decode.low + len(decode.misses[0]))
        if p + d <= most
    ]
    dear = pools.gpus
    hour, cold = price * WINDOW_S / 3600, price * pools.cold_start / 3600
    best = dict.fromkeys(states, 0.0)
    came: list[dict[Pair, Pair]] = []
    for index in range(len(prefill.misses)):
        local = {
            (p, d): prefill.misses[index][p - prefill.low] + decode.misses[index][d - decode.low]
            + hour * (p * dear[0] + d * dear[1])
            for p, d in states
        }
        after: dict[Pair, float] = {}
        origin: dict[Pair, Pair] = {}
        for p, d in states:
            least, whence = float("inf"), (p, d)
            for a in range(p - STEP, p + STEP + 1):
                for b in range(d - STEP, d + STEP + 1):
                    cost = best.get((a, b))
                    if cost is None:
                        continue
                    if (a, b) != (p, d):
                        more = (p - a) * dear[0] + (d - b) * dear[1]
                        cost += CHANGE + cold * max(0, more)
                    if cost < least:
                        least, whence = cost, (a, b)
            after[p, d] = least + local[p, d]
            origin[p, d] = whence
        came.append(origin)
        best = after
    state = min(best, key=lambda each: best[each])
    path = [state]
    for origin in reversed(came[1:]):
        state = origin[state]
        path.append(state)
    path.reverse()
    return _due(path, pools)


def _due(path: list[Pair], pools: Pools) -> Schedule:
    """When each change must be begun: what is added a cold start early, what changes its role a little."""
    changes: list[tuple[float, int, int]] = []
    for index in range(1, len(path)):
        at = index * WINDOW_S
        more = [path[index][role] - path[index - 1][role] for role in (0, 1)]
        moved = min(max(more), -min(more)) if max(more) > 0 > min(more) and pools.are_alike else 0
        towards = 1 if more[0] > 0 else -1
        if moved:
            changes.append((max(0.0, at - EARLY_S), moved * towards, -moved * towards))
        rest = (more[0] - moved * towards, more[1] + moved * towards) if moved else (more[0], more[1])
        for role in (0, 1):
            if rest[role]:
                when = at - pools[role].cold_start if rest[role] > 0 else at
                changes.append((max(0.0, when), *((rest[role], 0) if role == 0 else (0, rest[role]))))
    counts = path[0]
    found: Schedule = [(0.0, counts)]
    for at, prefill, decode in sorted(changes, key=lambda each: each[0]):
        counts = (counts[0] + prefill, counts[1] + decode)
        found.append((at, counts))
    return found


def replay(trace: Trace, engines: Engines, found: Schedule, rules: RouterRules | None = None, *, seed: int = 1) -> Run:
    """A schedule in whole."""
    return World(trace, engines, found[0][1], ScheduleController(found, 5.0), rules=rules, seed=seed).play()
