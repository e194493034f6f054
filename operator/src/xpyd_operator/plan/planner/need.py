"""How many instances a demand needs.

Prefill is a queue with c servers. Of requests that come with rate X / L and take S = L / C seconds each (C tokens a second,
fewer where c instances have less cached, see ``capacity``), the share P(W > w) waits longer than w (Sakasegawa 1977 for the
share that waits, an exponential tail as in Kingman's bound):

    P(W > w) ≈ u^(√(2(c+1))) exp(-w / m)      m = S b (1 + v) / 2 / (c (1 - u))      u = X / (c C)

where v is the squared variation of prompt lengths and b by how much arrivals vary more than chance has it (``forecast``).
A request is late when its wait and its own prefill together take longer than the goal. Lengths are taken for log-normal
with the mean and the variation that were seen. c is the least with at most 5 % late. Prompts that are too long to be in
time however little they wait are no reason for another instance, but they use up what may be late; waiting may always make
1 % late. What waits already must be gone in time, so it counts as demand on top.

A link of G bytes a second carries X tokens a second of b bytes each, with X b / G of them at least on either side: so many
prefill instances and so many decode instances, since each has one.

Decode holds N = Y t requests (Little), for Y tokens a second and steps of t seconds, and an instance as many as its
capacity says; arrivals vary, so √N more.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from xpyd_operator.plan.planner.capacity import Capacity

MOST = 1000
LATE, LATE_LEAST = 0.05, 0.01
FULLEST = 0.92
"""Load of prefill beyond which queues grow however long they are watched."""
SLACK = 0.8
"""Share of TPOT's goal that is planned for: the 95th percentile lies above the mean step."""
TTFT_SLACK = 0.9
"""Share of TTFT's goal that is planned for: hand-over takes its part."""
SHORTEST_S, WIDEST = 1e-6, 1e6
"""A prefill and a squared variation beyond which nothing is measured any more."""
_NORMAL = NormalDist()
_POINTS = tuple(_NORMAL.inv_cdf((index + 0.5) / 50) for index in range(50))
"""Of the normal distribution, evenly spread by their share."""


def prefill(
    rate: float, backlog: float, drain_s: float, known: Capacity, ttft_s: float | None, *, burst: float = 1.0
) -> int:
    """Instances for ``rate`` tokens a second and ``backlog`` tokens that wait; 0: nothing is known yet."""
    if known.prefill_rate <= 0 or known.prompt <= 0:
        return 0
    demand = rate + backlog / drain_s
    count = max(1, math.ceil(min(MOST, demand / known.prefill_rate / FULLEST - 1e-9)))
    while count < MOST and not _suffice(count, rate, demand, known, ttft_s=ttft_s, burst=burst):
        count += 1
    return min(MOST, count)


def _suffice(count: int, rate: float, demand: float, known: Capacity, *, ttft_s: float | None, burst: float) -> bool:
    """Whether so many prefill instances read ``demand`` tokens a second, and ``rate`` of them in time."""
    capacity = known.rate_of(count, rate)
    if demand > count * capacity * FULLEST * (1 + 1e-9):
        return False
    if ttft_s is None:
        return True
    service, spread = known.prompt / capacity, known.spread
    rooms, hopeless = waiting_budgets(TTFT_SLACK * ttft_s, service, spread)
    return late(count, rate / capacity, service, burst * (1 + spread) - 1, rooms) <= max(LATE_LEAST, LATE - hopeless)


def waiting_budgets(goal_s: float, service: float, spread: float) -> tuple[tuple[float, ...], float]:
    """Seconds that requests may wait: what their own prefill leaves of the goal ``goal_s``, for evenly many of all of them;
    and the share of requests to which it leaves nothing.
    """
    square = math.log1p(min(spread, WIDEST))
    deviation, middle = math.sqrt(square), math.log(max(service, SHORTEST_S)) - square / 2
    rooms = tuple(goal_s - math.exp(min(50.0, middle + deviation * point)) for point in _POINTS)
    hopeless = 1.0 - _NORMAL.cdf((math.log(goal_s) - middle) / deviation) if deviation > 0 else float(service > goal_s)
    return tuple(room for room in rooms if room > 0), hopeless


def late(count: int, load: float, service: float, spread: float, rooms: tuple[float, ...]) -> float:
    """The share of requests that wait longer than they may, by ``rooms``; ``load`` is in instances."""
    if load <= 0:
        return 0.0
    used = load / count
    if used >= 1:
        return 1.0
    mean = max(SHORTEST_S, service) * (1 + spread) / 2 / (count * (1 - used))
    waits = float(used ** math.sqrt(2 * (count + 1)))
    return waits * sum(math.exp(-room / mean) for room in rooms) / len(_POINTS)


def decode(rate: float, known: Capacity, tpot_s: float | None) -> int:
    """Instances for ``rate`` tokens a second; 0: nothing is known yet."""
    batch = known.batch(tpot_goal(tpot_s))
    if batch <= 0:
        return 0
    requests = rate * known.token(batch)
    return max(1, math.ceil(min(MOST, (requests + math.sqrt(requests)) / batch - 1e-9)))


def link(rate: float, known: Capacity) -> int:
    """Instances of either role whose links carry the KV of ``rate`` prompt tokens a second; 0: no link was seen used up."""
    if known.link <= 0:
        return 0
    return max(1, math.ceil(min(MOST, rate * known.token_bytes / known.link / FULLEST - 1e-9)))


def tpot_goal(tpot_s: float | None) -> float | None:
    """What a token may take on average; None: no goal."""
    return SLACK * tpot_s if tpot_s is not None else None
