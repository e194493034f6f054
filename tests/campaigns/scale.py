"""The campaign of scale steps and role switches, into a results file.

    python tests/campaigns/scale.py --simulated     1,000 random scale steps of the planner's world (seconds)
    python tests/campaigns/scale.py --real          60 steps and 100 switches of real engines under load (an hour)
    … --real --steps 6 --switches 20                a part of it

Real: `xpyd up` with at most four engines under a load whose every answer is compared with a plain engine's. A scale step
changes one count by one; a switch moves one instance to the other role. Goals: no failed request, no wrong token, no engine
process started or ended by a switch. Simulated: never fewer that serve than before and after a step ask for, and an end to
every step. Exit code 1: a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support")]

from corpus import mixed  # noqa: E402 (tests/support is not on the path before)
from engines import Engine  # noqa: E402
from pod_world import ROLES, PodWorld, wish  # noqa: E402
from service import Service  # noqa: E402
from traffic import References, Steady, plain_answers  # noqa: E402

from xpyd_operator.plan.desired import Desired  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "campaign_scale.json"
MOST = 4
"""Engines at a time."""
REST_S = 3
"""Simulated: nothing is done for so long."""
IDLE_SWITCHES = 10
"""Switches that are timed without a load, of which the goal of two seconds is."""
Shape = tuple[int, int]
Section = dict[str, Any]


def next_step(dice: random.Random, now: Shape) -> Shape:
    """One count changed by one, within one of each and ``MOST``."""
    near = [(now[0] + a, now[1] + b) for a, b in ((1, 0), (-1, 0), (0, 1), (0, -1))]
    return dice.choice([shape for shape in near if min(shape) >= 1 and sum(shape) <= MOST])


def next_switch(dice: random.Random, now: Shape) -> Shape:
    """One instance in the other role. There are three at least."""
    return dice.choice([shape for shape in ((now[0] + 1, now[1] - 1), (now[0] - 1, now[1] + 1)) if min(shape) >= 1])


def simulated(steps: int, seed: int) -> Section:
    """The planner alone, over pods that start, drain and end as Kubernetes has them."""
    dice, world, faults = random.Random(seed), PodWorld(start_s=20.0, drain_s=10.0), []
    shape, switches, made, rests = (2, 3), 0, 0, []

    def want(of: Shape) -> Desired:
        return wish(*of, switches=True, switch_window_s=30.0)

    world.run(want(shape))
    for number in range(steps):
        before, began, mark = shape, world.now, len(world.log)
        more = (dice.choice([-1, 0, 1]), dice.choice([-2, -1, 0, 1, 2]))
        shape = (max(1, min(6, shape[0] + more[0])), max(1, min(6, shape[1] + more[1])))
        still = 0
        while still < REST_S and world.now - began < 600:
            plan = world.tick(want(shape))
            there = [tuple(map(len, map(of, ROLES))) for of in (world.existing, world.serving)]
            still = still + 1 if there == [shape, shape] and not plan.actions else 0
            for role, was, now in zip(ROLES, before, shape, strict=True):
                if len(world.serving(role)) < min(was, now):
                    faults.append(f"step {number}: {len(world.serving(role))} {role} serve of {min(was, now)}")
        if still < REST_S:
            faults.append(f"step {number}: no rest at {shape}")
        rests.append(world.now - began - REST_S)
        switches += sum(line.startswith("switch") for line in world.log[mark:])
        made += sum(line.startswith("create") for line in world.log[mark:])
    return {"steps": steps, "switches": switches, "cold_starts": made, "faults": len(faults), "examples": faults[:5],
            "rest_s_p95": round(sorted(rests)[int(0.95 * len(rests))], 1)}


def _engines(service: Service) -> dict[str, int]:
    return {name: pid for name, pid in service.processes().items() if name.endswith("/engine")}


async def _change(service: Service, shape: Shape) -> float:
    """Ask for it; the seconds until the router serves it."""
    began = time.monotonic()
    await asyncio.to_thread(service.write, *shape)
    await asyncio.to_thread(service.xpyd, "up", "-f", str(service.file), "--detach", "--timeout", "280", check=True)
    return time.monotonic() - began


async def real(service: Service, references: References, args: argparse.Namespace) -> Section:
    """Under load; first the switches, which need no engine to start, then the steps."""
    cases, steps, switches, seed = list(references), args.steps, args.switches, args.seed
    dice, shape, restarted = random.Random(seed), (2, 2), 0
    await _change(service, shape)
    idle_s = []
    for _ in range(min(IDLE_SWITCHES, switches)):
        shape = next_switch(dice, shape)
        idle_s.append(await _change(service, shape))
    async with Steady(service.url, cases, references, pause_s=1.0) as steady:
        for _ in range(switches):
            engines, shape = _engines(service), next_switch(dice, shape)
            await _change(service, shape)
            restarted += _engines(service) != engines
        for _ in range(steps):
            shape = next_step(dice, shape)
            await _change(service, shape)
    report = steady.report
    return {
        "steps": steps, "switches": switches, "engines_restarted_by_switches": restarted, "requests": report.total,
        "tokens": report.tokens, "failed": len(report.failed), "wrong": len(report.wrong), "examples": report.failed[:3],
        "near_ties": len(report.near_ties), "idle_switch_with_command_s": [round(one, 2) for one in idle_s],
    }


def main() -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description="Scale steps and role switches.")
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--switches", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    found: Section = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    missed = []
    if args.simulated:
        found["simulated"] = simulated(1000, args.seed)
        missed += ["simulated"] * bool(found["simulated"]["faults"])
    if args.real:
        cases = mixed(60, seed=3)
        with tempfile.TemporaryDirectory() as folder:
            with Engine("plain", Path(folder) / "plain", connector=False) as engine:
                engine.wait_ready()
                references = asyncio.run(plain_answers(engine.url, cases))
            with Service(Path(folder)) as service:
                service.up(1, 1)
                found["real"] = asyncio.run(real(service, references, args))
        missed += [name for name in ("failed", "wrong", "engines_restarted_by_switches") if found["real"][name]]
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    print(f"missed: {missed}" if missed else "all goals are met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
