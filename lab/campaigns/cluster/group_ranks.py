"""``campaign-group-ranks-cluster``: data-parallel ranks with shared experts over two pods, on a whole cluster.

Prefill and decode are each one instance of two pods with a rank; real engines. A link of a pod is cut and an engine is
killed: no member runs alone for more than 20 s, and the group is back within its start time and 30 s.
Figures go to bench/results/campaign_group_ranks_cluster.json. Not part of ``make test``, as groups.py beside it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dp_engines import PLUGIN
from engines import Engine, post
from group_in_cluster import ALONE_S, BACK_S, KILL, LATER_S, GroupInCluster, note, served, write
from make_model import ensure_moe
from service import FORKS
from service_in_cluster import Images, asked
from testcluster import network
from testcluster.full import FullCluster
from testcluster.kubectl import wait_until

pytestmark = pytest.mark.timeout(3600)
RESULT = "campaign_group_ranks_cluster.json"
LOCAL = 'source="local_compute"'
QUESTION = {"model": "tiny", "messages": [{"role": "user", "content": "What is xpyd?"}], "max_tokens": 40, "temperature": 0}
"""What ``asked`` asks."""
WATCH = """
import os, sys, time
from pathlib import Path
from xpyd_sidecar.agent.ask import ask
from xpyd_sidecar.contract.launch import ENV_RUN_DIR

def runs():
    group = ask(Path(os.environ[ENV_RUN_DIR]), "GET", "/status")[1]["group"]
    return group["held"] in ("running", "busy") and group["life"] in ("", sys.argv[1])

print("it runs" if runs() else "nothing runs")
while runs():
    time.sleep(0.2)
print(time.time())
"""
"""A program that prints when the engine of a life, which runs, does not any more."""


class RanksInCluster(GroupInCluster):
    """``ranks``: each role is an instance of two pods with a rank."""

    name = "ranks"
    namespace = "ranks"

    def __init__(self, cluster: FullCluster, images: Images, plugins: Path) -> None:
        super().__init__(cluster, images)
        self.plugins = plugins

    def document(self) -> dict[str, Any]:
        made = super().document()
        spec = made["spec"]
        model = ensure_moe()
        (model / "model.safetensors").chmod(0o644)  # it is written for its owner alone, and pods run as another user
        spec["model"]["source"] = str(model)
        for role in ("prefill", "decode"):
            pod = spec[role]["template"]["spec"]
            pod["volumes"].append({"name": "moe", "hostPath": {"path": str(model), "type": "Directory"}})
            pod["containers"][0]["volumeMounts"].append({"name": "moe", "mountPath": str(model), "readOnly": True})
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
        said: dict[str, Any] = post(f"{engine.url}/v1/chat/completions", QUESTION)
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
def ranks(answer: str, operator: FullCluster, images: Images, plugins: Path) -> Iterator[RanksInCluster]:
    with served(RanksInCluster(operator, images, plugins)) as service:
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
        note(RESULT, "nothing wrong", ended)


@pytest.mark.parametrize("index", [1, 0])
def test_a_pod_that_is_cut_off_ends_its_round_and_decode_goes_on_alone(
        ranks: RanksInCluster, answer: str, index: int) -> None:
    pods = ranks.pods("prefill")
    life = ranks.life(pods[0])
    url = ranks.get(f"dsvc/{ranks.name}")["status"]["url"]
    link = link_of(ranks, pods[index])
    with ranks.explained(), ranks.traffic() as ended, watched(ranks, pods, life) as ends:
        began = time.time()
        cut(ranks, link)
        try:
            over_s = ends(began)
            time.sleep(max(0.0, began + 25 - time.time()))
        finally:
            mend(ranks, link)
        mended = time.monotonic()
        wait_until(lambda: ranks.serves("prefill", life), BACK_S, "the group is back in its pods")
        back_s = time.monotonic() - mended
    lone_s = {f"member_{pods.index(pod)}_over_s": after for pod, after in over_s.items()}
    note(RESULT, f"cut off member {index}", ended, back_s=back_s, start_s=ranks.start_s, **lone_s)
    assert ranks.pods("prefill") == pods
    assert asked(ranks, f"{url}/v1", f"{url}/v1") == [answer] * 2
    assert max(over_s.values()) <= ALONE_S, over_s
    assert back_s <= ranks.start_s + LATER_S


def test_a_killed_rank_of_decode_comes_back_in_its_pod(ranks: RanksInCluster, answer: str) -> None:
    """There is no other decode, so nothing is asked meanwhile."""
    pods = ranks.pods("decode")
    life = ranks.life(pods[0])
    with ranks.explained(), watched(ranks, pods, life) as ends:
        began = time.time()
        ranks.kubectl("exec", pods[1], "-c", "main", "--", "python3", "-c", KILL)
        over_s = ends(began)
        wait_until(lambda: ranks.serves("decode", life), BACK_S, "the group is back in its pods")
        back_s = time.time() - began
        assert ranks.pods("decode") == pods
        url = ranks.get(f"dsvc/{ranks.name}")["status"]["url"]
        assert asked(ranks, f"{url}/v1", f"{url}/v1") == [answer] * 2
    lone_s = {f"member_{pods.index(pod)}_over_s": after for pod, after in over_s.items()}
    write(RESULT, "a killed rank of decode", back_s=back_s, start_s=ranks.start_s, **lone_s)
    assert max(over_s.values()) <= ALONE_S, over_s
    assert back_s <= ranks.start_s + LATER_S


@contextlib.contextmanager
def watched(service: GroupInCluster, pods: list[str], life: str) -> Iterator[Callable[[float], dict[str, float]]]:
    """How to learn, for each pod, after how many seconds the engine of this life did not run there any more.

    A program in each pod looks five times a second, whether or not the pod has a network.
    """
    with contextlib.ExitStack() as stack:
        looking = {}
        for pod in pods:
            words = service.cluster.kubectl.command("-n", service.namespace, "exec", pod, "-c", "sidecar", "--",
                                                    "python3", "-u", "-c", WATCH, life)
            looking[pod] = stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
            stack.callback(looking[pod].kill)
            assert looking[pod].stdout.readline() == "it runs\n"  # type: ignore[union-attr]  # as given above

        yield lambda since: {pod: float(one.communicate(timeout=60)[0]) - since for pod, one in looking.items()}


def link_of(service: GroupInCluster, pod: str) -> str:
    """The end of a pod's link at the node's bridge."""
    pid = next(path.parent.name for path in Path("/proc").glob("[0-9]*/environ")
               if f"HOSTNAME={pod}".encode() in read(path).split(b"\0"))
    inside = run("nsenter", "-t", pid, "-n", "ip", "-json", "link", "show", "dev", "eth0")
    index = json.loads(inside)[0]["link_index"]
    outside = json.loads(run(*network.node_prefix(service.cluster.folder), "ip", "-json", "link", "show"))
    return str(next(each["ifname"] for each in outside if each["ifindex"] == index))


def cut(service: GroupInCluster, link: str) -> None:
    """Packets from and to a pod are lost without a word."""
    run(*network.node_prefix(service.cluster.folder), "ip", "link", "set", link, "nomaster")


def mend(service: GroupInCluster, link: str) -> None:
    """They arrive again."""
    run(*network.node_prefix(service.cluster.folder), "ip", "link", "set", link, "master", "cni0")


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
