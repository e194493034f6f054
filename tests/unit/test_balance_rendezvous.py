"""Rendezvous hashing: even, the same everywhere, and calm when instances come and go."""

from __future__ import annotations

from collections import Counter

import pytest
from members import member

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.api.prompt import key_of
from xpyd_sidecar.router.balance.candidates import Rendezvous
from xpyd_sidecar.router.fleet.member import FleetMember

KEYS = [key_of(str(number).encode()) for number in range(20_000)]


def fleet(count: int) -> tuple[FleetMember, ...]:
    return tuple(member(f"qwen-e{number}") for number in range(count))


@pytest.mark.parametrize(("count", "least", "most"), [(2, 0.9, 1.1), (8, 0.85, 1.15), (64, 0.6, 1.4)])
def test_keys_are_spread_evenly(count: int, least: float, most: float) -> None:
    hashing, instances = Rendezvous(), fleet(count)
    wins = Counter(next(hashing.order(Role.DECODE, instances, key)) for key in KEYS)
    mean = len(KEYS) / count
    assert least * mean < min(wins.values()) <= max(wins.values()) < most * mean
    assert len(wins) == count


def test_second_places_are_spread_too() -> None:
    hashing, instances = Rendezvous(), fleet(8)
    seconds: dict[int, Counter[int]] = {index: Counter() for index in range(8)}
    for key in KEYS:
        order = hashing.order(Role.DECODE, instances, key)
        seconds[next(order)][next(order)] += 1
    for first, counts in seconds.items():
        assert len(counts) == 7, f"the load of {first} goes to all others when it is gone"
        assert max(counts.values()) < 0.45 * sum(counts.values())


def test_the_same_in_every_router_whatever_it_saw_before() -> None:
    one, two, instances = Rendezvous(), Rendezvous(), fleet(8)
    for key in KEYS[:100]:
        next(two.order(Role.DECODE, fleet(5), key))
    assert [next(one.order(Role.DECODE, instances, key)) for key in KEYS[:500]] == [
        next(two.order(Role.DECODE, instances, key)) for key in KEYS[:500]]


def test_one_that_goes_moves_only_its_own_keys() -> None:
    hashing, instances = Rendezvous(), fleet(8)
    left = instances[:3] + instances[4:]
    for key in KEYS[:2000]:
        before = instances[next(hashing.order(Role.DECODE, instances, key))]
        after = left[next(hashing.order(Role.DECODE, left, key))]
        assert after is before or before is instances[3]


def test_an_order_names_each_once_the_winner_first() -> None:
    hashing, instances = Rendezvous(), fleet(40)
    for key in KEYS[:50]:
        order = list(hashing.order(Role.DECODE, instances, key))
        assert sorted(order) == list(range(40))
        assert order[0] == next(hashing.order(Role.DECODE, instances, key))
        without = [index for index in order if index != order[0]]
        rest = tuple(each for index, each in enumerate(instances) if index != order[0])
        assert rest[next(hashing.order(Role.DECODE, rest, key))] is instances[without[0]]
