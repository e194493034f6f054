"""What the policies are worth on real traffic: prefix hits, waiting and balance, and what one choice costs.

    python -m lab bench-policies TRACE.jsonl[.gz]        results: bench/results/policies.json
    python -m lab bench-policies                         for a look; writes nothing

The trace is one of Mooncake's (a row: milliseconds, prompt length, ids of its 512-token blocks); without one, conversations
of the same shape are made up. Instances are simulated: each computes the blocks that it does not hold, one prompt after the
other, at a fixed rate, and holds the blocks used last. The policies are the router's own, one state per router.
"""

from __future__ import annotations

import gzip
import heapq
import json
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path
from statistics import fmean, median
from time import process_time
from timeit import timeit
from typing import Any

from xpyd_sidecar.contract.core_steps import PromptWork
from xpyd_sidecar.contract.ids import AgentId, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.membership import WIRE_VERSION, Heartbeat, Load
from xpyd_sidecar.router.api.prompt import PromptPrefix
from xpyd_sidecar.router.balance import policies
from xpyd_sidecar.router.balance.candidates import Holdings, Mean, score
from xpyd_sidecar.router.balance.policies import Policy, Query
from xpyd_sidecar.router.fleet.member import FleetMember

INSTANCES = 8
TOKENS_PER_S = 8000.0
"""Of one prefill instance."""
BLOCK = 512
BEAT_S = 3.0
RESULTS = Path(__file__).resolve().parents[3] / "bench/results/policies.json"
Row = tuple[float, list[int]]


def rows_of(path: Path) -> list[Row]:
    """Seconds and block ids of each request."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [(row["timestamp"] / 1000, row["hash_ids"]) for row in map(json.loads, lines)]


def made_up(count: int = 8000, seed: int = 1) -> list[Row]:
    """Conversations with one system prompt: each turn repeats what was before it."""
    draw = random.Random(seed)
    ids = iter(range(1, 10**9))
    rows: list[Row] = []
    while len(rows) < count:
        at, blocks = draw.uniform(0, 3000), [0]
        for _ in range(min(12, 1 + int(draw.expovariate(0.4)))):
            blocks = blocks + [next(ids) for _ in range(1 + int(draw.expovariate(0.2)))]
            rows.append((at, blocks))
            at += 20 + draw.expovariate(1 / 60)
    return sorted(rows)[:count]


class TrieAlone:
    """An alternative that was not taken: what this router sent where, and for new prefixes the less loaded of two."""

    holds = True

    def __init__(self, seed: int) -> None:
        self._rest = policies.make("least_loaded", {}, random.Random(seed).random)
        self._mean = Mean()

    def choose(self, query: Query, candidates: Sequence[FleetMember], partners: int = 1) -> int:
        """Index of the chosen one."""
        most = max(2, ceil(1.25 * self._mean.of(candidates[0].role, candidates)))
        found = query.holdings.holders(candidates, query.prefix)[0] if query.holdings is not None else []
        fit = [index for _, index in found if score(candidates[index]) < most]
        return fit[0] if fit else self._rest.choose(query, candidates, partners)


def policy_of(name: str, seed: int) -> Policy:
    """One of the router's policies, or the one of this file."""
    return TrieAlone(seed) if name == "trie alone" else policies.make(name, {}, random.Random(seed).random)


class Fleet:
    """Instances, and the routers that choose among them. Beats tell routers the load every ``BEAT_S``."""

    def __init__(self, policy: str, routers: int, capacity: int, *, trie: bool) -> None:
        self.caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(INSTANCES)]
        self.busy = [0.0] * INSTANCES
        self.work = [0.0] * INSTANCES
        self.capacity = capacity
        self.views = [tuple(self._member(index) for index in range(INSTANCES)) for _ in range(routers)]
        self.policies = [policy_of(policy, seed) for seed in range(routers)]
        self.holdings = [Holdings() if trie and each.holds else None for each in self.policies]
        self.computed = [0] * INSTANCES
        self.ends: list[tuple[float, int, int, int]] = []
        """When, at which instance, of which router, and tokens that it took to be uncached."""
        self.beat_at, self.beats = 0.0, 0

    @staticmethod
    def _member(index: int) -> FleetMember:
        return FleetMember(InstanceName(f"qwen-e{index}"), role=Role.PREFILL, incarnation=Incarnation(f"e{index}"))

    def tick(self, now: float) -> None:
        """Requests end, and every beat tells all routers what is there."""
        while self.ends and self.ends[0][0] <= now:
            _, index, router, uncached = heapq.heappop(self.ends)
            self.views[router][index].in_flight -= 1
            self.views[router][index].uncached_tokens -= uncached
        if now >= self.beat_at:
            self.beat_at, self.beats = now + BEAT_S, self.beats + 1
            for index in range(INSTANCES):
                total = sum(view[index].in_flight for view in self.views)
                queued = int(max(0.0, self.busy[index] - now) * TOKENS_PER_S)
                load = Load(running=total, prompts=PromptWork(queued, max(0, self.computed[index] - queued)))
                name = self.views[0][index].name
                told = Heartbeat(WIRE_VERSION, ServiceName("qwen"), name, self.beats, Role.PREFILL, 0, State.READY,
                                 AgentId("a"), load=load)
                for view in self.views:
                    view[index].take_beat(now, told)

    def serve(self, now: float, router: int, blocks: list[int]) -> tuple[int, float]:
        """Blocks that were held, and seconds until the first token."""
        view, prefix = self.views[router], PromptPrefix(b"".join(b"%08d" % block * 256 for block in blocks))
        holdings = self.holdings[router]
        tokens = len(blocks) * BLOCK
        index = self.policies[router].choose(Query(prefix, holdings, tokens, now), view)
        uncached = tokens
        if holdings is not None:
            uncached -= tokens * holdings.held(view[index], prefix) // max(1, len(prefix))
            holdings.add(view[index], prefix)
        cache = self.caches[index]
        held = next((n for n, block in enumerate(blocks) if block not in cache), len(blocks))
        for block in blocks:
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > self.capacity:
            cache.popitem(last=False)
        seconds = (len(blocks) - held) * BLOCK / TOKENS_PER_S + 0.02
        self.busy[index] = max(self.busy[index], now) + seconds
        self.work[index] += seconds
        self.computed[index] += (len(blocks) - held) * BLOCK
        view[index].in_flight += 1
        view[index].uncached_tokens += uncached
        view[index].sent_tokens += uncached
        heapq.heappush(self.ends, (self.busy[index], index, router, uncached))
        return held, self.busy[index] - now


def replay(rows: list[Row], policy: str, routers: int, capacity: int, *, trie: bool = True) -> dict[str, float]:
    """Serve a trace."""
    fleet, draw = Fleet(policy, routers, capacity, trie=trie), random.Random(3)
    hits = blocks = 0
    waits = []
    for now, ids in rows:
        fleet.tick(now)
        held, wait = fleet.serve(now, draw.randrange(routers), ids)
        hits, blocks = hits + held, blocks + len(ids)
        waits.append(wait)
    waits.sort()
    return {"hit_share": round(hits / blocks, 4), "ttft_p50_s": round(median(waits), 3),
            "ttft_p95_s": round(waits[int(len(waits) * 0.95)], 3),
            "work_max_over_mean": round(max(fleet.work) / fmean(fleet.work), 3)}


def costs() -> Iterator[tuple[str, float]]:
    """Processor time, in microseconds, of one choice among 256 instances, for a prompt of 8 KB, its keys included."""
    draw = random.Random(1)
    view = tuple(Fleet._member(index) for index in range(256))
    for each in view:
        each.in_flight = draw.randrange(8)
    prompts = [draw.randbytes(8192) for _ in range(2000)]
    for name in policies.names():
        policy, turn = policies.make(name, {}, draw.random), iter(prompts)
        holdings = Holdings() if policy.holds else None

        def choose() -> None:
            prefix = PromptPrefix(next(turn))  # noqa: B023  # called within this turn alone
            index = policy.choose(Query(prefix, holdings, 2048), view)  # noqa: B023
            if holdings is not None:  # noqa: B023
                holdings.add(view[index], prefix)  # noqa: B023

        yield name, round(timeit(choose, number=len(prompts), timer=process_time) / len(prompts) * 1e6, 2)


def main(arguments: list[str]) -> None:
    """Measure, print, and write what a trace gave."""
    rows = rows_of(Path(arguments[0])) if arguments else made_up()
    results: dict[str, Any] = {"trace": Path(arguments[0]).name if arguments else "made up", "requests": len(rows)}
    for capacity in (1000, 4000):
        for routers in (1, 3):
            for name, policy, trie in (("round_robin", "round_robin", True), ("least_loaded", "least_loaded", True),
                                       ("hash alone", "cost", False), ("trie alone", "trie alone", True),
                                       ("cost", "cost", True)):
                found = replay(rows, policy, routers, capacity, trie=trie)
                results[f"{name}, {routers} routers, {capacity} blocks"] = found
                sys.stdout.write(f"{capacity} blocks  {routers} routers  {name:14} {found}\n")
    results["pick_us_256"] = dict(costs())
    sys.stdout.write(f"{results['pick_us_256']}\n")
    if arguments:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
