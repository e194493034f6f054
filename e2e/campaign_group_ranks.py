"""``make campaign-group-ranks-cluster``: data-parallel ranks with shared experts over two pods, on a whole cluster.

Prefill and decode are each one instance of two pods with a rank; real engines. A link of a pod is cut and an engine is
killed; strangers try the pods of an instance of two tensor ranks. Not part of ``make test``, as e2e/campaign_groups.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from campaign_groups import BACK_S, KILL, GroupInCluster, served
from dp_engines import PLUGIN
from engines import Engine, post
from make_model import ensure_moe
from service import FORKS
from service_in_cluster import CONNECT, Images, asked, check, listening
from testcluster import network
from testcluster.full import FullCluster
from testcluster.kubectl import wait_until

from xpyd_sidecar.contract.ids import join_host_port

pytestmark = pytest.mark.timeout(1800)
PLUGINS = "/plugins"
LOCAL = 'source="local_compute"'
QUESTION = {"model": "tiny", "messages": [{"role": "user", "content": "What is xpyd?"}], "max_tokens": 40, "temperature": 0}
"""What ``asked`` asks."""
GREETED = """
import socket, sys
for address in sys.argv[1:]:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=4) as sock:
        sock.settimeout(0.5)
        try:
            said = sock.recv(10)
        except OSError:
            continue
        if said[:1] == b"\\xff" and said[9:] == b"\\x7f":
            print(address)
"""
"""A program that prints the addresses at which ZMQ greets."""
SPEAK = """
import os, pickle, sys, time, zmq

class Bomb:
    def __reduce__(self):
        return os.system, ("touch /tmp/ran",)

context, heard = zmq.Context(), []
for address in sys.argv[1:]:
    for kind in (zmq.DEALER, zmq.SUB, zmq.XSUB, zmq.PUB):
        sock = context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        if kind == zmq.SUB:
            sock.setsockopt(zmq.SUBSCRIBE, b"")
        sock.connect(f"tcp://{address}")
        heard.append((address, kind, sock))
end = time.monotonic() + 20
while time.monotonic() < end:
    for address, kind, sock in heard:
        if kind != zmq.SUB and sock.poll(0, zmq.POLLOUT):
            sock.send((b"\\x01" if kind == zmq.XSUB else b"") + pickle.dumps(Bomb()), zmq.NOBLOCK)
        if kind != zmq.PUB and sock.poll(0):
            print("heard", address, kind, len(sock.recv()), flush=True)
    time.sleep(0.5)
print("done")
"""
"""A program that takes each address for a queue of calls: it tries to be a reader, and to send what would run as code."""


class RanksInCluster(GroupInCluster):
    """``ranks``: each role is an instance of two pods with a rank."""

    name = "ranks"
    namespace = "ranks"

    def __init__(self, cluster: FullCluster, images: Images, plugins: Path) -> None:
        super().__init__(cluster, images)
        self._plugins = plugins

    def document(self) -> dict[str, Any]:
        made = super().document()
        spec = made["spec"]
        model = ensure_moe()
        spec["model"]["source"] = str(model)
        for role in ("prefill", "decode"):
            pod = spec[role]["template"]["spec"]
            for name, host, path in (("moe", str(model), str(model)), ("plugins", str(self._plugins), PLUGINS)):
                pod["volumes"].append({"name": name, "hostPath": {"path": host, "type": "Directory"}})
                pod["containers"][0]["volumeMounts"].append({"name": name, "mountPath": path, "readOnly": True})
            pod["containers"][0]["workingDir"] = PLUGINS  # what Python has on its path where it is started with -m
        spec["prefill"] = {**spec["prefill"], "parallelism": {"data": 2, "pods": 2, "device": "none"}}
        spec["decode"] = {**spec["decode"], "parallelism": {"data": 2, "pods": 2, "device": "none"}}
        return made

    def sums(self, role: str, name: str, label: str = "") -> list[float]:
        """A metric of the engine of each member."""
        program = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8000/metrics').read().decode())"
        found = []
        for pod in self.pods(role):
            text = self.kubectl("exec", pod, "-c", "main", "--", "python3", "-c", program)
            found.append(sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
                             if line.startswith(f"{name}{{") and label in line))
        return found

    def serves(self, role: str, life: str) -> bool:
        """Both members of a role run one life, another one than this, and the service is ready."""
        try:
            lives = {self.life(pod) for pod in self.pods(role)}
        except Exception:  # noqa: BLE001  # a pod that is being started again answers nobody
            return False
        ready = self.get(f"dsvc/{self.name}")["status"].get("ready")
        return len(lives) == 1 and not lives & {"", life} and ready == "1P1D"


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one engine of this host says, before there is a cluster."""
    with Engine("plain", tmp_path_factory.mktemp("plain"), connector=False, model=ensure_moe()) as engine:
        engine.wait_ready()
        said: dict[str, Any] = json.loads(post(f"{engine.url}/v1/chat/completions", QUESTION))
        return str(said["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both plugins of vLLM, for everybody to read."""
    folder = tmp_path_factory.mktemp("plugins")
    for source in (PLUGIN, FORKS):
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder, *folder.parents):
        if path.owner() == "root" and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    return folder


@pytest.fixture(scope="module")
def multi(operator: FullCluster) -> FullCluster:
    """The cluster, whose operator takes instances of several pods."""
    operator.kubectl("-n", "xpyd-system", "set", "env", "deployment/xpyd-operator", "XPYD_MULTI_POD=true")
    operator.kubectl("-n", "xpyd-system", "rollout", "status", "deployment/xpyd-operator", "--timeout=120s", timeout_s=130)
    return operator


@pytest.fixture(scope="module")
def ranks(answer: str, multi: FullCluster, images: Images, plugins: Path) -> Iterator[RanksInCluster]:
    with served(RanksInCluster(multi, images, plugins)) as service:
        yield service


@pytest.fixture(scope="module")
def wide(multi: FullCluster, images: Images) -> Iterator[GroupInCluster]:
    with served(GroupInCluster(multi, images)) as service:
        yield service


def test_ranks_over_pods_prefill_and_decode_as_one_engine(ranks: RanksInCluster, answer: str) -> None:
    url = ranks.get(f"dsvc/{ranks.name}")["status"]["url"]
    assert len(ranks.pods("prefill")) == len(ranks.pods("decode")) == 2
    with ranks.explained():
        before = ranks.sums("decode", "vllm:prompt_tokens_by_source_total", LOCAL)
        assert asked(ranks, *[f"{url}/v1"] * 4) == [answer] * 4
        after = ranks.sums("decode", "vllm:prompt_tokens_by_source_total", LOCAL)
        assert sum(after) - sum(before) <= 4, "no more than the last token of each"
        assert all(pushed > 0 for pushed in ranks.sums("prefill", "xpyd_kv_pushed_bytes_total")), "both ranks prefill"
        assert all(loaded > 0 for loaded in ranks.sums("decode", "xpyd_kv_loaded_tokens_total")), "both ranks decode"
        with ranks.traffic() as ended:
            time.sleep(20)
        check(ended)


@pytest.mark.parametrize("index", [1, 0])
def test_a_pod_that_is_cut_off_ends_its_round_and_decode_goes_on_alone(
        ranks: RanksInCluster, answer: str, index: int) -> None:
    pods = ranks.pods("prefill")
    life = ranks.life(pods[0])
    url = ranks.get(f"dsvc/{ranks.name}")["status"]["url"]
    began = time.monotonic()
    with ranks.explained(), ranks.traffic() as ended:
        cut(ranks, pods[index])
        try:
            wait_until(lambda: ranks.life(pods[1 - index]) != life, 60, "the round is over at the other one")
            over_s = time.monotonic() - began
            time.sleep(max(0.0, 25 - over_s))
        finally:
            mend(ranks, pods[index])
        wait_until(lambda: ranks.serves("prefill", life), BACK_S, "the group is back in its pods")
    back_s = time.monotonic() - began
    print(f"cut {pods[index]}: the other one's round over after {over_s:.0f} s, back after {back_s:.0f} s")
    check(ended)
    assert ranks.pods("prefill") == pods
    assert asked(ranks, f"{url}/v1", f"{url}/v1") == [answer] * 2


def test_a_killed_rank_of_decode_comes_back_in_its_pod(ranks: RanksInCluster, answer: str) -> None:
    pods = ranks.pods("decode")
    life = ranks.life(pods[0])
    began = time.monotonic()
    with ranks.explained():
        ranks.kubectl("exec", pods[1], "-c", "main", "--", "python3", "-c", KILL)
        wait_until(lambda: ranks.serves("decode", life), BACK_S, "the group is back in its pods")
        print(f"killed rank of {pods[1]}: back after {time.monotonic() - began:.0f} s")
        assert ranks.pods("decode") == pods
        url = ranks.get(f"dsvc/{ranks.name}")["status"]["url"]
        assert asked(ranks, f"{url}/v1", f"{url}/v1") == [answer] * 2


def test_strangers_reach_no_port_of_a_group_but_the_routers(wide: GroupInCluster) -> None:
    """From another namespace, and from a pod of the same one that is none of the service's."""
    pods = wide.get("pods", "-l", "xpyd.dev/role=prefill")["items"]
    tried = [address for pod in pods for address in addresses(wide, pod)]
    assert len(tried) > 10, "engine, agent, queue, connector and torch listen in both pods"
    for namespace in ("strangers", wide.namespace):
        said = wide.python(namespace, "probe", CONNECT, *tried, timeout_s=400)
        found = dict(line.split() for line in said.splitlines())
        assert set(found.values()) == {"blocked"}, found


def test_who_is_let_in_by_the_network_reads_and_sends_no_call_without_the_key(wide: GroupInCluster) -> None:
    """A pod with the service's label, which the policy takes for one of its own."""
    life = wide.life("wide-e0-0")
    (leader,) = [pod for pod in wide.get("pods", "-l", "xpyd.dev/role=prefill")["items"]
                 if pod["metadata"]["name"] == "wide-e0-0"]
    # Torch's store and Gloo ask nobody, as docs/groups.md says; what is tried are the queues, by what listens for ZMQ.
    greeted = wide.kubectl("exec", "wide-e0-0", "-c", "main", "--", "python3", "-c", GREETED, *addresses(wide, leader))
    tried = greeted.split()
    assert tried, "the queue of calls listens"
    said = wide.python(wide.namespace, "inside", SPEAK, *tried, timeout_s=120,
                       labels={"xpyd.dev/service": wide.name})
    assert said.split() == ["done"], said
    for pod in wide.members():
        listed = wide.kubectl("exec", pod, "-c", "main", "--", "python3", "-c", "import os; print(os.listdir('/tmp'))")
        assert "'ran'" not in listed
    assert wide.life("wide-e0-0") == life
    url = wide.get(f"dsvc/{wide.name}")["status"]["url"]
    first, second = asked(wide, f"{url}/v1", f"{url}/v1")
    assert first == second


def addresses(service: GroupInCluster, pod: Any) -> list[str]:
    """Of everything that listens in an engine's pod."""
    return [join_host_port(each["ip"], port) for each in pod["status"]["podIPs"]
            for port in listening(service, pod["metadata"]["name"])]


def link_of(service: GroupInCluster, pod: str) -> str:
    """The end of a pod's link at the node's bridge."""
    pid = next(path.parent.name for path in Path("/proc").glob("[0-9]*/environ")
               if f"HOSTNAME={pod}".encode() in read(path).split(b"\0"))
    inside = run("nsenter", "-t", pid, "-n", "ip", "-json", "link", "show", "dev", "eth0")
    index = json.loads(inside)[0]["link_index"]
    outside = json.loads(run(*network.node_prefix(service.cluster.folder), "ip", "-json", "link", "show"))
    return str(next(each["ifname"] for each in outside if each["ifindex"] == index))


def cut(service: GroupInCluster, pod: str) -> None:
    """Packets from and to a pod are lost without a word."""
    run(*network.node_prefix(service.cluster.folder), "ip", "link", "set", link_of(service, pod), "nomaster")


def mend(service: GroupInCluster, pod: str) -> None:
    """They arrive again."""
    run(*network.node_prefix(service.cluster.folder), "ip", "link", "set", link_of(service, pod), "master", "cni0")


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
