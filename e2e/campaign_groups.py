"""``make campaign-groups-cluster``: an instance of two pods on a whole cluster with real engines.

TP2 over two pods prefills for TP1; an engine is killed and a pod is evicted, under traffic.

Not part of ``make test``: four engines' worth of processes on two cores take minutes to start, several times.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from service_in_cluster import ASK, Images, ServiceInCluster, asked, check
from testcluster.errors import CommandFailed
from testcluster.full import FullCluster
from testcluster.kubectl import wait_until

pytestmark = pytest.mark.timeout(1800)
BACK_S = 600
KILL = """
import os, signal
for pid in filter(str.isdigit, os.listdir("/proc")):
    if open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1] == "1":
        os.kill(int(pid), signal.SIGKILL)
"""
"""Kills what the launcher, the first process of its container, has started."""


class GroupInCluster(ServiceInCluster):
    """``wide``: prefill of two pods."""

    name = "wide"
    namespace = "groups"

    def document(self) -> dict[str, Any]:
        made = super().document()
        made["apiVersion"] = "xpyd.dev/v1beta1"
        made["spec"]["prefill"] |= {"parallelism": {"tensor": 2, "pods": 2, "device": "none"}}
        # With tensor ranks vLLM for CPUs compiles at the first request, and these images have no compiler.
        made["spec"]["engine"].setdefault("env", []).append({"name": "TORCHDYNAMO_DISABLE", "value": "1"})
        made["spec"]["decode"] = {"replicas": 1, "resources": {}, "template": made["spec"]["decode"]["template"]}
        return made

    def members(self) -> list[str]:
        """The pods of the group that stay, the leader first."""
        return self.pods("prefill")

    def metric(self, pod: str, name: str) -> float:
        """The sum over the series of a metric of an engine."""
        program = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8000/metrics').read().decode())"
        text = self.kubectl("exec", pod, "-c", "main", "--", "python3", "-c", program)
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"{name}{{"))

    def life(self, pod: str) -> str:
        """What the agent says that its group runs."""
        said = self.kubectl("exec", pod, "-c", "sidecar", "--", "python3", "-m", "xpyd_sidecar.agent.ask", "status")
        return str(json.loads(said)["group"]["life"])

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Where something is wrong, what the members said of it."""
        try:
            yield
        except BaseException:
            for pod, container in itertools.product(self.pods(), ("main", "sidecar")):
                with contextlib.suppress(CommandFailed):
                    said = self.kubectl("logs", pod, "-c", container, "--tail=400")
                    print(f"--- {pod} {container}", *(line for line in said.splitlines() if "GET /" not in line), sep="\n")
            raise

    def answers(self) -> bool:
        """All members run one life, and both instances serve."""
        try:
            lives = {self.life(pod) for pod in self.members()}
        except CommandFailed:
            return False
        return len(lives) == 1 and "" not in lives and self.get(f"dsvc/{self.name}")["status"].get("ready") == "1P1D"


@pytest.fixture(scope="module")
def service(operator: FullCluster, images: Images) -> Iterator[GroupInCluster]:
    operator.kubectl("-n", "xpyd-system", "set", "env", "deployment/xpyd-operator", "XPYD_MULTI_POD=true")
    operator.kubectl("-n", "xpyd-system", "rollout", "status", "deployment/xpyd-operator", "--timeout=120s", timeout_s=130)
    service = GroupInCluster(operator, images)
    service.apply()
    try:
        service.wait_ready("1P1D", BACK_S)
        yield service
    finally:
        service.remove()


def test_two_pods_prefill_as_one_engine_and_the_answer_is_that_of_decode_alone(service: GroupInCluster) -> None:
    """Also the first ones of a life, while kernels are compiled."""
    assert service.members() == ["wide-e0-0", "wide-e0-1"]
    life = service.life("wide-e0-0")
    url = service.get(f"dsvc/{service.name}")["status"]["url"]
    (decode,) = service.pods("decode")
    with service.explained():
        through, again = asked(service, f"{url}/v1", f"{url}/v1")
        said = service.kubectl("exec", decode, "-c", "main", "--", "python3", "-c", ASK, "http://127.0.0.1:8000/v1")
        assert through == again == json.loads(said)["choices"][0]["message"]["content"]
        with service.traffic() as ended:
            time.sleep(20)
        check(ended)
        assert service.metric("wide-e0-0", "xpyd_kv_pushed_bytes_total") > 0, "the leader counts for both ranks"
        assert service.life("wide-e0-0") == life, "nothing has ended"


def test_a_killed_worker_ends_the_round_and_the_group_comes_back_in_its_pods(service: GroupInCluster) -> None:
    before = {pod: standing(service, pod) for pod in service.members()}
    life = service.life("wide-e0-0")
    with service.explained(), service.traffic() as ended:
        service.kubectl("exec", "wide-e0-1", "-c", "main", "--", "python3", "-c", KILL)
        wait_until(lambda: service.life("wide-e0-0") != life, 60, "the round is over")
        wait_until(service.answers, BACK_S, "the group is back")
    check(ended)
    assert {pod: standing(service, pod) for pod in service.members()} == before
    assert service.life("wide-e0-0") not in ("", life)


def test_an_evicted_follower_takes_its_group_along_and_no_request_fails(service: GroupInCluster) -> None:
    named = {"name": "wide-e0-1", "namespace": service.namespace}
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": named}
    path = f"/api/v1/namespaces/{service.namespace}/pods/wide-e0-1/eviction"
    with service.explained(), service.traffic() as ended:
        service.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
        wait_until(lambda: not {"wide-e0-0", "wide-e0-1"} & set(service.members()), 60, "both are to go")
        wait_until(lambda: len(service.members()) == 2 and service.answers(), BACK_S, "another group serves")
    check(ended)


def standing(service: GroupInCluster, pod: str) -> tuple[str, int]:
    """Of a pod, and how often its engine's container began again."""
    found = service.get("pod", pod)
    (main,) = [each for each in found["status"]["containerStatuses"] if each["name"] == "main"]
    return str(found["metadata"]["uid"]), int(main["restartCount"])
