"""cost: where the prompt is done soonest, and the same place in every router for what each sees for the first time."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, deque
from random import Random

import msgspec
import pytest
from beats import beat
from members import member
from msgspec import Raw

from xpyd_sidecar.contract.core_steps import PromptWork
from xpyd_sidecar.contract.ids import Incarnation, InstanceName, Role
from xpyd_sidecar.contract.membership import Load
from xpyd_sidecar.router.api.prompt import PromptPrefix, prefix_of
from xpyd_sidecar.router.balance import policies
from xpyd_sidecar.router.balance.candidates import PrefixCacheIndex, backlog, score
from xpyd_sidecar.router.balance.policies import BOUND, BOUND_TOKENS, FEW, FEW_TOKENS, Policy, Query
from xpyd_sidecar.router.fleet.member import FleetMember


def fleet(role: Role = Role.PREFILL, count: int = 8) -> tuple[FleetMember, ...]:
    return tuple(member(f"e{number}", role) for number in range(count))


class Router:
    """A policy with what it knows, over instances of its own view."""

    def __init__(self, instances: tuple[FleetMember, ...], seed: int = 1) -> None:
        self.fleet = instances
        self.policy: Policy = policies.make("cost", {}, Random(seed).random)
        self.holdings = PrefixCacheIndex()

    def send(self, prompt: str | PromptPrefix, now: float = 0.0) -> FleetMember:
        """Choose, and believe from now on that it is there."""
        prefix = prompt if isinstance(prompt, PromptPrefix) else PromptPrefix(prompt.encode())
        query = Query(prefix, self.holdings, len(prefix) // 4, now)
        chosen = self.fleet[self.policy.choose(query, self.fleet)]
        self.holdings.add(chosen, prefix)
        return chosen


def text(*parts: object, size: int = 3000) -> str:
    return "".join(str(part).ljust(size, ".") for part in parts)


def chat(*said: str, **beside: object) -> PromptPrefix:
    messages = [{"role": "assistant" if n % 2 else "user", "content": one} for n, one in enumerate(said)]
    fields = {name: Raw(msgspec.json.encode(value)) for name, value in {"messages": messages, **beside}.items()}
    return prefix_of("chat", fields, b"")


@pytest.mark.parametrize("role", list(Role))
def test_a_conversation_stays_where_it_began(role: Role) -> None:
    router = Router(fleet(role))
    for number in range(50):
        parts = [f"conversation {number}"]
        home = router.send(text(*parts))
        for turn in range(6):
            parts.append(f"turn {turn}")
            assert router.send(text(*parts)) is home


@pytest.mark.parametrize("role", list(Role))
def test_three_routers_agree_on_prompts_that_each_sees_for_the_first_time(role: Role) -> None:
    routers = [Router(fleet(role), seed) for seed in range(3)]
    for number in range(300):
        assert len({router.send(text(number)).name for router in routers}) == 1


def test_three_routers_agree_on_conversations_of_which_each_sees_a_third() -> None:
    draw = random.Random(5)
    routers = [Router(fleet(), seed) for seed in range(3)]
    homes = []
    for number in range(200):
        said, names = [f"conversation {number} " * 200], []
        for turn in range(5):
            names.append(draw.choice(routers).send(chat(*said)).name)
            said += [f"answer {turn}", f"turn {turn}"]
        homes.append(len(set(names)))
    assert sum(count == 1 for count in homes) >= 0.95 * len(homes)


def test_routers_agree_behind_a_common_system_prompt_too() -> None:
    """The hash of the beginning alone would send everything to one instance."""
    routers = [Router(fleet(), seed) for seed in range(3)]
    system = "system".ljust(6000, ".")
    for number in range(60):  # under load, so that most instances see it
        for router in routers:
            router.send(system + text(f"warm {number}")).uncached_tokens += 2000
    for router in routers:
        for each in router.fleet:
            each.uncached_tokens = 0
    agreed, spread = 0, Counter[str]()
    for number in range(200):
        names = {router.send(system + text(f"new {number}")).name for router in routers}
        agreed += len(names) == 1
        spread.update(names)
    assert agreed >= 190
    assert max(spread.values()) < 2.5 * sum(spread.values()) / 8, spread


def test_what_counts_is_tokens_and_not_requests() -> None:
    """One with a prompt of 100,000 tokens is busier than one with twenty short ones."""
    router = Router(fleet(count=2))
    long, short = router.fleet
    long.uncached_tokens, long.in_flight = 100_000, 1
    short.uncached_tokens, short.in_flight = 10_000, 20
    assert {router.send(text(number)) for number in range(20)} == {short}


def test_a_holder_is_left_only_for_one_whose_queue_is_shorter_by_more_than_it_holds() -> None:
    router = Router(fleet())
    home = router.send(text("x", size=40_000))
    asked = text("x", "more", size=40_000)
    home.uncached_tokens = 8_000
    assert router.send(asked) is home, "some 8,200 of 20,000 tokens are there"
    router = Router(fleet())
    home = router.send(text("x", size=40_000))
    home.uncached_tokens = 11_000
    assert router.send(asked) is not home


def test_no_instance_has_far_more_than_the_mean_of_what_nobody_holds() -> None:
    draw, router = random.Random(2), Router(fleet())
    for number in range(500):
        size = draw.choice((400, 4000, 40_000))
        router.send(text(number, size=size)).uncached_tokens += size // 4
        loads = [backlog(each, 0.0) for each in router.fleet]
        assert max(loads) <= max(FEW_TOKENS, BOUND_TOKENS * sum(loads) / 8) + 10_000


def test_a_constant_that_everybody_names_as_its_conversation_is_a_hint_within_the_bound() -> None:
    router = Router(fleet())
    for number in range(400):
        router.send(chat(f"{number} " * 300, user="default")).uncached_tokens += 500
    assert max(backlog(each, 0.0) for each in router.fleet) <= BOUND_TOKENS * 400 * 500 / 8 + 500


def test_decode_has_no_more_requests_than_the_bound_whatever_is_asked_for() -> None:
    """Zipf's law: the most common prefix is a fifth of all. Requests stay, so load only grows."""
    draw, router = random.Random(2), Router(fleet(Role.DECODE))
    weights = [1 / rank for rank in range(1, 101)]
    for count in range(1, 2001):
        (number,) = draw.choices(range(100), weights)
        router.send(text(number)).in_flight += 1
        assert max(map(score, router.fleet)) <= max(FEW, BOUND * count / 8 + 1)


def test_an_overloaded_decode_home_is_left_and_found_again() -> None:
    router = Router(fleet(Role.DECODE))
    home = router.send(text("x"))
    home.in_flight = 9
    other = router.send(text("x"))
    assert other is not home
    home.in_flight = 0
    other.in_flight = 1
    assert router.send(text("x")) is home, "of two that hold it the less loaded one"


@pytest.mark.parametrize("prompt", ["", "x"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_shortest_prompts_and_the_smallest_fleets_are_served(prompt: str, count: int) -> None:
    for role in Role:
        router = Router(fleet(role, count))
        assert {router.send(prompt) for _ in range(3)} <= set(router.fleet)


def test_without_account_kept_the_hash_decides() -> None:
    instances = fleet()
    query = Query(PromptPrefix(text("x").encode()))
    chosen = {policies.make("cost", {}, Random(seed).random).choose(query, instances) for seed in range(5)}
    assert len(chosen) == 1


BLOCK = 2048
"""Bytes of a prompt that are cached together: 512 tokens."""


class Caches:
    """Prefill instances that compute one prompt after the other and hold the blocks that were used last."""

    def __init__(self, count: int, blocks: int, tokens_per_s: float) -> None:
        self.held: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(count)]
        self.free, self.computed, self.blocks, self.rate = [0.0] * count, [0] * count, blocks, tokens_per_s

    def serve(self, index: int, now: float, ids: list[int]) -> int:
        """Blocks that were held."""
        cache = self.held[index]
        found = next((at for at, block in enumerate(ids) if block not in cache), len(ids))
        for block in reversed(ids):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > self.blocks:
            cache.popitem(last=False)
        tokens = (len(ids) - found) * BLOCK // 4
        self.computed[index] += tokens
        self.free[index] = max(self.free[index], now) + tokens / self.rate
        return found


def replay(rows: list[tuple[float, list[int]]], routers: int) -> float:
    """Share of blocks that were held, of agents' turns at 8 prefill instances whose beats come every 3 s."""
    draw, caches = random.Random(3), Caches(8, 2000, 8000.0)
    views = [Router(tuple(FleetMember(InstanceName(f"p{n}"), role=Role.PREFILL, incarnation=Incarnation(f"p{n}"))
                          for n in range(8)), seed) for seed in range(routers)]
    legs = [[deque[tuple[float, int]]() for _ in range(8)] for _ in range(routers)]
    beat_at, seq, hits, asked = 0.0, 0, 0, 0
    for now, ids in rows:
        if now >= beat_at:
            beat_at, seq = now + 3.0, seq + 1
            for index in range(8):
                queued = int(max(0.0, caches.free[index] - now) * caches.rate)
                told = Load(prompts=PromptWork(queued, max(0, caches.computed[index] - queued)))
                for view in views:
                    view.fleet[index].take_beat(now, beat(f"p{index}", Role.PREFILL, seq=seq, load=told))
        who = draw.randrange(routers)
        for one, open_ in zip(views[who].fleet, legs[who], strict=True):
            while open_ and open_[0][0] <= now:
                one.uncached_tokens -= open_.popleft()[1]
        prefix = PromptPrefix(b"".join(b"%08d" % block * (BLOCK // 8) for block in ids))
        chosen = views[who].send(prefix, now)
        index = views[who].fleet.index(chosen)
        tokens = len(ids) * BLOCK // 4 - views[who].holdings.held_bytes(chosen, prefix) // 4
        chosen.uncached_tokens += tokens
        chosen.sent_tokens += tokens
        hits, asked = hits + caches.serve(index, now, ids), asked + len(ids)
        legs[who][index].append((caches.free[index], tokens))
    return hits / asked


@pytest.mark.parametrize(("routers", "least"), [(1, 0.90), (4, 0.88)])
def test_agents_with_80_kib_in_common_find_their_conversations(routers: int, least: float) -> None:
    draw, ids = random.Random(1), iter(range(1000, 10**8))
    rows, at = list[tuple[float, list[int]]](), 0.0
    while len(rows) < 2000:
        at += draw.expovariate(1.5)
        when, blocks = at, list(range(1, 41))
        for _ in range(4 + int(draw.expovariate(1 / 12))):
            blocks = blocks + [next(ids) for _ in range(1 + int(draw.expovariate(0.5)))]
            rows.append((when, blocks))
            when += 8 + draw.expovariate(1 / 10)
    found = replay(sorted(rows)[:2000], routers)
    assert found >= least, found
