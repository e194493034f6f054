"""The real part of the campaign of scale steps and role switches: a part of it at a time, each with a seed of its own.

    xpyd up ─▶ idle switches, timed ─▶ load on ─▶ switches ─▶ steps ─▶ load off ─▶ figures of this part
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[2] / "tests" / "support")]

from engines import BASE_ENV, HttpError, get  # noqa: E402 (tests/support is not on the path before)
from service import NAME, Service  # noqa: E402
from traffic import References, Steady  # noqa: E402

from xpyd_operator.local.paths import ServiceFolder  # noqa: E402
from xpyd_sidecar.contract import keys  # noqa: E402

START_S = 900
"""A change of the counts; an engine starts within a minute or two, and longer on a busy machine."""
ANSWER_S = 600
"""A request that takes longer has failed; on a busy machine a minute is nothing."""
LOOK_S = 0.02
Shape = tuple[int, int]
Part = dict[str, Any]


class Bounds(NamedTuple):
    """Of the counts of a service."""

    first: Shape
    """What each part begins with."""
    most: int
    """Instances at a time."""


ENGINES = Bounds((2, 2), 4)
GROUPS = Bounds((2, 1), 3)
"""Each is two processes that compute, and one that schedules."""
SUMS = ("steps", "switches", "engines_restarted_by_switches", "requests", "tokens", "failed", "wrong", "seconds")
"""Figures that add up."""


class ServiceOfGroups(Service):
    """Every instance has two members, with a tensor rank each."""

    def write(self, prefill: int, decode: int) -> None:
        """See ``Service``."""
        env = {**BASE_ENV, "GLOO_SOCKET_IFNAME": "lo", "TORCHDYNAMO_DISABLE": "1"}
        self.spec = {role: {"replicas": count, "parallelism": {"tensor": 2, "pods": 2}}
                     for role, count in (("prefill", prefill), ("decode", decode))}
        self.engine_env = env
        super().write(prefill, decode)


def next_step(dice: random.Random, now: Shape, most: int) -> Shape:
    """One count changed by one, within one of each and ``most``."""
    near = [(now[0] + a, now[1] + b) for a, b in ((1, 0), (-1, 0), (0, 1), (0, -1))]
    return dice.choice([shape for shape in near if min(shape) >= 1 and sum(shape) <= most])


def next_switch(dice: random.Random, now: Shape) -> Shape:
    """One instance in the other role. There are three at least."""
    return dice.choice([shape for shape in ((now[0] + 1, now[1] - 1), (now[0] - 1, now[1] + 1)) if min(shape) >= 1])


def together(parts: list[Part]) -> Part:
    """All parts in sum. Raises ValueError where two have one seed: the second would be the first again."""
    seeds = [part["seed"] for part in parts]
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"parts with one seed: {sorted(seeds)}")
    idle = sorted(one for part in parts for one in part["idle_switch_s"])
    found: Part = {name: round(sum(part[name] for part in parts), 1) for name in SUMS}
    found["examples"] = [one for part in parts for one in part["examples"]][:5]
    found["near_ties"] = sum(len(part["near_ties"]) for part in parts)
    if idle:
        found |= {"idle_switch_s_median": idle[len(idle) // 2], "idle_switch_s_max": idle[-1]}
    return {**found, "parts": parts}


class Change:
    """Changes of one service's counts, and how long they take."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._folder = ServiceFolder(NAME, service.home)

    def engines(self) -> dict[str, int]:
        """Process ids of the engines by name: their servers (launchers, where they have members), and their cores."""
        return {name: pid for name, pid in self._service.processes().items() if name.endswith(("/engine", "/core"))}

    async def to(self, shape: Shape) -> None:
        """Ask for it with ``xpyd up``, which returns when it is there."""
        command = ("up", "-f", str(self._service.file), "--detach", "--timeout", str(START_S))
        await asyncio.to_thread(self._service.write, *shape)
        await asyncio.to_thread(self._service.xpyd, *command, check=True, timeout_s=START_S + 60)

    async def timed(self, shape: Shape) -> float:
        """Seconds from the moment that the new document lies there until the router serves by it."""
        before, changed = self._folder.desired.stat().st_mtime, asyncio.create_task(self.to(shape))
        served = 0.0
        while not served:
            if self._shape() == shape:
                served = time.time()
            elif changed.done():
                await changed
                raise AssertionError(f"the router does not serve {shape} after xpyd up")
            await asyncio.sleep(LOOK_S)
        await changed
        began = self._folder.desired.stat().st_mtime
        assert began > before, "xpyd up wrote the document"
        return served - began

    def _shape(self) -> Shape | None:
        """By roles of what is ready, as the router picks."""
        token = keys.admin_token(keys.read(self._folder.key))
        try:
            url = f"http://127.0.0.1:{self._service.admin}/fleet"
            fleet = json.loads(get(url, 2.0, {"Authorization": f"Bearer {token}"}))
        except (OSError, HttpError):
            return None
        roles = [each["role"] for each in fleet["instances"] if each["state"] == "ready"]
        return roles.count("prefill"), roles.count("decode")


async def part(service: Service, references: References, bounds: Bounds, *, seed: int, steps: int, switches: int,
               idle: int) -> Part:
    """One part. Raises where counts do not come about; a failed request is counted."""
    dice, shape, restarted, change, began = random.Random(seed), bounds.first, 0, Change(service), time.monotonic()
    await change.to(shape)
    idle_s = []
    for _ in range(idle):
        shape = next_switch(dice, shape)
        idle_s.append(round(await change.timed(shape), 2))
    async with Steady(service.url, list(references), references, pause_s=1.0, timeout_s=ANSWER_S) as steady:
        for _ in range(switches):
            engines, shape = change.engines(), next_switch(dice, shape)
            await change.to(shape)
            restarted += change.engines() != engines
        for _ in range(steps):
            shape = next_step(dice, shape, bounds.most)
            await change.to(shape)
        await steady.wait_total(steady.report.total + 1, ANSWER_S)
    report = steady.report
    return {
        "seed": seed, "steps": steps, "switches": switches, "engines_restarted_by_switches": restarted,
        "requests": report.total, "tokens": report.tokens, "failed": len(report.failed), "wrong": len(report.wrong),
        "examples": (report.failed + report.wrong)[:3], "near_ties": report.near_ties, "idle_switch_s": idle_s,
        "seconds": round(time.monotonic() - began, 1),
    }
