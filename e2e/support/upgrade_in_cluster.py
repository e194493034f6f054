"""A service in the cluster while xpyd itself is replaced under it: installs, rollouts, and what is watched meanwhile."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import threading
import time
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
import yaml
from releases import Release
from service_in_cluster import Images, ServiceInCluster
from testcluster.errors import CommandFailed
from testcluster.full import FullCluster

SYSTEM = "xpyd-system"
INSTALL = "xpyd-install"
POLL_S = 1.0
DEPLOYMENT = ("-n", SYSTEM, "deployment/xpyd-operator")


def install(cluster: FullCluster, release: Release, images: dict[str, Any], *, crds: bool = True) -> None:
    """What ``make install`` of that release does: its CRDs, rights and operator, from its own manifests.

    Without ``crds`` those that are there stay, as in a downgrade: an older one may lack a version in which objects are
    stored.
    """
    text = cluster.kubectl("kustomize", str(release.folder / "manifests/base"))
    if not crds:
        made = [each for each in yaml.safe_load_all(text) if each["kind"] != "CustomResourceDefinition"]
        text = yaml.safe_dump_all(made)
    for name in ("operator", "sidecar"):
        text = re.sub(rf"\bxpyd-{name}:[\w.]+", images[name]["image"], text)
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)
    cluster.kubectl("rollout", "status", "-n", SYSTEM, "deployment/xpyd-operator", "--timeout=120s", timeout_s=130)


def kill_operators(cluster: FullCluster) -> None:
    """Both of its pods, without a chance to hand anything over."""
    selector = "app.kubernetes.io/name=xpyd-operator"
    cluster.kubectl("-n", SYSTEM, "delete", "pod", "-l", selector, "--force", "--grace-period=0")


class Upgraded(ServiceInCluster):
    """1P1D whose pods are made anew by another ``round``, an annotation of theirs."""

    name = "upgraded"

    def __init__(self, cluster: FullCluster, images: Images, *, placement: str = "sidecar") -> None:
        super().__init__(cluster, images)
        self.round = 1
        self._placement = placement

    def document(self) -> dict[str, Any]:
        """See ServiceInCluster."""
        made = super().document()
        spec = made["spec"]
        spec["decode"] = {**spec["decode"], "replicas": 1}
        del spec["decode"]["scaling"]
        spec["router"] = {"placement": self._placement}
        for role in ("prefill", "decode"):
            template = {**spec[role]["template"], "metadata": {"annotations": {"example.com/round": str(self.round)}}}
            spec[role] = {**spec[role], "template": template}
        return made

    def roll(self) -> None:
        """Have all engine pods made anew."""
        self.round += 1
        self.cluster.kubectl.apply(self.document())

    def packages(self) -> dict[str, str]:
        """By engine pod: the image that brought xpyd's package to its engine."""
        selector = f"xpyd.dev/service={self.name},app.kubernetes.io/component=engine"
        return {pod["metadata"]["name"]: package_of(pod) for pod in self.get("pods", "-l", selector)["items"]}


def package_of(pod: Any) -> str:
    """Image of the init container that brings the package."""
    return next((str(each["image"]) for each in pod["spec"].get("initContainers", ()) if each["name"] == INSTALL), "")


class Life(NamedTuple):
    """One engine pod that was seen."""

    name: str
    began: float
    package: str


class Access(msgspec.Struct):
    """A line of a router's access log."""

    time: str
    logger: str = ""
    prefill: str = ""
    decode: str = ""
    detail: str = ""


class Watch:
    """Looks at the pods once a second, and keeps every access line of every router."""

    def __init__(self, service: Upgraded, folder: Path) -> None:
        self.service = service
        self.faults: list[str] = []
        self.looks = 0
        self.least = {"prefill": 99, "decode": 99}
        """Fewest pods of a role that were ready at the same time."""
        self.lives: dict[str, Life] = {}
        """By uid."""
        self._folder = folder
        self._followers: dict[str, subprocess.Popen[bytes]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(60)
        for each in self._followers.values():
            each.kill()
            each.wait(10)

    def handed(self) -> dict[tuple[str, str], int]:
        """Requests by the packages of the engines that computed their prompt and their tokens; those with both alone."""
        found: dict[tuple[str, str], int] = {}
        for file in sorted(self._folder.glob("*.log")):
            for line in file.read_bytes().splitlines():
                with contextlib.suppress(msgspec.DecodeError):
                    said = msgspec.json.decode(line, type=Access)
                    if said.logger == "xpyd_sidecar.access" and said.prefill and said.decode:
                        at = datetime.fromisoformat(said.time).timestamp()
                        pair = (self._package(said.prefill, at), self._package(said.decode, at))
                        found[pair] = found.get(pair, 0) + 1
        return found

    def _package(self, name: str, at: float) -> str:
        lives = [each for each in self.lives.values() if each.name == name and each.began <= at]
        return max(lives, key=lambda each: each.began).package if lives else f"unknown {name}"

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                self._look()
            except (CommandFailed, json.JSONDecodeError, KeyError) as error:
                self.faults.append(f"a look failed: {error!r}")

    def _look(self) -> None:
        pods = self.service.get("pods", "-l", f"xpyd.dev/service={self.service.name}")["items"]
        self.looks += 1
        ready = {"prefill": 0, "decode": 0}
        for pod in pods:
            metadata, role = pod["metadata"], pod["metadata"]["labels"].get("xpyd.dev/role", "")
            status = pod.get("status") or {}
            serves = any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions", ()))
            if role:
                began = datetime.fromisoformat(metadata["creationTimestamp"]).timestamp()
                self.lives[metadata["uid"]] = Life(metadata["name"], began, package_of(pod))
                ready[role] += serves and "deletionTimestamp" not in metadata
            self._follow(pod, "router" if not role else "sidecar")
        for role, count in ready.items():
            self.least[role] = min(self.least[role], count)
            if not count:
                self.faults.append(f"{time.strftime('%H:%M:%S')}: no {role} pod is ready")

    def _follow(self, pod: Any, container: str) -> None:
        """Keep what a router says until its pod is gone."""
        uid, name, status = pod["metadata"]["uid"], pod["metadata"]["name"], pod.get("status") or {}
        states = (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
        runs = any(each["name"] == container and "running" in each["state"] for each in states)
        if uid not in self._followers and runs:
            words = ("-n", self.service.namespace, "logs", "-f", name, "-c", container)
            command = self.service.cluster.kubectl.command(*words)
            with (self._folder / f"{uid}.log").open("wb") as log:
                self._followers[uid] = subprocess.Popen(command, stdout=log, stderr=subprocess.DEVNULL)
