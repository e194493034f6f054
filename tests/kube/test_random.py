"""Hundreds of random steps on a real API server: what must never be never is, and left alone it converges."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from random import Random

import aiohttp
import pytest
from kube_client import KubeError, Object
from kube_faults import WRITES, Fault, FaultProxy
from kube_operator import OperatorProcess
from kube_team import CHILDREN, LASTING, Team
from kube_watchdog import Bounds, Watchdog
from kube_watched import is_ready, label
from node_agent import SERVICE, Script, by_image, same_for_all

pytestmark = [pytest.mark.test_all, pytest.mark.timeout(1200)]  # the first run on a machine builds Kubernetes
STEPS = int(os.environ.get("XPYD_RANDOM_STEPS", "500"))
SEED = int(os.environ.get("XPYD_RANDOM_SEED", "7"))
STEP_S = 0.1
SURGE = 1
LATE_S = 30.0
"""An operator that is restarted, or whose watches were cut, may act on what was asked for so long ago."""
STORMS = (
    [Fault("status", share=0.3, status=409, methods=WRITES)],
    [Fault("status", share=0.3, status=429)],
    [Fault("status", share=0.3, status=500)],
    [Fault("drop", share=0.2), Fault("lose", share=0.2, methods=WRITES)],
    [Fault("delay", share=0.5, delay_s=0.3)],
)


class Chaos:
    """One step at a time, from a seed."""

    def __init__(self, team: Team, proxy: FaultProxy, bounds: Bounds, seed: int) -> None:
        self.team = team
        self.proxy = proxy
        self.bounds = bounds
        self.random = Random(seed)
        self.counts = {"prefill": 1, "decode": 2}
        self.image = 0
        self.done: dict[str, int] = {}
        self._steps = {self.scale: 20, self.roll: 6, self.change_role: 4, self.delete_pod: 12, self.kill_pod: 8,
                       self.crash: 12, self.restart: 2, self.storm: 6, self.calm: 10, self.cut: 4, self.spoil: 6,
                       self.scale_pool: 4, self.wait: 6}

    async def step(self) -> None:
        chosen = self.random.choices(list(self._steps), weights=list(self._steps.values()))[0]
        name = chosen.__name__
        self.done[name] = self.done.get(name, 0) + 1
        await chosen()

    def document(self) -> Object:
        prefill, decode = self.counts["prefill"], self.counts["decode"]
        return self.team.document(prefill=prefill, decode=decode, engine={"image": f"engine:{self.image}"})

    async def apply(self) -> None:
        self.bounds.ask(**self.counts)
        await self.team.apply(self.document())

    async def scale(self) -> None:
        self.counts = {"prefill": self.random.randint(1, 3), "decode": self.random.randint(1, 4)}
        await self.apply()

    async def roll(self) -> None:
        self.image = self.random.randint(0, 3)
        self.team.agent.fingerprint = self.random.choice((same_for_all, by_image))
        await self.apply()

    async def change_role(self) -> None:
        document = self.document()
        document["spec"]["decode"]["args"] = [f"--max-num-seqs={self.random.randint(1, 3)}"]
        self.bounds.ask(**self.counts)
        await self.team.apply(document)

    def some_pod(self) -> str:
        names = [pod["metadata"]["name"] for pod in self.team.pods()]
        return self.random.choice(names) if names else ""

    async def delete_pod(self) -> None:
        if name := self.some_pod():
            await self.team.kube.delete("Pod", self.team.namespace, name)

    async def kill_pod(self) -> None:
        if name := self.some_pod():
            await self.team.kube.delete("Pod", self.team.namespace, name, grace_s=0)

    async def crash(self) -> None:
        lives = [life for life in self.team.agent.engines("qwen") if life.facts.stage == "ready" and not life.ending]
        if lives:
            self.team.agent.crash(self.random.choice(lives).name)

    async def restart(self) -> None:
        if self.random.random() < 0.7:
            await self.team.operator.kill()
        else:
            await self.team.operator.stop()
        self.team.operator.spawn()

    async def storm(self) -> None:
        self.proxy.faults = self.random.choice(STORMS)

    async def calm(self) -> None:
        self.proxy.faults = []
        self.proxy.open()

    async def cut(self) -> None:
        if self.random.random() < 0.3:
            self.proxy.close()
        else:
            self.proxy.cut_watches()

    async def spoil(self) -> None:
        kind, name = self.random.choice((("Service", "qwen"), ("Service", "qwen-members"), ("NetworkPolicy", "qwen"),
                                         ("PodDisruptionBudget", "qwen-decode"), ("DisaggPool", "qwen-prefill")))
        await self.team.kube.delete(kind, self.team.namespace, name)

    async def scale_pool(self) -> None:
        try:
            await self.team.kube.merge("DisaggPool", self.team.namespace, "qwen-decode",
                                       {"spec": {"replicas": self.random.randint(0, 9)}}, "scale")
        except KubeError as error:
            if error.status != 404:
                raise

    async def wait(self) -> None:
        await asyncio.sleep(self.random.uniform(0, 0.5))


def invariants(team: Team) -> None:
    """One owner for each object, which is the service, or none where it lasts; no finalizer anywhere."""
    service = team.of("DisaggService").get("qwen")
    assert service is not None
    assert "finalizers" not in service["metadata"]
    for kind in (*CHILDREN, "Pod"):
        for name, each in team.of(kind).items():
            if label(each, SERVICE):
                owners = [one["uid"] for one in each["metadata"].get("ownerReferences", ()) if one.get("controller")]
                wanted = [] if kind in LASTING else [service["metadata"]["uid"]]
                assert owners == wanted, f"{kind} {name} is owned by {owners}"
                assert "finalizers" not in each["metadata"], f"{kind} {name}"


async def test_random_steps(quiet_team: Team, operator_kubeconfig: Path, tmp_path: Path) -> None:
    team = quiet_team
    team.agent.script = lambda _: Script(start_s=0.1, settle_s=0.1, drain_s=0.1, restart_s=0.2)
    async with FaultProxy(team.kube, seed=SEED) as proxy:
        kubeconfig = proxy.kubeconfig(operator_kubeconfig, tmp_path / "proxied.kubeconfig")
        team.operator = OperatorProcess(kubeconfig, tmp_path / "operator.log", "--no-leader-election",
                                        namespace=team.namespace)
        await team.operator.start()
        try:
            dog = Watchdog(team, deaths=True)
            chaos = Chaos(team, proxy, Bounds(dog, SURGE, LATE_S), SEED)
            await chaos.apply()
            await team.wait_settled("1P2D")
            next_at = time.monotonic()
            for _ in range(STEPS):
                await chaos.step()
                invariants(team)
                assert not dog.faults, f"{dog.faults}\n{chaos.done}"
                assert team.operator.running, team.operator.tail()
                next_at = max(next_at + STEP_S, time.monotonic())
                await asyncio.sleep(next_at - time.monotonic())
            await chaos.calm()
            await chaos.apply()
            shape = f"{chaos.counts['prefill']}P{chaos.counts['decode']}D"
            await team.wait_settled(shape)
            assert all(is_ready(pod) for pod in team.pods())
            assert len(chaos.done) == 13, chaos.done
            invariants(team)
            await dog.end()
            await team.delete()
            await team.wait_nothing_left()
        except aiohttp.ClientError as error:
            raise AssertionError(f"the API server is away: {error!r}") from error
        finally:
            await team.operator.kill()
