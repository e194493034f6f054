"""``make campaign-groups-cluster``: an instance of two pods on a whole cluster with real engines.

TP2 over two pods prefills for TP1; an engine is killed, a pod is evicted, a node with two groups is drained, and a kubelet
is away, under traffic.

Not part of ``make test``: four engines' worth of processes on two cores take minutes to start, several times.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

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

    def answers(self, groups: int = 1) -> bool:
        """The members of each group run one life, and all instances serve."""
        try:
            lives = {(pod.rpartition("-")[0], self.life(pod)) for pod in self.members()}
        except CommandFailed:
            return False
        whole = len(lives) == groups and all(life for _, life in lives)
        return whole and self.get(f"dsvc/{self.name}")["status"].get("ready") == f"{groups}P1D"

    def want(self, groups: int) -> None:
        """So many groups from now on."""
        patch = {"spec": {"prefill": {"replicas": groups}}}
        self.kubectl("patch", f"dsvc/{self.name}", "--type=merge", "-p", json.dumps(patch))
        wait_until(lambda: self.answers(groups) and len(self.members()) == 2 * groups, BACK_S, f"{groups} groups serve")

    def ready(self) -> dict[str, bool]:
        """By group: whether all of its pods are ready, of those that are there."""
        found: dict[str, bool] = {}
        for pod in self.get("pods", "-l", f"xpyd.dev/service={self.name},xpyd.dev/role=prefill")["items"]:
            conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions", ())}
            group = pod["metadata"]["labels"]["xpyd.dev/instance"]
            found[group] = found.get(group, True) and conditions.get("Ready") == "True"
        return found

    def uids(self, *, ending: bool = True) -> set[str]:
        """Of all members, or of those that stay."""
        found = self.get("pods", "-l", f"xpyd.dev/service={self.name},xpyd.dev/role=prefill")["items"]
        return {str(pod["metadata"]["uid"]) for pod in found if ending or "deletionTimestamp" not in pod["metadata"]}


Wide = TypeVar("Wide", bound=GroupInCluster)


@contextlib.contextmanager
def served(service: Wide) -> Iterator[Wide]:
    """It serves as 1P1D, and is removed in the end."""
    service.apply()
    try:
        service.wait_ready("1P1D", BACK_S)
        yield service
    finally:
        service.remove()


@pytest.fixture(scope="module")
def service(operator: FullCluster, images: Images) -> Iterator[GroupInCluster]:
    operator.kubectl("-n", "xpyd-system", "set", "env", "deployment/xpyd-operator", "XPYD_MULTI_POD=true")
    operator.kubectl("-n", "xpyd-system", "rollout", "status", "deployment/xpyd-operator", "--timeout=120s", timeout_s=130)
    with served(GroupInCluster(operator, images)) as service:
        yield service


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


def test_a_drained_node_gives_up_one_group_after_the_other_and_no_request_fails(service: GroupInCluster) -> None:
    """``kubectl drain``. There is one node, which takes new pods again at once, as another node would."""
    service.want(2)
    before = service.uids()
    (node,) = service.cluster.kubectl.get("nodes")["items"]
    name = node["metadata"]["name"]
    drain = ("drain", name, f"--pod-selector=xpyd.dev/service={service.name},xpyd.dev/member", "--delete-emptydir-data",
             f"--timeout={2 * BACK_S}s")
    least = 2
    with service.explained(), service.traffic() as ended, ThreadPoolExecutor(1) as pool:
        drained = pool.submit(service.cluster.kubectl, *drain, timeout_s=2 * BACK_S + 10.0)
        wait_until(lambda: service.cluster.kubectl.get(f"node/{name}")["spec"].get("unschedulable"), 30, "it is cordoned")
        service.cluster.kubectl("uncordon", name)
        while not drained.done():
            least = min(least, sum(service.ready().values()))
            time.sleep(1.0)
        drained.result()
        assert not before & service.uids(), "all of them were evicted"
        wait_until(lambda: service.answers(2), BACK_S, "both groups are back")
    check(ended)
    assert least == 1, "the other group served all the time, and the drain was seen"
    service.want(1)


def test_while_the_kubelet_is_away_a_group_that_serves_stays_and_one_that_does_not_is_made_anew(
    service: GroupInCluster
) -> None:
    """A node that does not answer (NodeLost). Engines and network live on, so that only what was killed is missing."""
    before = service.uids()
    spaces = [service.kubectl("exec", pod, "-c", "main", "--", "readlink", "/proc/1/ns/pid").strip()
              for pod in service.members()]
    with service.explained(), service.traffic() as ended:
        service.cluster.stop("kubelet")
        try:
            wait_until(lambda: not any(service.ready().values()), 120, "the node is lost")
            time.sleep(30)
            assert service.uids() == before, "it serves, so nothing is done to it"
            for pid in of_namespaces(spaces):
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda: len(service.members()) == 2 and not before & service.uids(ending=False), 120, "a new group")
        finally:
            service.cluster.start("kubelet")
        wait_until(service.answers, BACK_S, "the new group serves")
    check(ended)
    wait_until(lambda: not before & service.uids(), 120, "the old one is gone")


def of_namespaces(spaces: list[str]) -> list[int]:
    """Processes of this host, all containers' among them, that are in one of these namespaces of process ids."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and os.readlink(folder / "ns/pid") in spaces:
                found.append(int(folder.name))
    return found


def standing(service: GroupInCluster, pod: str) -> tuple[str, int]:
    """Of a pod, and how often its engine's container began again."""
    found = service.get("pod", pod)
    (main,) = [each for each in found["status"]["containerStatuses"] if each["name"] == "main"]
    return str(found["metadata"]["uid"]), int(main["restartCount"])
