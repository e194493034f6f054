"""Kueue on a light cluster: its own manifests, and its manager as a process that admits pods.

    with Kueue(cluster, folder, ("team",)) as kueue:
        kueue.quota("team", "team-a", {"nvidia.com/gpu": "3"})

The API server calls its webhooks as any: Service without selector → EndpointSlice → this host's own address.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from host_endpoint import endpoint_slice, own_address
from processes import Group, free_port
from testcluster import build, probes
from testcluster.errors import CommandFailed
from testcluster.light import LightCluster

NAMESPACE = "kueue-system"
SERVICE = "kueue-webhook-service"
SECRET = "kueue-webhook-server-cert"
READY_S = 240.0
LEFT_OUT = {"Deployment", "APIService"}
"""Of its manifests: it runs as a process, and no second API is served."""


class Kueue:
    """Kueue's manager, for pods of some namespaces. Admits nothing before it is ready; its log is in ``folder``."""

    def __init__(self, cluster: LightCluster, folder: Path, namespaces: Sequence[str]) -> None:
        self._cluster = cluster
        self._namespaces = list(namespaces)
        self._certificates = folder / "certificates"
        self._certificates.mkdir()
        self._config = folder / "kueue.yaml"
        self._log = folder / "kueue.log"
        self._group: Group | None = None

    def __enter__(self) -> Self:
        binaries = build.ensure(["kueue"])["kueue"]
        address, webhooks, health = own_address(), free_port(), free_port()
        self._cluster.kubectl("apply", "--server-side", "-f", "-",
                              stdin=yaml.safe_dump_all(self._manifests(binaries.parent / "assets", address, webhooks)))
        self._config.write_text(yaml.safe_dump(self._configuration(address, webhooks, health)))
        self._group = Group([str(binaries / "kueue"), f"--config={self._config}", "--zap-log-level=2",
                             f"--kubeconfig={self._cluster.kubeconfig}", "--feature-gates=VisibilityOnDemand=false"],
                            log=self._log, env={"PATH": "/usr/bin:/bin"}, name="kueue")
        try:
            self._group.wait_until(self._mounted, READY_S, "given its certificate")
            self._group.wait_until(lambda: not probes.plain(f"http://127.0.0.1:{health}/readyz"), READY_S, "ready")
        except BaseException:
            self._group.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._group is not None:
            self._group.kill()

    def tail(self) -> str:
        """The end of its log."""
        return self._group.tail() if self._group is not None else ""

    def quota(self, namespace: str, queue: str, amounts: Mapping[str, str], **more: Any) -> None:
        """A LocalQueue and the ClusterQueue behind it, with these amounts. ``more``: of the ClusterQueue's spec."""
        covered = [{"name": name, "nominalQuota": amount} for name, amount in amounts.items()]
        spec = {"namespaceSelector": {}, "resourceGroups": [
            {"coveredResources": list(amounts), "flavors": [{"name": queue, "resources": covered}]}]}
        self.apply({"kind": "ResourceFlavor", "metadata": {"name": queue}},
                   {"kind": "ClusterQueue", "metadata": {"name": queue}, "spec": spec | more},
                   {"kind": "LocalQueue", "metadata": {"name": queue, "namespace": namespace},
                    "spec": {"clusterQueue": queue}})

    def apply(self, *objects: dict[str, Any]) -> None:
        """Objects of Kueue's API."""
        documents = [{"apiVersion": "kueue.x-k8s.io/v1beta2"} | one for one in objects]
        self._cluster.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(documents))

    def workloads(self, namespace: str) -> list[dict[str, Any]]:
        """What it has been asked to admit."""
        said = self._cluster.kubectl("get", "workloads.kueue.x-k8s.io", "-n", namespace, "-o", "json")
        found: list[dict[str, Any]] = json.loads(said)["items"]
        return found

    def _manifests(self, assets: Path, address: str, port: int) -> list[dict[str, Any]]:
        found = yaml.safe_load_all(self._cluster.kubectl("kustomize", str(assets / "config/default")))
        kept = [one for one in found if one["kind"] not in LEFT_OUT]
        [service] = [one for one in kept if one["kind"] == "Service" and one["metadata"]["name"] == SERVICE]
        del service["spec"]["selector"]
        return [*kept, endpoint_slice(SERVICE, NAMESPACE, address, port)]

    def _configuration(self, address: str, webhooks: int, health: int) -> dict[str, Any]:
        return {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2", "kind": "Configuration", "namespace": NAMESPACE,
            "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"}, "metrics": {"bindAddress": "0"},
            "webhook": {"host": address, "port": webhooks, "certDir": str(self._certificates)},
            "leaderElection": {"leaderElect": False}, "integrations": {"frameworks": ["pod"]},
            "managedJobsNamespaceSelector": {"matchExpressions": [
                {"key": "kubernetes.io/metadata.name", "operator": "In", "values": self._namespaces}]},
        }

    def _mounted(self) -> bool:
        """Its Secret as files, once it has written it; a kubelet would do that."""
        try:
            secret = json.loads(self._cluster.kubectl("get", "secret", SECRET, "-n", NAMESPACE, "-o", "json"))
        except CommandFailed:
            return False
        data: dict[str, str] = secret.get("data") or {}
        for name, value in data.items():
            (self._certificates / name).write_bytes(base64.b64decode(value))
        return "tls.crt" in data
