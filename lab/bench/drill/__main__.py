"""A drill: an hour of traffic in six minutes on a real operator, real routers and a real API server, beside the simulation.

    python -m lab drill                    without faults, then with them; results are printed
    python -m lab drill --write            the same, into bench/results/drill.json where all is as it has to be
    python -m lab drill --parts faults     one of both; ``--faster 2 --family flat:hours=0.1`` on a machine that is busy

Operator and routers are processes of this tree, API server, store and controllers those of a cluster on loopback. Only the
kubelet is scripted, and engines work as the simulation's instances do (``core``). Faults: the operator is killed at a
quarter, the API server is away for a minute from two fifths on, a prefill and a decode engine die at three quarters. Needs
root.

Everything is in the drill's own time, a tenth of the hour's. A machine without a processor for the drill would be measured
in its place: for which share of the time its processes waited for one is in the results. Exit code 1: something was lost,
attainment is further from the simulation's than five points, or the machine was too busy to tell.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime as dt
import os
import platform
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from figures import DrillWatch, rounded, verdict
from kube_cluster import apply_crds, away
from kube_operator import OperatorProcess
from kube_team import Team, make_team, operator_login
from play import FASTER, MODEL, START, Play, document, play_of, simulated
from pods import Pods
from processes import free_port
from testcluster import build
from testcluster.control_plane import CONTROLLERS
from testcluster.light import LightCluster

from xpyd_operator.simulation.chance import Chance
from xpyd_operator.traffic.drive import TrafficTarget, drive
from xpyd_operator.traffic.measures import RequestOutcome, measure
from xpyd_sidecar.contract.ids import Role

RESULTS = Path(__file__).resolve().parents[3] / "bench/results/drill.json"
FAMILY = "diurnal:hours=1,rate=1,times=4,period=1h,prompt=1200,output=250"
NAME = "qwen"
PARTS = ("calm", "faults")
ROUTERS = 2
BEGIN_S = 240.0
ANSWER_S = 180.0
AWAY_S = 60.0
AGAIN_S = 5.0
"""From the operator's end to the next one's start."""


async def faults(cluster: LightCluster, team: Team, pods: Pods, lasts_s: float) -> list[str]:
    """What goes wrong; what was done, in words."""
    begun = time.monotonic()
    done: list[str] = []

    async def until(share: float) -> None:
        await asyncio.sleep(max(0.0, begun + share * lasts_s - time.monotonic()))

    def told(words: str) -> None:
        done.append(f"{time.monotonic() - begun:.0f} s: {words}")
        print(done[-1], flush=True)

    await until(0.25)
    await team.operator.kill()
    told("the operator was killed")
    await asyncio.sleep(AGAIN_S)
    await team.operator.start()
    told("another one works")
    await until(0.4)
    async with away(cluster):
        told("the API server is away")
        await asyncio.sleep(AWAY_S)
    told("it is back")
    await until(0.75)
    for role in (Role.PREFILL, Role.DECODE):
        victim = pods.engines(role)[0]
        await pods.crash(victim)
        told(f"{victim}, a {role} engine, died")
    return done


async def traffic(play: Play, urls: list[str]) -> list[RequestOutcome]:
    """All requests, in turns to all routers."""
    ended = 0

    def count(_: RequestOutcome) -> None:
        nonlocal ended
        ended += 1
        if not ended % 1000:
            print(f"{ended} of {len(play.trace)} answered", flush=True)

    found = await asyncio.gather(*(
        drive(TrafficTarget(url, MODEL, timeout_s=ANSWER_S), play.trace[at::len(urls)], Chance(play.seed + at).random,
              count) for at, url in enumerate(urls)))
    return [one for part in found for one in part]


@contextlib.asynccontextmanager
async def prepared(cluster: LightCluster, play: Play, folder: Path, namespace: str) -> AsyncIterator[tuple[Team, Pods]]:
    """A service with the counts with which the play begins, ready."""
    login = operator_login(cluster)
    operator = OperatorProcess(login, folder / "operator.log", "--no-leader-election", namespace=namespace)
    try:
        async with make_team(cluster, namespace, operator) as team:
            pods = Pods(team.agent, play.engine, folder)
            await operator.start()
            await team.apply(document(play, NAME, (free_port(), free_port(), free_port()), ROUTERS))
            await team.wait(lambda: team.shape(NAME) == f"{START[0]}P{START[1]}D" and len(pods.clients()) == ROUTERS
                            and all(pods.engines(role) for role in Role), "instances and routers are there", BEGIN_S)
            await team.wait_condition("Ready", name=NAME, deadline_s=BEGIN_S)
            yield team, pods
    finally:
        await operator.kill()


async def drill(cluster: LightCluster, play: Play, folder: Path, part: str) -> dict[str, Any]:
    """One play; its figures."""
    async with prepared(cluster, play, folder, f"drill-{part}") as (team, pods):
        watch = DrillWatch(team, NAME, pods)
        begun = time.monotonic()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch.run())
            breaking = group.create_task(faults(cluster, team, pods, play.lasts_s)) if part == "faults" else None
            outcomes = await traffic(play, pods.clients())
            lasted_s = time.monotonic() - begun
            done = await breaking if breaking is not None else []
            watching.cancel()
        said = team.condition("Disaggregating", NAME)
        found = measure(outcomes, ttft_s=play.ttft_s, tpot_s=play.tpot_s)
        return {
            "requests": len(outcomes), "lost": found.failed, "errors": dict(found.errors),
            "lost_tokens": sum(each.output for each in play.trace) - sum(each.output_tokens for each in outcomes),
            "attained": found.goodput, "ttft_p50_ms": found.ttft_ms.p50, "ttft_p95_ms": found.ttft_ms.p95,
            "tpot_p50_ms": found.tpot_ms.p50, "tpot_p95_ms": found.tpot_ms.p95, "sent_late_p99_ms": found.late_ms_p99,
            "instance_s": watch.instance_s, "changes": watch.changes, "lasted_s": lasted_s,
            "waited_for_a_processor": watch.waited_s / lasted_s, "disaggregating": f"{said['status']}, {said['reason']}",
            "plan": team.status(NAME).get("plan", ""), "faults": done, "counts": watch.story()}


def by_simulation(play: Play) -> dict[str, Any]:
    """The figures of the same play, simulated."""
    run = simulated(play, ROUTERS)
    counts = [f"{at:.0f} s: wanted {prefill}P{decode}D" for at, _, (prefill, decode) in run.changes]
    return {"attained": run.attainment(play.ttft_s, play.tpot_s), "instance_s": run.instance_s, "changes": len(run.changes),
            "lost": run.refused, "counts": counts}


def main() -> int:
    """Run it; 1 where something is not as it has to be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default=FAMILY, help=f"of traffic, as xpyd simulate takes it (default: {FAMILY})")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faster", type=float, default=FASTER, help="than the hour, so many times (default: 10)")
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--write", action="store_true", help="results of both parts, where all is as it has to be")
    parser.add_argument("--folder", type=Path, help="for cluster and logs; default: a temporary one")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="xpyd-drill-"))
    play = play_of(args.family, args.seed, args.faster)
    results: dict[str, Any] = {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"), "family": args.family, "seed": args.seed,
        "faster": args.faster, "kubernetes": build.KUBERNETES, "python": platform.python_version(),
        "cpus": os.cpu_count() or 0, "simulated": by_simulation(play)}
    with LightCluster(folder / "cluster") as cluster:
        apply_crds(cluster)
        cluster.stop(CONTROLLERS)  # the garbage collector looks for new CRDs at its start, and then only every 30 s
        cluster.start(CONTROLLERS)
        for part in args.parts:
            logs = folder / part
            logs.mkdir(exist_ok=True)
            results[part] = asyncio.run(drill(cluster, play, logs, part))
    text = msgspec.json.format(msgspec.json.encode(rounded(results)), indent=1).decode() + "\n"
    print(text)
    wrong = verdict(results)
    for each in wrong:
        print(f"wrong: {each}", file=sys.stderr)
    if args.write and not wrong and set(args.parts) == set(PARTS):
        RESULTS.write_text(text)
    print(f"logs: {folder}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
