"""How fast the operator makes, readies and removes pods, and what it costs: on fake nodes of a real API server.

    python -m lab bench-operator                     both scenarios, about five minutes; needs root
    python -m lab bench-operator --pods 200 …      smaller, for a look
    python -m lab bench-operator-services            1,000 services of two pods
    python -m lab bench-operator-groups              instances of several pods, see ``groups``

    one     one service of 1,000 engine pods, from one apply, until it says Ready; then nothing changes; then it is deleted
    many    100 services of 10 pods, the same way

Nodes and kubelets are KWOK's, so that a pod is ready as soon as it is bound. Routers are scripted (``routers``): the
operator asks a real HTTP server, which tells of every pod of the service. API server, store, scheduler and controllers
run on the same machine as the operator, as does this program; they are in every figure of time.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import importlib.metadata
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import groups
import kubernetes
import msgspec
from kube_cluster import Request, apply_crds, requests
from kube_team import USER
from measures import Timeline, cpu_s, machine_load, peak_rss_mib, quantile_ms, rounds
from surroundings import Surroundings, surroundings
from testcluster import build
from testcluster.control_plane import CONTROLLERS
from testcluster.light import LightCluster

from xpyd_operator.cli.plot import panels

RESULTS = Path(__file__).resolve().parents[3] / "bench/results"
NAMESPACE = "bench"
USUAL = (1000, 100, 10)
"""Pods of the one service, services, pods of each."""
MANY = (10, 1000, 2)
FILES = {USUAL: "operator.json", MANY: "operator_services.json"}
"""Sizes of which figures are recorded, and where."""
NODES = 10
DEADLINE_S = 240.0
SERVICE_S = 1.0
"""More of it for each service."""
QUIET_S = 60.0
SETTLE_S = 3.0
READS = ("get", "list", "watch")


def document(name: str, prefill: int, decode: int, port: int) -> dict[str, Any]:
    """A service whose pods ask for what every GPU pod asks for."""
    return {"apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService", "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"model": {"source": "org/tiny"}, "engine": {"image": "engine:1"}, "prefill": {"replicas": prefill},
                     "decode": {"replicas": decode}, "router": {"ports": {"admin": port}}}}


class Bench:
    """One scenario after the other against one operator."""

    def __init__(self, cluster: LightCluster, around: Surroundings) -> None:
        self._cluster = cluster
        self._kube = around.kube
        self._operator = around.operator
        self._mirrors = around.pods, around.services

    async def scenario(self, documents: list[dict[str, Any]], pods: int) -> tuple[dict[str, float], Timeline]:
        """Figures of one scenario, and how the counts went."""
        asked = len(requests(self._cluster, USER))
        deadline_s = DEADLINE_S + SERVICE_S * len(documents)
        timeline = Timeline(*self._mirrors)
        for each in documents:
            await self._kube.apply("DisaggService", NAMESPACE, each)
        applied_s = timeline.now()
        created_s = await timeline.wait(lambda: timeline.made >= pods, f"{pods} pods exist", deadline_s)
        ready_s = await timeline.wait(lambda: timeline.ready >= pods, f"{pods} pods are ready", deadline_s)
        serving_s = await timeline.wait(lambda: timeline.serving >= len(documents), "all services say Ready", deadline_s)
        calls = [each for each in await self._wait_quiet(asked) if each.verb != "watch"]
        before, cpu = rounds(await self._operator.said("/metrics")), cpu_s(self._operator.pid)
        quiet = len(requests(self._cluster, USER))
        await asyncio.sleep(QUIET_S)
        after = rounds(await self._operator.said("/metrics"))
        cpu = (cpu_s(self._operator.pid) - cpu) / QUIET_S
        written = [each for each in requests(self._cluster, USER)[quiet:] if each.verb not in READS]
        looked = after[-1][1] - before[-1][1]
        rss = peak_rss_mib(self._operator.pid)
        delete_s = timeline.now()
        for each in documents:
            await self._kube.delete("DisaggService", NAMESPACE, each["metadata"]["name"])
        gone_s = await timeline.wait(lambda: not timeline.there, "no pod is left", deadline_s)
        timeline.close()
        return {
            "applied_s": applied_s, "created_s": created_s, "ready_s": ready_s, "serving_s": serving_s,
            "deleted_s": gone_s - delete_s, "api_calls_per_pod": len(calls) / pods, "rss_mib": rss,
            "noop_p99_ms": quantile_ms(before, after), "noop_rounds": looked, "noop_writes": len(written),
            "noop_cpu": cpu, "noop_cpu_ms": cpu * QUIET_S * 1000 / looked,
        }, timeline

    async def _wait_quiet(self, since: int) -> list[Request]:
        """Everything that the operator asked for since then, once it has written nothing for a while (Events come late)."""
        end, last = time.monotonic() + DEADLINE_S, -1
        while True:
            asked = requests(self._cluster, USER)[since:]
            writes = sum(each.verb not in READS for each in asked)
            if writes == last:
                return asked
            if time.monotonic() > end:
                raise TimeoutError(f"the operator still writes after {DEADLINE_S:.0f} s")
            last = writes
            await asyncio.sleep(SETTLE_S)


async def bench(cluster: LightCluster, folder: Path, pods: int, services: int, per_service: int) -> dict[str, Any]:
    """Both scenarios; the figures."""
    load = machine_load()
    async with surroundings(cluster, folder, NAMESPACE) as around:
        runner = Bench(cluster, around)
        idle = peak_rss_mib(around.operator.pid)
        port = around.routers.port
        many_docs = [document(f"many-{index}", 1, per_service - 1, port) for index in range(services)]
        one_doc = [document("one", pods // 5, pods - pods // 5, port)]
        one, one_line = await runner.scenario(one_doc, pods)
        print("one:", {key: round(value, 3) for key, value in one.items()}, flush=True)
        many, many_line = await runner.scenario(many_docs, services * per_service)
        print("many:", {key: round(value, 3) for key, value in many.items()}, flush=True)
    RESULTS.mkdir(exist_ok=True)
    title = f"{pods} engine pods of one service / {services} services of {per_service}"
    lines = {f"{kind}: {name}": line for kind, found in (("one", one_line), ("many", many_line))
             for name, line in found.lines().items()}
    if (pods, services, per_service) == USUAL:
        (RESULTS / "operator.svg").write_text(panels(title, [("pods", lines)], x="seconds since apply"))
    figures = {f"{name}_{pods}_s": one[f"{name}_s"] for name in ("created", "ready", "serving", "deleted")}
    figures |= {"api_calls_per_pod": one["api_calls_per_pod"],
                "rss_mib": max(one["rss_mib"], many["rss_mib"]), "rss_idle_mib": idle,
                "noop_p99_ms": max(one["noop_p99_ms"], many["noop_p99_ms"])}
    figures |= {f"one_{key}": value for key, value in one.items() if key.startswith("noop")}
    figures |= {f"many_{key}": value for key, value in many.items() if key != "applied_s"}
    return figures | {"load_before": load}


def about() -> dict[str, Any]:
    """Where and with what it was measured."""
    return {"date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"), "kubernetes": build.KUBERNETES,
            "kopf": importlib.metadata.version("kopf"),
            "client": kubernetes.__version__, "python": platform.python_version(), "cpus": os.cpu_count() or 0}


def main() -> None:
    """Run it, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=USUAL[0], help="of the one service")
    parser.add_argument("--services", type=int, default=USUAL[1])
    parser.add_argument("--per-service", type=int, default=USUAL[2])
    parser.add_argument("--folder", type=Path, help="for cluster and logs; default: a temporary one")
    parser.add_argument("--groups", action="store_true", help="instances of several pods instead")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="xpyd-bench-"))
    began = time.monotonic()
    with LightCluster(folder / "cluster", kwok=True) as cluster:
        apply_crds(cluster)
        cluster.stop(CONTROLLERS)  # the garbage collector looks for new CRDs at its start, and then only every 30 s
        cluster.start(CONTROLLERS)
        if args.groups:
            results, file = asyncio.run(groups.bench(cluster, folder)), "operator_groups.json"
        else:
            cluster.add_nodes(NODES, {"cpu": "1000", "memory": "4Ti", "pods": "300", "nvidia.com/gpu": "300"})
            results = asyncio.run(bench(cluster, folder, args.pods, args.services, args.per_service))
            file = FILES.get((args.pods, args.services, args.per_service), "")
    figures = {key: round(value, 2) if isinstance(value, float) else value for key, value in results.items()} | about()
    text = msgspec.json.format(msgspec.json.encode(figures), indent=2).decode() + "\n"
    if file:
        (RESULTS / file).write_text(text)
    print(text)
    print(f"took {time.monotonic() - began:.0f} s; logs: {folder}")


if __name__ == "__main__":
    main()
