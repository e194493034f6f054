"""Routers in pods of their own, on a real kubelet and without engines: why they do not come, and what brings them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from testcluster.errors import CommandFailed
from testcluster.full import FullCluster
from testcluster.kubectl import wait_until

pytestmark = pytest.mark.timeout(600)
NAMESPACE, NAME = "routers", "alone"
NO_IMAGE = "localhost/nobody-has-this:1"


def document(**router: Any) -> dict[str, Any]:
    """Engines never start, since their image is not there."""
    return {
        "apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService", "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {
            "model": {"source": "org/tiny"},
            "engine": {"image": NO_IMAGE},
            "template": {"spec": {"containers": [{"name": "main", "imagePullPolicy": "Never"}]}},
            "prefill": {"replicas": 0}, "decode": {"replicas": 1, "resources": {}},
            "router": {"placement": "deployment", "replicas": 1, **router},
        },
    }


@pytest.fixture(scope="module")
def apart(operator: FullCluster) -> Iterator[FullCluster]:
    """A namespace at the level ``restricted``."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    operator.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}})
    try:
        yield operator
    finally:
        with contextlib.suppress(CommandFailed):
            operator.kubectl("delete", "namespace", NAMESPACE, "--timeout=120s", timeout_s=130)


def condition(cluster: FullCluster, kind: str) -> dict[str, Any]:
    status = cluster.kubectl.get("-n", NAMESPACE, f"dsvc/{NAME}").get("status") or {}
    return next((each for each in status.get("conditions", ()) if each["type"] == kind), {"message": "", "reason": ""})


def wait_said(cluster: FullCluster, kind: str, *words: str) -> dict[str, Any]:
    """Until a condition says all of that."""
    said: dict[str, Any] = {}

    def says() -> bool:
        said.update(condition(cluster, kind))
        return all(each in json.dumps(said) for each in words)

    wait_until(says, 240, f"{kind} says {words}")
    return said


def running(cluster: FullCluster) -> list[dict[str, Any]]:
    """Pods of routers."""
    found = cluster.kubectl.get("-n", NAMESPACE, "pods", "-l", "app.kubernetes.io/component=router")["items"]
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] == "Running"]


def test_a_container_whose_image_is_not_there_keeps_a_router_away_and_is_named(apart: FullCluster) -> None:
    restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    waits = {"name": "waits", "image": NO_IMAGE, "imagePullPolicy": "Never", "securityContext": restricted}
    apart.kubectl.apply(document(template={"spec": {"initContainers": [waits]}}))
    said = wait_said(apart, "Degraded", "container waits of pod alone-router-", NO_IMAGE)
    assert "ImagePull" in said["message"] + said["reason"]


def test_a_router_that_no_node_takes_is_named(apart: FullCluster) -> None:
    apart.kubectl.apply(document(template={"spec": {"nodeSelector": {"nowhere": "at-all"}}}))
    wait_said(apart, "Progressing", "no node takes pod alone-router-", "didn't match Pod's node affin")


def test_what_the_namespace_forbids_is_a_fault_of_the_document(apart: FullCluster) -> None:
    apart.kubectl.apply(document(template={"spec": {"hostPID": True}}))
    said = wait_said(apart, "Valid", "TemplateRejected", "a pod of a router")
    assert "violates PodSecurity" in said["message"]


def test_a_template_brings_what_a_router_needs(apart: FullCluster) -> None:
    """Any uid of the range that the namespace has, as where random ones are given; and it answers, also with 503."""
    template = {"spec": {"securityContext": {"runAsUser": 1234567, "runAsGroup": 0, "fsGroup": 1234567},
                         "imagePullSecrets": [{"name": "not-there"}], "tolerations": [{"operator": "Exists"}]}}
    apart.kubectl.apply(document(resources={"requests": {"cpu": "10m", "memory": "64Mi"}}, template=template))
    # What could not start before stays beside it: without decode the new one is not ready, and the Deployment waits.
    wait_until(lambda: running(apart) != [], 120, "a router runs")
    (pod,) = running(apart)
    (container,) = pod["spec"]["containers"]
    assert container["resources"] == {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "1Gi"}}
    name = pod["metadata"]["name"]
    program = ("import urllib.request, urllib.error, os\n"
               "print(os.getuid(), urllib.request.urlopen('http://127.0.0.1:10001/health').status)\n"
               "try: urllib.request.urlopen('http://[::1]:10001/ready')\n"
               "except urllib.error.HTTPError as error: print(error.code, error.read().decode())\n")
    run = ("-n", NAMESPACE, "exec", name, "--", "python3", "-c", program)

    def said() -> str:
        with contextlib.suppress(CommandFailed):
            return apart.kubectl(*run)
        return ""

    wait_until(lambda: re.match(r"1234567 200\n503 ", said()) is not None, 120, "the router answers, as that user")
    degraded = wait_said(apart, "Degraded", "alone-e0")
    assert name not in degraded["message"], "nothing is wrong with a router that waits for engines"
    wait_until(lambda: condition(apart, "Ready")["reason"] == "ImagePull", 120, "what lacks is decode")
