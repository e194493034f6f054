"""``campaign-gang``: instances of two pods and a scheduler that places groups whole (coscheduling), on a fake node.

Two services want an instance each where three pods have a place. kube-scheduler alone lets one hold half of its places;
with the plugin in it, and an operator that is told so, nobody holds less than all. Figures go to
bench/results/campaign_gang.json.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from halves import Halves
from kube_client import Kube, Mirror, Object
from kube_cluster import start_light
from kube_operator import OperatorProcess
from kube_team import operator_login
from kube_watched import label
from node_agent import SERVICE
from processes import Group, free_port
from testcluster import build
from testcluster.control_plane import SCHEDULER
from testcluster.errors import CommandFailed
from testcluster.light import LightCluster

pytestmark = pytest.mark.timeout(3600)
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results/campaign_gang.json"
CRD = ROOT / "tests/data/podgroups/coscheduling.yaml"
NAMESPACE = "gang"
PLACES = 3
ROUNDS = {"alone": 3, "coscheduling": 10}
HELD_S = 5.0
"""The pods of a group are bound one after the other, within this time."""
DEADLINE_S = 120.0


class Places:
    """Who has places, as a watch tells of it: instances by service, and for how long one had less than all."""

    def __init__(self, pods: Mirror) -> None:
        self.halves = Halves()
        self._pods = pods

    def placed(self, service: str) -> int:
        """Pods of a service that have a node and do not end."""
        return sum(label(pod, SERVICE) == service for pod in self._placed())

    def look(self) -> None:
        """Once more; call it often."""
        self.halves.look(self._placed())

    def _placed(self) -> Iterator[Object]:
        return (pod for pod in self._pods.objects.values()
                if pod["spec"].get("nodeName") and not pod["metadata"].get("deletionTimestamp"))


def document(name: str) -> Object:
    """One instance of two pods with a GPU each."""
    role = {"replicas": 1, "parallelism": {"tensor": 2, "pods": 2}}
    return {"apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService", "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"model": {"source": "org/tiny"}, "engine": {"image": "engine:1"}, "prefill": {"replicas": 0},
                     "decode": role}}


async def play(kube: Kube, pods: Mirror, rounds: int) -> dict[str, float]:
    """In each round two services come at once; whoever is placed first goes, and then the other has its places."""
    places, next_s = Places(pods), 0.0

    async def wait(condition: Any, what: str) -> float:
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < DEADLINE_S, f"not within {DEADLINE_S:g} s: {what}"
            places.look()
            await asyncio.sleep(0.05)
        return time.monotonic() - began

    for number in range(rounds):
        names = [f"{side}{number}" for side in ("a", "b")]
        await asyncio.gather(*(kube.apply("DisaggService", NAMESPACE, document(name)) for name in names))
        await wait(lambda names=names: any(places.placed(name) == 2 for name in names), "one has its places")
        end = time.monotonic() + 2 * HELD_S
        await wait(lambda end=end: time.monotonic() > end, "the other one is looked at")
        other, first = sorted(names, key=places.placed)
        await kube.delete("DisaggService", NAMESPACE, first)
        next_s = max(next_s, await wait(lambda other=other: places.placed(other) == 2, "the other has its places"))
        await kube.delete("DisaggService", NAMESPACE, other)
        await wait(lambda: not any(label(pod, SERVICE) for pod in pods.objects.values()), "nothing is left")
    return {"rounds": rounds, "longest_half_s": round(places.halves.longest_s, 1), "next_after_s": round(next_s, 1)}


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightCluster]:
    with start_light(tmp_path_factory, kwok=True) as light:
        light.add_nodes(1, {"cpu": "1000", "memory": "4Ti", "pods": "100", "nvidia.com/gpu": str(PLACES)})
        yield light


def scheduler(cluster: LightCluster, folder: Path) -> Group:
    """kube-scheduler with the plugin, in the place of the cluster's own."""
    binary = build.ensure(["gang"])["gang"] / "gang"
    cluster.stop(SCHEDULER)
    cluster.kubectl("apply", "--server-side", "-f", str(CRD))
    cluster.kubectl("wait", "--for=condition=Established", "-f", str(CRD), "--timeout=30s")
    plugins = {"multiPoint": {"enabled": [{"name": "Coscheduling"}]},
               "queueSort": {"enabled": [{"name": "Coscheduling"}], "disabled": [{"name": "*"}]}}
    config = folder / "gang.yaml"
    config.write_text(yaml.safe_dump({
        "apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False}, "clientConnection": {"kubeconfig": str(cluster.kubeconfig)},
        "profiles": [{"schedulerName": "default-scheduler", "plugins": plugins}]}))
    return Group([str(binary), f"--config={config}", f"--secure-port={free_port()}", "--bind-address=127.0.0.1",
                  f"--cert-dir={folder}"], log=folder / "gang.log", env={"PATH": "/usr/bin:/bin"}, name="gang")


async def test_two_halves_never_wait_for_each_other(cluster: LightCluster, tmp_path: Path) -> None:
    kubeconfig, found = operator_login(cluster), dict[str, dict[str, float]]()
    async with Kube(cluster.kubeconfig) as kube:
        await kube.create("Namespace", {"metadata": {"name": NAMESPACE}})
        async with Mirror(kube, "Pod", NAMESPACE) as pods:
            for kind, gang in (("alone", "none"), ("coscheduling", "coscheduling")):
                group = scheduler(cluster, tmp_path) if kind == "coscheduling" else None
                operator = OperatorProcess(kubeconfig, tmp_path / f"{kind}.log", "--no-leader-election", f"--gang={gang}")
                await operator.start()
                try:
                    found[kind] = await play(kube, pods, ROUNDS[kind])
                except AssertionError as error:
                    said = group.tail() if group is not None else ""
                    raise AssertionError(f"{error}\n{described(cluster)}\n{said}\n{operator.tail()}") from error
                finally:
                    await operator.kill()
                    if group is not None:
                        group.kill()
    print(found)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    assert found["alone"]["longest_half_s"] >= HELD_S, "halves are seen where there are some"
    assert found["coscheduling"]["longest_half_s"] < HELD_S


def described(cluster: LightCluster) -> str:
    try:
        return cluster.kubectl("-n", NAMESPACE, "get", "pods,podgroups", "-o", "yaml")[-6000:]
    except CommandFailed as error:
        return str(error)
