"""Stale load makes no herd: several routers, beats that are seconds old, and eight instances that stay even."""

from __future__ import annotations

import heapq
import random
from statistics import fmean

import pytest
from members import member

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.contract.membership import Load
from xpyd_sidecar.router.api.prompt import PromptPrefix
from xpyd_sidecar.router.balance import policies
from xpyd_sidecar.router.balance.candidates import UNTOLD
from xpyd_sidecar.router.balance.policies import Query

INSTANCES = 8
BEAT_S = 3.0
TOKENS = UNTOLD
"""Of each prompt."""


def imbalance(policy: str, routers: int, *, role: Role = Role.DECODE, rate: float = 40.0, service_s: float = 4.0,
              seed: int = 1) -> tuple[float, float]:
    """Largest over mean of what runs, averaged over a minute, and the worst moment. Beats come every 3 s, at odd times."""
    draw = random.Random(seed)
    views = [tuple(member(f"e{index}", role) for index in range(INSTANCES)) for _ in range(routers)]
    chosen = [policies.make(policy, {}, random.Random(number).random) for number in range(routers)]
    running = [0] * INSTANCES
    ends: list[tuple[float, int, int]] = []
    beats = [draw.uniform(0, BEAT_S) for _ in range(INSTANCES)]
    ratios = []
    now = 0.0
    while now < 90.0:
        now += draw.expovariate(rate)
        while ends and ends[0][0] <= now:
            _, index, router = heapq.heappop(ends)
            running[index] -= 1
            views[router][index].in_flight -= 1
            views[router][index].uncached_tokens -= TOKENS
        for index, at in enumerate(beats):
            if now >= at:
                beats[index] = now + BEAT_S
                for view in views:
                    view[index].load, view[index].in_flight_at_beat = Load(running=running[index]), view[index].in_flight
        router = draw.randrange(routers)
        prefix = PromptPrefix(draw.randbytes(64))
        index = chosen[router].choose(Query(prefix, tokens=TOKENS), views[router])
        running[index] += 1
        views[router][index].in_flight += 1
        views[router][index].uncached_tokens += TOKENS
        heapq.heappush(ends, (now + draw.expovariate(1 / service_s), index, router))
        if now > 30.0:
            ratios.append(max(running) / fmean(running))
    return fmean(ratios), max(ratios)


@pytest.mark.parametrize("routers", [1, 3, 8])
def test_least_loaded_with_stale_load_stays_balanced(routers: int) -> None:
    mean, worst = imbalance("least_loaded", routers)
    assert mean < 1.35, (mean, worst)
    assert worst < 1.8, (mean, worst)


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("routers", [1, 3])
def test_cost_with_prompts_of_all_kinds_stays_balanced_too(routers: int, role: Role) -> None:
    mean, worst = imbalance("cost", routers, role=role)
    assert mean < 1.5, (mean, worst)
    assert worst < 2.0, (mean, worst)


@pytest.mark.parametrize(("routers", "better"), [(1, 0.15), (3, 0.0), (8, -0.05)])
def test_it_is_better_than_chance_as_far_as_load_is_known_and_never_worse(routers: int, better: float) -> None:
    """A router knows its own legs at once and those of others when they are 3 s old, of requests that take 4 s."""
    assert imbalance("least_loaded", routers)[0] + better < imbalance("random", routers)[0]
