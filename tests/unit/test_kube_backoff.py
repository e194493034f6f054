"""Refusals that only mean to wait, and for how long."""

from __future__ import annotations

import pytest

from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.client.backoff import FIRST_S, LATELY_S, LONGEST_S, Holds

QUOTA = ApiError(403, "Forbidden", "exceeded quota: small")


@pytest.mark.parametrize(("error", "waits"), [
    (QUOTA, True), (ApiError(403, "NamespaceTerminating", "it ends"), True), (ApiError(403, "Forbidden", "no"), False),
    (ApiError(422, "Invalid", "exceeded quota"), False), (ApiError(0, "Timeout", "silence"), False)])
def test_which_refusals(error: ApiError, waits: bool) -> None:
    holds = Holds()
    assert holds.excuses(error, "creating qwen-e0", 0.0) is waits
    assert holds.is_holding(1.0) is waits
    assert ("creating qwen-e0 waits: " in str(holds.waiting)) is waits


def test_waits_grow_to_a_bound_and_many_refusals_at_once_are_one() -> None:
    holds, now, waits = Holds(), 0.0, []
    for _ in range(6):
        for _ in range(20):
            assert holds.excuses(QUOTA, "x", now)
        began = now
        while holds.is_holding(now):
            now += 1.0
        waits.append(now - began)
    assert waits[0] <= 2 * FIRST_S
    assert waits == sorted(waits)
    assert waits[-1] == LONGEST_S


def test_success_ends_the_row_but_not_a_wait_that_has_begun() -> None:
    holds = Holds()
    holds.excuses(QUOTA, "x", 0.0)
    holds.clear(1.0)
    assert holds.is_holding(1.0)
    assert holds.waiting
    holds.clear(100.0)
    assert holds.waiting == ()


def test_a_refusal_is_remembered_for_a_while() -> None:
    holds = Holds()
    assert not holds.refused_lately(0.0)
    holds.excuses(QUOTA, "x", 0.0)
    holds.clear(100.0)
    assert holds.refused_lately(100.0)
    assert not holds.refused_lately(LONGEST_S + LATELY_S)
