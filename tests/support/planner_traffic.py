"""Routers whose counters grow with the time, by a rate that a test sets: what the planner sees of a load."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from node_agent import Life, NodeAgent

from xpyd_operator.kube.podstate.facts import Facts
from xpyd_operator.kube.routers.observe import RouterAnswers
from xpyd_sidecar.contract.fleet import Fleet, FleetInstance
from xpyd_sidecar.contract.ids import Fingerprint, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.membership import Load
from xpyd_sidecar.contract.totals import Totals, bucket_of

PROMPT, OUTPUT, RATE = 2000, 100, 10_000.0


def counted(many: int, since: float = 1.0) -> Totals:
    """Of so many requests that all went well."""
    return Totals(
        since=since, arrivals=many, arrived_tokens=many * PROMPT // 2, measured=many, prompt_tokens=many * PROMPT,
        measured_size=many * PROMPT // 2,
        prompt_squares=2 * many * PROMPT**2, output_tokens=many * OUTPUT, handovers=many, handover_s=0.05 * many,
        ttft={bucket_of(0.6): many}, tpot={bucket_of(0.02): many})


def instance(name: str, role: Role, running: int) -> FleetInstance:
    """One that serves."""
    return FleetInstance(
        InstanceName(name), role, 1, State.READY, Incarnation("i"), Fingerprint("f"), (), (), "m",
        Load(running=running, kv_usage=0.002 * running), drained=False, in_flight=0, beat_age_s=0.0)


class Traffic:
    """Stands for the routers of a service, and for who asks them."""

    hurried = False

    def __init__(self) -> None:
        self.rate, self.arrivals, self.now = 0.0, 0, 0.0

    def go_on(self, now: float) -> None:
        """Time has passed."""
        self.arrivals += round(self.rate * (now - self.now)) if self.now else 0
        self.now = now

    def fleet(self) -> Fleet:
        """What a router says now."""
        busy = min(8, round(self.rate * PROMPT / RATE))
        instances = [instance(f"p{index}", Role.PREFILL, int(index < busy)) for index in range(8)]
        instances.append(instance("d0", Role.DECODE, round(self.rate * OUTPUT * 0.02)))
        return Fleet(ServiceName("qwen"), "r0", 10.0, settled=True, instances=tuple(instances),
                     totals=counted(self.arrivals))

    async def ask(self, *_: Any, **__: Any) -> RouterAnswers:
        """As ``Fleets``."""
        return RouterAnswers(self.fleet(), frozenset())

    async def fetch_fleets(self, routers: Sequence[Facts], *_: Any, **__: Any) -> dict[str, Fleet]:
        """As ``Fleets``."""
        return {"r0": self.fleet()}

    def close(self) -> None:
        """As ``Fleets``."""


class Flow:
    """The same load on the scripted pods of a service: the first router counts all of it, by the clock."""

    def __init__(self, agent: NodeAgent, service: str = "qwen") -> None:
        self._agent, self._service = agent, service
        self._rate, self._since, self._before = 0.0, time.time(), 0.0
        self._began = self._since
        agent.totals, agent.load = self._totals, self._load

    def set(self, rate: float) -> None:
        """So many requests a second from now on."""
        self._before, self._since, self._rate = self._arrivals(), time.time(), rate

    def _arrivals(self) -> float:
        return self._before + self._rate * (time.time() - self._since)

    def _totals(self, life: Life) -> Totals:
        routers = self._agent.engines(self._service, "decode")
        return counted(round(self._arrivals()), self._began) if life is routers[0] else Totals(since=self._began)

    def _load(self, life: Life) -> Load:
        for role, work in (("prefill", self._rate * PROMPT / RATE), ("decode", self._rate * OUTPUT * 0.02)):
            found = self._agent.engines(self._service, role)
            if life in found:
                running = round(work / len(found)) if role == "decode" else int(found.index(life) < round(work))
                return Load(running=running, kv_usage=0.002 * running)
        return Load()
