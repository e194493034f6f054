"""Load as it is known now, and the mean of many."""

from __future__ import annotations

from members import member

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.balance.candidates import REFRESH, Mean, score


def test_own_legs_since_the_beat_correct_it() -> None:
    assert score(member("a", running=4, waiting=2, in_flight=3, at_beat=1)) == 8


def test_the_mean_counts_the_one_that_is_placed_and_is_added_up_now_and_then() -> None:
    fleet = tuple(member(f"e{number}", in_flight=1) for number in range(64))
    mean = Mean()
    assert mean.of(Role.DECODE, fleet) == 65 / 64
    for each in fleet:
        each.in_flight = 3
    stale = [mean.of(Role.DECODE, fleet) for _ in range(64 // REFRESH)]
    assert stale == sorted(stale)
    assert stale[-1] == 65 / 64 + (64 // REFRESH) / 64
    assert mean.of(Role.DECODE, fleet) == 3 + 1 / 64


def test_a_list_is_added_up_each_time_since_it_may_change() -> None:
    some = [member("a", in_flight=1), member("b", in_flight=1)]
    mean = Mean()
    assert mean.of(Role.DECODE, some) == 1.5
    some[0].in_flight = 3
    assert mean.of(Role.DECODE, some) == 2.5
