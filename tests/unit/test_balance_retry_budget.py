"""Retries stay a share of recent requests."""

from __future__ import annotations

import random

from xpyd_sidecar.router.balance.limits import FLOOR_PER_S, WINDOW_S, RetryBudget

FLOOR = int(FLOOR_PER_S * WINDOW_S)


def spend(budget: RetryBudget, now: float) -> int:
    """Retries until it says no."""
    return next(taken for taken in range(10**6) if not budget.may_retry(now))


def test_the_floor_is_there_without_any_request_and_comes_back() -> None:
    budget = RetryBudget(0.0)
    assert budget.remaining_retries(100.0) == FLOOR
    assert spend(budget, 100.0) == FLOOR
    assert spend(budget, 100.0 + WINDOW_S - 1) == 0
    assert spend(budget, 100.0 + WINDOW_S) == FLOOR


def test_requests_add_their_share_for_as_long_as_they_are_recent() -> None:
    budget = RetryBudget(0.2)
    for _ in range(1000):
        budget.on_request(50.5)
    assert spend(budget, 58.0) == FLOOR + 200
    assert spend(budget, 59.9) == 0
    assert spend(budget, 60.0) == 0, "the requests are forgotten, the retries not yet"
    assert spend(budget, 68.0) == FLOOR


def test_a_long_pause_forgets_everything_at_the_cost_of_one_window() -> None:
    budget = RetryBudget(1.0)
    for _ in range(10):
        budget.on_request(1.0)
    assert budget.remaining_retries(1e9) == FLOOR
    assert budget.remaining_retries(1e9 - 5) == FLOOR, "a clock that goes back changes nothing"


def test_in_every_window_retries_stay_within_floor_and_share() -> None:
    draw = random.Random(7)
    budget = RetryBudget(0.2)
    requests: list[float] = []
    retries: list[float] = []
    now = 1000.0
    for _ in range(20_000):
        now += draw.expovariate(40)
        budget.on_request(now)
        requests.append(now)
        if draw.random() < 0.6 and budget.may_retry(now):
            retries.append(now)
    for end in range(1000, int(now)):
        inside = sum(end <= at < end + WINDOW_S for at in retries)
        assert inside <= FLOOR + 0.2 * sum(end <= at < end + WINDOW_S for at in requests)
    assert len(retries) > 0.2 * len(requests), "the budget is used"
