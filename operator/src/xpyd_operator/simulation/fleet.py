"""The instances of a simulated service: they start, serve, drain, take the other role, and go.

    wish ─▶ starting ──(cold start; fails and begins anew)──▶ ready ─▶ draining ─▶ gone
                                                                │          └──(switch)──▶ ready in the other role
Roles are switched only between pools whose instances are alike; between others one goes and one starts cold.
"""

from __future__ import annotations

from collections.abc import Callable

from xpyd_operator.simulation.chance import Chance
from xpyd_operator.simulation.engine import Pools
from xpyd_operator.simulation.instance import DRAINING, GONE, READY, STARTING, SimulatedInstance
from xpyd_operator.simulation.outcome import Pair, Run

BornAt = Callable[[float, SimulatedInstance, int], None]
"""Hears when an instance is through with its start, or with its switch, and in which role."""


class SimulatedFleet:
    """All instances of both roles. ``run`` is told what becomes of them."""

    def __init__(
        self, pools: Pools, start: Pair, run: Run, born_at: BornAt, *, seed: int = 1, switching: bool = True
    ) -> None:
        self._pools, self._run, self._born_at = pools, run, born_at
        self._draw = Chance(seed).random
        self._switching = switching and pools.are_alike
        self.wanted = start
        self.all: list[SimulatedInstance] = []
        """By number, also those that are gone."""
        self.live: list[SimulatedInstance] = []
        self.ready: tuple[list[SimulatedInstance], list[SimulatedInstance]] = ([], [])
        self._failed: set[int] = set()
        """Numbers of those that are to fail at the end of their start."""
        for role in (0, 1):
            for _ in range(start[role]):
                made = self._make(role, 0.0)
                made.state = READY
                self.ready[role].append(made)

    def scale(self, now: float, wanted: Pair) -> None:
        """Make what is there what is wanted: switch, then add and remove."""
        have = [0, 0]
        for each in self.live:
            if each.state != DRAINING:
                have[each.role] += 1
            elif each.to >= 0:
                have[each.to] += 1
        more = [wanted[role] - have[role] for role in (0, 1)]
        if self._switching:
            for to in (0, 1):
                while more[to] > 0 and more[1 - to] < 0 and self._switch(now, 1 - to, to):
                    more[to] -= 1
                    more[1 - to] += 1
        for role in (0, 1):
            for _ in range(more[role]):
                self._start(now, self._make(role, now), role)
                self._run.added += 1
            for _ in range(-more[role]):
                self._remove(now, role)
        if wanted != self.wanted:
            self._run.changes.append((now, self.wanted, wanted))
        self.wanted = wanted

    def on_started(self, now: float, instance: SimulatedInstance, role: int) -> bool:
        """The start or the switch of an instance is over. Returns whether it serves now."""
        if instance.state != STARTING:
            return False
        if instance.number in self._failed:
            self._failed.remove(instance.number)
            self._run.failed_starts += 1
            self._start(now, instance, role)
            return False
        instance.begin(role, READY, now)
        self.ready[role].append(instance)
        return True

    def leave(self, now: float, instance: SimulatedInstance) -> None:
        """Its work is done: it takes the other role, or goes."""
        if instance.to >= 0:
            instance.state, instance.role = STARTING, instance.to
            instance.version += 1
            self._born_at(now + instance.model.switch, instance, instance.to)
        else:
            self._end(now, instance)

    def bill(self, until: float) -> None:
        """What all of them have cost by then."""
        for each in self.all:
            seconds = max(0.0, min(each.gone, until) - each.born)
            self._run.instance_s += seconds
            self._run.gpu_s += seconds * each.model.gpus

    def _make(self, role: int, now: float) -> SimulatedInstance:
        made = SimulatedInstance(self._pools[role], role, now, len(self.all))
        self.all.append(made)
        self.live.append(made)
        return made

    def _start(self, now: float, instance: SimulatedInstance, role: int) -> None:
        """A group serves when the last of its pods does, and fails when one of them does."""
        model = instance.model
        late = 1.0
        if model.cold_spread:
            late = max(1 + model.cold_spread * (2 * self._draw() - 1) for _ in range(model.pods))
        if model.cold_failures and any(self._draw() < model.cold_failures for _ in range(model.pods)):
            self._failed.add(instance.number)
        self._born_at(now + model.cold_start * late, instance, role)

    def _switch(self, now: float, role: int, to: int) -> bool:
        ready = self.ready[role]
        if not ready:
            return False
        one = min(ready, key=lambda each: each.count)
        self._run.switches += 1
        self._drain(now, one, to)
        return True

    def _remove(self, now: float, role: int) -> None:
        starting = [each for each in self.live if each.state == STARTING and each.role == role]
        ready = self.ready[role]
        if not starting and not ready:
            return
        self._run.removed += 1
        if starting:
            self._end(now, starting[-1])
        else:
            self._drain(now, min(ready, key=lambda each: each.count), -1)

    def _drain(self, now: float, instance: SimulatedInstance, to: int) -> None:
        self.ready[instance.role].remove(instance)
        instance.state, instance.to = DRAINING, to
        if not instance.count:
            self.leave(now, instance)

    def _end(self, now: float, instance: SimulatedInstance) -> None:
        instance.state, instance.gone = GONE, now
        self._failed.discard(instance.number)
        self.live.remove(instance)
        instance.cache.clear()
