"""A service that is deleted: its policies and Services are there until its last pod has gone, whoever deletes how, and
whether or not an operator runs; and no pod is there without its policies before.
"""

from __future__ import annotations

import asyncio

import pytest
from background import Background
from kube_client import KubeError, Object
from kube_team import LASTING, Team
from kube_watched import label
from node_agent import SERVICE, Script

pytestmark = pytest.mark.timeout(1200)  # the first run on a machine builds Kubernetes
SERVICE_UID = "xpyd.dev/service-uid"
FENCE = {"NetworkPolicy/qwen", "NetworkPolicy/qwen-clients"}
NAMES = FENCE | {"Service/qwen", "Service/qwen-members"}
LOOK_S = 0.03
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
DENIALS = ("validatingadmissionpolicies", "validatingadmissionpolicybindings")


class Fence(Background):
    """Looks again and again: where there are pods of the service, ``names`` are there.

    Pods are asked for last. So in a service that goes, whose pods do not come again, one that is seen was there when
    something else was not; in one that comes, see ``first``.
    """

    def __init__(self, team: Team, names: set[str] = NAMES, *, first: bool = False) -> None:
        """``first``: pods are asked for first: in a service that comes, what they need was there before them."""
        self.looks = 0
        self.faults: list[str] = []
        self._team, self._names, self._first = team, names, first

    async def work(self) -> None:
        while True:
            pods = await self._pods() if self._first else []
            there = {f"{kind}/{each['metadata']['name']}" for kind in LASTING
                     for each in await self._team.kube.items(kind, self._team.namespace)}
            pods = pods if self._first else await self._pods()
            self.looks += bool(pods)
            if pods and (lacking := self._names - there):
                self.faults.append(f"{', '.join(pods)} without {', '.join(sorted(lacking))}")
            await asyncio.sleep(LOOK_S)

    async def _pods(self) -> list[str]:
        items = await self._team.kube.items("Pod", self._team.namespace)
        return [each["metadata"]["name"] for each in items if label(each, SERVICE) == "qwen"]

    def check(self) -> None:
        assert self.looks, "no pod was seen"
        assert not self.faults, "\n".join([*self.faults[:5], self._team.describe()])


def left(team: Team) -> set[str]:
    return {each for each in team.left() if not each.startswith("Secret/")}


@pytest.mark.parametrize("away", [False, True], ids=["there", "away"])
@pytest.mark.parametrize("how", ["Background", "Foreground"])
async def test_policies_and_services_stay_until_the_last_pod_has_gone(team: Team, how: str, away: bool) -> None:
    team.agent.script = lambda _: Script(drain_s=2.0)
    await team.apply(team.document(decode=2))
    await team.wait_settled("1P2D")
    if away:
        await team.operator.kill()
    async with Fence(team) as fence:
        await team.delete(propagation=how)
        await team.wait(lambda: not team.of("Pod"), "all pods have drained")
        if away:
            await team.wait(lambda: set(team.left()) == NAMES, "only what has no owner is left")
            await team.operator.start()
        await team.wait_nothing_left()
    fence.check()


async def test_what_was_orphaned_stays_with_the_pods_and_goes_with_the_last_of_them(team: Team) -> None:
    await team.apply(team.document(decode=2))
    await team.wait_settled("1P2D")
    team.agent.script = lambda _: Script(drain_s=1.0)
    before = left(team) - {"DisaggService/qwen"}
    async with Fence(team) as fence:
        await team.delete(propagation="Orphan")
        await team.wait(lambda: not team.of("DisaggService"), "the service is gone")
        await asyncio.sleep(3.0)
        assert left(team) == before, "as the person wished"
        assert not any(each["metadata"].get("ownerReferences") for each in team.of("Pod").values())
        for name in sorted(team.of("Pod")):
            await team.kube.delete("Pod", team.namespace, name)
        await team.wait(lambda: not left(team), "all but the Secret has gone, which the operator may not delete")
    fence.check()


async def test_a_namesake_takes_over_what_is_left_and_takes_nothing_from_pods_that_drain(team: Team) -> None:
    await team.apply(team.document(decode=2))
    await team.wait_settled("1P2D")
    old = {pod["metadata"]["uid"] for pod in team.pods()}
    first = team.of("Service")["qwen"]["metadata"]["uid"]
    team.agent.ends = False
    async with Fence(team) as fence:
        await team.delete()
        await team.wait(lambda: "qwen" not in team.of("DisaggService"), "the service is gone")
        await team.apply(team.document(decode=1, networkPolicy={"enabled": False}))

        def taken_over() -> bool:
            uid = team.of("DisaggService").get("qwen", {}).get("metadata", {}).get("uid", "")
            marks = {label(team.of("Service")[name], SERVICE_UID) for name in ("qwen", "qwen-members")}
            return bool(uid) and marks == {uid}

        await team.wait(taken_over, "the Services are its own")
        assert team.of("Service")["qwen"]["metadata"]["uid"] == first, "and the same: clients keep their address"
        await asyncio.sleep(2.0)
        assert old <= {pod["metadata"]["uid"] for pod in team.pods()}, "the old pods still drain"
    fence.check()
    team.agent.ends = True
    await team.wait(lambda: not team.of("NetworkPolicy"), "no pod is left that they were made for")
    await team.wait_settled("1P1D")
    assert not old & {pod["metadata"]["uid"] for pod in team.pods()}


def denial(name: str, namespace: str) -> tuple[Object, Object]:
    """What refuses all NetworkPolicies of a namespace, as a policy engine does."""
    at = {"apiVersion": "admissionregistration.k8s.io/v1"}
    rule = {"apiGroups": ["networking.k8s.io"], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"],
            "resources": ["networkpolicies"]}
    policy = at | {"kind": "ValidatingAdmissionPolicy", "metadata": {"name": name}, "spec": {
        "failurePolicy": "Fail", "matchConstraints": {"resourceRules": [rule]},
        "validations": [{"expression": "false", "message": "this team writes no policies"}]}}
    only = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    binding = at | {"kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": name}, "spec": {
        "policyName": name, "validationActions": ["Deny"], "matchResources": {"namespaceSelector": only}}}
    return policy, binding


async def allow(team: Team, name: str) -> None:
    """Take a denial back, the binding first; gone already is fine."""
    for plural in reversed(DENIALS):
        try:
            await team.kube.request("DELETE", f"{ADMISSION}/{plural}/{name}")
        except KubeError as error:
            if error.status != 404:
                raise


async def wait_denied(team: Team) -> None:
    """The API server hears of a policy a moment after it has taken it."""
    probe = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "probe"},
             "spec": {"podSelector": {}}}
    path = f"/apis/networking.k8s.io/v1/namespaces/{team.namespace}/networkpolicies"
    async with asyncio.timeout(120):
        while True:
            try:
                await team.kube.request("POST", path, probe, dryRun="All")
            except KubeError as error:
                if "this team writes no policies" in str(error):
                    return
                raise
            await asyncio.sleep(0.1)


async def deny(team: Team, name: str) -> None:
    """From now on."""
    for plural, body in zip(DENIALS, denial(name, team.namespace), strict=True):
        await team.kube.request("POST", f"{ADMISSION}/{plural}", body)
    await wait_denied(team)


async def test_nothing_is_made_of_a_document_whose_policies_a_policy_engine_denies(team: Team) -> None:
    name = f"deny-{team.namespace}"
    try:
        await deny(team, name)
        async with Fence(team, FENCE, first=True) as fence:
            await team.apply(team.document())
            await team.wait_condition("Valid", "False", words=("TemplateRejected", "this team writes no policies"))
            await asyncio.sleep(2.0)
            assert team.pods() == []
            await allow(team, name)
            await team.wait_settled("1P1D")
            await asyncio.sleep(1.0)
        fence.check()
    finally:
        await allow(team, name)


async def test_no_pod_is_made_while_a_policy_that_went_cannot_be_made_again(team: Team) -> None:
    name = f"deny-{team.namespace}"
    await team.apply(team.document())
    await team.wait_settled("1P1D")
    before = {pod["metadata"]["uid"] for pod in team.pods()}
    try:
        await deny(team, name)
        await team.kube.delete("NetworkPolicy", team.namespace, "qwen")
        await team.wait_condition("Degraded", words=("this team writes no policies",))
        await team.apply(team.document(decode=3))
        await team.wait_condition("Progressing", words=("Waiting", "NetworkPolicy qwen is not there yet"))
        await asyncio.sleep(2.0)
        assert {pod["metadata"]["uid"] for pod in team.pods()} == before, "who runs goes on, and nobody joins"
        await allow(team, name)
        await team.wait_settled("1P3D")
        assert set(team.left()) >= FENCE
    finally:
        await allow(team, name)


async def test_a_misspelt_field_of_a_policy_is_named_and_nothing_is_made_of_it(team: Team) -> None:
    """As in a group of pods, in which whoever reaches a port runs code."""
    wide = {"replicas": 1, "parallelism": {"tensor": 2, "pods": 2, "device": "none"}}
    typo = {"egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "port": 8443}]}
    await team.apply(team.document(prefill=wide, decode=wide, networkPolicy=typo))
    await team.wait_condition("Valid", "False", words=("port",))
    await asyncio.sleep(1.0)
    assert team.pods() == []
    right = {"egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": 8443}]}]}
    async with Fence(team, FENCE, first=True) as fence:
        await team.apply(team.document(prefill=wide, decode=wide, networkPolicy=right))
        await team.wait(lambda: len(team.ready()) == 4, "both groups are made")
        await asyncio.sleep(1.0)
    fence.check()


async def test_a_misspelt_field_of_a_template_is_named_and_the_pods_of_before_go_on(team: Team) -> None:
    await team.apply(team.document())
    await team.wait_settled("1P1D")
    before = {pod["metadata"]["uid"] for pod in team.pods()}
    typo = {"replicas": 1, "template": {"spec": {"nodeselector": {"pool": "gpus"}}}}
    await team.apply(team.document(decode=typo))
    await team.wait_condition("Valid", "False", words=("TemplateRejected", "a pod of decode", "nodeselector"))
    await asyncio.sleep(1.0)
    assert {pod["metadata"]["uid"] for pod in team.pods()} == before
