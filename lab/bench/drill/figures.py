"""What is measured in a drill beside its requests, and what is not as it has to be."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any, NamedTuple

from kube_team import Team
from pods import Pods
from processes import kept_waiting_s

from xpyd_sidecar.contract.ids import Role

SAMPLE_S = 1.0
WITHIN = 0.05
"""Of the simulation's attainment, without faults."""
WAITED = 0.15
"""Share of the time in which a process of the drill waited for a processor, at most."""


class CountMark(NamedTuple):
    """Instances at one time."""

    at: float
    prefill: int
    """Wanted."""
    decode: int
    ready_prefill: int
    ready_decode: int

    def __str__(self) -> str:
        """In words."""
        return f"wanted {self.prefill}P{self.decode}D, ready {self.ready_prefill}P{self.ready_decode}D"


class DrillWatch:
    """Counts of instances over the time, and the seconds in which the drill's own processes waited for a processor."""

    def __init__(self, team: Team, service: str, pods: Pods) -> None:
        self._team, self._service, self._pods = team, service, pods
        self._begun = time.monotonic()
        self._waited: dict[int, tuple[float, float]] = {}
        """By process: at its first look, and at its last."""
        self.marks: list[CountMark] = []

    async def run(self) -> None:
        """Look every second, until this is cancelled."""
        while True:
            self._look()
            await asyncio.sleep(SAMPLE_S)

    def _look(self) -> None:
        pools = self._team.of("DisaggPool")
        roles = (Role.PREFILL, Role.DECODE)
        wanted = [int((pools.get(f"{self._service}-{role}") or {"spec": {}})["spec"].get("replicas", 0)) for role in roles]
        ready = [len(self._team.ready(self._service, role)) for role in roles]
        self.marks.append(CountMark(time.monotonic() - self._begun, *wanted, *ready))
        pids = [os.getpid(), *(each.group.pid for each in self._pods.routers() if each.group is not None)]
        if self._team.operator.running:
            pids.append(self._team.operator.pid)
        for pid in pids:
            now = kept_waiting_s([pid])
            self._waited[pid] = (self._waited.get(pid, (now, now))[0], now)

    @property
    def waited_s(self) -> float:
        """Of the process that waited longest."""
        return max((now - first for first, now in self._waited.values()), default=0.0)

    @property
    def changes(self) -> int:
        """How often the counts that are wanted changed."""
        return sum(a[1:3] != b[1:3] for a, b in zip(self.marks, self.marks[1:], strict=False))

    @property
    def instance_s(self) -> float:
        """Seconds of instances that were wanted."""
        return sum((b.at - a.at) * (a.prefill + a.decode) for a, b in zip(self.marks, self.marks[1:], strict=False))

    def story(self) -> list[str]:
        """The counts, where they changed."""
        found: list[str] = []
        for mark in self.marks:
            if not found or found[-1].partition(": ")[2] != str(mark):
                found.append(f"{mark.at:.0f} s: {mark}")
        return found


def verdict(results: dict[str, Any]) -> list[str]:
    """What is not as it has to be, in words."""
    wrong = []
    for name in ("calm", "faults"):
        found = results.get(name)
        if found is None:
            continue
        if found["lost"] or found["lost_tokens"]:
            wrong.append(f"{name}: {found['lost']} requests and {found['lost_tokens']} tokens were lost: {found['errors']}")
        if found["waited_for_a_processor"] > WAITED:
            share = found["waited_for_a_processor"]
            wrong.append(f"{name}: for {share:.0%} of the time a process of the drill waited for a processor, so figures "
                         "are the machine's")
    if "calm" in results:
        real, model = results["calm"]["attained"], results["simulated"]["attained"]
        if abs(real - model) > WITHIN:
            wrong.append(f"calm: {real:.1%} attained, by the simulation {model:.1%}")
    return wrong


def rounded(value: Any) -> Any:
    """For people."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return round(value, 4) if isinstance(value, float) else value
