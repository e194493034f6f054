"""Groups that schedulers know, on a real API server with their CRDs: made, kept and taken away with the instances."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kube_client import Object
from kube_cluster import wait_established
from kube_team import Team
from kube_watched import label
from node_agent import INSTANCE, MEMBER, Script
from testcluster.errors import CommandFailed
from testcluster.kubectl import wait_until
from testcluster.light import LightCluster

pytestmark = pytest.mark.timeout(1200)  # the first run on a machine builds Kubernetes
CRDS = Path(__file__).resolve().parent.parent / "data/podgroups"
WIDE = {"replicas": 2, "parallelism": {"tensor": 2, "pods": 2, "device": "none"},
        "template": {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team-a"}}}}
PREFILL = {"replicas": 1, "parallelism": {"tensor": 2, "device": "none"}}
VERSIONS = {"volcano": "scheduling.volcano.sh/v1beta1",
            "coscheduling": "scheduling.x-k8s.io/v1alpha1"}


@contextlib.asynccontextmanager
async def served(cluster: LightCluster, kind: str) -> AsyncIterator[None]:
    """The API server has the CRD of a scheduler."""
    file = CRDS / f"{kind}.yaml"
    there = ("get", "-f", str(file), "--ignore-not-found", "-o", "jsonpath={.metadata.deletionTimestamp}")
    await asyncio.to_thread(wait_until, lambda: not cluster.kubectl(*there), 240, "that of a test before has gone")
    await asyncio.to_thread(cluster.kubectl, "apply", "--server-side", "-f", str(file))
    await asyncio.to_thread(wait_established, cluster, file)
    end = asyncio.get_running_loop().time() + 240.0
    while not await asyncio.to_thread(told_of, cluster, VERSIONS[kind]):  # later, where the group has versions of its own
        assert asyncio.get_running_loop().time() < end, f"the API server does not tell of {VERSIONS[kind]}"
        await asyncio.sleep(0.3)
    try:
        yield
    finally:
        await asyncio.to_thread(cluster.kubectl, "delete", "-f", str(file), "--wait=false")


def told_of(cluster: LightCluster, version: str) -> bool:
    """Whether who asks what the API server serves hears of groups of this version."""
    try:
        return '"podgroups"' in cluster.kubectl("get", "--raw", f"/apis/{version}")
    except CommandFailed as error:
        if "NotFound" in str(error):
            return False
        raise


async def begin(
    team: Team, monkeypatch: pytest.MonkeyPatch, gang: str, topology: str | None = None, **decode: object
) -> None:
    """An operator that is told so, and a service."""
    monkeypatch.setenv("XPYD_GANG", gang)
    await team.operator.start()
    document = team.document("qwen", PREFILL, WIDE | decode)
    if topology is not None:
        document["spec"].setdefault("engine", {})["topology"] = topology
    await team.apply(document)


async def groups(team: Team, kind: str) -> dict[str, Object]:
    path = f"/apis/{VERSIONS[kind]}/namespaces/{team.namespace}/podgroups"
    found = await team.kube.request("GET", path)
    return {each["metadata"]["name"]: each for each in found["items"]}


async def wait_groups(team: Team, kind: str, count: int, what: str, deadline_s: float = 240.0) -> dict[str, Object]:
    end = asyncio.get_running_loop().time() + deadline_s
    while len(found := await groups(team, kind)) != count:
        assert asyncio.get_running_loop().time() < end, f"not within {deadline_s:g} s: {what}: {sorted(found)}"
        await asyncio.sleep(0.3)
    return found


@pytest.mark.parametrize("kind", ["coscheduling", "volcano"])
async def test_each_instance_of_several_pods_has_a_group_for_its_life(
    cluster: LightCluster, quiet_team: Team, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    team = quiet_team
    async with served(cluster, kind):
        await begin(team, monkeypatch, kind)
        await team.wait_settled("1P4D")
        found = await wait_groups(team, kind, 2, "one for each instance of several pods")
        wide = [pod for pod in team.pods() if label(pod, MEMBER)]
        assert set(found) == {label(pod, INSTANCE) for pod in wide}
        assert {each["spec"]["minMember"] for each in found.values()} == {2}
        for pod in wide:
            notes, name = pod["metadata"]["annotations"], label(pod, INSTANCE)
            told = label(pod, "scheduling.x-k8s.io/pod-group") if kind == "coscheduling" else \
                notes["scheduling.k8s.io/group-name"]
            assert told == name
            assert pod["spec"]["schedulerName"] == ("volcano" if kind == "volcano" else "default-scheduler")
            assert label(pod, "kueue.x-k8s.io/pod-group-name").startswith(f"{name}-")
            assert notes["kueue.x-k8s.io/pod-group-total-count"] == "2"
        first = min(found)
        leader = team.of("Pod")[f"{first}-0"]["metadata"]["uid"]
        await team.kube.delete("Pod", team.namespace, f"{first}-1")
        await team.wait(lambda: leader not in {pod["metadata"]["uid"] for pod in team.pods()}, "the group goes")
        await team.wait_settled("1P4D")
        after = await wait_groups(team, kind, 2, "the old one's group is gone")
        assert found[first]["metadata"]["uid"] not in {each["metadata"]["uid"] for each in after.values()}
        await team.operator.kill()
        await team.operator.start()
        await team.wait_looked()
        await team.wait_settled("1P4D")
        assert {name: each["metadata"]["uid"] for name, each in (await groups(team, kind)).items()} == \
            {name: each["metadata"]["uid"] for name, each in after.items()}, "another operator takes them over"
        await team.delete()
        await wait_groups(team, kind, 0, "they go with the service")


async def test_all_wait_for_places_at_once_where_the_scheduler_places_whole_groups(
    cluster: LightCluster, quiet_team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scripted scheduler has no place for anybody, as a gang scheduler says of all pods of a group."""
    team = quiet_team
    team.agent.script = lambda pod: Script(trouble="unschedulable" if label(pod, MEMBER) else "")
    async with served(cluster, "coscheduling"):
        await begin(team, monkeypatch, "coscheduling", replicas=4)
        await team.wait(lambda: len(team.pods(role="decode")) == 8, "all are made, though none has a place")
        before = {pod["metadata"]["uid"] for pod in team.pods()}
        await team.wait_condition("Progressing", words=("WaitingForNode", "2 of 2 pods of qwen-e"), deadline_s=300)
        assert {pod["metadata"]["uid"] for pod in team.pods()} == before, "and none goes for another"


async def test_what_was_asked_for_and_is_not_served_is_a_condition_and_the_service_serves(
    quiet_team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begin(quiet_team, monkeypatch, "volcano")
    said = await quiet_team.wait_condition("Degraded", words=("GangNotServed", "install Volcano"))
    assert "--gang auto or none" in said["message"]
    await quiet_team.wait(lambda: quiet_team.shape() == "1P4D", "it serves all the same")


async def test_a_label_that_no_node_has_is_said_before_any_pod_is_late(
    quiet_team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begin(quiet_team, monkeypatch, "none", topology="example.com/rack")
    said = await quiet_team.wait_condition("Degraded", words=("TopologyUnknown",), deadline_s=120)
    assert said["message"].startswith("spec.engine.topology: no node has the label example.com/rack")
