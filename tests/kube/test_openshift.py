"""A cluster that assigns users, as OpenShift does by its constraint restricted-v2: pods that name one are refused.

The API server is told the rules of that constraint as an admission policy. What it would fill in (a user of the namespace's
range) nobody here reads.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from kube_operator import OperatorProcess
from kube_team import Team
from testcluster.errors import CommandFailed

pytestmark = pytest.mark.timeout(1200)  # the first run on a machine builds Kubernetes
CONTAINERS = "object.spec.containers + (has(object.spec.initContainers) ? object.spec.initContainers : [])"
MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
NO = "unable to validate against any security context constraint"
RULES = {
    "runAsUser must be in the ranges: [1000660000, 1000669999]":
        f"(!has(object.spec.securityContext.runAsUser) || object.spec.securityContext.runAsUser >= 1000660000) && "
        f"({CONTAINERS}).all(c, !has(c.securityContext.runAsUser) || c.securityContext.runAsUser >= 1000660000)",
    "fsGroup: 65532 is not an allowed group":
        "!has(object.spec.securityContext.fsGroup) || object.spec.securityContext.fsGroup >= 1000660000",
    "Containers must drop ALL capabilities":
        f"({CONTAINERS}).all(c, has(c.securityContext.capabilities) && 'ALL' in c.securityContext.capabilities.drop && "
        "!has(c.securityContext.capabilities.add) && c.securityContext.allowPrivilegeEscalation == false)",
    "host namespaces and paths are not allowed":
        "!has(object.spec.hostNetwork) && !has(object.spec.hostIPC) && !has(object.spec.hostPID) && "
        "object.spec.volumes.all(v, !has(v.hostPath))",
}


FIXED_USER = {
    "securityContext": {"runAsUser": 65532}, "volumes": [{"name": "t", "emptyDir": {}}],
    "containers": [{"name": "c", "image": "i", "securityContext": {
        "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}}]}


@pytest.fixture
async def constrained(quiet_team: Team) -> AsyncIterator[Team]:
    """A namespace under the constraint."""
    name = quiet_team.namespace
    policy = {
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy", "metadata": {"name": name},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [
                {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}]},
            "validations": [{"expression": rule, "message": f"{NO}: {words}"} for words, rule in RULES.items()],
        },
    }
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": name},
        "spec": {"policyName": name, "validationActions": ["Deny"], "matchResources": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}},
    }
    for made in (policy, binding):
        await quiet_team.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(made))
    try:
        await quiet_team.kube.wait_refused(name, FIXED_USER, "runAsUser must be in the ranges")
        yield quiet_team
    finally:
        for made in (binding, policy):
            await quiet_team.kubectl("delete", str(made["kind"]), name, "--wait=false")


async def test_pods_that_name_a_user_are_refused_and_the_service_says_why(constrained: Team) -> None:
    team = constrained
    await team.operator.start()
    await team.apply(team.document())
    said = await team.wait_condition("Valid", "False", words=("TemplateRejected", "runAsUser must be in the ranges"))
    assert "unable to validate against any security context constraint" in said["message"]
    assert team.pods() == []


@pytest.mark.parametrize("placement", ["sidecar", "deployment"])
async def test_where_users_are_assigned_pods_of_engines_and_routers_are_taken(
    constrained: Team, operator_kubeconfig: Path, tmp_path: Path, placement: str
) -> None:
    team = constrained
    flags = ("--no-leader-election", "--pod-user=assigned")
    team.operator = OperatorProcess(operator_kubeconfig, tmp_path / "operator.log", *flags, namespace=team.namespace)
    await team.operator.start()
    try:
        await team.apply(team.document(decode=2, router={"placement": placement}))
        await team.wait_settled("1P2D")
        for pod in team.of("Pod").values():
            assert pod["spec"]["securityContext"].keys() & {"runAsUser", "runAsGroup", "fsGroup"} == set()
            assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    finally:
        await team.operator.kill()


@pytest.mark.parametrize(("folder", "taken"), [("base", False), ("overlays/openshift", True)])
async def test_the_operators_own_pod_is_taken_by_its_overlay(constrained: Team, folder: str, taken: bool) -> None:
    made = yaml.safe_load_all(await constrained.kubectl("kustomize", str(MANIFESTS / folder)))
    (template,) = [each["spec"]["template"] for each in made if each["kind"] == "Deployment"]
    template["spec"].pop("serviceAccountName")  # it is in another namespace
    metadata = {"name": "operator", **template["metadata"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    said = ""
    try:
        await constrained.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
    except CommandFailed as error:
        said = str(error)
    assert ("runAsUser must be in the ranges" in said) is not taken, said
    assert bool(said) is not taken, said
