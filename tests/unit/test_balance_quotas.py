"""Quotas of tenants in simulated time, against an oracle that adds up what happened."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from more_cases import more

from xpyd_sidecar.contract.tenants import Tenant
from xpyd_sidecar.router.balance.quotas import BURST_S, DAY_S, Quotas, TenantAccount, TokenReservation

NOON = 20_000.5 * DAY_S


def tenant(name: str = "a", **fields: Any) -> Tenant:
    return Tenant(name, (), **fields)


def account(**fields: Any) -> TenantAccount:
    """One that has filled its bucket."""
    return TenantAccount(tenant(**fields), -BURST_S)


def take(one: TenantAccount, tokens: int, now: float, unix: float = NOON) -> TokenReservation | None:
    return one.take(tokens, now, unix) if one.refusal(now, unix) is None else None


def test_a_tenant_without_limits_has_none() -> None:
    one = account()
    for _ in range(1000):
        assert take(one, 10**9, 0.0) is not None
    assert one.in_flight == 1000
    assert one.standing(0.0, NOON) is None


def test_a_bucket_holds_half_a_minute_and_fills_at_the_limit() -> None:
    one = account(tokens_per_minute=600)
    assert take(one, 299, 0.0) is not None
    assert take(one, 1, 0.0) is not None
    refusal = one.refusal(0.0, NOON)
    assert refusal is not None
    assert (refusal.bound, refusal.limit, refusal.after_s) == ("minute", 600, 0.0)
    assert take(one, 1, 0.2) is not None
    assert one.standing(1000.0, NOON) == (600, 300, 0.0), "a pause earns no second half"


def test_a_tenant_begins_with_two_seconds_of_its_tokens() -> None:
    """Routers that start at once do not know of each other: each would give out a whole bucket."""
    assert TenantAccount(tenant(tokens_per_minute=600), 5.0).standing(5.0, NOON) == (600, 20, 28.0)


def test_a_request_that_is_larger_than_the_bucket_goes_and_is_paid_for_before_the_next() -> None:
    one = account(tokens_per_minute=60)
    assert take(one, 1000, 0.0) is not None
    refusal = one.refusal(10.0, NOON)
    assert refusal is not None
    assert refusal.after_s == pytest.approx(1000 - 30 - 10)
    assert take(one, 1, 969.0) is None
    assert take(one, 1, 970.5) is not None


def test_what_was_not_used_is_given_back_once() -> None:
    one = account(tokens_per_minute=600, tokens_per_day=1000, in_flight=1)
    taken = take(one, 300, 0.0)
    assert taken is not None
    refusal = one.refusal(0.0, NOON)
    assert refusal is not None
    assert refusal.bound == "in_flight"
    for _ in range(2):
        one.settle(taken, 100, 40, 0.0, NOON)
    assert one.standing(0.0, NOON) == (600, 200, 10.0)
    assert (one.today, one.in_flight) == (100, 0)
    assert 240 < one.usual < 256


def test_nothing_that_was_not_sent_costs_anything() -> None:
    one = account(tokens_per_minute=600, tokens_per_day=1000)
    before = one.standing(0.0, NOON)
    for _ in range(100):
        taken = take(one, 300, 0.0)
        assert taken is not None
        one.settle(taken, 0, -1, 0.0, NOON)
    assert one.standing(0.0, NOON) == before
    assert one.usual == 256.0


def test_a_day_is_a_count_from_midnight() -> None:
    one, midnight = account(tokens_per_day=100), 20_001.0 * DAY_S
    late = take(one, 90, 0.0, midnight - 1)
    assert late is not None
    assert take(one, 20, 0.0, midnight - 1) is not None
    refusal = one.refusal(0.0, midnight - 1)
    assert refusal is not None
    assert (refusal.bound, refusal.after_s) == ("day", 1.0)
    assert one.refusal(1.0, midnight) is None
    one.settle(late, 50, -1, 2.0, midnight + 1)
    assert one.today == 0, "what was given back is of the day before"
    assert take(one, 100, 3.0, midnight + 2) is not None
    assert one.refusal(4.0, midnight - 5) is not None, "a clock that is set back begins no day again"


def test_the_least_that_is_left_is_shown() -> None:
    one = account(tokens_per_minute=600, tokens_per_day=200)
    assert one.standing(0.0, NOON) == (200, 200, DAY_S / 2)
    assert account(tokens_per_minute=6, tokens_per_day=200).standing(0.0, NOON) == (6, 3, 0.0)


def test_an_answer_is_expected_to_be_as_long_as_the_ones_before() -> None:
    one = account()
    assert one.expected_tokens(10, 16) == 26
    assert one.expected_tokens(10, 4096) == 266
    for _ in range(200):
        one.settle(one.take(1, 0.0, NOON), 1, 50, 0.0, NOON)
    assert 10 + 50 <= one.expected_tokens(10, 4096) <= 10 + 52
    assert one.expected_tokens(0, 0) == 1


def test_other_limits_forget_neither_a_debt_nor_what_is_in_flight() -> None:
    quotas = Quotas()
    quotas.take_over([tenant(tokens_per_minute=60), tenant("b")], -BURST_S)
    one = quotas.account("a")
    assert one is not None
    taken = take(one, 1030, 0.0)
    assert taken is not None
    quotas.take_over([tenant(tokens_per_minute=600, in_flight=1)], 0.0)
    assert (quotas.account("a"), quotas.account("b"), len(quotas)) == (one, None, 1)
    refusal = one.refusal(0.0, NOON)
    assert refusal is not None
    assert refusal.bound == "in_flight"
    one.settle(taken, 1030, 5, 0.0, NOON)
    refusal = one.refusal(0.0, NOON)
    assert refusal is not None
    assert (refusal.bound, refusal.after_s) == ("minute", 100.0)
    quotas.take_over([tenant(tokens_per_minute=6000)], 200.0)
    assert one.standing(200.0, NOON) == (6000, 300, 27.0), "more room is not at once full"
    quotas.take_over([tenant()], 200.0)
    quotas.take_over([tenant(tokens_per_minute=60)], 200.0)
    assert quotas.account("a") is one
    assert one.standing(200.0, NOON) == (60, 30, 0.0)


EVENTS = st.lists(
    st.tuples(st.integers(0, 40_000), st.integers(1, 3_000), st.integers(0, 4_000), st.booleans()), max_size=80)


@settings(max_examples=300, deadline=None)
@given(EVENTS, st.integers(1, 5_000), st.integers(1, 20_000), st.integers(1, 4))
def test_it_does_what_adding_up_says(events: list[tuple[int, int, int, bool]], minute: int, day: int, most: int) -> None:
    """The oracle keeps every event, in fractions: the level is what has flowed in, less what was taken, never above the
    room; the day's count is the sum of what its reservations are charged.
    """
    one = account(tokens_per_minute=minute, tokens_per_day=day, in_flight=most)
    room, level, at = Fraction(minute) * int(BURST_S) / 60, Fraction(minute) * int(BURST_S) / 60, Fraction(0)
    charged: dict[int, list[int]] = {}
    open_: list[tuple[TokenReservation, int, int]] = []
    ms = 0
    for gap, tokens, used, ends in events:
        ms += gap
        now, unix = Fraction(ms, 1024), NOON + 20_000 + ms / 1024
        level, at = min(room, level + (now - at) * minute / 60), now
        today = charged.setdefault(int(unix // DAY_S), [])
        if ends and open_:
            taken, day_of, index = open_.pop(0)
            one.settle(taken, used, used, float(now), unix)
            level = min(room, level + taken.tokens - used)
            if charged.get(day_of) is today:
                today[index] = used
            continue
        refusal = one.refusal(float(now), unix)
        if len(open_) >= most:
            assert refusal is not None
            assert refusal.bound == "in_flight"
        elif abs(level) > Fraction(1, 10**6) and level < 0:
            assert refusal is not None
            assert refusal.bound == "minute"
            assert refusal.after_s == pytest.approx(float(-level * 60 / minute), abs=1e-3)
        elif level > Fraction(1, 10**6) and sum(today) >= day:
            assert refusal is not None
            assert refusal.bound == "day"
        elif level > Fraction(1, 10**6):
            assert refusal is None
        if refusal is None:
            open_.append((one.take(tokens, float(now), unix), int(unix // DAY_S), len(today)))
            today.append(tokens)
            level -= tokens
        standing = one.standing(float(now), unix)
        assert standing is not None
        assert standing.remaining <= max(0, min(float(level) + 1e-3, day - sum(today)))
        assert one.in_flight == len(open_)


@pytest.mark.parametrize("seed", [0, 1, *more(range(2, 5))])
def test_an_hour_of_a_flood_takes_its_limit_within_one_percent(seed: int) -> None:
    """Answers are shorter than they may be, longer than they were, or not known; requests come far faster than allowed."""
    rng, one, now, spent = random.Random(seed), account(tokens_per_minute=60_000), 0.0, 0
    running: list[tuple[float, TokenReservation, int, int]] = []
    while now < 3600.0:
        now += rng.expovariate(50.0)
        for ended in sorted(each for each in running if each[0] <= now):
            running.remove(ended)
            one.settle(ended[1], ended[2] + max(0, ended[3]), ended[3], now, NOON)
            spent += ended[2] + max(0, ended[3])
        prompt = rng.randrange(10, 2000)
        if one.refusal(now, NOON) is None:
            taken = one.take(one.expected_tokens(prompt, 4096), now, NOON)
            running.append((now + rng.uniform(0.1, 20.0), taken, prompt, rng.randrange(1, 600)))
    assert abs(spent / (60_000 * 60) - 1) < 0.01, spent


def test_ten_thousand_tenants_are_kept_apart() -> None:
    quotas = Quotas()
    quotas.take_over([tenant(f"t{number}", tokens_per_minute=number + 1) for number in range(10_000)], 0.0)
    for number in random.Random(1).sample(range(10_000), 500):
        one = quotas.account(f"t{number}")
        assert one is not None
        assert take(one, 10**6, 0.0) is not None
        assert take(one, 1, 0.0) is None
    assert sum(one.refusal(0.0, NOON) is not None for one in quotas) == 500
    assert math.isclose(sum(one.in_flight for one in quotas), 500)
