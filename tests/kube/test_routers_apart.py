"""Routers in pods of their own: what the document says of their pods, and what the status says where they do not come."""

from __future__ import annotations

from typing import Any

import pytest
from kube_client import WITH_NIC, Object
from kube_team import Team
from kube_watched import label
from node_agent import ROLE, SERVICE, Script

pytestmark = pytest.mark.timeout(1200)  # the first run on a machine builds Kubernetes
QUOTA = """
apiVersion: v1
kind: ResourceQuota
metadata: {name: none}
spec: {hard: {requests.example.com/nic: "0"}}
"""


def apart(**router: Any) -> Object:
    return {"placement": "deployment", "replicas": 1} | router


def engines_alone(script: Script) -> object:
    """A script for routers; engines come up."""
    return lambda pod: Script() if label(pod, ROLE) else script


def routers(team: Team) -> list[Object]:
    return [pod for pod in team.of("Pod").values() if label(pod, SERVICE) == "qwen" and not label(pod, ROLE)]


async def test_an_image_that_cannot_be_pulled_is_named(team: Team) -> None:
    team.agent.script = engines_alone(Script(trouble="pull", words="pull access denied"))  # type: ignore[assignment]
    await team.apply(team.document(router=apart()))
    said = await team.wait_condition("Degraded", words=("ImagePull", "container router of pod qwen-router-"))
    assert said["reason"] == "ImagePull"
    for words in ("pull access denied", "spec.router.template.spec.imagePullSecrets"):
        assert words in said["message"]
    ready = await team.wait_condition("Ready", "False", words=("pull access denied",))
    assert ready["reason"] in ("RouterNotReady", "NoRouter")
    assert "decode instance" not in ready["message"]
    team.agent.script = lambda _: Script()
    team.agent.again()
    await team.wait_settled("1P1D")


async def test_a_router_that_no_node_takes_is_named(team: Team) -> None:
    words = "0/3 nodes are available: 3 node(s) had untolerated taint {dedicated: gpu}."
    team.agent.script = engines_alone(Script(trouble="unschedulable", words=words, ago_s=300))  # type: ignore[assignment]
    await team.apply(team.document(router=apart()))
    said = await team.wait_condition("Progressing", words=("qwen-router-", "untolerated taint"))
    assert "spec.router.template" in said["message"]
    await team.wait_condition("Ready", "False", words=("NoRouter", "untolerated taint"))


async def test_what_a_quota_keeps_from_being_made_is_named(team: Team) -> None:
    """On the real Deployment controller."""
    await team.kubectl("apply", "-f", "-", stdin=QUOTA)
    await team.kube.wait_refused(team.namespace, WITH_NIC, "exceeded quota: none")
    nic = {"limits": {"example.com/nic": 1}}
    await team.apply(team.document(router=apart(resources=nic)))
    said = await team.wait_condition("Degraded", words=("Deployment qwen-router cannot make pods", "exceeded quota: none"))
    assert said["reason"] == "RouterPodsRefused"
    await team.wait_condition("Ready", "False", words=("NoRouter", "exceeded quota: none"))
    assert team.condition("Valid")["status"] == "True", "a quota says nothing against the document"
    assert routers(team) == []
    await team.apply(team.document(router=apart()))
    await team.wait_settled("1P1D")


async def test_a_template_reaches_the_pods_and_one_that_is_refused_changes_nothing(team: Team) -> None:
    spec = {"imagePullSecrets": [{"name": "registry"}], "tolerations": [{"operator": "Exists"}],
            "securityContext": {"runAsUser": 1000, "fsGroup": None}}
    await team.apply(team.document(router=apart(template={"spec": spec})))
    await team.wait_settled("1P1D")
    (router,) = routers(team)
    assert router["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert router["spec"]["securityContext"]["runAsUser"] == 1000
    assert "fsGroup" not in router["spec"]["securityContext"]
    assert router["spec"]["containers"][0]["resources"]["limits"] == {"memory": "1Gi"}
    engines = {pod["metadata"]["uid"] for pod in team.pods()}
    version = team.of("Deployment")["qwen-router"]["metadata"]["generation"]

    wrong = {"spec": spec | {"tolerations": [{"key": "a", "operator": "Never"}]}}
    await team.apply(team.document(router=apart(template=wrong)))
    said = await team.wait_condition("Valid", "False", words=("TemplateRejected", "a pod of a router"))
    assert "operator" in said["message"], "the API server's own words"
    assert team.of("Deployment")["qwen-router"]["metadata"]["generation"] == version, "nothing was written again and again"
    assert team.condition("Ready")["status"] == "True"

    await team.apply(team.document(router=apart(template={"spec": spec | {"priorityClassName": ""}})))
    await team.wait_settled("1P1D")
    assert {pod["metadata"]["uid"] for pod in team.pods()} == engines, "pods of engines do not know of it"


async def test_an_autoscaler_owns_the_count_of_routers_where_the_document_has_none(team: Team) -> None:
    """On real server-side apply: what is scaled through ``/scale`` stays when the operator applies the rest."""
    def count() -> int:
        return int(team.of("Deployment")["qwen-router"]["spec"]["replicas"])

    plain = {"placement": "deployment"}
    await team.apply(team.document(router=plain | {"replicas": 1}))
    await team.wait_settled("1P1D")
    await team.apply(team.document(router=plain))
    await team.wait_settled("1P1D")
    assert count() == 1, "a count that the document no longer has stays, and does not go to a default"
    await team.apply(team.document(router=plain | {"resources": {"limits": {"cpu": 2}}}))
    await team.wait_settled("1P1D")
    assert count() == 1, "also where nobody else has written it since"

    await team.kubectl("scale", "deployment", "qwen-router", "--replicas=3")
    await team.wait(lambda: count() == 3 and len(routers(team)) == 3, "it is scaled")
    await team.apply(team.document(router=plain | {"resources": {"limits": {"cpu": 1}}}))
    await team.wait(lambda: team.current() and "'cpu': '1'" in str(team.of("Deployment")["qwen-router"]["spec"]),
                    "the Deployment has the change")
    await team.wait_settled("1P1D")
    assert count() == 3
    await team.apply(team.document(router=plain | {"replicas": 2}))
    await team.wait(lambda: count() == 2, "a count of the document is put there")


async def test_a_service_begins_with_two_routers_that_no_document_counts(team: Team) -> None:
    await team.apply(team.document(router={"placement": "deployment"}))
    await team.wait_settled("1P1D")
    assert team.of("Deployment")["qwen-router"]["spec"]["replicas"] == 2
    assert team.of("PodDisruptionBudget")["qwen-router"]["spec"].get("maxUnavailable") == 1


async def test_services_prefer_both_families_and_take_the_one_that_is_there(team: Team) -> None:
    await team.apply(team.document())
    await team.wait_settled("1P1D")
    for name in ("qwen", "qwen-members"):
        spec = team.of("Service")[name]["spec"]
        assert (spec["ipFamilyPolicy"], spec["ipFamilies"]) == ("PreferDualStack", ["IPv4"])
