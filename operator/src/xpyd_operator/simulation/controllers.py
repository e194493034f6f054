"""Who decides on counts in a simulation: nobody, xpyd's planner, Kubernetes' HPA, or a schedule made beforehand."""

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


class Planned:
    """``plan/planner``, as the operator runs it."""

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
        if self.bounds.total is not None and prefill + decode > self.bounds.total:
            prefill = max(look.counts[0], min(prefill, self.bounds.total - look.counts[1]))
            decode = min(decode, self.bounds.total - prefill)
        return prefill, decode

    def _one(self, role: int, now: float, count: int, queue: float) -> int:
        low, high = self.bounds.prefill if role == 0 else self.bounds.decode
        ratio = queue / max(1, count) / self.targets[role]
        wanted = count if abs(ratio - 1) <= 0.1 else math.ceil(queue / self.targets[role])
        seen = self._seen[role]
        seen.append((now, wanted))
        while seen[0][0] < now - 300:
            seen.popleft()
        held = max(each for _, each in seen)
        if held < count:
            found = held
        elif wanted > count:
            found = min(wanted, max(2 * count, count + 4))
        else:
            found = count
        return min(high, max(low, found))


class Scheduled:
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
