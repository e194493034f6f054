"""The full test cluster runs pods as a real one does, and leaves the host as it was."""

from __future__ import annotations

import contextlib
import http.server
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testcluster import build, images, network, packages, remains
from testcluster.errors import ClusterError, CommandFailed, InUse
from testcluster.full import FullCluster
from testcluster.kubectl import wait_until

from xpyd_sidecar.contract.ids import join_host_port

IMAGE = "localhost/netprobe:1"
PORT = 8000
POD_S = 100
WAIT_S = 240
"""For what comes at once where there is a processor for it."""
GRACE_S = 100
pytestmark = pytest.mark.timeout(1800)  # the first run on a machine builds Kubernetes


def pod(name: str, labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    container = {"name": "main", "image": IMAGE, "imagePullPolicy": "Never", "args": ["serve", f":{PORT}", name],
                 "readinessProbe": {"httpGet": {"path": "/", "port": PORT}, "periodSeconds": 1},
                 **spec.pop("container", {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name, **(labels or {})}},
            "spec": {"containers": [container], "terminationGracePeriodSeconds": 20, **spec}}


def mount_points() -> list[str]:
    return [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]


def host_state() -> dict[str, Any]:
    """What a cluster could have changed on the host."""

    def said(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout

    return {
        "links": {path.name for path in remains.LINKS.iterdir()},
        "routes": said("ip", "-4", "route", "show", "table", "all"),
        "routes of IPv6": said("ip", "-6", "route", "show", "table", "all"),
        "rules": [line for program in ("iptables-save", "ip6tables-save") for line in said(program).splitlines()
                  if not line.startswith("#")],
        "tables": said("nft", "list", "tables"),
        "mounts": [point for point in mount_points() if point.startswith(("/run/", "/var/", "/sys/"))],
        "groups": {str(path) for root in remains.hierarchies() for path in root.glob("*") if path.is_dir()},
        "places": [path for path in ("/run/containerd", "/var/lib/kubelet", "/var/lib/cni", "/var/log/pods", "/run/netns",
                                     "/opt/containerd", "/etc/cni") if Path(path).exists()],
        "forwarding": [Path("/proc/sys/net", each).read_text() for each in ("ipv4/ip_forward", "ipv6/conf/all/forwarding")],
    }


@pytest.fixture(scope="module")
def before() -> dict[str, Any]:
    """The host's state, with the distribution's packages installed: its own commands read it, and a cluster leaves them."""
    packages.ensure()
    return host_state()


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory, before: dict[str, Any]) -> Iterator[FullCluster]:
    program = build.ensure(["netprobe"])["netprobe"] / "netprobe"
    archive = images.assemble(tmp_path_factory.mktemp("image") / "netprobe.tar", IMAGE, program, ["/netprobe"])
    with FullCluster(tmp_path_factory.mktemp("full"), kwok=True) as cluster:
        assert cluster.import_image(archive) == [IMAGE]
        service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "server"},
                   "spec": {"ipFamilyPolicy": "PreferDualStack", "selector": {"app": "server"},
                            "ports": [{"port": 80, "targetPort": PORT}]}}
        cluster.kubectl.apply(pod("server"), pod("friend", {"role": "friend"}), pod("stranger"), service)
        cluster.kubectl("wait", "--for=condition=Ready", "pod", "--all", f"--timeout={POD_S}s")
        wait_until(lambda: ask(cluster, "friend", "http://server/") == "server", WAIT_S, "kube-proxy knows the Service")
        yield cluster


def ask(cluster: FullCluster, client: str, url: str, limit: str = "30s") -> str:
    return cluster.kubectl("exec", client, "--", "/netprobe", "get", url, limit).strip()


def refused(cluster: FullCluster, client: str, url: str) -> bool:
    """Whether a policy drops the connection: a server that is away would refuse it at once."""
    try:
        return ask(cluster, client, url, "3s") == ""
    except CommandFailed as error:
        if "exceeded" in str(error):
            return True
        raise


def test_a_pod_finds_another_by_the_name_of_its_service(full: FullCluster) -> None:
    for name in ("server", "server.default", "server.default.svc.cluster.local"):
        assert ask(full, "friend", f"http://{name}/") == "server"
    address = full.kubectl.get("pod", "friend")["status"]["podIP"]
    assert f"asked by {address}:" in full.kubectl("logs", "server")
    with pytest.raises(CommandFailed, match="no such host"):
        ask(full, "friend", "http://example.com/")


def test_a_pod_reaches_itself_through_its_service(full: FullCluster) -> None:
    assert ask(full, "server", "http://server.default/") == "server"


def test_the_host_reaches_pods_and_services_and_pods_the_host(full: FullCluster) -> None:
    service = full.kubectl.get("service", "server")["spec"]["clusterIP"]
    address = full.kubectl.get("pod", "server")["status"]["podIP"]
    for url in (f"http://{service}/", f"http://{address}:{PORT}/"):
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert answer.read() == b"server\n"
    with http.server.HTTPServer((network.HOST_ADDRESS, 0), http.server.SimpleHTTPRequestHandler) as server:
        asked = threading.Thread(target=server.handle_request)
        asked.start()
        assert "404" in ask(full, "stranger", f"http://{network.HOST_ADDRESS}:{server.server_port}/nothing-here")
        asked.join(60)


def both(addresses: list[str]) -> list[str]:
    """One address of each family, as they stand in a URL."""
    assert [":" in address for address in addresses] == [False, True]
    return [join_host_port(address, 80).removesuffix(":80") for address in addresses]


def test_pods_and_services_have_addresses_of_both_families(full: FullCluster) -> None:
    inside = both(full.kubectl.get("service", "server")["spec"]["clusterIPs"])
    pods = both([each["ip"] for each in full.kubectl.get("pod", "server")["status"]["podIPs"]])
    for url in (*(f"http://{address}/" for address in inside), *(f"http://{address}:{PORT}/" for address in pods)):
        assert ask(full, "friend", url) == "server"
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert answer.read() == b"server\n", "the host reaches them, too"
    addresses = [each["address"] for each in full.kubectl.get("node", "node")["status"]["addresses"]]
    assert set(full.addresses.node) < set(addresses)


def test_a_policy_lets_friends_in_and_nobody_else(full: FullCluster) -> None:
    assert ask(full, "stranger", "http://server/") == "server"
    policy = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "friends"},
              "spec": {"podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"],
                       "ingress": [{"from": [{"podSelector": {"matchLabels": {"role": "friend"}}}]}]}}
    server = full.kubectl.get("service", "server")["spec"]
    urls = ["http://server/", *(f"http://{address}/" for address in both(server["clusterIPs"]))]
    full.kubectl.apply(policy)
    try:
        wait_until(lambda: all(refused(full, "stranger", url) for url in urls), WAIT_S,
                   "the policy keeps strangers out, whatever the family")
        for url in urls:
            assert ask(full, "friend", url) == "server"
        with pytest.raises(OSError, match="timed out"):
            urllib.request.urlopen(f"http://{server['clusterIP']}/", timeout=1)
        assert full.kubectl.get("pod", "server")["status"]["containerStatuses"][0]["ready"], "the kubelet still asks"
    finally:
        full.kubectl("delete", "networkpolicy", "friends")
    wait_until(lambda: not refused(full, "stranger", "http://server/"), WAIT_S, "without the policy everybody comes in")


def test_egress_to_dns_alone(full: FullCluster) -> None:
    dns = {"to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
                   "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}],
           "ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}
    policy = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "names"},
              "spec": {"podSelector": {"matchLabels": {"app": "stranger"}}, "policyTypes": ["Egress"], "egress": [dns]}}
    full.kubectl.apply(policy)
    try:
        wait_until(lambda: refused(full, "stranger", "http://server/"), WAIT_S, "the policy keeps the stranger in")
        with pytest.raises(CommandFailed, match="no such host"):  # an answer of DNS, not a time-out
            ask(full, "stranger", "http://nobody.default.svc.cluster.local/")
    finally:
        full.kubectl("delete", "networkpolicy", "names")


def test_pre_stop_ends_before_the_container_is_told_to(full: FullCluster, tmp_path: Path) -> None:
    hook = {"exec": {"command": ["/netprobe", "write", "/out/stopped", "by preStop", "2s"]}}
    container = {"lifecycle": {"preStop": hook}, "volumeMounts": [{"name": "out", "mountPath": "/out"}]}
    volumes = [{"name": "out", "hostPath": {"path": str(tmp_path)}}]
    full.kubectl.apply(pod("slow", container=container, volumes=volumes, terminationGracePeriodSeconds=GRACE_S))
    full.kubectl("wait", "--for=condition=Ready", "pod/slow", f"--timeout={POD_S}s")
    begin = time.monotonic()
    full.kubectl("delete", "pod", "slow")
    assert (tmp_path / "stopped").read_text() == "by preStop"
    assert 2 <= time.monotonic() - begin < 0.9 * GRACE_S, "it was told to, and did not have to be killed"


def test_a_restricted_pod_runs_within_its_limits(full: FullCluster) -> None:
    full.kubectl("create", "namespace", "strict")
    full.kubectl("label", "namespace", "strict", "pod-security.kubernetes.io/enforce=restricted")
    container = {
        "securityContext": {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "runAsNonRoot": True,
                            "runAsUser": 65532, "capabilities": {"drop": ["ALL"]},
                            "seccompProfile": {"type": "RuntimeDefault"}},
        "resources": {"limits": {"memory": "64Mi", "cpu": "500m"}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}}]
    wanted = pod("modest", container=container, volumes=volumes)
    wanted["metadata"]["namespace"] = "strict"
    wait_until(lambda: bool(full.kubectl("get", "serviceaccount", "default", "-n", "strict")), WAIT_S, "its account")
    full.kubectl.apply(wanted)
    full.kubectl("wait", "-n", "strict", "--for=condition=Ready", "pod/modest", f"--timeout={POD_S}s")
    full.kubectl("exec", "-n", "strict", "modest", "--", "/netprobe", "write", "/dev/shm/here", "x", "0s")
    with pytest.raises(CommandFailed, match="read-only file system"):
        full.kubectl("exec", "-n", "strict", "modest", "--", "/netprobe", "write", "/here", "x", "0s")
    uid = full.kubectl.get("pod", "modest", "-n", "strict")["metadata"]["uid"]
    groups = [path for root in remains.cgroups(full.folder) for path in root.glob(f"**/*{uid}*")]
    limits = [(path / name).read_text().strip() for path in groups for name in ("memory.limit_in_bytes", "memory.max")
              if (path / name).exists()]
    assert limits == [str(64 << 20)]
    full.kubectl("delete", "namespace", "strict", "--timeout=200s", timeout_s=210)


def test_fake_nodes_beside_the_real_one(full: FullCluster) -> None:
    full.add_nodes(2, {"nvidia.com/gpu": "8"}, prefix="gpu", tainted=True)
    tolerated = {"tolerations": [{"operator": "Exists"}],
                 "container": {"resources": {"limits": {"nvidia.com/gpu": "8"}}, "readinessProbe": None}}
    full.kubectl.apply(pod("large", **tolerated), pod("larger", **tolerated), pod("small"))
    full.kubectl("wait", "--for=condition=Ready", "pod/large", "pod/larger", "pod/small", f"--timeout={POD_S}s")
    where = {each: full.kubectl.get("pod", each)["spec"]["nodeName"] for each in ("large", "larger", "small")}
    assert {where["large"], where["larger"]} == {"gpu-0", "gpu-1"}
    assert where["small"] == "node"
    full.kubectl("delete", "pod", "large", "larger", "small")
    full.kubectl("delete", "node", "gpu-0", "gpu-1")


def test_a_second_full_cluster_is_refused(full: FullCluster, tmp_path: Path) -> None:
    with pytest.raises(InUse, match=str(full.folder.path)):
        FullCluster(tmp_path / "second").up()
    assert remains.leftovers(FullCluster(tmp_path / "second").folder) == []


def test_an_archive_without_full_names_is_refused(full: FullCluster, tmp_path: Path) -> None:
    archive = images.assemble(tmp_path / "short.tar", "short", build.ensure(["pause"])["pause"] / "pause", ["/pause"])
    with pytest.raises(ClusterError, match=r"short\.tar: every image in it needs a full name"):
        full.import_image(archive)
    (tmp_path / "none.tar").write_bytes(b"nothing")
    with pytest.raises(ClusterError, match="not an OCI archive"):
        full.import_image(tmp_path / "none.tar")


def test_up_heals_the_node_and_its_pods_run_on(full: FullCluster) -> None:
    started = full.kubectl.get("pod", "server")["status"]["containerStatuses"][0]["state"]
    for component in ("containerd", "kubelet", "netpol"):
        full.kill(component)
    assert set(full.up()) == {"containerd", "kubelet", "netpol"}
    wait_until(lambda: ask(full, "friend", "http://server/") == "server", WAIT_S, "pods talk again")
    assert full.kubectl.get("pod", "server")["status"]["containerStatuses"][0]["state"] == started


def test_down_leaves_nothing_even_of_a_node_that_was_killed(full: FullCluster, before: dict[str, Any]) -> None:
    left = full.leftovers()
    assert {line.split(" ", maxsplit=1)[0] for line in left} == {"process", "mount", "link", "control"}
    assert any("/netprobe serve" in line for line in left), "the processes of pods are found"
    for pid in remains.processes(full.folder):
        with contextlib.suppress(ProcessLookupError):  # a probe that has ended since, or a child of one that was killed
            os.kill(pid, signal.SIGKILL)
    full.down()
    assert full.leftovers() == []
    assert host_state() == before
    assert {path.name for path in full.folder.path.iterdir()} == {"lock", "logs"}


def test_down_after_a_start_that_was_cut_off(tmp_path_factory: pytest.TempPathFactory, before: dict[str, Any]) -> None:
    cluster = FullCluster(tmp_path_factory.mktemp("cut"))
    cluster.folder.path.mkdir(exist_ok=True)
    try:
        network.ensure(cluster.folder)
        subprocess.run(["ip", "link", "delete", remains.short_name(cluster.folder)], check=True)
        assert cluster.leftovers()
        network.ensure(cluster.folder)
        assert [line for line in cluster.leftovers() if line.startswith("link")]
    finally:
        cluster.down()
    assert cluster.leftovers() == []
    assert host_state() == before
