"""One DisaggService of the Kubernetes backend over a store in memory."""

from __future__ import annotations

import time
from typing import Any

import aiohttp
from kube_documents import document, pod
from kube_keys import master, turns
from memory_api import MemoryApi

from xpyd_operator.kube.client.cache import OWNER_KIND, WatchCache
from xpyd_operator.kube.client.events import Events
from xpyd_operator.kube.client.metrics import Metrics
from xpyd_operator.kube.gangs.gangs import Gangs
from xpyd_operator.kube.gangs.topology import Topology
from xpyd_operator.kube.routes.gateways import Gateways
from xpyd_operator.kube.service.backend import KubeBackend
from xpyd_operator.kube.service.shared import SharedParts
from xpyd_operator.kube.settings import OperatorSettings
from xpyd_operator.loop import converge
from xpyd_operator.plan.round import Round


class MemoryWorld:
    """A document, its backend, and what is there. ``round`` it, ``run_pods``, and let ``now`` pass."""

    def __init__(self, session: aiohttp.ClientSession, **more: Any) -> None:
        self.api, self.cache, self.now = MemoryApi(), WatchCache(), time.time()
        settings = OperatorSettings(sidecar_image="sidecar:1", fleet_timeout_s=0.2, **more)
        self.events = Events(self.api, Metrics())  # type: ignore[arg-type]
        gangs = Gangs(self.api, settings)  # type: ignore[arg-type]
        topology = Topology(self.api)  # type: ignore[arg-type]
        self.woken: list[tuple[str, str]] = []
        self.gateways = Gateways(self.api, self.cache, (), lambda *at: self.woken.append(at))  # type: ignore[arg-type]
        self.shared = SharedParts(  # type: ignore[arg-type]
            self.api, self.cache, settings, self.events, session, lambda: self.now, master(self.api), turns(self.cache),
            gangs, topology, self.gateways)
        self.backend: KubeBackend

    def write(self, **spec: Any) -> None:
        """The document, by hand."""
        before = self.api.objects.get((OWNER_KIND, "team-a", "qwen"))
        generation = before["metadata"]["generation"] + 1 if before else 1
        body = document(generation=generation, **spec)
        status = {"status": before["status"]} if before and "status" in before else {}
        self.cache.on_seen(OWNER_KIND, self.api.put(OWNER_KIND, body | status))
        if before is None:
            entry = self.cache.get(OWNER_KIND, "team-a", "qwen")
            assert entry is not None
            self.backend = KubeBackend(self.shared, entry)

    async def round(self) -> Round:
        last = self.backend.last.desired if self.backend.last else None
        done = await converge(self.backend, self.now, last=last)
        await self.backend.close()  # writes what was said
        return done

    def run_pods(self) -> None:
        """Every pod that was made becomes ready, as a kubelet would have it; ended ones go."""
        self.api.run_pods(self.cache, pod(0)["status"] | {"podIP": ""})

    def restart(self) -> None:
        """The operator begins anew, over what is there."""
        entry = self.cache.get(OWNER_KIND, "team-a", "qwen")
        assert entry is not None
        self.backend = KubeBackend(self.shared, entry)

    def named(self, kind: str) -> set[str]:
        return {at[2] for at in self.api.objects if at[0] == kind}

    def condition(self, kind: str) -> dict[str, Any]:
        status = self.api.objects[OWNER_KIND, "team-a", "qwen"].get("status") or {}
        return next((each for each in status.get("conditions", ()) if each["type"] == kind), {})


def pods(world: MemoryWorld) -> dict[str, dict[str, Any]]:
    """All that there are, by name."""
    return {at[2]: body for at, body in world.api.objects.items() if at[0] == "Pod"}


async def settle(world: MemoryWorld, rounds: int = 8, *, size: int) -> None:
    """Rounds of 6 s, after each of which pods run. No engine begins before all ``size`` members of its group are there."""
    def complete(body: dict[str, Any]) -> bool:
        name = body["metadata"]["name"]
        instance = name.rpartition("-")[0]
        return name.count("-") == 1 or all(f"{instance}-{index}" in pods(world) for index in range(size))

    for _ in range(rounds):
        await world.round()
        world.api.run_pods(world.cache, pod(0)["status"] | {"podIP": ""}, complete)
        world.now += 6
