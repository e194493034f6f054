"""``campaign-walk``: a service's life on a whole cluster with real engines, step by step as docs/quickstart.md and
docs/kubernetes.md go, by kubectl and by ``xpyd check``.

The steps are in one test, since each begins with what the one before has left. The seconds of each go to
bench/results/campaign_walk.json. Requests run from another pod during every step that a service is to survive.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from group_in_cluster import BACK_S, GroupInCluster, write
from service_in_cluster import Images, ServiceInCluster, asked, check
from testcluster.full import FullCluster
from testcluster.kubectl import wait_until

pytestmark = pytest.mark.timeout(3600)
RESULT = "campaign_walk.json"
SEEN_S = 300.0
"""For what the operator says of a change; engines have ``START_S`` of their own."""
CORE_S = 600.0
"""Until an engine whose core stands still is restarted and serves: it must be silent for two minutes first."""
STOP_CORE = """
import os, signal
found = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        name = open(f"/proc/{pid}/comm").read().strip()
    except OSError:  # it has ended
        continue
    if name.startswith("VLLM::EngineCor"):
        os.kill(int(pid), signal.SIGSTOP)
        found.append(pid)
print(*found)
"""
"""Stops the engine's core, which answers no signal of a probe afterwards; prints its process ids."""


class WalkedService(ServiceInCluster):
    """``walk``, in a namespace of its own; its ``spec`` may be edited between two applies."""

    name = "walk"
    namespace = "walking"

    def __init__(self, cluster: FullCluster, images: Images) -> None:
        super().__init__(cluster, images)
        self.spec: dict[str, Any] = super().document()["spec"]
        self.spec["decode"] = {**self.spec["decode"], "replicas": 1}
        del self.spec["decode"]["scaling"]

    def document(self) -> dict[str, Any]:
        """As ``spec`` is now."""
        return {**super().document(), "spec": self.spec}

    def restarts(self, pod: str) -> int:
        """Of the engine's container."""
        states = self.get(f"pod/{pod}")["status"]["containerStatuses"]
        return int(next(one["restartCount"] for one in states if one["name"] == "main"))


@pytest.fixture
def walk(operator: FullCluster, images: Images) -> Iterator[WalkedService]:
    service = WalkedService(operator, images)
    try:
        yield service
    finally:
        service.remove()


@contextlib.contextmanager
def step(name: str, service: ServiceInCluster) -> Iterator[None]:
    """One of the walk: its seconds are recorded, and where it fails, what a person would look at."""
    began = time.monotonic()
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{name}: {error}\n{service.story()}") from error
    took = time.monotonic() - began
    print(f"{name}: {took:.0f} s, load {os.getloadavg()[0]:.1f}", flush=True)
    write(RESULT, name, seconds=took)


def test_the_life_of_a_service(walk: WalkedService, operator: FullCluster, images: Images, tmp_path: Path) -> None:
    with step("1 check", walk):
        file = tmp_path / "walk.yaml"
        file.write_text(yaml.safe_dump(walk.document()), "utf-8")
        done = subprocess.run([Path(sys.executable).parent / "xpyd", "check", "-f", file, "--for", "kubernetes"],
                              capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
    with step("2 apply, until requests are answered", walk):
        walk.apply()
        walk.wait_ready("1P1D")
    url = walk.get(f"dsvc/{walk.name}")["status"]["url"]
    with step("3 ask", walk):
        first, = asked(walk, f"{url}/v1")
        assert first.strip()
    with step("4 describe", walk):
        said = walk.kubectl("describe", "dsvc", walk.name)
        assert walk.condition("Ready")["message"] in said
        assert url in said
    with step("5 scale decode to two and back, under load", walk), walk.traffic(least=20) as ended:
        walk.kubectl("patch", f"dsvc/{walk.name}", "--type=merge", "-p", '{"spec": {"decode": {"replicas": 2}}}')
        walk.wait_ready("1P2D")
        walk.kubectl("patch", f"dsvc/{walk.name}", "--type=merge", "-p", '{"spec": {"decode": {"replicas": 1}}}')
        walk.wait_ready("1P1D")
    check(ended, 20)
    before = set(walk.uids().values())
    with step("6 edit an engine's arguments, under load", walk), walk.traffic(least=20) as ended:
        args = walk.spec["engine"]["args"]
        walk.spec["engine"]["args"] = ["896" if word == "1024" else word for word in args]
        walk.apply()
        wait_until(lambda: not before & set(walk.uids().values()), 2 * BACK_S, "all pods are new ones")
        walk.wait_ready("1P1D")
    check(ended, 20)
    with step("7 break it: an image that is nowhere, and back", walk), walk.traffic(least=20) as ended:
        image = walk.spec["engine"]["image"]
        walk.spec["engine"]["image"] = "registry.invalid/nothing:1"
        walk.apply()
        wait_until(lambda: "registry.invalid/nothing:1" in json.dumps(walk.status()), SEEN_S,
                   "the status names the image")
        assert walk.condition("Ready")["status"] == "True", "the pods of before go on"
        walk.spec["engine"]["image"] = image
        walk.apply()
        wait_until(lambda: walk.condition("Progressing")["status"] == "False", SEEN_S, "it has settled")
        walk.wait_ready("1P1D")
    check(ended, 20)
    (decode,) = walk.pods("decode")
    with step("8 stop the core of the only decode engine", walk):
        restarts = walk.restarts(decode)
        assert walk.kubectl("exec", decode, "-c", "main", "--", "python3", "-c", STOP_CORE).split()
        with ThreadPoolExecutor() as pool:  # without a request, one that stands still has nothing to do
            waits = pool.submit(asked, walk, f"{url}/v1")
            wait_until(lambda: walk.restarts(decode) > restarts, CORE_S, "the engine is restarted")
            waits.exception()  # whatever it heard: nobody else decodes
        walk.wait_ready("1P1D")
        assert asked(walk, f"{url}/v1") == [first]
    with step("9 upgrade the operator and roll it back, under load", walk), walk.traffic(least=10) as ended:
        engines = set(walk.uids().values())
        rollout = ("-n", "xpyd-system", "rollout")
        rolled = (*rollout, "status", "deployment/xpyd-operator", "--timeout=300s")
        operator.kubectl("-n", "xpyd-system", "set", "env", "deployment/xpyd-operator",
                         f"XPYD_SIDECAR_IMAGE={images.name('sidecar')}-next")
        operator.kubectl(*rolled, timeout_s=310)
        walk.wait_ready("1P1D")
        operator.kubectl(*rollout, "undo", "deployment/xpyd-operator")
        operator.kubectl(*rolled, timeout_s=310)
        walk.wait_ready("1P1D")
        assert set(walk.uids().values()) == engines
    check(ended, 10)
    with step("10 delete, until nothing is left", walk):
        walk.kubectl("delete", "dsvc", walk.name, "--timeout=300s", timeout_s=310)
        wait_until(lambda: not walk.left(), SEEN_S, "nothing is left")
    group = GroupInCluster(operator, images)
    try:
        with step("11 an instance of two pods: apply, ask, delete", group), group.explained():
            group.apply()
            group.wait_ready("1P1D", BACK_S)
            url = group.get(f"dsvc/{group.name}")["status"]["url"]
            through, again = asked(group, f"{url}/v1", f"{url}/v1")
            assert through == again
            assert through.strip()
            group.kubectl("delete", "dsvc", group.name, "--timeout=300s", timeout_s=310)
            wait_until(lambda: not group.pods(), SEEN_S, "no pod is left")
    finally:
        group.remove()
