"""Shares of several routers, in simulated time: what they tell each other comes late, twice, in disorder, or not at all."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from more_cases import more

from xpyd_sidecar.contract.demand import (
    MAX_CARRIED,
    MAX_DEMANDING,
    MAX_TOLD,
    RouterDemand,
    TenantDemand,
    newest_demands,
)
from xpyd_sidecar.contract.tenants import Tenant
from xpyd_sidecar.router.balance.demand import FORGET_S, IDLE, SharedDemand
from xpyd_sidecar.router.balance.quotas import DAY_S, Quotas, TenantAccount

NOON = 20_000.5 * DAY_S


class RouterSide:
    """One router's quotas, and what it knows of others."""

    def __init__(self, name: str, tenants: list[Tenant]) -> None:
        self.quotas = Quotas()
        self.quotas.take_over(tenants, 0.0)
        self.shared = SharedDemand(name, self.quotas)
        self.spent: dict[str, int] = dict.fromkeys([one.name for one in tenants], 0)

    def account(self, name: str) -> TenantAccount:
        found = self.quotas.account(name)
        assert found is not None
        return found

    def ask(self, name: str, tokens: int, now: float, unix: float = NOON) -> bool:
        """A request that takes its tokens at once."""
        account = self.account(name)
        self.quotas.want(account, tokens)
        if account.refusal(now, unix) is not None:
            return False
        account.settle(account.take(tokens, now, unix), tokens, -1, now, unix)
        self.spent[name] += tokens
        return True


def tenants(count: int, **fields: Any) -> list[Tenant]:
    return [Tenant(f"t{number}", (), **fields) for number in range(count)]


def routers(count: int, those: list[Tenant]) -> list[RouterSide]:
    return [RouterSide(f"r{number}", those) for number in range(count)]


def tell_all(sides: list[RouterSide], now: float, unix: float = NOON) -> None:
    """One round without delay."""
    said = newest_demands(tuple(side.shared.own_words(unix + now) for side in sides))
    for side in sides:
        side.shared.take_words(said, now, unix)


def test_a_router_alone_gives_out_all() -> None:
    one = routers(1, tenants(2, tokens_per_minute=600))[0]
    one.ask("t0", 50, 0.0)
    one.shared.share(1.0, NOON)
    assert one.account("t0").share == one.account("t1").share == 1.0


def test_routers_that_are_not_asked_have_equal_shares() -> None:
    sides = routers(4, tenants(3, tokens_per_minute=600))
    tell_all(sides, 1.0)
    for side in sides:
        side.shared.share(1.0, NOON)
        assert [side.account(f"t{number}").share for number in range(3)] == [0.25] * 3


def test_shares_follow_demand_and_add_up_to_one() -> None:
    sides = routers(3, tenants(1, tokens_per_minute=60_000))
    for second in range(60):
        for side, tokens in zip(sides, (3000, 1000, 0), strict=True):
            if tokens:
                side.ask("t0", tokens, float(second))
        for side in sides:
            side.shared.share(float(second), NOON)
        tell_all(sides, float(second))
    for side, tokens in zip(sides, (3000, 1000, 0), strict=True):
        if tokens:
            side.ask("t0", tokens, 60.0)
        side.shared.share(60.0, NOON)
    shares = [side.account("t0").share for side in sides]
    assert sum(shares) == pytest.approx(1.0, abs=1e-3)
    assert shares == [pytest.approx(0.75, abs=0.01), pytest.approx(0.25, abs=0.01), pytest.approx(IDLE / 4, abs=IDLE)]


def test_what_is_old_or_twice_changes_nothing_and_the_silent_are_forgotten() -> None:
    one = routers(1, tenants(1, tokens_per_minute=600))[0]
    new, old = (RouterDemand("r9", at, (TenantDemand("t0", wanted, 7),)) for at, wanted in ((2000, 600), (1000, 0)))
    one.shared.take_words((new,), 0.0, NOON)
    one.shared.share(1.0, NOON)
    share = one.account("t0").share
    assert share < 0.01
    one.shared.take_words((old,), 1.0, NOON)
    one.shared.take_words((new,), FORGET_S - 1, NOON)
    one.shared.share(FORGET_S - 1, NOON)
    assert one.account("t0").share == share
    one.shared.share(FORGET_S + 1, NOON)
    assert one.account("t0").share == 1.0
    assert one.account("t0").elsewhere == 7, "what it gave out stays counted"
    one.shared.take_words((new,), FORGET_S + 1, NOON)
    one.shared.share(FORGET_S + 1, NOON)
    assert one.account("t0").share == 1.0, "the same words again"
    one.shared.take_words((old,), FORGET_S + 2, NOON)
    one.shared.share(FORGET_S + 2, NOON)
    assert one.account("t0").share == 0.5, "its clock was set back"
    one.shared.share(29.0 + FORGET_S, NOON)
    one.shared.take_words((RouterDemand("r0", 9000, (TenantDemand("t0", 600, 7),)),), 50.0, NOON)
    one.shared.share(50.0, NOON)
    assert one.account("t0").share == 1.0, "its own words that come back"


def test_a_day_is_counted_over_all_routers_also_those_that_begin_anew() -> None:
    sides, midnight = routers(2, tenants(1, tokens_per_day=1000)), 20_001.0 * DAY_S
    assert sides[0].ask("t0", 600, 0.0)
    for at in (1.0, 2.0):
        for side in sides:
            side.shared.share(at, NOON)
        tell_all(sides, at)
    sides[1].shared.share(3.0, NOON)
    assert sides[1].account("t0").elsewhere == 600
    again = RouterSide("r0", tenants(1, tokens_per_day=1000))
    assert again.ask("t0", 300, 3.0)
    again.shared.share(4.0, NOON)
    sides[1].shared.take_words((again.shared.own_words(NOON + 4),), 4.0, NOON)
    sides[1].shared.share(5.0, NOON)
    assert sides[1].account("t0").elsewhere == 900
    assert sides[1].ask("t0", 200, 5.0)
    assert not sides[1].ask("t0", 1, 5.0)
    sides[1].shared.share(6.0, midnight)
    assert sides[1].ask("t0", 1000, 6.0, midnight)


def test_what_is_told_has_a_bound_and_all_take_turns() -> None:
    those = tenants(1000, tokens_per_minute=600)
    one = routers(1, those)[0]
    for tenant in those:
        one.ask(tenant.name, 600 if tenant.name in {"t7", "t8"} else 60, 0.0)
    one.shared.share(1.0, NOON)
    seen: set[str] = set()
    for at in range(40):
        one.shared.share(2.0 + at, NOON)
        said = one.shared.own_words(NOON + at)
        assert len(said.tenants) == MAX_TOLD
        assert {each.tenant for each in said.tenants[:2]} == {"t7", "t8"}
        assert len(msgspec.msgpack.encode(said)) < 8 << 10
        seen |= {each.tenant for each in said.tenants}
    assert len(seen) == 1000
    many = tuple(RouterDemand(f"r{number:03}", 1, said.tenants) for number in range(100))
    beat = newest_demands(many)
    assert len(beat) == MAX_DEMANDING
    assert sum(len(each.tenants) for each in beat) <= MAX_CARRIED
    assert newest_demands(many[:4]) == many[:4]


def test_many_busy_tenants_get_their_shares_by_turns() -> None:
    those = tenants(2500, tokens_per_minute=600)
    one = routers(1, those)[0]
    words = tuple(TenantDemand(tenant.name, 600, 0) for tenant in those)
    for at in range(20):
        said = (RouterDemand(f"r{number}", at + 1, words[number * 125:][:125]) for number in range(1, 20))
        one.shared.take_words(tuple(said), float(at), NOON)
        one.shared.share(float(at), NOON)
    shares = [one.account(tenant.name).share for tenant in those]
    assert max(shares[125:2375] + shares[2499:]) <= 1 / 20 + 1e-9
    assert max(shares[125:2375]) < 0.01


def test_strangers_names_and_too_many_routers_take_no_room() -> None:
    one = routers(1, tenants(1, tokens_per_minute=600))[0]
    for number in range(3 * MAX_DEMANDING):
        one.shared.take_words((RouterDemand(f"x{number}", 1, (TenantDemand("nobody", 5, 5),)),), float(number), NOON)
    assert len(one.shared._others) == MAX_DEMANDING
    assert not any(router.tenants for router in one.shared._others.values())


def flood(seed: int, sides: list[RouterSide], those: list[Tenant], weights: Callable[[int, int], list[float]],
          seconds: int = 3600) -> None:
    """Each tenant asks for twice its limit, at routers by ``weights`` (tenant, second); words are 3 to 6 s on their way."""
    rng = random.Random(seed)
    under_way: list[tuple[float, tuple[RouterDemand, ...]]] = []
    for second in range(seconds):
        for number, tenant in enumerate(those):
            assert tenant.tokens_per_minute is not None
            want = 2 * tenant.tokens_per_minute / 60
            for side in rng.choices(sides, weights(number, second), k=2):
                side.ask(tenant.name, max(1, round(want / 2 * rng.uniform(0.5, 1.5))), second + rng.random())
        for side in sides:
            side.shared.share(float(second + 1), NOON)
        said = newest_demands(tuple(side.shared.own_words(NOON + second) for side in sides))
        under_way.append((second + rng.uniform(3.0, 6.0), said))
        for at, words in [each for each in under_way if each[0] <= second]:
            under_way.remove((at, words))
            for side in rng.sample(sides, len(sides) - (rng.random() < 0.2)):
                side.shared.take_words(words, float(second), NOON)


@pytest.mark.parametrize(("kind", "count"), [("even", 5), ("one", 5), *more([("uneven", 50)])])
def test_four_routers_give_each_tenant_its_hour_within_one_percent(kind: str, count: int) -> None:
    those = [Tenant(f"t{number}", (), tokens_per_minute=6_000 * (number + 1)) for number in range(count)]
    sides = routers(4, those)
    ways: dict[str, Callable[[int, int], list[float]]] = {
        "even": lambda *_: [1, 1, 1, 1], "uneven": lambda number, _: [1 + number % 7, 1, 2, 0.1],
        "one": lambda number, _: [float(place == number % 4) for place in range(4)]}
    flood(1, sides, those, ways[kind])
    for tenant in those:
        assert tenant.tokens_per_minute is not None
        spent = sum(side.spent[tenant.name] for side in sides)
        assert spent == pytest.approx(60 * tenant.tokens_per_minute, rel=0.01), tenant.name


def test_demand_that_moves_from_router_to_router_never_gets_more_than_its_hour() -> None:
    """Every five minutes another router has nearly all of it; what is lost is what the one before had not given out."""
    those = tenants(5, tokens_per_minute=60_000)
    sides = routers(4, those)
    flood(2, sides, those, lambda number, second: [10.0 if (number + second // 300) % 4 == place else 0.2
                                                   for place in range(4)])
    for tenant in those:
        spent = sum(side.spent[tenant.name] for side in sides)
        assert 0.9 < spent / 3_600_000 < 1.01, (tenant.name, spent)
