"""The operator's process on a real API server, as it is installed: elections, outages, late CRDs, its rights."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube_cluster import away, requests, wait_established
from kube_gateways import GATEWAY, POOL, ROUTE, TLS, GatewayStage
from kube_operator import OperatorProcess
from kube_team import OPERATOR, OPERATOR_NAMESPACE, USER, Team, make_team
from kube_watchdog import Watchdog
from more_cases import more
from testcluster.errors import CommandFailed
from testcluster.kubectl import wait_until
from testcluster.light import LightCluster

ROOT = Path(__file__).resolve().parents[2]
INSTALL = ROOT / "manifests/install.yaml"
pytestmark = pytest.mark.timeout(1200)  # the first run on a machine builds Kubernetes
OUTAGE_S = 20.0
PATIENCE_S = 120.0
"""For what a machine may take long for. Seconds that are promised of a Lease: ``tests/unit/test_kube_lease.py``."""
HANDED = "handed the Lease back"

_numbers = itertools.count()

Right = tuple[str, str, str]
"""API group, resource (with its subresource), verb."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightCluster]:
    """A cluster with install.yaml in it, as a person applies it. Its Deployment has no nodes to run on."""
    with LightCluster(tmp_path_factory.mktemp("installed")) as cluster:
        install(cluster)
        yield cluster


def install(cluster: LightCluster) -> None:
    cluster.kubectl("apply", "--server-side", "--validate=strict", "-f", str(INSTALL))
    wait_established(cluster, ROOT / "crds")
    cluster.kubectl("get", "serviceaccount", OPERATOR, "-n", OPERATOR_NAMESPACE)


class Operators:
    """Processes that log in as the shipped ServiceAccount; all that are left end with the test."""

    def __init__(self, cluster: LightCluster, folder: Path) -> None:
        self.kubeconfig = cluster.kubeconfig_for(OPERATOR, OPERATOR_NAMESPACE)
        self._folder = folder
        self._all: list[OperatorProcess] = []

    def make(self, *flags: str) -> OperatorProcess:
        number = len(self._all)
        self._all.append(OperatorProcess(self.kubeconfig, self._folder / f"operator-{number}.log", *flags))
        return self._all[-1]

    async def end(self) -> None:
        for each in self._all:
            await each.kill()


@pytest.fixture(autouse=True)
async def controllers(installed: LightCluster) -> None:
    """A test begins when the cluster's own controllers work."""
    namespace = f"probe-{next(_numbers)}"
    await asyncio.to_thread(installed.kubectl, "create", "namespace", namespace)
    account = ("get", "serviceaccount", "default", "-n", namespace, "-o", "name")
    await asyncio.to_thread(wait_until, lambda: bool(installed.kubectl(*account)), 240, "the controllers work")
    await asyncio.to_thread(installed.kubectl, "delete", "namespace", namespace, "--wait=false")


@pytest.fixture
async def operators(installed: LightCluster, tmp_path: Path) -> AsyncIterator[Operators]:
    found = Operators(installed, tmp_path)
    try:
        yield found
    finally:
        await found.end()


async def until(condition: Callable[[], Any], what: str) -> float:
    """Seconds until an awaited condition holds."""
    began = time.monotonic()
    while not await condition():
        assert time.monotonic() - began < PATIENCE_S, f"not within {PATIENCE_S:g} s: {what}"
        await asyncio.sleep(0.05)
    return time.monotonic() - began


async def leads(operator: OperatorProcess) -> bool:
    return await operator.metric("xpyd_operator_leader") == 1.0


async def leader_of(operators: Operators) -> OperatorProcess:
    """A new process that leads. It is ready before that: from its first look at the Lease on it follows."""
    operator = operators.make()
    await operator.start()
    await until(lambda: leads(operator), "the first leads")
    return operator


async def test_the_shipped_deployment_passes_pod_security(installed: LightCluster) -> None:
    def made() -> bool:
        pods = installed.kubectl.get("pods", "-n", OPERATOR_NAMESPACE)["items"]
        return len([pod for pod in pods if pod["metadata"]["labels"]["app.kubernetes.io/name"] == OPERATOR]) == 2

    await asyncio.to_thread(wait_until, made, 120, "both pods of the Deployment are admitted")


@pytest.mark.test_all
async def test_one_leads_and_the_other_takes_over(installed: LightCluster, operators: Operators) -> None:
    one, other = await leader_of(operators), operators.make()
    await other.start()
    async with make_team(installed, "failover", one) as team:
        await team.apply(team.document())
        await team.wait_settled("1P1D")
        assert not await leads(other)

        await one.kill()
        took_s = await until(lambda: leads(other), "the other leads after kill -9")
        assert HANDED not in one.tail()
        await other.wait_ready()
        team.operator = other
        await team.apply(team.document(decode=2))
        await team.wait_settled("1P2D")

        third = operators.make()
        await third.start()
        assert not await leads(third)
        stopping = asyncio.create_task(other.stop())
        handed_s = await until(lambda: leads(third), "the third leads after SIGTERM")
        assert await stopping == 0
        assert HANDED in other.tail(), "the third did not wait for the Lease to run out"
        team.operator = third
        await team.apply(team.document(decode=1))
        await team.wait_settled("1P1D")
        print(f"lease failover: {took_s:.1f} s after kill -9, {handed_s:.1f} s after SIGTERM")


@pytest.mark.test_all
async def test_an_upgrade_and_its_rollback_restart_no_engine(installed: LightCluster, operators: Operators) -> None:
    """As the Deployment rolls: a new process follows, the old one ends and hands the Lease on, while the count changes."""
    leader = await leader_of(operators)
    first = leader.image
    async with make_team(installed, "upgrade", leader) as team:
        await team.apply(team.document(decode={"scaling": {"min": 1, "max": 5}}))
        await team.wait_settled("1P1D")
        await team.kubectl("scale", "dpool", "qwen-decode", "--replicas=2")
        await team.wait_settled("1P2D")
        dog = Watchdog(team, floors={"prefill": 1, "decode": 2}, most={"prefill": 1, "decode": 5})
        for count, image in ((3, "registry.example/xpyd-sidecar:next"), (4, first)):
            before = {pod["metadata"]["uid"] for pod in team.pods()}
            successor = operators.make()
            successor.image = image
            await successor.start()
            assert not await leads(successor)
            stopping = asyncio.create_task(leader.stop())
            await team.kubectl("scale", "dpool", "qwen-decode", f"--replicas={count}")
            assert await stopping == 0
            await until(lambda: leads(successor), "the other version leads")  # noqa: B023 (awaited here)
            leader = team.operator = successor
            await team.wait_settled(f"1P{count}D")
            made = [pod for pod in team.pods() if pod["metadata"]["uid"] not in before]
            assert before < {pod["metadata"]["uid"] for pod in team.pods()}, "who ran goes on"
            assert len(made) == 1, "by the one that ends or by the one that follows"
        await team.kubectl("scale", "dpool", "qwen-decode", "--replicas=5")
        await team.wait_settled("1P5D")
        await dog.end()
        newest = max(team.pods(role="decode"), key=lambda pod: int(pod["metadata"]["name"].rpartition("-e")[2]))
        containers = (*newest["spec"]["initContainers"], *newest["spec"]["containers"])
        assert first in {each["image"] for each in containers}, "what is made after the rollback is of the first version"


async def test_a_leader_that_slept_through_its_lease_works_no_more(operators: Operators) -> None:
    one, other = await leader_of(operators), operators.make()
    await other.start()
    one.pause()
    await until(lambda: leads(other), "the other leads")
    one.resume()

    async def follows() -> bool:
        return not await leads(one) and await one.said("/readyz") == "ok"

    await until(follows, "the first follows")
    assert await leads(other)


@pytest.mark.test_all
async def test_crds_come_after_the_operator_go_and_come_back(installed: LightCluster, operators: Operators) -> None:
    crds = str(ROOT / "crds")
    await asyncio.to_thread(installed.kubectl, "delete", "-f", crds, "--wait=true")
    operator = operators.make("--no-leader-election")
    operator.spawn()
    try:
        async def waits() -> bool:
            return "DisaggService" in await operator.said("/readyz")

        await until(waits, "it says what it waits for")
        await asyncio.to_thread(install, installed)
        pid = operator.pid
        await operator.wait_ready()
        async with make_team(installed, "late-crds", operator) as team:
            await team.apply(team.document())
            await team.wait_settled("1P1D")
            await team.delete()
            await team.wait_nothing_left()
            await asyncio.to_thread(installed.kubectl, "delete", "-f", crds, "--wait=true")
            await asyncio.sleep(2.0)  # a watch that comes back too early gets 404
            await asyncio.to_thread(install, installed)
            await team.wait(lambda: operator.running, "it goes on")
            await team.apply(team.document())
            await team.wait_settled("1P1D")
        assert operator.pid == pid, "the same process"
    finally:
        await asyncio.to_thread(install, installed)


@pytest.mark.parametrize("how", ["stopped", *more(["paused"])])
async def test_an_api_server_that_is_away(installed: LightCluster, operators: Operators, how: str) -> None:
    operator = operators.make()
    await operator.start()
    pid = operator.pid
    async with make_team(installed, f"away-{how}", operator) as team:
        await team.apply(team.document(decode=2))
        await team.wait_settled("1P2D")
        before = {pod["metadata"]["uid"] for pod in team.pods()}
        async with away(installed, paused=how == "paused"):
            await asyncio.sleep(OUTAGE_S)
            assert await operator.said("/healthz") == "ok", "an API server that is away does not make it unhealthy"

            async def gave_up() -> bool:
                return not await leads(operator)

            await until(gave_up, "it gave up the Lease that it could not renew")
        await team.wait_settled("1P2D")
        assert {pod["metadata"]["uid"] for pod in team.pods()} == before, "nothing was replaced"
        await team.apply(team.document(decode=3))
        await team.wait_settled("1P3D")
    assert operator.pid == pid, "the same process"


async def test_what_was_deleted_while_the_watch_was_cut_is_noticed(installed: LightCluster, operators: Operators) -> None:
    """A new API server does not know the versions before its start: the watches answer 410 and all is listed again."""
    operator = operators.make("--no-leader-election", "--resync=3600")
    await operator.start()
    async with make_team(installed, "cut", operator) as team:
        await team.apply(team.document(decode=2))
        await team.wait_settled("1P2D")
        victim = team.pods(role="decode")[0]
        operator.pause()
        await team.kube.delete("Pod", team.namespace, victim["metadata"]["name"], grace_s=0)
        await team.kube.delete("PodDisruptionBudget", team.namespace, "qwen-prefill")
        async with away(installed):
            pass
        operator.resume()

        def replaced() -> bool:
            uids = {pod["metadata"]["uid"] for pod in team.pods(role="decode")}
            return len(uids) == 2 and victim["metadata"]["uid"] not in uids

        await team.wait(replaced, "the deleted pod is replaced")
        await team.wait(lambda: "qwen-prefill" in team.of("PodDisruptionBudget"), "the deleted budget is back")
        await team.wait_settled("1P2D")


OF_GROUPS: set[Right] = {("", "nodes", "list")} | {
    (f"scheduling.{group}", "podgroups", verb) for group in ("k8s.io", "volcano.sh", "x-k8s.io")
    for verb in ("get", "list", "create", "delete")}
OF_GATEWAYS: set[Right] = {("gateway.networking.k8s.io", "gateways", "get")} | {
    (f"{group}.networking.k8s.io", resource, verb)
    for group, resource in (("gateway", "httproutes"), ("gateway", "backendtlspolicies"), ("inference", "inferencepools"))
    for verb in ("get", "list", "create", "patch", "delete")}
"""Where the API server serves none of it, nothing of it is asked for."""
OF_PREFETCH: set[Right] = {(group, resource, verb) for group, resource in (("apps", "daemonsets"), ("batch", "jobs"))
                           for verb in ("get", "create", "patch", "delete")}


def held() -> set[Right]:
    """What the shipped roles let the operator do."""
    roles = [each for each in yaml.safe_load_all(INSTALL.read_text()) if each["kind"] in ("ClusterRole", "Role")
             and each["metadata"]["name"].startswith(OPERATOR)]
    assert {each["metadata"]["name"] for each in roles} == {
        OPERATOR, *(f"{OPERATOR}-{what}" for what in ("discovery", "keys", "lease"))}
    return {(group, resource, verb) for each in roles for rule in each["rules"] for group in rule["apiGroups"]
            for resource in rule["resources"] for verb in rule["verbs"]}


def used(cluster: LightCluster, since: int) -> tuple[set[Right], list[str]]:
    """What the operator asked for, and what it was forbidden. A server-side apply that makes an object needs create too."""
    rights: set[Right] = set()
    forbidden = []
    for each in requests(cluster, USER)[since:]:
        if not each.object.resource:
            continue  # discovery, which everybody may
        resource = "/".join(part for part in (each.object.resource, each.object.subresource) if part)
        rights.add((each.object.api_group, resource, each.verb))
        if each.verb == "patch" and each.answer.code == 201:
            rights.add((each.object.api_group, resource, "create"))
        if each.answer.code in (401, 403):
            forbidden.append(f"{each.verb} {each.path}: {each.answer.code}")
    return rights, forbidden


async def test_it_uses_each_of_its_rights_and_needs_no_other(installed: LightCluster, operators: Operators) -> None:
    await asyncio.to_thread(installed.kubectl, "delete", "lease", OPERATOR, "-n", OPERATOR_NAMESPACE, "--ignore-not-found")
    since = len(requests(installed, USER))
    operator = operators.make()
    await operator.start()
    async with make_team(installed, "rights", operator) as team:
        taken = {"metadata": {"name": "qwen-e0"}, "spec": {"containers": [{"name": "c", "image": "somebody-elses"}]}}
        await team.kube.create("Pod", taken, team.namespace)
        await team.apply(team.document(decode={"scaling": {"min": 1, "max": 3}}, router={"placement": "deployment"}))
        await team.wait(lambda: "qwen-router" in team.of("Deployment"), "the Deployment of routers")
        await team.apply(team.document(decode=2))
        await team.wait(lambda: "qwen-router" not in team.of("Deployment"), "no Deployment of routers")
        await team.wait_settled("1P2D")
        await team.kubectl("scale", "dpool", "qwen-decode", "--replicas=3")
        await team.wait(lambda: bool(team.events("PoolScaledBack")), "the pool is scaled back")
        router = {"xpyd.dev/router": "false"}
        edited = await team.kube.merge("Service", team.namespace, "qwen", {"spec": {"selector": router}})
        version = int(edited["metadata"]["resourceVersion"])

        def undone() -> bool:
            service = team.of("Service")["qwen"]
            return int(service["metadata"]["resourceVersion"]) > version and service["spec"]["selector"] != \
                edited["spec"]["selector"]

        await team.wait(undone, "the edit is undone")
        await team.apply(team.document(decode=1, networkPolicy={"enabled": False}))
        await team.wait(lambda: not team.of("NetworkPolicy"), "no policies")
        await team.wait_settled("1P1D")
        await team.delete(propagation="Orphan")
        await team.wait(lambda: not team.of("DisaggService"), "the service is gone, and its pods run on")
        for kind, names in (("Pod", list(team.of("Pod"))), ("Secret", list(team.of("Secret")))):
            for name in names:
                await team.kube.delete(kind, team.namespace, name)
        await team.wait_nothing_left()
    assert await operator.stop() == 0
    rights, forbidden = used(installed, since)
    assert not forbidden
    expected = held() - OF_GROUPS - OF_GATEWAYS - OF_PREFETCH
    assert rights == expected, f"unused: {sorted(expected - rights)}, beyond: {sorted(rights - held())}"
    assert held() >= OF_GATEWAYS


async def test_instances_of_several_pods_need_some_more(installed: LightCluster, operators: Operators) -> None:
    """With the groups of one scheduler; for the others it is the same."""
    crd = ROOT / "tests/data/podgroups/coscheduling.yaml"
    await asyncio.to_thread(installed.kubectl, "apply", "--server-side", "-f", str(crd))
    await asyncio.to_thread(wait_established, installed, crd)
    since = len(requests(installed, USER))
    operator = operators.make("--gang=coscheduling")
    try:
        await operator.start()
        async with make_team(installed, "wide", operator) as team:
            path = f"/apis/scheduling.x-k8s.io/v1alpha1/namespaces/{team.namespace}/podgroups"
            taken = {"apiVersion": "scheduling.x-k8s.io/v1alpha1", "kind": "PodGroup", "metadata": {"name": "qwen-e1"},
                     "spec": {"minMember": 3}}
            await team.kube.request("POST", path, taken)
            wide = {"replicas": 1, "parallelism": {"tensor": 2, "pods": 2, "device": "none"}}
            await team.apply(team.document(decode=wide, engine={"image": "engine:1", "topology": "kubernetes.io/hostname"}))
            await team.wait_condition("Degraded", words=("NameTaken", "PodGroup qwen-e1"))
            await team.kube.request("DELETE", f"{path}/qwen-e1")
            await team.wait(lambda: team.shape() == "1P2D" and len(team.ready()) == 3, "it serves, whatever nodes say")
            await team.apply(team.document(decode=1))
            await team.wait(lambda: team.shape() == "1P1D" and "qwen-engines" not in team.of("Service"), "nothing is left")
            end = time.monotonic() + PATIENCE_S
            while left := (await team.kube.request("GET", path))["items"]:  # else the collector of garbage is first
                assert time.monotonic() < end, left
                await asyncio.sleep(0.05)
            await team.delete()
            await team.wait_nothing_left()
        assert await operator.stop() == 0
    finally:
        await asyncio.to_thread(installed.kubectl, "delete", "-f", str(crd), "--wait=false")
    rights, forbidden = used(installed, since)
    assert not forbidden
    group = "scheduling.x-k8s.io"
    assert rights & OF_GROUPS == {each for each in OF_GROUPS if each[1] != "podgroups" or each[0] == group}


async def test_what_fetches_ahead_needs_some_more(installed: LightCluster, operators: Operators) -> None:
    since = len(requests(installed, USER))
    operator = operators.make("--no-leader-election")
    await operator.start()
    async with make_team(installed, "ahead", operator) as team:
        zero = {role: {"scaling": {"min": 0, "max": 1}} for role in ("prefill", "decode")}
        zero["router"] = {"placement": "deployment", "replicas": 1, "hold": "10m"}
        model = {"source": "org/tiny", "cache": {"claim": "hub"}, "prefetch": True}
        await team.apply(team.document(model=model, **zero))
        await team.wait(lambda: team.of("DaemonSet") and team.of("Job"), "both are made")
        await team.apply(team.document(model=model | {"prefetch": False}, **zero))
        await team.wait(lambda: not team.of("DaemonSet") and not team.of("Job"), "and taken away")
    assert await operator.stop() == 0
    rights, forbidden = used(installed, since)
    assert not forbidden
    assert rights & OF_PREFETCH == OF_PREFETCH


async def test_a_route_to_routers_needs_some_more(installed: LightCluster, operators: Operators) -> None:
    since = len(requests(installed, USER))
    operator = operators.make("--no-leader-election")
    await operator.start()
    public = {"parentRefs": [{"name": "public"}]}
    async with make_team(installed, "routed", operator) as team:
        stage = GatewayStage(team.kube, team.namespace)
        try:
            await stage.serve(ROUTE, TLS, POOL, GATEWAY)
            await stage.make(GATEWAY, "public", spec={"gatewayClassName": "scripted"})
            await team.apply(team.document(router={"gateway": public | {"pool": {"picker": "lwepp"}}}))
            await stage.wait(ROUTE, "after its pool")
            secure = {"gateway": public | {"tls": {"hostname": "qwen.internal"}}, "tls": {"secret": "certificate"}}
            await team.apply(team.document(router=secure))
            await stage.wait(TLS, "where routers serve HTTPS")
            await stage.wait_gone(POOL)
            await team.apply(team.document())
            await stage.wait_gone(ROUTE)
            await stage.wait_gone(TLS)
        finally:
            await stage.end()
    assert await operator.stop() == 0
    rights, forbidden = used(installed, since)
    assert not forbidden
    assert rights & OF_GATEWAYS == OF_GATEWAYS


async def test_roles_of_a_release_before_are_named_and_keep_a_route_away_and_nothing_else(
    installed: LightCluster, operators: Operators
) -> None:
    apply = ("apply", "--server-side", "--force-conflicts", "-f", "-")
    role = next(each for each in yaml.safe_load_all(INSTALL.read_text())
                if (each["kind"], each["metadata"]["name"]) == ("ClusterRole", OPERATOR))
    groups = {group for group, _, _ in OF_GATEWAYS}
    before = role | {"rules": [rule for rule in role["rules"] if groups.isdisjoint(rule["apiGroups"])]}
    operator = operators.make("--no-leader-election")
    await asyncio.to_thread(installed.kubectl, *apply, stdin=yaml.safe_dump(before))
    try:
        may = ("auth", "can-i", "list", "httproutes.gateway.networking.k8s.io", "-A", f"--as={USER}")
        async with make_team(installed, "older", operator) as team:
            stage = GatewayStage(team.kube, team.namespace)
            try:
                await stage.serve(ROUTE, GATEWAY)
                await stage.make(GATEWAY, "public", spec={"gatewayClassName": "scripted"})
                await asyncio.to_thread(wait_until, lambda: not allowed(installed, *may), 120, "the rights have gone")
                await operator.start()
                await team.apply(team.document(router={"gateway": {"parentRefs": [{"name": "public"}]}}))
                await team.wait_settled("1P1D")
                said = await team.wait_condition("GatewayReady", "False", words=("NotAllowed", "may not list httproutes"))
                assert "release before" in said["message"]
                assert await stage.find(ROUTE) is None
                await asyncio.to_thread(installed.kubectl, *apply, stdin=yaml.safe_dump(role))
                await stage.wait(ROUTE, "the roles of this release are there")
                await team.wait_condition("GatewayReady", "Unknown", words=("NotTold",))
                await team.delete()
                await team.wait_nothing_left()
                await stage.wait_gone(ROUTE)
            finally:
                await stage.end()
    finally:
        await asyncio.to_thread(installed.kubectl, *apply, stdin=yaml.safe_dump(role))


def allowed(cluster: LightCluster, *question: str) -> bool:
    """What ``kubectl auth can-i`` says; it ends with 1, without a word on stderr, where it says no."""
    try:
        return cluster.kubectl(*question).strip() == "yes"
    except CommandFailed as error:
        if not str(error).endswith("ended with 1: "):  # with words it is another trouble
            raise
        return False


async def test_in_one_namespace_with_the_rights_of_the_overlay(installed: LightCluster, operators: Operators) -> None:
    """``overlays/namespaced``, whose namespace is ``default``, with the cluster-wide binding taken away."""
    kubectl = installed.kubectl
    overlay = str(ROOT / "manifests/overlays/namespaced")
    await asyncio.to_thread(kubectl, "delete", "clusterrolebinding", OPERATOR)
    try:
        await asyncio.to_thread(kubectl, "apply", "--server-side", "--force-conflicts", "-k", overlay)
        may = ("auth", "can-i", "list", "disaggservices.xpyd.dev", "-n", "default", f"--as={USER}")
        await asyncio.to_thread(wait_until, lambda: bool(kubectl(*may)), 120, "the API server has heard of its rights")
        since = len(requests(installed, USER))
        operator = operators.make("--namespace=default")
        await operator.start()
        document = Team.document(None, "solo")  # type: ignore[arg-type]
        await asyncio.to_thread(kubectl.apply, document | {"metadata": {"name": "solo", "namespace": "default"}})

        def made() -> bool:
            pods = kubectl.get("pods", "-n", "default", "-l", "xpyd.dev/service=solo")["items"]
            return len(pods) == 2

        await asyncio.to_thread(wait_until, made, 120, "both pods are made")
        assert await operator.stop() == 0
        assert used(installed, since)[1] == []
    finally:
        with contextlib.suppress(Exception):
            await asyncio.to_thread(kubectl, "delete", "dsvc", "solo", "-n", "default")
        await asyncio.to_thread(kubectl, "delete", "-n", "default", "rolebinding", OPERATOR, "--ignore-not-found")
        await asyncio.to_thread(install, installed)
