"""prefix_aware: the same beginning to the same instance, within the bound on load."""

from __future__ import annotations

import random
from collections import Counter
from random import Random

import pytest
from members import member

from xpyd_sidecar.router.api.prompt import PromptPrefix
from xpyd_sidecar.router.balance import policies
from xpyd_sidecar.router.balance.candidates import Holdings, score
from xpyd_sidecar.router.balance.policies import Policy, Query
from xpyd_sidecar.router.fleet.member import FleetMember


def fleet(count: int = 8) -> tuple[FleetMember, ...]:
    return tuple(member(f"e{number}") for number in range(count))


class Router:
    """A policy with what it knows, over instances of its own view."""

    def __init__(self, instances: tuple[FleetMember, ...], seed: int = 1, **options: object) -> None:
        self.fleet = instances
        self.policy: Policy = policies.make("prefix_aware", options, Random(seed).random)
        self.holdings = Holdings()

    def send(self, text: str) -> FleetMember:
        """Choose, and believe from now on that it is there."""
        prefix = PromptPrefix(text.encode())
        chosen = self.fleet[self.policy.choose(Query(prefix, self.holdings), self.fleet)]
        self.holdings.add(chosen, prefix)
        return chosen


def text(*parts: object, size: int = 3000) -> str:
    return "".join(str(part).ljust(size, ".") for part in parts)


def test_a_conversation_stays_where_it_began() -> None:
    router = Router(fleet())
    for number in range(50):
        parts = [f"conversation {number}"]
        home = router.send(text(*parts))
        for turn in range(6):
            parts.append(f"turn {turn}")
            assert router.send(text(*parts)) is home


def test_short_first_turns_are_remembered_though_the_hashed_blocks_are_not_full() -> None:
    router = Router(fleet())
    for number in range(50):
        home = router.send(text(number, size=400))
        assert router.send(text(number, "more", size=400)) is home


def test_three_routers_agree_on_prefixes_that_each_sees_for_the_first_time() -> None:
    routers = [Router(fleet(), seed) for seed in range(3)]
    for number in range(300):
        assert len({router.send(text(number)).name for router in routers}) == 1


def test_three_routers_agree_on_conversations_of_which_each_sees_a_third() -> None:
    draw = random.Random(5)
    routers = [Router(fleet(), seed) for seed in range(3)]
    homes = []
    for number in range(200):
        parts = [f"conversation {number}".ljust(4096, ".")]
        names = []
        for turn in range(5):
            names.append(draw.choice(routers).send(text(*parts)).name)
            parts.append(f"turn {turn}")
        homes.append(len(set(names)))
    assert sum(count == 1 for count in homes) >= 0.95 * len(homes)


def test_routers_agree_behind_a_common_system_prompt_too() -> None:
    """The hash of the first blocks alone would send everything to one instance."""
    routers = [Router(fleet(), seed) for seed in range(3)]
    system = "system".ljust(6000, ".")
    for number in range(60):  # under load, so that most instances see it
        for router in routers:
            router.send(system + text(f"warm {number}")).in_flight += 1
    for router in routers:
        for each in router.fleet:
            each.in_flight = 0
    agreed, spread = 0, Counter[str]()
    for number in range(200):
        names = {router.send(system + text(f"new {number}")).name for router in routers}
        agreed += len(names) == 1
        spread.update(names)
    assert agreed >= 190
    assert max(spread.values()) < 2.5 * sum(spread.values()) / 8, spread


@pytest.mark.parametrize("bound", [1.0, 1.25, 2.0])
def test_no_instance_has_more_than_the_bound_whatever_is_asked_for(bound: float) -> None:
    """Zipf's law: the most common prefix is a fifth of all. Requests stay, so load only grows."""
    draw, router = random.Random(2), Router(fleet(), bound=bound)
    weights = [1 / rank for rank in range(1, 101)]
    for count in range(1, 2001):
        (number,) = draw.choices(range(100), weights)
        router.send(text(number)).in_flight += 1
        assert max(map(score, router.fleet)) <= max(2, bound * count / 8 + 1)


def test_a_prefix_that_everybody_asks_for_spreads_and_no_further_than_it_must() -> None:
    router = Router(fleet(), bound=2.0)
    names = Counter()
    for _ in range(64):
        chosen = router.send(text("popular"))
        chosen.in_flight += 1
        names[chosen.name] += 1
    assert 4 <= len(names) <= 6, names


def test_without_account_kept_the_hash_decides() -> None:
    instances = fleet()
    query = Query(PromptPrefix(text("x").encode()))
    chosen = {policies.make("prefix_aware", {}, Random(seed).random).choose(query, instances) for seed in range(5)}
    assert len(chosen) == 1


def test_an_overloaded_home_is_left_and_found_again() -> None:
    router = Router(fleet())
    home = router.send(text("x"))
    home.in_flight = 9
    other = router.send(text("x"))
    assert other is not home
    home.in_flight = 0
    other.in_flight = 1
    assert router.send(text("x")) is home, "of two that hold it the less loaded one"
