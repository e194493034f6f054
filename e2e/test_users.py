"""Users that a cluster assigns, as OpenShift does: a number that stands in no image's list of users, and root's group.

Kubelets run what the constraint would have filled in; tests of rendering say that pods name no user by themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from service_in_cluster import ASK, Images, ServiceInCluster
from testcluster.full import FullCluster
from testcluster.kubectl import wait_until

pytestmark = pytest.mark.timeout(900)
SYSTEM = "xpyd-system"
USER = 1000660000
ASSIGNED = {"runAsUser": USER, "runAsGroup": 0, "fsGroup": USER}
WHO = "import os; print(os.getuid(), os.getgid(), sorted(set(os.getgroups()) - {0}))"


class AnyUser(ServiceInCluster):
    """The same service, run by the assigned user."""

    name = "anyone"
    namespace = "assigned"

    def document(self) -> dict[str, Any]:
        document = super().document()
        for role in ("prefill", "decode"):
            document["spec"][role]["template"]["spec"]["securityContext"] = ASSIGNED
        return document


@pytest.fixture
def anyone(operator: FullCluster, images: Images) -> Iterator[AnyUser]:
    service = AnyUser(operator, images)
    service.apply()
    try:
        yield service
    finally:
        service.remove()


def test_the_operator_runs_as_any_user_and_engines_and_routers_too(anyone: AnyUser, operator: FullCluster) -> None:
    """The operator stays as it is then, and so this file is the last one; nor can another cluster begin beside this one."""
    security = {"spec": {"template": {"spec": {"securityContext": {"runAsUser": USER, "runAsGroup": 0}}}}}
    operator.kubectl("patch", "-n", SYSTEM, "deployment/xpyd-operator", "--patch", json.dumps(security))
    operator.kubectl("rollout", "status", "-n", SYSTEM, "deployment/xpyd-operator", "--timeout=300s", timeout_s=310)
    anyone.wait_ready("1P1D")
    found = {}
    for pod in anyone.pods():
        for container in ("main", "sidecar"):
            found[pod, container] = anyone.kubectl("exec", pod, "-c", container, "--", "python3", "-c", WHO).strip()
    assert set(found.values()) == {f"{USER} 0 [{USER}]"}, found
    url = anyone.get(f"dsvc/{anyone.name}")["status"]["url"]
    answer = json.loads(anyone.python("clients", "ask-anyone", ASK, f"{url}/v1", timeout_s=240))
    assert answer["choices"][0]["message"]["content"].strip()
    (prefill,) = anyone.pods("prefill")
    wait_until(lambda: anyone.metric(prefill, "xpyd_kv_pushed_bytes_total") > 0, 120, "KV went from one to the other")
