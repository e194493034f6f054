"""Who decides on counts in a simulation: nobody, xpyd's planner, rivals (Kubernetes' HPA, a control law on the service
level, a threshold of load), or a schedule made beforehand.
"""

from __future__ import annotations

import math
from collections import deque

from xpyd_operator.plan.planner.decide import Decision, Memory, decide
from xpyd_operator.plan.planner.figures import Bounds, Goals
from xpyd_operator.simulation.outcome import ControllerLook

Pair = tuple[int, int]


class Static:
    """The counts stay."""

    switching = False
    interval_s = 60.0

    def want(self, look: ControllerLook) -> Pair:
        """As they are."""
        return look.counts


class PlannerController:
    """The planner (``plan/planner``), as the operator runs it."""

    def __init__(self, goals: Goals, bounds: Bounds) -> None:
        self.goals, self.bounds = goals, bounds
        self.switching = goals.switching
        self.interval_s = goals.interval_s
        self.memory = Memory()
        self.decisions: list[tuple[float, Decision]] = []

    def want(self, look: ControllerLook) -> Pair:
        """What the planner says."""
        self.memory, found = decide(self.memory, look.figures, look.counts, self.goals, self.bounds)
        self.decisions.append((look.now, found))
        return found.prefill, found.decode


class Hpa:
    """Kubernetes' algorithm, one per pool, on the requests in a role per instance (autoscaling/v2 with its defaults).

        wanted = ceil(queue / target), left alone within a tenth of the target
        up: at most twice as many or 4 more in 15 s; down: the most wanted within 300 s

    https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/
    """

    interval_s = 15.0

    def __init__(self, targets: tuple[float, float], bounds: Bounds, *, switching: bool = False) -> None:
        self.targets, self.bounds, self.switching = targets, bounds, switching
        self._seen: tuple[deque[tuple[float, int]], deque[tuple[float, int]]] = (deque(), deque())

    def want(self, look: ControllerLook) -> Pair:
        """Of both pools; of a total that is too small prefill gets its part first."""
        prefill, decode = (self._one(role, look.now, look.counts[role], look.queues[role]) for role in (0, 1))
        return _fitting(prefill, decode, look.counts, self.bounds)

    def _one(self, role: int, now: float, count: int, queue: float) -> int:
        low, high = self.bounds.prefill if role == 0 else self.bounds.decode
        ratio = queue / max(1, count) / self.targets[role]
        wanted = count if abs(ratio - 1) <= 0.1 else math.ceil(queue / self.targets[role])
        if wanted > count:
            wanted = min(wanted, max(2 * count, count + 4))
        found = _held(self._seen[role], now, 300.0, count, wanted)
        return min(high, max(low, found))


class ControlLaw:
    """The trivial law: both roles in proportion to how late the worst measure is, as autoscalers on the service level do.

        wanted = ceil(now * min(2, max(1/2, worst of p95 / goal) / target)), smoothed; up at once, down after ``HOLD_S``

    TTFT is taken for prefill's, TPOT for decode's. ``target``: what share of a goal is aimed at.
    """

    interval_s = 30.0
    HOLD_S = 300.0

    def __init__(self, target: float, goals: Goals, bounds: Bounds, *, switching: bool = False) -> None:
        self.target, self.goals, self.bounds, self.switching = target, goals, bounds, switching
        self._smooth = [1.0, 1.0]
        self._seen: tuple[deque[tuple[float, int]], deque[tuple[float, int]]] = (deque(), deque())

    def want(self, look: ControllerLook) -> Pair:
        """Of both roles."""
        figures = look.figures
        measured = ((figures.ttft_p95, self.goals.ttft_s), (figures.tpot_p95, self.goals.tpot_s))
        found = []
        for role, (value, goal) in enumerate(measured):
            ratio = min(2.0, max(0.5, value / goal / self.target)) if goal and value else 1.0
            if role == 0 and not value and figures.queued:
                ratio = 2.0  # nothing was answered at all
            self._smooth[role] = (self._smooth[role] + ratio) / 2
            count = look.counts[role]
            ratio = self._smooth[role]
            rounded = math.ceil(count * ratio) if ratio > 1 else math.floor(count * ratio)
            wanted = count if abs(ratio - 1) <= 0.1 else rounded
            found.append(_held(self._seen[role], look.now, self.HOLD_S, count, max(1, wanted)))
        return _fitting(found[0], found[1], look.counts, self.bounds)


class LoadThreshold:
    """Load above a threshold adds one, and load that the others could carry below it removes one; a role whose latency is
    beyond its goal has one more, one at most at a time.

    Load: of prefill requests per instance, of decode requests per instance over ``batch``. A flat threshold flaps, so what
    would be left is asked, not what is.
    """

    interval_s = 30.0
    DOWN_S = 180.0

    def __init__(self, threshold: float, batch: float, goals: Goals, bounds: Bounds, *, switching: bool = False) -> None:
        self.threshold, self.batch, self.goals, self.bounds, self.switching = threshold, batch, goals, bounds, switching
        self._seen: tuple[deque[tuple[float, int]], deque[tuple[float, int]]] = (deque(), deque())

    def want(self, look: ControllerLook) -> Pair:
        """Of both roles."""
        figures = look.figures
        late = (
            self.goals.ttft_s is not None and figures.ttft_p95 > self.goals.ttft_s,
            self.goals.tpot_s is not None and figures.tpot_p95 > self.goals.tpot_s,
        )
        found = []
        for role, most in ((0, 2 * self.threshold), (1, self.threshold * self.batch)):
            count, queue = look.counts[role], look.queues[role]
            if late[role] or queue > most * count:
                wanted = count + max(1, math.ceil(queue / most - count))
            elif count > 1 and queue < most * (count - 1):
                wanted = count - 1
            else:
                wanted = count
            found.append(_held(self._seen[role], look.now, self.DOWN_S, count, wanted))
        return _fitting(found[0], found[1], look.counts, self.bounds)


def _held(seen: deque[tuple[float, int]], now: float, hold_s: float, count: int, wanted: int) -> int:
    """Up at once; down to the most that was wanted within ``hold_s``, which must have been watched."""
    seen.append((now, wanted))
    while seen[0][0] < now - hold_s:
        seen.popleft()
    most = max(each for _, each in seen)
    return wanted if wanted > count else min(count, most)


def _fitting(prefill: int, decode: int, counts: Pair, bounds: Bounds) -> Pair:
    """Within the bounds; of a total that is too small prefill gets its part first."""
    prefill = min(bounds.prefill[1], max(bounds.prefill[0], prefill))
    decode = min(bounds.decode[1], max(bounds.decode[0], decode))
    if bounds.total is not None and prefill + decode > bounds.total:
        prefill = max(counts[0], min(prefill, bounds.total - counts[1]))
        decode = min(decode, bounds.total - prefill)
    return prefill, decode


class ScheduleController:
    """A schedule known beforehand: pairs of time and counts, the first at 0."""

    switching = True

    def __init__(self, schedule: list[tuple[float, Pair]], interval_s: float) -> None:
        self.interval_s = interval_s
        self._schedule = schedule
        self._next = 0

    def want(self, look: ControllerLook) -> Pair:
        """What is due."""
        while self._next + 1 < len(self._schedule) and self._schedule[self._next + 1][0] <= look.now + 1e-9:
            self._next += 1
        return self._schedule[self._next][1]
