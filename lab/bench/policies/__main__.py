"""What the policies are worth on real traffic: prefix hits, waiting and balance, what one choice costs, and what it is
worth that engines tell of their caches.

    python -m lab bench-policies TRACE.jsonl[.gz]        results: bench/results/policies.json
    python -m lab bench-policies                         for a look; writes nothing

The trace is one of Mooncake's (a row: milliseconds, prompt length, ids of its 512-token blocks); without one, conversations
of the same shape are made up. Instances are simulated: each computes the blocks that it does not hold, one prompt after the
other, at a fixed rate, and holds the blocks used last. The policies are the router's own, one state per router, and what is
told of caches goes through the engines' ledger, the agents' teller and the routers' belief as it does in a service.
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
from typing import Any, NamedTuple

from xpyd_sidecar.agent.prefix_teller import PrefixTeller
from xpyd_sidecar.contract import held_prefixes, prefix_cuts
from xpyd_sidecar.contract.core_steps import PromptWork
from xpyd_sidecar.contract.held_prefixes import HeldPrefixes
from xpyd_sidecar.contract.ids import AgentId, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.membership import WIRE_VERSION, Heartbeat, Load
from xpyd_sidecar.engine.scheduler.prefix_ledger import PrefixLedger
from xpyd_sidecar.kv.reach import CacheGroup, Reach
from xpyd_sidecar.router.api.prompt import PromptPrefix
from xpyd_sidecar.router.balance import policies
from xpyd_sidecar.router.balance.candidates import Mean, PrefixCacheIndex, score
from xpyd_sidecar.router.balance.policies import Policy, Query
from xpyd_sidecar.router.fleet.member import FleetMember

BLOCK = 512
RESTART_AT = 0.5
"""When a router begins anew, as a share of the trace."""
AFTER_S = 600.0
"""For how long behind that its hits are compared, from the second beat on."""
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
        most = max(2, ceil(1.25 * self._mean.load_per_instance(candidates[0].role, candidates)))
        found = query.holdings.holders(candidates, query.prefix)[0] if query.holdings is not None else []
        fit = [index for _, index in found if score(candidates[index]) < most]
        return fit[0] if fit else self._rest.choose(query, candidates, partners)


def policy_of(name: str, seed: int) -> Policy:
    """One of the router's policies, or the one of this file."""
    return TrieAlone(seed) if name == "trie alone" else policies.make(name, {}, random.Random(seed).random)


class Sizes(NamedTuple):
    """Of a fleet."""

    instances: int = 8
    tokens_per_s: float = 8000.0
    """Of one prefill instance."""
    blocks: int = 1000
    """That one of them holds."""


class Fleet:
    """Instances, and the routers that choose among them. Beats tell routers the load every ``BEAT_S``, and where ``tells``
    what the caches hold.
    """

    def __init__(self, policy: str, routers: int, sizes: Sizes, *, trie: bool, tells: bool = False) -> None:
        count = sizes.instances
        self.sizes, self.tells = sizes, tells and trie
        self.caches: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(count)]
        self.busy = [0.0] * count
        self.work = [0.0] * count
        self.views = [tuple(self._member(index) for index in range(count)) for _ in range(routers)]
        self.policies = [policy_of(policy, seed) for seed in range(routers)]
        self.holdings = [PrefixCacheIndex() if trie and each.holds else None for each in self.policies]
        self.ledgers = [PrefixLedger({0: CacheGroup(Reach("all", BLOCK), BLOCK)}, BLOCK, lambda block, _: block)
                        for _ in range(count)]
        self.tellers = [[PrefixTeller() for _ in range(count)] for _ in range(routers)]
        self.computed = [0] * count
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
            for index in range(self.sizes.instances):
                total = sum(view[index].in_flight for view in self.views)
                queued = int(max(0.0, self.busy[index] - now) * self.sizes.tokens_per_s)
                load = Load(running=total, prompts=PromptWork(queued, max(0, self.computed[index] - queued)))
                name = self.views[0][index].name
                told = Heartbeat(WIRE_VERSION, ServiceName("qwen"), name, self.beats, Role.PREFILL, 0, State.READY,
                                 AgentId("a"), self.views[0][index].incarnation, load=load)
                held = self.ledgers[index].compare(self.caches[index].keys()) if self.tells else None
                for router, view in enumerate(self.views):
                    view[index].take_beat(now, told)
                    if held is not None:
                        self._tell(router, index, told, held)

    def _tell(self, router: int, index: int, beat: Heartbeat, now: HeldPrefixes) -> None:
        holdings, member, teller = self.holdings[router], self.views[router][index], self.tellers[router][index]
        assert holdings is not None
        before = member.prefixes_seq
        for one in teller.changes(beat, now):
            holdings.tell(member, held_prefixes.unpack(one.added), held_prefixes.unpack(one.removed), whole=one.whole)
            member.prefixes_seq = one.seq
        teller.on_ack(beat.seq, before)

    def restart(self, router: int) -> None:
        """A router begins anew: it knows nothing of caches."""
        if self.holdings[router] is not None:
            self.holdings[router] = PrefixCacheIndex()
        for member in self.views[router]:
            member.prefixes_seq = 0

    def serve(self, now: float, router: int, blocks: list[int]) -> tuple[int, float]:
        """Blocks that were held, and seconds until the first token."""
        view, prefix = self.views[router], PromptPrefix(b"".join(b"%08d" % block * 256 for block in blocks))
        holdings = self.holdings[router]
        tokens = len(blocks) * BLOCK
        index = self.policies[router].choose(Query(prefix, holdings, tokens, now), view)
        uncached = tokens
        if holdings is not None:
            uncached -= tokens * holdings.held_bytes(view[index], prefix) // max(1, len(prefix))
            holdings.add(view[index], prefix)
        cache, hashes = self.caches[index], [b"%d" % block for block in blocks]
        held = next((n for n, block in enumerate(hashes) if block not in cache), len(blocks))
        if self.tells:
            request = f"{now} {len(self.ends)}"
            self.ledgers[index].add(request, prefix_cuts.decode(prefix.cuts), tokens, hashes)
            self.ledgers[index].end(request)
        for block in reversed(hashes):  # an engine frees a prompt's last block first
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > self.sizes.blocks:
            cache.popitem(last=False)
        seconds = (len(blocks) - held) * BLOCK / self.sizes.tokens_per_s + 0.02
        self.busy[index] = max(self.busy[index], now) + seconds
        self.work[index] += seconds
        self.computed[index] += (len(blocks) - held) * BLOCK
        view[index].in_flight += 1
        view[index].uncached_tokens += uncached
        view[index].sent_tokens += uncached
        heapq.heappush(self.ends, (self.busy[index], index, router, uncached))
        return held, self.busy[index] - now


def replay(rows: list[Row], policy: str, routers: int, sizes: Sizes, *, trie: bool = True, tells: bool = False,
           seed: int = 3, restarts: bool = False) -> dict[str, float]:
    """Serve a trace. ``restarts``: one of the routers begins anew at ``RESTART_AT``."""
    fleet, draw = Fleet(policy, routers, sizes, trie=trie, tells=tells), random.Random(seed)
    hits = blocks = late_hits = late_blocks = 0
    waits = []
    at = rows[-1][0] * RESTART_AT
    restart = at if restarts else float("inf")
    for now, ids in rows:
        fleet.tick(now)
        if now >= restart:
            restart = float("inf")
            fleet.restart(0)
        router = draw.randrange(routers)
        held, wait = fleet.serve(now, router, ids)
        hits, blocks = hits + held, blocks + len(ids)
        if router == 0 and at + 2 * BEAT_S <= now < at + AFTER_S:
            late_hits, late_blocks = late_hits + held, late_blocks + len(ids)
        waits.append(wait)
    waits.sort()
    return {"hit_share": round(hits / blocks, 4), "hit_share_later": round(late_hits / max(1, late_blocks), 4),
            "ttft_mean_s": round(fmean(waits), 3), "ttft_p50_s": round(median(waits), 3),
            "ttft_p95_s": round(waits[int(len(waits) * 0.95)], 3),
            "work_max_over_mean": round(max(fleet.work) / fmean(fleet.work), 3)}


def told(rows: list[Row]) -> Iterator[tuple[str, dict[str, float]]]:
    """What it is worth that engines tell, with four routers and 16 instances that hold 1,000 blocks each."""
    sizes = Sizes(16, 5000.0, 1000)
    for seed in (3, 4):
        for tells in (False, True):
            for restarts in (False, True):
                name = f"4 routers, 16 instances, {'told' if tells else 'not told'}, seed {seed}"
                found = replay(rows, "cost", 4, sizes, tells=tells, seed=seed, restarts=restarts)
                yield name + ", one router restarts" * restarts, found


def costs() -> Iterator[tuple[str, float]]:
    """Processor time, in microseconds, of one choice among 256 instances, for a prompt of 8 KB, its keys included."""
    draw = random.Random(1)
    view = tuple(Fleet._member(index) for index in range(256))
    for each in view:
        each.in_flight = draw.randrange(8)
    prompts = [draw.randbytes(8192) for _ in range(2000)]
    for name in policies.names():
        policy, turn = policies.make(name, {}, draw.random), iter(prompts)
        holdings = PrefixCacheIndex() if policy.holds else None

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
            for name, policy, trie, tells in (
                    ("round_robin", "round_robin", True, False), ("least_loaded", "least_loaded", True, False),
                    ("hash alone", "cost", False, False), ("trie alone", "trie alone", True, False),
                    ("cost, nobody tells", "cost", True, False), ("cost", "cost", True, True)):
                found = replay(rows, policy, routers, Sizes(blocks=capacity), trie=trie, tells=tells)
                results[f"{name}, {routers} routers, {capacity} blocks"] = found
                sys.stdout.write(f"{capacity} blocks  {routers} routers  {name:18} {found}\n")
    for name, found in told(rows):
        results[name] = found
        sys.stdout.write(f"{name:44} {found}\n")
    results["pick_us_256"] = dict(costs())
    sys.stdout.write(f"{results['pick_us_256']}\n")
    if arguments:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
