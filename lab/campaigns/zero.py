"""To no instances and back, again and again, on a real operator, real routers and a real API server.

    python -m lab campaign-zero                  200 rounds: bench/results/campaign_zero.json
    python -m lab campaign-zero --rounds 5       a look

A round begins with no instances: requests come within a second at both routers, 1,000 of them in the first round and in
every fiftieth, 20 otherwise. One instance of each role starts and answers them; nobody asks, and both go. In every fifth
round a request comes at the moment when the pools are set to 0, while instances still drain. Only the kubelet is scripted,
and engines work as the simulation's instances do (``lab/bench/drill``).

It is counted what was lost, how many instances a wake started, how long the operator took from the first byte to the pools'
new counts, and what is left at the end, when the service is deleted. Needs root.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / each) for each in ("tests/support", "lab/cluster", "lab/bench/drill"))]

from kube_client import Object  # noqa: E402 (its folder is not on the path before)
from kube_cluster import apply_crds  # noqa: E402
from kube_operator import OperatorProcess  # noqa: E402
from kube_team import Team, make_team, operator_login  # noqa: E402
from node_agent import ROLE  # noqa: E402
from play import MODEL, hurried  # noqa: E402
from pods import Pods  # noqa: E402
from processes import free_port  # noqa: E402
from testcluster.control_plane import CONTROLLERS  # noqa: E402
from testcluster.light import LightCluster  # noqa: E402

from xpyd_operator.simulation.chance import Chance  # noqa: E402
from xpyd_operator.simulation.engine import EngineModel  # noqa: E402
from xpyd_operator.simulation.trace import Arrival  # noqa: E402
from xpyd_operator.traffic.drive import TrafficTarget, drive  # noqa: E402
from xpyd_operator.traffic.measures import RequestOutcome  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "campaign_zero.json"
NAME, ROUTERS = "qwen", 2
ENGINE = EngineModel(prefill_start=0.02, prefill_rate=25_000, step_base=0.02, step_per_request=0.0004, max_requests=256,
                     kv_tokens=4_000_000, handover=0.05, kv_bytes=147_456, link=12.5e9, cold_start=5.0)
FASTER = 10.0
"""A start takes half a second: what is idle for three of them goes."""
MANY, FEW, OFTEN = 1000, 20, 50
LATE_EVERY = 5
PROMPT, OUTPUT = 200, 10
AWAY_S = 4.0
"""For so long nobody asks once all have gone: a gap that lasted less than three starts more keeps the next instances."""
STEP_S = 240.0
ANSWER_S = 240.0


def document(ports: tuple[int, int, int]) -> Object:
    """The service. ``ports``: for clients, agents, and the operator."""
    http, members, admin = ports
    roles = {role: {"scaling": {"min": 0, "max": 4}} for role in ("prefill", "decode")}
    router = {"placement": "deployment", "replicas": ROUTERS, "hold": "5m",
              "ports": {"http": http, "members": members, "admin": admin}}
    return {"apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService", "metadata": {"name": NAME},
            "spec": roles | {"model": {"source": MODEL}, "engine": {"image": "engine:1"}, "drain": {"timeout": "30s"},
                             "rollout": {"switchWindow": "0s"}, "router": router, "planner": {"idleTimeout": "1s"}}}


class Rounds:
    """What came of them."""

    def __init__(self, team: Team, pods: Pods, seed: int) -> None:
        self._team, self._pods = team, pods
        self._source, self._chance = random.Random(seed), Chance(seed)
        self.asked = self.lost = self.late = 0
        self.errors: Counter[str] = Counter()
        self.wake_s: list[float] = []
        self.first_s: list[float] = []
        self.started: Counter[str] = Counter()
        """Instances that a wake started, by their shape."""
        self._seen: set[str] = set()

    def pools(self) -> tuple[int, int]:
        """Wanted instances of prefill and of decode."""
        prefill, decode = (int(self._team.of("DisaggPool")[f"{NAME}-{role}"]["spec"]["replicas"])
                           for role in ("prefill", "decode"))
        return prefill, decode

    def asleep(self) -> bool:
        """Nobody is wanted, and nobody is there."""
        return self.pools() == (0, 0) and not self._team.pods(NAME)

    async def one(self, number: int) -> None:
        """From none to none."""
        count = MANY if number % OFTEN == 0 else FEW
        times = sorted(self._source.uniform(0.0, 1.0) for _ in range(count))
        watching = asyncio.create_task(self._woken())
        answering = asyncio.create_task(self.ask(times))
        outcomes = await answering
        began = min(each.started for each in outcomes)
        self.wake_s.append(await watching - began)
        self.first_s += [each.ttft for each in outcomes if each.ok][:1]
        fresh = {pod["metadata"]["uid"]: pod for pod in self._team.pods(NAME) if pod["metadata"]["uid"] not in self._seen}
        roles = Counter(pod["metadata"]["labels"][ROLE] for pod in fresh.values())
        self.started[f"{roles['prefill']}P{roles['decode']}D"] += 1
        self._seen |= fresh.keys()
        await self._team.wait(lambda: self.pools() == (0, 0), "both pools are set to 0", STEP_S)
        if number % LATE_EVERY == LATE_EVERY - 1:
            self.late += 1
            await self.ask([0.0])
            self._seen |= {pod["metadata"]["uid"] for pod in self._team.pods(NAME)}
        await self._team.wait(self.asleep, "all have gone", STEP_S)
        await asyncio.sleep(AWAY_S)

    async def ask(self, times: list[float]) -> list[RequestOutcome]:
        """Requests at these times, in turns to both routers."""
        urls = self._pods.clients()
        trace = [Arrival(at, PROMPT, OUTPUT) for at in times]
        parts = [(url, trace[at::len(urls)]) for at, url in enumerate(urls) if trace[at::len(urls)]]
        found = await asyncio.gather(*(
            drive(TrafficTarget(url, MODEL, timeout_s=ANSWER_S), part, self._chance.random, lambda _: None)
            for url, part in parts))
        outcomes = [each for part in found for each in part]
        self.asked += len(outcomes)
        for each in outcomes:
            if not each.ok or each.output_tokens != OUTPUT:
                self.lost += 1
                self.errors[each.error or f"{each.output_tokens} tokens"] += 1
        return outcomes

    async def _woken(self) -> float:
        """When both pools were first seen to be set, by the clock of outcomes."""
        await self._team.wait(lambda: self.pools() == (1, 1), "both pools are set to 1", STEP_S)
        return time.perf_counter()

    def told(self) -> dict[str, Any]:
        """For the results."""
        return {"rounds": len(self.wake_s), "requests": self.asked, "lost": self.lost, "errors": dict(self.errors),
                "in_the_last_step_down": self.late, "started_by_a_wake": dict(self.started),
                "wake_s_median": round(statistics.median(self.wake_s), 3), "wake_s_max": round(max(self.wake_s), 3),
                "first_token_s_median": round(statistics.median(self.first_s), 2)}


async def run(cluster: LightCluster, folder: Path, rounds: int, seed: int) -> dict[str, Any]:
    """So many rounds, and what is left when the service has been deleted."""
    namespace, login = "zero", operator_login(cluster)
    operator = OperatorProcess(login, folder / "operator.log", "--no-leader-election", namespace=namespace)
    try:
        async with make_team(cluster, namespace, operator) as team:
            pods = Pods(team.agent, hurried(ENGINE, FASTER), folder)
            await operator.start()
            await team.apply(document((free_port(), free_port(), free_port())))
            await team.wait_condition("Ready", name=NAME, words=("AtZero",), deadline_s=STEP_S)
            await team.wait(lambda: len(pods.clients()) == ROUTERS, "both routers run", STEP_S)
            campaign, began = Rounds(team, pods, seed), time.monotonic()
            await campaign.ask([0.0])  # a start is measured, so that the next rounds go after three of that length
            await team.wait(campaign.asleep, "all have gone", 900.0)
            await asyncio.sleep(AWAY_S)
            for number in range(rounds):
                await campaign.one(number)
                print(f"{time.monotonic() - began:.0f} s: {campaign.told()}", flush=True)
            await team.delete(NAME)
            await team.wait_nothing_left(STEP_S)
            return campaign.told() | {"left": team.left(), "seconds": round(time.monotonic() - began)}
    finally:
        await operator.kill()


def main() -> int:
    """Run it; 1 where something was lost or left, or a wake was late or started more than one of each role."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="xpyd-zero-"))
    with LightCluster(folder / "cluster") as cluster:
        apply_crds(cluster)
        cluster.stop(CONTROLLERS)  # the garbage collector looks for new CRDs at its start, and then only every 30 s
        cluster.start(CONTROLLERS)
        told = {"seed": args.seed, "load": os.getloadavg()[0]} | asyncio.run(run(cluster, folder, args.rounds, args.seed))
    text = json.dumps(told, indent=1) + "\n"
    if args.write:
        RESULTS.write_text(text)
    print(text)
    print(f"logs: {folder}")
    return int(bool(told["lost"] or told["left"]) or set(told["started_by_a_wake"]) != {"1P1D"} or told["wake_s_max"] > 1.5)


if __name__ == "__main__":
    sys.exit(main())
