"""The light test cluster keeps what it promises to the tests that stand on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kube_client import Kube
from kube_cluster import apply_crds, away, requests, start_light
from testcluster import remains
from testcluster.errors import ClusterError, CommandFailed, ComponentFailed, InUse
from testcluster.kubectl import wait_until
from testcluster.light import LightCluster
from testcluster.runner import Component
from testcluster.state import Folder

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples/kubernetes").glob("*.yaml"))
pytestmark = [pytest.mark.test_all, pytest.mark.timeout(1200)]  # the first run on a machine builds Kubernetes


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightCluster]:
    with start_light(tmp_path_factory) as light:
        yield light


def test_every_example_is_admitted(cluster: LightCluster) -> None:
    assert EXAMPLES
    for path in EXAMPLES:
        cluster.kubectl("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", str(path))


def test_a_wrong_field_is_refused(cluster: LightCluster) -> None:
    wrong = EXAMPLES[0].read_text().replace("replicas: 1", "replicas: -1", 1)
    with pytest.raises(CommandFailed, match="replicas"):
        cluster.kubectl("apply", "--server-side", "-f", "-", stdin=wrong)


async def test_state_outlives_each_component(cluster: LightCluster) -> None:
    cluster.kubectl("create", "configmap", "kept", "--from-literal=a=1")
    port = cluster.kubectl("config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}")
    for component in cluster.components():
        cluster.kill(component)
        with pytest.raises(ClusterError, match="does not run"):
            cluster.pid(component)
        cluster.start(component)
    async with away(cluster):
        with pytest.raises(CommandFailed, match="refused"):
            cluster.kubectl("get", "configmap", "kept")
    assert cluster.kubectl.get("configmap", "kept")["data"] == {"a": "1"}
    assert cluster.kubectl("config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}") == port


async def test_a_paused_api_server_keeps_its_connections_and_answers_later(cluster: LightCluster) -> None:
    async with away(cluster, paused=True):
        with pytest.raises(CommandFailed, match="did not end"):
            cluster.kubectl("get", "namespaces", timeout_s=2)
    assert "default" in cluster.kubectl("get", "namespaces")


def test_the_audit_log_names_user_verb_and_resource_once(cluster: LightCluster) -> None:
    cluster.kubectl("create", "serviceaccount", "auditor")
    cluster.kubectl("create", "role", "reader", "--verb=get,list", "--resource=pods")
    cluster.kubectl("create", "rolebinding", "reader", "--role=reader", "--serviceaccount=default:auditor")
    auditor = cluster.kubectl_as(cluster.kubeconfig_for("auditor"))
    user = "system:serviceaccount:default:auditor"
    wait_until(lambda: bool(auditor("auth", "can-i", "list", "pods")), 240, "the role works")
    auditor("get", "--raw", "/api/v1/namespaces/default/pods")
    with pytest.raises(CommandFailed, match="forbidden"):
        auditor("get", "--raw", "/api/v1/namespaces/default/secrets")

    def seen() -> list[tuple[str, str, int]]:
        """Of what was asked itself, and not whether it may be asked."""
        return [(each.verb, each.object.resource, each.answer.code) for each in requests(cluster, user)
                if each.object.resource in {"pods", "secrets"}]

    wait_until(lambda: len(seen()) >= 2, 60, "both stand in the log")  # a line may come after its answer
    assert seen() == [("list", "pods", 200), ("list", "secrets", 403)]


async def test_pod_security_is_enforced_where_a_namespace_asks_for_it(cluster: LightCluster) -> None:
    cluster.kubectl("create", "namespace", "strict")
    cluster.kubectl("label", "namespace", "strict", "pod-security.kubernetes.io/enforce=restricted")
    wait_until(lambda: bool(cluster.kubectl("get", "serviceaccount", "default", "-n", "strict")), 240, "its account")
    loose = {"hostNetwork": True, "containers": [{"name": "c", "image": "none"}]}
    async with Kube(cluster.kubeconfig) as kube:
        await kube.wait_refused("strict", loose, "violates PodSecurity")
    with pytest.raises(CommandFailed, match="violates PodSecurity"):
        cluster.kubectl("run", "loose", "-n", "strict", "--image=none", "--privileged")


def test_up_heals_what_is_dead_and_leaves_what_lives(cluster: LightCluster) -> None:
    etcd = cluster.pid("etcd")
    cluster.kill("kube-apiserver")
    assert cluster.up() == ["kube-apiserver"]
    assert cluster.up() == []
    assert cluster.pid("etcd") == etcd


def test_two_clusters_side_by_side_and_fake_nodes_that_run_pods(
    cluster: LightCluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with start_light(tmp_path_factory, kwok=True) as other:
        other.add_nodes(2, {"nvidia.com/gpu": "8"}, labels={"zone": "a"})
        other.kubectl("create", "deployment", "busy", "--image=none", "--replicas=6")
        other.kubectl("rollout", "status", "deployment/busy", "--timeout=240s", timeout_s=250)
        pods = other.kubectl.get("pods", "-l", "app=busy")["items"]
        assert {pod["spec"]["nodeName"] for pod in pods} == {"fake-0", "fake-1"}
        assert len({pod["status"]["podIP"] for pod in pods}) == 6
        other.kubectl("delete", "pods", "--all", "--timeout=100s")
        assert cluster.kubectl("get", "nodes", "-o", "name") == ""
        assert other.folder.path != cluster.folder.path
    assert other.leftovers() == []
    assert cluster.leftovers() != []


def test_everything_killed_is_started_again_and_removed_without_a_record(tmp_path: Path) -> None:
    cluster = LightCluster(tmp_path / "lost")
    cluster.up()
    for component in cluster.components():
        os.kill(cluster.pid(component), signal.SIGKILL)
    wait_until(lambda: not remains.processes(cluster.folder), 120, "what was killed has ended")
    assert set(cluster.up()) == set(cluster.components())
    pids = [cluster.pid(component) for component in cluster.components()]
    (cluster.folder / "cluster.json").unlink()
    assert len(cluster.leftovers()) == len(pids)
    cluster.down()
    assert cluster.leftovers() == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert {path.name for path in cluster.folder.path.iterdir()} == {"lock", "logs"}


def test_down_after_kill_9_of_everything(tmp_path: Path) -> None:
    cluster = LightCluster(tmp_path / "killed")
    cluster.up()
    for pid in remains.processes(cluster.folder):
        os.kill(pid, signal.SIGKILL)
    cluster.down()
    assert cluster.leftovers() == []
    cluster.down()


def test_a_cluster_ends_with_its_owner_even_after_kill_9(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "owned")
    program = ("import sys, pathlib; from testcluster.light import LightCluster\n"
               "with LightCluster(pathlib.Path(sys.argv[1])): print('up', flush=True); sys.stdin.read()")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program, str(folder.path)], env=environment, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        assert len(remains.leftovers(folder)) == 3
        owner.kill()
    end = time.monotonic() + 120
    while remains.leftovers(folder):
        assert time.monotonic() < end, remains.leftovers(folder)
        time.sleep(0.1)


def test_an_error_quotes_the_log(tmp_path: Path, cluster: LightCluster) -> None:
    broken = Component("broken", ["sh", "-c", "echo no such luck; exit 3"], lambda: "not there")
    with pytest.raises(ComponentFailed, match="no such luck"):
        cluster._run.start(broken)
    with pytest.raises(ClusterError, match="there is no kubelet in this cluster"):
        cluster.start("kubelet")


def test_a_folder_holds_one_kind_of_cluster(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text('{"profile": "full", "options": {}}')
    with pytest.raises(InUse, match="holds a full cluster"):
        LightCluster(tmp_path).up()
    (tmp_path / "cluster.json").write_text('{"profile": "huge"}')
    with pytest.raises(ClusterError, match=r"cluster\.json"):
        LightCluster(tmp_path).up()


def test_fake_nodes_need_kwok(cluster: LightCluster) -> None:
    with pytest.raises(ClusterError, match="kwok=True"):
        cluster.add_nodes(1)
    apply_crds(cluster)
