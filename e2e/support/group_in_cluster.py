"""An instance of two pods on a whole cluster with real engines, and figures of what becomes of it.

    with served(GroupInCluster(operator, images)) as service:
        with service.explained(), service.traffic() as ended:
            …
        note(RESULT, "killed", ended, back_s=…)
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from service import FORKS
from service_in_cluster import Ended, ServiceInCluster, check
from testcluster.errors import CommandFailed
from testcluster.kubectl import wait_until

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
BACK_S = 1500
"""Each engine process imports vLLM, which takes two minutes on a machine that is busy with other work."""
LATER_S = 30.0
"""A group that was lost is back by itself within the time that the service took to start, and this."""
ALONE_S = 20.0
"""No member's engine runs longer without that of another one."""
PLUGINS = "/plugins"
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
    plugins = FORKS
    """A folder with plugins of vLLM, for everybody to read."""
    start_s = 0.0
    """How long it took from its document until all of it served."""

    def document(self) -> dict[str, Any]:
        made = super().document()
        made["apiVersion"] = "xpyd.dev/v1beta1"
        made["spec"]["prefill"] |= {"parallelism": {"tensor": 2, "pods": 2, "device": "none"}}
        # With tensor ranks vLLM for CPUs compiles at the first request, and these images have no compiler.
        made["spec"]["engine"]["env"].append({"name": "TORCHDYNAMO_DISABLE", "value": "1"})
        made["spec"]["decode"] = {"replicas": 1, "resources": {}, "template": made["spec"]["decode"]["template"]}
        for role in ("prefill", "decode"):
            template = made["spec"][role]["template"] = copy.deepcopy(made["spec"][role]["template"])
            pod, main = template["spec"], template["spec"]["containers"][0]
            pod["volumes"].append({"name": "plugins", "hostPath": {"path": str(self.plugins), "type": "Directory"}})
            main["volumeMounts"].append({"name": "plugins", "mountPath": PLUGINS, "readOnly": True})
            main["workingDir"] = PLUGINS  # what Python has on its path where it is started with -m
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

    def member_uids(self, *, ending: bool = True) -> set[str]:
        """Of all members, or of those that stay."""
        found = self.get("pods", "-l", f"xpyd.dev/service={self.name},xpyd.dev/role=prefill")["items"]
        return {str(pod["metadata"]["uid"]) for pod in found if ending or "deletionTimestamp" not in pod["metadata"]}


Wide = TypeVar("Wide", bound=GroupInCluster)


@contextlib.contextmanager
def served(service: Wide) -> Iterator[Wide]:
    """It serves as 1P1D, and is removed in the end."""
    began = time.monotonic()
    service.apply()
    try:
        service.wait_ready("1P1D", BACK_S)
        service.start_s = time.monotonic() - began
        print(f"{service.name} serves after {service.start_s:.0f} s, load {os.getloadavg()[0]:.1f}")
        yield service
    finally:
        service.remove()


def note(file: str, name: str, ended: list[Ended], **figures: float) -> None:
    """What was seen under traffic goes into a file of results; then nothing may have failed."""
    write(file, name, requests=len(ended), failed=sum(bool(each.fault) for each in ended), **figures)
    check(ended)


def write(file: str, name: str, **figures: float) -> None:
    """One row of a file of results, with the machine's load."""
    path = RESULTS / file
    found = json.loads(path.read_text()) if path.exists() else {}
    seen = {key: round(value, 1) for key, value in figures.items()} | {"load": round(os.getloadavg()[0], 1)}
    path.write_text(json.dumps({**found, name: seen}, indent=1, sort_keys=True) + "\n", "utf-8")
