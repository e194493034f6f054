"""Fake nodes: kwok plays the kubelet of every node that has its annotation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testcluster import probes
from testcluster.control_plane import Place
from testcluster.runner import Component

KWOK = "kwok"
FAKE = "kwok.x-k8s.io/node"
FAKE_PODS = "10.200.0.0/16"
LEASE_S = 40


def kwok(place: Place, program: Path) -> Component:
    """Nodes with the annotation become ready; pods on them run at once, and end at once when they are deleted."""
    stages = place.folder / "config/stages.yaml"
    assets = sorted((program.parent.parent / "assets").iterdir())
    stages.write_text("\n---\n".join(path.read_text() for path in assets))
    command = [
        *place.prefix, str(program), f"--kubeconfig={place.kubeconfig(KWOK)}", f"--config={stages}",
        f"--manage-nodes-with-annotation-selector={FAKE}=fake", f"--node-lease-duration-seconds={LEASE_S}",
        f"--cidr={FAKE_PODS}", f"--server-address=127.0.0.1:{place.ports[KWOK]}",
    ]  # fmt: skip
    return Component(KWOK, command, lambda: probes.plain(f"http://127.0.0.1:{place.ports[KWOK]}/readyz"))


def fake_node(name: str, allocatable: Mapping[str, str], labels: Mapping[str, str] | None = None,
              tainted: bool = False) -> dict[str, Any]:
    """A node for kwok. ``allocatable`` is also the capacity; with a taint only pods that tolerate it come there."""
    known = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64", FAKE: "fake"}
    resources = {"cpu": "64", "memory": "512Gi", "pods": "250"} | dict(allocatable)
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "annotations": {FAKE: "fake"}, "labels": known | dict(labels or {})},
        "spec": {"taints": [{"key": FAKE, "value": "fake", "effect": "NoSchedule"}]} if tainted else {},
        "status": {"allocatable": resources, "capacity": resources},
    }
