"""``campaign-kueue``: services whose pods queue at a real Kueue, on a fake node.

Figures go to bench/results/campaign_kueue.json.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from halves import Halves
from kube_client import Kube, KubeError, Mirror, Object
from kube_cluster import start_light
from kube_operator import OperatorProcess
from kube_team import operator_login
from kube_watched import label
from kueue import Kueue
from node_agent import ROLE, SERVICE
from testcluster.errors import CommandFailed
from testcluster.light import LightCluster

pytestmark = pytest.mark.timeout(3600)
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results/campaign_kueue.json"
NAMESPACE = "team"
QUEUE = "team-a"
GPU = "nvidia.com/gpu"
QUOTA = 3
ROUNDS = 5
STILL_S = 5.0
"""How long nothing may change, where nothing is to be admitted."""
DEADLINE_S = 180.0
COLUMNS = {
    "pods": "NAME:.metadata.name,PHASE:.status.phase,GATES:.spec.schedulingGates[*].name,ENDS:.metadata.deletionTimestamp,"
            "FINALIZERS:.metadata.finalizers,OF:.metadata.ownerReferences[*].name",
    "workloads": "NAME:.metadata.name,CONDITIONS:.status.conditions[*].type,HOLDS:.status.conditions[*].status,"
                 "ENDS:.metadata.deletionTimestamp",
    "disaggservices": "NAME:.metadata.name,SAYS:.status.conditions[*].message",
}
"""What is shown where something does not come."""


def _admitted(pod: Object) -> bool:
    return not pod["spec"].get("schedulingGates")


class Stage:
    """The pods of a namespace, who of them is admitted, and what the services say."""

    def __init__(self, kube: Kube, pods: Mirror, services: Mirror, kueue: Kueue) -> None:
        self.kube, self.pods, self.services, self.kueue = kube, pods, services, kueue
        self.most_admitted, self.halves = 0, Halves()

    def alive(self, service: str) -> list[Object]:
        """Pods of a service's instances that do not end."""
        return [pod for pod in self.pods.objects.values() if label(pod, SERVICE) == service and label(pod, ROLE)
                and not pod["metadata"].get("deletionTimestamp")]

    def admitted(self, service: str) -> int:
        """Those of them without a gate."""
        return sum(map(_admitted, self.alive(service)))

    def uids(self, service: str) -> set[str]:
        """Of these pods."""
        return {pod["metadata"]["uid"] for pod in self.alive(service)}

    def condition(self, service: str, kind: str) -> Object:
        """One condition of a service; empty: it has none yet."""
        found = self.services.objects.get(service, {}).get("status", {}).get("conditions", [])
        return next((one for one in found if one["type"] == kind), {})

    def queued(self, service: str) -> bool:
        """Whether a service says that it waits for its queue, and calls it no fault."""
        said = self.condition(service, "Progressing").get("message", "")
        return said.startswith("queued: ") and self.condition(service, "Degraded").get("status") == "False"

    def look(self) -> None:
        """Once more; call it often."""
        admitted = [pod for pod in self.pods.objects.values() if label(pod, ROLE) and _admitted(pod)
                    and not pod["metadata"].get("deletionTimestamp")]
        self.most_admitted = max(self.most_admitted, len(admitted))
        self.halves.look(admitted)

    async def wait(self, condition: Callable[[], bool], what: str) -> float:
        """Seconds until it holds."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < DEADLINE_S, f"not within {DEADLINE_S:g} s: {what}"
            self.look()
            await asyncio.sleep(0.05)
        return time.monotonic() - began

    async def still(self, condition: Callable[[], bool], what: str) -> None:
        """It holds all the time."""
        end = time.monotonic() + STILL_S
        while time.monotonic() < end:
            assert condition(), what
            self.look()
            await asyncio.sleep(0.05)

    async def apply(self, name: str, pods: int, replicas: int = 1, **metadata: str) -> None:
        """A service of decode instances, each of so many pods with a GPU each."""
        template = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": QUEUE, **metadata}}}
        role = {"replicas": replicas, "parallelism": {"tensor": pods, "pods": pods}, "template": template}
        await self.kube.apply("DisaggService", NAMESPACE, {
            "apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService", "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"model": {"source": "org/tiny"}, "engine": {"image": "engine:1"}, "prefill": {"replicas": 0},
                     "decode": role}})

    async def leave(self, *names: str) -> None:
        """The services go, with all pods and workloads."""
        for name in names:
            await self.kube.delete("DisaggService", NAMESPACE, name)
        await self.wait(lambda: not any(label(pod, SERVICE) for pod in self.pods.objects.values()), "no pod is left")
        await self.wait(lambda: not self.kueue.workloads(NAMESPACE), "no workload is left")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightCluster]:
    with start_light(tmp_path_factory, kwok=True) as light:
        light.add_nodes(1, {"cpu": "1000", "memory": "4Ti", "pods": "100", GPU: "16"})
        yield light


@pytest.fixture(scope="module")
def kueue(cluster: LightCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kueue]:
    cluster.kubectl("create", "namespace", NAMESPACE)
    with Kueue(cluster, tmp_path_factory.mktemp("kueue"), [NAMESPACE]) as kueue:
        kueue.quota(NAMESPACE, QUEUE, {GPU: str(QUOTA), "cpu": "900", "memory": "3Ti", "ephemeral-storage": "3Ti"},
                    preemption={"withinClusterQueue": "LowerPriority"})
        kueue.apply({"kind": "WorkloadPriorityClass", "metadata": {"name": "high"}, "value": 1000})
        yield kueue


async def end(kube: Kube, pods: Mirror) -> None:
    """What a kubelet says of a pod whose containers have ended. Fake nodes delete it at once; Kueue waits for this word
    before it takes its finalizer away.
    """
    while True:
        for pod in list(pods.objects.values()):
            if pod["metadata"].get("deletionTimestamp") and pod["status"].get("phase") == "Running":
                with contextlib.suppress(KubeError):  # it has gone meanwhile, and is looked at again if not
                    await kube.merge("Pod", NAMESPACE, pod["metadata"]["name"], {"status": {"phase": "Failed"}}, "status")
        await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def staged(cluster: LightCluster, kueue: Kueue, folder: Path) -> AsyncIterator[Stage]:
    """An operator, and what is seen of the namespace."""
    operator = OperatorProcess(operator_login(cluster), folder / "operator.log", "--no-leader-election")
    await operator.start()
    try:
        async with (Kube(cluster.kubeconfig) as kube, Mirror(kube, "Pod", NAMESPACE) as pods,
                    Mirror(kube, "DisaggService", NAMESPACE) as services):
            kubelet = asyncio.create_task(end(kube, pods))
            try:
                yield Stage(kube, pods, services, kueue)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{described(cluster)}\n{kueue.tail()}\n{operator.tail()}") from error
            finally:
                kubelet.cancel()
                await asyncio.gather(kubelet, return_exceptions=True)
    finally:
        await operator.kill()


def described(cluster: LightCluster) -> str:
    try:
        return "\n".join(cluster.kubectl("-n", NAMESPACE, "get", kind, "-o", f"custom-columns={columns}")
                         for kind, columns in COLUMNS.items())
    except CommandFailed as error:
        return str(error)


def kept(name: str, found: dict[str, Any]) -> None:
    """Into the results, beside what other runs have found."""
    print(name, found)
    so_far = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(so_far | {name: found}, indent=1) + "\n")


async def test_groups_are_admitted_whole_and_the_next_one_once_there_is_quota(
        cluster: LightCluster, kueue: Kueue, tmp_path: Path) -> None:
    async with staged(cluster, kueue, tmp_path) as stage:
        next_s = 0.0
        for number in range(ROUNDS):
            names = [f"{side}{number}" for side in ("a", "b")]
            await asyncio.gather(*(stage.apply(name, pods=2) for name in names))
            await stage.wait(lambda names=names: any(stage.admitted(name) == 2 for name in names), "one is admitted")
            other, first = sorted(names, key=stage.admitted)
            await stage.wait(lambda other=other: len(stage.alive(other)) == 2 and stage.queued(other), "the other says so")
            await stage.still(lambda other=other: stage.admitted(other) == 0, "half of a group is admitted")
            await stage.kube.delete("DisaggService", NAMESPACE, first)
            next_s = max(next_s, await stage.wait(lambda other=other: stage.admitted(other) == 2, "the other is admitted"))
            await stage.leave(other)
        kept("groups", {"rounds": ROUNDS, "most_admitted": stage.most_admitted, "next_after_s": round(next_s, 1),
                        "longest_half_s": round(stage.halves.longest_s, 1)})
        assert stage.most_admitted == 2


async def test_a_group_that_loses_a_pod_goes_and_another_one_queues_in_its_place(
        cluster: LightCluster, kueue: Kueue, tmp_path: Path) -> None:
    async with staged(cluster, kueue, tmp_path) as stage:
        slowest = 0.0
        await stage.apply("one", pods=2)
        await stage.wait(lambda: stage.admitted("one") == 2, "it is admitted")
        for number in range(ROUNDS):
            before = stage.uids("one")
            victim = sorted(pod["metadata"]["name"] for pod in stage.alive("one"))[number % 2]
            await stage.kube.delete("Pod", NAMESPACE, victim)
            slowest = max(slowest, await stage.wait(
                lambda before=before: stage.admitted("one") == 2 and not before & stage.uids("one"), "a new group"))
        await stage.leave("one")
        kept("pods deleted", {"rounds": ROUNDS, "back_after_s": round(slowest, 1), "most_admitted": stage.most_admitted})


async def test_a_group_makes_room_for_one_of_higher_priority_as_a_whole_and_comes_back(
        cluster: LightCluster, kueue: Kueue, tmp_path: Path) -> None:
    async with staged(cluster, kueue, tmp_path) as stage:
        await stage.apply("low", pods=2)
        await stage.wait(lambda: stage.admitted("low") == 2, "it is admitted")
        before = stage.uids("low")
        await stage.apply("high", pods=2, **{"kueue.x-k8s.io/priority-class": "high"})
        preempted_s = await stage.wait(lambda: stage.admitted("high") == 2, "the higher one is admitted")
        await stage.wait(lambda: len(stage.alive("low")) == 2 and not before & stage.uids("low"), "a new group of it")
        await stage.wait(lambda: stage.queued("low"), "it says that it waits")
        await stage.still(lambda: stage.admitted("low") == 0, "half of a group is admitted")
        await stage.kube.delete("DisaggService", NAMESPACE, "high")
        back_s = await stage.wait(lambda: stage.admitted("low") == 2, "it is admitted again")
        await stage.leave("low")
        kept("preempted", {"after_s": round(preempted_s, 1), "back_after_s": round(back_s, 1),
                           "most_admitted": stage.most_admitted})


async def test_instances_of_one_pod_queue_one_by_one(cluster: LightCluster, kueue: Kueue, tmp_path: Path) -> None:
    async with staged(cluster, kueue, tmp_path) as stage:
        await stage.apply("many", pods=1, replicas=QUOTA + 2)
        await stage.wait(lambda: stage.admitted("many") == QUOTA and stage.queued("many"), "as many as there is quota for")
        await stage.still(lambda: stage.admitted("many") == QUOTA, "more than the quota")
        victim = next(pod["metadata"] for pod in stage.alive("many") if _admitted(pod))
        await stage.kube.delete("Pod", NAMESPACE, victim["name"])
        await stage.wait(lambda: victim["uid"] not in stage.uids("many"), "it ends")
        back_s = await stage.wait(
            lambda: stage.admitted("many") == QUOTA and len(stage.alive("many")) == QUOTA + 2, "the next is admitted")
        await stage.leave("many")
        kept("pods of their own", {"next_after_s": round(back_s, 1), "most_admitted": stage.most_admitted})
