"""How fast instances of two pods come to be on fake nodes: where all fit, and where some find no place.

    all     96P144D, 480 pods on 60 nodes of 8 GPUs: until all pods are made, and until all are ready
    short   30 such instances where 24 and one pod have a place: until 24 are whole. One after the other then, since the
            scheduler knows no groups
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kube_client import Mirror
from kube_team import is_ready, label
from measures import Timeline, cpu_s, machine_load
from node_agent import INSTANCE, MEMBER
from surroundings import Surroundings, surroundings
from testcluster.control_plane import API
from testcluster.light import LightCluster

NAMESPACE = "bench-groups"
NODES, GPUS = 60, 8
PREFILL, DECODE = 96, 144
WANTED, ROOM = 30, 24
DEADLINE_S = 300.0
SHORT = {"bench": "short"}
ROOMY = {"cpu": "1000", "memory": "4Ti", "pods": "100"}


def document(name: str, prefill: int, decode: int, port: int, where: dict[str, Any]) -> dict[str, Any]:
    """A service whose instances are two pods with a GPU each."""
    role = {"parallelism": {"tensor": 2, "pods": 2}, "template": {"spec": where}}
    return {"apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService", "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"model": {"source": "org/tiny"}, "engine": {"image": "engine:1"},
                     "prefill": {"replicas": prefill, **role}, "decode": {"replicas": decode, **role},
                     "router": {"ports": {"admin": port}}}}


def whole(pods: Mirror) -> int:
    """Instances of which both pods are ready."""
    ready: dict[str, int] = {}
    for pod in pods.objects.values():
        if label(pod, MEMBER) and is_ready(pod):
            ready[label(pod, INSTANCE)] = ready.get(label(pod, INSTANCE), 0) + 1
    return sum(count == 2 for count in ready.values())


async def scenario(
    around: Surroundings, busy: Callable[[], dict[str, float]], described: dict[str, Any], count: int
) -> dict[str, float]:
    """From the apply on, seconds: until two pods of each instance are made, and until so many are whole; and what
    ``busy`` tells of processor time, until all were made.
    """
    timeline = Timeline(around.pods, around.services)
    wanted = described["spec"]["prefill"]["replicas"] + described["spec"]["decode"]["replicas"]
    before = busy()
    await around.kube.apply("DisaggService", NAMESPACE, described)
    created_s = await timeline.wait(lambda: timeline.made >= 2 * wanted, f"{2 * wanted} pods are made", DEADLINE_S)
    spent = {f"{name}_cpu_s": now - before[name] for name, now in busy().items()}
    whole_s = await timeline.wait(lambda: whole(around.pods) >= count, f"{count} instances are whole", DEADLINE_S)
    made = timeline.made
    await around.kube.delete("DisaggService", NAMESPACE, described["metadata"]["name"])
    await timeline.wait(lambda: not timeline.there, "no pod is left", DEADLINE_S)
    timeline.close()
    return {"created_s": created_s, **spent, "whole_s": whole_s, "pods_made": made}


async def bench(cluster: LightCluster, folder: Path) -> dict[str, Any]:
    """Both scenarios; the figures."""
    load = machine_load()
    async with surroundings(cluster, folder, NAMESPACE) as around:

        def busy() -> dict[str, float]:
            return {"operator": cpu_s(around.operator.pid), "api_server": cpu_s(cluster.pid(API)),
                    "bench": time.process_time()}

        cluster.add_nodes(NODES, ROOMY | {"nvidia.com/gpu": str(GPUS)})
        described = document("all", PREFILL, DECODE, around.routers.port, {})
        all_fit = await scenario(around, busy, described, PREFILL + DECODE)
        print("all:", {key: round(value, 2) for key, value in all_fit.items()}, flush=True)
        cluster.add_nodes(1, ROOMY | {"nvidia.com/gpu": str(2 * ROOM + 1)}, SHORT, "short")
        described = document("short", 0, WANTED, around.routers.port, {"nodeSelector": SHORT})
        short = await scenario(around, busy, described, ROOM)
        print("short:", {key: round(value, 2) for key, value in short.items()}, flush=True)
    named = {f"{name}_{key}": value for name, figures in (("all", all_fit), ("short", short))
             for key, value in figures.items()}
    return named | {"load_before": load}
