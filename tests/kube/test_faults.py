"""API server away, watches cut, storms of errors, a killed operator, people's hands: each ends where it should."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from kube_client import Object
from kube_cluster import apply_crds, away
from kube_faults import READS, WRITES, Fault, FaultProxy
from kube_operator import OperatorProcess
from kube_team import Team
from kube_watchdog import Watchdog
from kube_watched import is_ready
from more_cases import more
from node_agent import Script
from testcluster.control_plane import CONTROLLERS

pytestmark = pytest.mark.timeout(1200)  # the first run on a machine builds Kubernetes
SLOW_S = 240.0
JSON_PATCH = "application/json-patch+json"


def uids(team: Team) -> set[str]:
    return {pod["metadata"]["uid"] for pod in team.pods()}


@pytest.mark.test_all
async def test_the_api_server_is_away_for_a_while(team: Team) -> None:
    await team.apply(team.document(decode=2))
    await team.wait_settled("1P2D")
    before = uids(team)
    async with away(team.cluster):
        await asyncio.sleep(8)
        assert await team.operator.said("/healthz") == "ok", "a restart would not help"
    await team.wait_settled("1P2D", deadline_s=SLOW_S)
    assert uids(team) == before
    await team.apply(team.document(decode=3))
    await team.wait_settled("1P3D", deadline_s=SLOW_S)


async def test_the_api_server_hangs_for_a_while(team: Team) -> None:
    await team.apply(team.document())
    await team.wait_settled("1P1D")
    async with away(team.cluster, paused=True):
        await asyncio.sleep(6)
    await team.apply(team.document(decode=2))
    await team.wait_settled("1P2D", deadline_s=SLOW_S)


async def test_an_operator_begins_with_a_list_so_long_that_it_comes_packed(proxied: tuple[Team, FaultProxy]) -> None:
    team, proxy = proxied
    await team.apply(team.document(decode=12))
    await team.wait_settled("1P12D")
    await team.operator.kill()
    before = proxy.packed
    await team.operator.start()
    await team.apply(team.document(decode=1))
    await team.wait_settled("1P1D", deadline_s=SLOW_S)
    assert proxy.packed > before


async def test_watches_are_cut_again_and_again(proxied: tuple[Team, FaultProxy]) -> None:
    team, proxy = proxied
    dog = Watchdog(team, most={"prefill": 3, "decode": 5})
    for prefill, decode in ((1, 1), (1, 3), (2, 4), (1, 2)):
        await team.apply(team.document(prefill=prefill, decode=decode))
        end, cuts = time.monotonic() + SLOW_S, 0
        while cuts < 4:  # an operator that stands still has none to cut
            assert time.monotonic() < end, f"its watches were there {cuts} times"
            await asyncio.sleep(0.3)
            cuts += proxy.cut_watches() > 0
        await team.wait_settled(f"{prefill}P{decode}D", deadline_s=SLOW_S)
    await dog.end()


async def test_what_is_deleted_while_the_api_server_cannot_be_reached_is_missed(proxied: tuple[Team, FaultProxy]) -> None:
    team, proxy = proxied
    await team.apply(team.document(decode=2))
    await team.wait_settled("1P2D")
    proxy.close()
    gone = team.pods(role="decode")[-1]["metadata"]
    await team.kube.delete("Pod", team.namespace, gone["name"], grace_s=0)
    await team.kube.delete("Service", team.namespace, "qwen-members")
    await team.wait(lambda: gone["name"] not in team.of("Pod"), "the pod is gone")
    await asyncio.sleep(2)
    proxy.open()
    await team.wait(lambda: "qwen-members" in team.of("Service") and len(team.pods()) == 3, "both are made again", SLOW_S)
    await team.wait_settled("1P2D", deadline_s=SLOW_S)
    proxy.close()
    await team.delete()
    await asyncio.sleep(1)
    proxy.open()
    await team.wait_nothing_left()
    await asyncio.sleep(2)
    assert not team.left(), "nothing is made for a service that has gone"


@pytest.mark.parametrize("faults", [
    [Fault("status", share=0.5, status=409, methods=WRITES)],
    [Fault("status", share=0.5, status=429)],
    [Fault("status", share=0.3, status=500), Fault("status", share=0.2, status=503), Fault("drop", share=0.1)],
    *more([[Fault("lose", share=0.4, methods=WRITES)]]),
    [Fault("delay", share=0.5, delay_s=0.5), Fault("lose", share=0.1)],
], ids=["409", "429", "5xx", "lost", "slow"])
async def test_a_storm_of_errors(proxied: tuple[Team, FaultProxy], faults: list[Fault]) -> None:
    team, proxy = proxied
    dog = Watchdog(team, most={"prefill": 3, "decode": 4})
    proxy.faults = faults
    for turn in range(60):
        await team.apply(team.document(prefill=1 + turn % 2, decode=1 + turn % 3))
        await asyncio.sleep(0.5)
        if sum(proxy.injected.values()) >= 8 and turn >= 4:
            break
    assert sum(proxy.injected.values()) >= 8, proxy.injected
    assert team.operator.running
    await team.apply(team.document(prefill=2, decode=3))
    proxy.faults = []
    await team.wait_settled("2P3D", deadline_s=SLOW_S)
    asked = sum(proxy.requests.values())
    assert asked < 800, f"{asked} requests: errors are answered with patience"
    await dog.end()


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.test_all)])
async def test_the_operator_is_killed_at_any_point_of_a_plan(team: Team, seed: int) -> None:
    random = Random(seed)
    await team.apply(team.document(prefill=1, decode=2, engine={"image": "engine:0"}))
    await team.wait_settled("1P2D")
    dog = Watchdog(team, floors={"prefill": 1, "decode": 2}, most={"prefill": 3, "decode": 4})
    team.agent.script = lambda _: Script(start_s=0.4, drain_s=0.3)
    for image in (1, 2):
        await team.apply(team.document(prefill=2, decode=3, engine={"image": f"engine:{image}"}))
        for _ in range(2):
            await asyncio.sleep(random.uniform(0.1, 1.5))
            await team.operator.kill()
            await team.operator.start()
    await team.wait_settled("2P3D", deadline_s=SLOW_S)
    assert {pod["spec"]["containers"][0]["image"] for pod in team.pods()} == {"engine:2"}
    await dog.end()


async def test_pods_that_people_delete_come_again(team: Team) -> None:
    await team.apply(team.document(decode=2))
    await team.wait_settled("1P2D")
    first = uids(team)
    for left, name, grace_s in ((2, team.routers()[0], None), (1, "qwen-e0", 0)):
        await team.kube.delete("Pod", team.namespace, name, grace_s=grace_s)
        await team.wait(lambda left=left: len(uids(team) & first) == left, f"{name} is gone")  # type: ignore[misc]
        await team.wait_settled("1P2D")


def _service(body: Object) -> object:
    return body["spec"]["ports"][0]["port"]


def _budget(body: Object) -> object:
    return body["spec"]["minAvailable"]


def _policy(body: Object) -> object:
    return body["spec"]["podSelector"]


def _version(body: Object) -> int:
    return int(body["metadata"]["resourceVersion"])


def _labels(body: Object) -> object:
    return body["metadata"]["labels"].get("app.kubernetes.io/managed-by")


@pytest.mark.parametrize(("kind", "name", "patch", "part"), [
    ("Service", "qwen", {"spec": {"ports": [{"name": "http", "port": 99, "targetPort": 99}]}}, _service),
    ("PodDisruptionBudget", "qwen-decode", {"spec": {"minAvailable": 0}}, _budget),
    ("NetworkPolicy", "qwen", {"spec": {"podSelector": {"matchLabels": {"app": "none"}}}}, _policy),
    ("Service", "qwen-members", {"metadata": {"labels": {"app.kubernetes.io/managed-by": "me"}}}, _labels),
], ids=["service", "budget", "policy", "labels"])
async def test_a_child_that_people_edit_or_delete_is_put_right(
    team: Team, kind: str, name: str, patch: Object, part: Callable[[Object], object]
) -> None:
    await team.apply(team.document(decode=2))
    await team.wait_settled("1P2D")
    before = uids(team)
    right = part(team.of(kind)[name])
    edited = await team.kube.merge(kind, team.namespace, name, patch)
    assert part(edited) != right
    # Newer than the edit: what is watched here may not show the edit yet, and then looks right.
    await team.wait(lambda: _version(team.of(kind)[name]) > _version(edited) and part(team.of(kind)[name]) == right,
                    f"{kind} {name} is put right")
    uid = team.of(kind)[name]["metadata"]["uid"]
    await team.kube.delete(kind, team.namespace, name)
    await team.wait(lambda: team.of(kind).get(name, edited)["metadata"]["uid"] != uid, f"{name} is made again")
    assert part(team.of(kind)[name]) == right
    await team.wait_settled("1P2D")
    assert uids(team) == before


async def test_a_label_that_people_add_stays(team: Team) -> None:
    await team.apply(team.document())
    await team.wait_settled("1P1D")
    await team.kube.merge("Service", team.namespace, "qwen", {"metadata": {"labels": {"team": "search"}}})
    await asyncio.sleep(2)
    await team.apply(team.document(decode=2))
    await team.wait_settled("1P2D")
    assert team.of("Service")["qwen"]["metadata"]["labels"]["team"] == "search"


async def test_a_pool_that_people_delete_comes_again(team: Team) -> None:
    await team.apply(team.document(decode=2))
    await team.wait_settled("1P2D")
    uid = team.of("DisaggPool")["qwen-decode"]["metadata"]["uid"]
    await team.kube.delete("DisaggPool", team.namespace, "qwen-decode")
    await team.wait(lambda: team.of("DisaggPool").get("qwen-decode", {}).get("metadata", {}).get("uid", uid) != uid,
                    "the pool is made again")
    assert team.of("DisaggPool")["qwen-decode"]["spec"]["replicas"] == 2
    await team.wait_settled("1P2D")


async def test_two_operators_and_one_of_them_dies(quiet_team: Team, operator_kubeconfig: Path, tmp_path: Path) -> None:
    team = quiet_team
    flags = (f"--lease-namespace={team.namespace}", "--lease-seconds=20")
    both = [OperatorProcess(operator_kubeconfig, tmp_path / f"operator-{index}.log", *flags, namespace=team.namespace)
            for index in range(2)]
    team.operator = both[0]
    async with contextlib.AsyncExitStack() as stack:
        for each in both:
            stack.push_async_callback(each.kill)
            await each.start()
            if each is both[0]:  # it is ready from its first look at the Lease on, and takes it after that
                end = time.monotonic() + SLOW_S
                while await each.metric("xpyd_operator_leader") != 1.0:
                    assert time.monotonic() < end, each.tail()
                    await asyncio.sleep(0.05)
        dog = Watchdog(team, most={"prefill": 2, "decode": 3})
        await team.apply(team.document(decode=2))
        await team.wait_settled("1P2D")
        leads = [await each.metric("xpyd_operator_leader") for each in both]
        assert leads == [1.0, 0.0], "the first took the Lease, the second follows"
        assert await both[1].metric("xpyd_operator_reconcile_seconds_count") == 0
        await both[0].kill()
        gone = team.of("Pod")["qwen-e0"]["metadata"]["uid"]
        await team.kube.delete("Pod", team.namespace, "qwen-e0", grace_s=0)
        await team.wait(lambda: any(is_ready(pod) and pod["metadata"]["uid"] != gone for pod in team.pods(role="prefill")),
                        "the second takes over")
        await both[0].start()
        await team.apply(team.document(decode=1))
        await team.wait_settled("1P1D")
        assert await both[0].metric("xpyd_operator_leader") == 0.0
        assert await both[1].stop() == 0
        await team.apply(team.document(decode=2))
        await team.wait_settled("1P2D")
        await dog.end()


async def test_the_crds_come_after_the_operator(quiet_team: Team) -> None:
    team = quiet_team
    await asyncio.to_thread(team.cluster.kubectl, "delete", "crd", "disaggservices.xpyd.dev", "disaggpools.xpyd.dev")
    try:
        team.operator.spawn()
        await asyncio.sleep(4)
        assert team.operator.running, team.operator.tail()
    finally:
        await asyncio.to_thread(apply_crds, team.cluster)
        team.cluster.stop(CONTROLLERS)  # the garbage collector looks for new CRDs at its start, and then only every 30 s
        await asyncio.to_thread(team.cluster.start, CONTROLLERS)
    await team.apply(team.document())
    await team.wait_settled("1P1D", deadline_s=SLOW_S)


async def test_a_newer_crd_with_a_field_that_this_operator_does_not_know(quiet_team: Team) -> None:
    team = quiet_team  # a watch that is older than the CRD does not show the field until it is renewed
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/disaggservices.xpyd.dev"
    at = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/speculation"
    field = {"type": "object", "properties": {"depth": {"type": "integer"}}}
    await team.kube.request("PATCH", path, [{"op": "add", "path": at, "value": field}], content=JSON_PATCH)
    try:
        await team.apply(team.document())
        end, stored = time.monotonic() + SLOW_S, {"spec": {}}
        while "speculation" not in stored["spec"] and time.monotonic() < end:
            newer = {"spec": {"speculation": {"depth": 3}}}
            stored = await team.kube.merge("DisaggService", team.namespace, "qwen", newer)
            await asyncio.sleep(0.1)
        assert stored["spec"]["speculation"] == {"depth": 3}
        await team.operator.start()
        said = await team.wait_condition("Valid", words=("UnknownFields", "speculation"))
        assert said["reason"] == "UnknownFields"
        await team.wait_settled("1P1D")
    finally:
        await team.kube.request("PATCH", path, [{"op": "remove", "path": at}], content=JSON_PATCH)


async def test_an_api_server_that_says_no_to_reads_too(proxied: tuple[Team, FaultProxy]) -> None:
    team, proxy = proxied
    await team.apply(team.document())
    await team.wait_settled("1P1D")
    proxy.faults = [Fault("status", status=500, methods=READS)]
    proxy.cut_watches()
    await asyncio.sleep(3)
    await team.apply(team.document(decode=2))
    await asyncio.sleep(1)
    proxy.faults = []
    await team.wait_settled("1P2D", deadline_s=SLOW_S)
