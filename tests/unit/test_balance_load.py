"""Load as it is known now, and the mean of many."""

from __future__ import annotations

from beats import beat
from members import member

from xpyd_sidecar.contract.core_steps import PromptWork
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.contract.membership import Load
from xpyd_sidecar.router.balance.candidates import REFRESH, UNTOLD, Mean, backlog, score


def test_own_legs_since_the_beat_correct_it() -> None:
    assert score(member("a", running=4, waiting=2, in_flight=3, at_beat=1)) == 8


def test_tokens_that_wait_are_what_was_told_less_what_is_computed_since_and_what_was_sent_since() -> None:
    one = member("a", Role.PREFILL)
    one.take_beat(10.0, beat("a", Role.PREFILL, load=Load(prompts=PromptWork(9_000, 1_000))))
    assert backlog(one, 12.0) == 9_000, "how fast it computes is not known yet"
    one.take_beat(12.0, beat("a", Role.PREFILL, seq=2, load=Load(prompts=PromptWork(8_000, 3_000))))
    assert one.computed_per_s == 500, "of nothing and of 1,000"
    one.take_beat(14.0, beat("a", Role.PREFILL, seq=3, load=Load(prompts=PromptWork(6_000, 5_000))))
    assert one.computed_per_s == 750
    one.uncached_tokens = one.sent_tokens = 300
    assert backlog(one, 16.0) == 6_000 - 1_500 + 300
    assert backlog(one, 100.0) == 300, "what is sent counts until the next beat"
    one.failed = 2
    assert backlog(one, 100.0) == 300 + 2 * UNTOLD, "who fails at once does not look idle"
    one.take_beat(102.0, beat("a", Role.PREFILL, seq=4, load=Load(prompts=PromptWork(0, 20_000))))
    assert backlog(one, 102.0) == 2 * UNTOLD


def test_of_an_engine_that_does_not_tell_own_tokens_count_and_others_requests() -> None:
    one = member("a", Role.PREFILL, running=2, waiting=5, in_flight=3, at_beat=3)
    one.uncached_tokens = 700
    assert backlog(one, 0.0) == 700 + 4 * UNTOLD
    one.in_flight_at_beat = 9
    assert backlog(one, 0.0) == 700


def test_a_new_incarnation_computes_at_a_rate_of_its_own() -> None:
    one = member("a", Role.PREFILL)
    for seq in (1, 2):
        one.take_beat(10.0 * seq, beat("a", Role.PREFILL, seq=seq, load=Load(prompts=PromptWork(9_000, 1_000 * seq))))
    assert one.computed_per_s > 0
    one.begin()
    one.take_beat(40.0, beat("a", Role.PREFILL, seq=3, load=Load(prompts=PromptWork(9_000, 10))))
    assert one.computed_per_s == 0


def test_the_mean_counts_the_one_that_is_placed_and_is_added_up_now_and_then() -> None:
    fleet = tuple(member(f"e{number}", in_flight=1) for number in range(64))
    mean = Mean()
    assert mean.load_per_instance(Role.DECODE, fleet) == 65 / 64
    for each in fleet:
        each.in_flight = 3
    stale = [mean.load_per_instance(Role.DECODE, fleet) for _ in range(64 // REFRESH)]
    assert stale == sorted(stale)
    assert stale[-1] == 65 / 64 + (64 // REFRESH) / 64
    assert mean.load_per_instance(Role.DECODE, fleet) == 3 + 1 / 64


def test_a_list_is_added_up_each_time_since_it_may_change() -> None:
    some = [member("a", in_flight=1), member("b", in_flight=1)]
    mean = Mean()
    assert mean.load_per_instance(Role.DECODE, some) == 1.5
    some[0].in_flight = 3
    assert mean.load_per_instance(Role.DECODE, some) == 2.5
