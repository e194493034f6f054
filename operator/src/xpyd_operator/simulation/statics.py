"""Static choices: counts that stay, what comes of them, and how they are compared at equal hours."""

from __future__ import annotations

import math

import msgspec

from xpyd_operator.plan.planner.figures import Bounds, Goals
from xpyd_operator.simulation.controllers import Static
from xpyd_operator.simulation.engine import EngineModel, Engines, pools_of
from xpyd_operator.simulation.outcome import Pair, Run, p95
from xpyd_operator.simulation.rules import RouterRules
from xpyd_operator.simulation.trace import Trace
from xpyd_operator.simulation.world import World

SAME = 1.0 + 1e-9
ENOUGH = 0.95
"""The 95th percentile of a goal."""


class Point(msgspec.Struct, frozen=True):
    """One choice and what came of it."""

    choice: str
    hours: float
    attained: float
    ttft_p95: float
    tpot_p95: float
    changes_per_h: float
    switches: int
    detail: str = ""


def point(choice: str, run: Run, goals: Goals, detail: str = "") -> Point:
    """Measure a run."""
    ttft, tpot = limits(goals)
    hours = max(run.ends_at, 1.0) / 3600
    return Point(
        choice, round(run.hours, 4), round(run.attainment(ttft, tpot), 5), p95(run.ttft), p95(run.tpot),
        round(len(run.changes) / hours, 2), run.switches, detail,
    )


def limits(goals: Goals) -> tuple[float, float]:
    """Both goals, infinite where none is set."""
    return goals.ttft_s or math.inf, goals.tpot_s or math.inf


def at_equal_hours(points: list[Point], hours: float) -> Point | None:
    """The best that costs no more; None where all cost more."""
    fit = [each for each in points if each.hours <= hours * SAME]
    return max(fit, key=lambda each: (each.attained, -each.hours), default=None)


def hull(points: list[Point], hours: float) -> Point | None:
    """The best mix of two static choices that costs ``hours`` at most; None where all cost more."""
    best = at_equal_hours(points, hours)
    if best is None:
        return None
    for low in points:
        if low.hours > hours * SAME:
            continue
        for high in points:
            if high.hours > hours * SAME and high.attained > best.attained:
                part = (hours - low.hours) / (high.hours - low.hours)
                attained = round(low.attained + part * (high.attained - low.attained), 5)
                if attained > best.attained:
                    best = msgspec.structs.replace(
                        low, choice=f"{low.choice} and {high.choice} for {part:.0%}", hours=hours, attained=attained)
    return best


class Statics:
    """Each simulated once."""

    def __init__(
        self, trace: Trace, engines: Engines, goals: Goals, bounds: Bounds, *, rules: RouterRules | None = None,
        seed: int = 1,
    ) -> None:
        self.trace, self.pools, self.goals, self.bounds = trace, pools_of(engines), goals, bounds
        self.rules, self.seed = rules, seed
        self.points: dict[Pair, Point] = {}
        """Within the bounds, as ``sweep`` came across them."""
        self.links: dict[Pair, float] = {}
        """Bytes a second into a decode instance."""
        self._others: dict[tuple[Pair, int], Point] = {}

    def point_of(self, counts: Pair) -> Point:
        """What these counts attain and cost, simulated once."""
        if counts not in self.points:
            run = World(self.trace, self.pools, counts, Static(), rules=self.rules, seed=self.seed).play()
            self.points[counts] = point(f"{counts[0]}P{counts[1]}D", run, self.goals)
            self.links[counts] = run.link_peak
        return self.points[counts]

    def point_outside(self, counts: Pair, chunk: int = 0) -> Point:
        """The same of counts that nobody chooses: a dead instance, or plain engines (no prefill) with steps of ``chunk``
        tokens.
        """
        if counts in self.points and not chunk:
            return self.points[counts]
        if (counts, chunk) not in self._others:
            pools = self.pools
            if chunk:
                pools = pools._replace(decode=msgspec.structs.replace(pools.decode, chunk=chunk))
            # Plain engines compute all prompts, whatever the service says of those without prefill.
            rules = msgspec.structs.replace(self.rules or RouterRules(), onto_decode=True) if chunk else self.rules
            run = World(self.trace, pools, counts, Static(), rules=rules, seed=self.seed).play()
            name = f"{counts[1]} plain" if chunk else f"{counts[0]}P{counts[1]}D"
            self._others[counts, chunk] = point(name, run, self.goals)
        return self._others[counts, chunk]

    def gpus(self, counts: Pair) -> int:
        """Devices of both roles."""
        each = self.pools.gpus
        return counts[0] * each[0] + counts[1] * each[1]

    def splits(self, total: int) -> list[Pair]:
        """All choices of so many devices, by their prefill instances."""
        (low, high), (least, most) = self.bounds.prefill, self.bounds.decode
        each = self.pools.gpus
        found = []
        for prefill in range(low, min(high, total // each[0]) + 1):
            decode, rest = divmod(total - prefill * each[0], each[1])
            fits = self.bounds.total is None or prefill + decode <= self.bounds.total
            if not rest and least <= decode <= most and fits:
                found.append((prefill, decode))
        return found

    def best(self, total: int, near: Pair) -> Pair | None:
        """The best split of so many devices, looked for from ``near`` on in both directions."""
        splits = self.splits(total)
        if not splits:
            return None
        at = min(range(len(splits)), key=lambda index: abs(splits[index][0] - near[0]))
        while True:
            around = [index for index in (at - 1, at, at + 1) if 0 <= index < len(splits)]
            better = max(around, key=lambda index: (self.point_of(splits[index]).attained, -abs(index - at)))
            if better == at:
                return splits[at]
            at = better

    def sweep(self) -> Pair:
        """The best split of every number of devices, until more of them help no more; the recommended one."""
        least = (self.bounds.prefill[0], self.bounds.decode[0])
        most = self.gpus((self.bounds.prefill[1], self.bounds.decode[1]))
        prefill, decode = load(self.trace, self.pools, limits(self.goals)[1])
        step, widest = math.gcd(*self.pools.gpus), max(self.pools.gpus)
        # With prefix caches prompts are computed in part only, so fewer may do.
        fewest = 0.0 if any(each.hashes for each in self.trace) else math.ceil(prefill) * self.pools.gpus[0]
        total = max(self.gpus(least), step * math.ceil((fewest + decode * self.pools.gpus[1]) / step))
        near = (max(1, round(prefill)), 1)
        found: Pair | None = None
        chosen: Pair | None = None
        idle, last = 0, -1.0
        while total <= most and idle < 2 * widest // step:
            split = self.best(total, near)
            total += step
            if split is None:
                continue
            near = split
            reached = self.point_of(split).attained
            idle = idle + 1 if reached <= last + 0.0005 and reached > 0.5 else 0
            if reached > last:
                last, found = reached, split
            if chosen is None and reached >= ENOUGH:
                chosen = split
        return chosen or found or least


def load(trace: Trace, engines: Engines, tpot_s: float) -> tuple[float, float]:
    """Mean load in instances of each role: fewer can never do."""
    pools = pools_of(engines)
    model, length = pools.decode, max(trace[-1].at, 1.0)
    batch = batch_of(trace, model, tpot_s)
    context = sum(each.prompt + each.output / 2 for each in trace) / len(trace)
    rate = batch / model.step_s(int(batch), batch * context)
    prefill = sum(pools.prefill.prefill_s(each.prompt) for each in trace) / length
    return prefill, sum(each.output for each in trace) / length / rate


def batch_of(trace: Trace, model: EngineModel, tpot_s: float) -> float:
    """Requests with which a step takes ``tpot_s``, or that KV has room for."""
    context = sum(each.prompt + each.output / 2 for each in trace) / len(trace)
    slope = model.step_per_request + context * model.step_per_token
    by_time = (tpot_s - model.step_base) / slope if slope > 0 and tpot_s < math.inf else model.max_requests
    return max(1.0, min(by_time, model.kv_tokens / context, model.max_requests))
