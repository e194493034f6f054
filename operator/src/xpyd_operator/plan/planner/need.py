"""How many instances a demand needs.

Prefill is a queue with c servers. Of requests that come with rate X / L and take S = L / C seconds each (C tokens a
second), the share P(W > w) waits longer than w (Sakasegawa 1977 for the share that waits, an exponential tail as in
Kingman's bound):

    P(W > w) ≈ u^(√(2(c+1))) exp(-w / m)      m = S (1 + v) / 2 / (c (1 - u))      u = X / (c C)

where v is the squared variation of prompt lengths. c is the least with P(W > w) ≤ 5 %, w being what the goal for TTFT
leaves after a long prompt's own time. What waits already must be gone in time, so it counts as demand on top.

Decode holds N = Y t requests (Little), for Y tokens a second and steps of t seconds, and an instance as many as its
capacity says; arrivals vary, so √N more.
"""

from __future__ import annotations

import math

from xpyd_operator.plan.planner.capacity import Capacity

MOST = 1000
LATE = 0.05
FULLEST = 0.92
"""Load of prefill beyond which queues grow however long they are watched."""
LONG = 1.64
"""A long prompt: so many standard deviations above the mean."""
SLACK = 0.8
"""Share of a goal that is planned for: the 95th percentile lies above the mean step, and hand-over takes its part."""


def prefill(rate: float, backlog: float, drain_s: float, known: Capacity, ttft_s: float | None) -> int:
    """Instances for ``rate`` tokens a second and ``backlog`` tokens that wait; 0: nothing is known yet."""
    capacity = known.prefill_rate
    if capacity <= 0 or known.prompt <= 0:
        return 0
    demand = rate + backlog / drain_s
    least = max(1, math.ceil(min(MOST, demand / capacity / FULLEST - 1e-9)))
    if ttft_s is None:
        return min(MOST, least)
    service = known.prompt / capacity
    spread = known.spread
    room = max(0.25 * ttft_s, SLACK * ttft_s - service * (1 + LONG * math.sqrt(spread)))
    count = least
    while count < MOST and late(count, rate / capacity, service, spread, room) > LATE:
        count += 1
    return min(MOST, count)


def late(count: int, load: float, service: float, spread: float, room: float) -> float:
    """The share of requests that wait longer than ``room``; ``load`` is in instances."""
    if load <= 0:
        return 0.0
    used = load / count
    if used >= 1:
        return 1.0
    mean = service * (1 + spread) / 2 / (count * (1 - used))
    return float(used ** math.sqrt(2 * (count + 1)) * math.exp(-room / mean))


def decode(rate: float, known: Capacity, tpot_s: float | None) -> int:
    """Instances for ``rate`` tokens a second; 0: nothing is known yet."""
    goal = SLACK * tpot_s if tpot_s is not None else None
    batch = known.batch(goal)
    if batch <= 0:
        return 0
    requests = rate * known.step(batch)
    return max(1, math.ceil(min(MOST, (requests + math.sqrt(requests)) / batch - 1e-9)))
