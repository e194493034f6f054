"""The queue in simulated time: bounded, fair, ordered, and nobody starves."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.api.priority import PRIORITIES
from xpyd_sidecar.router.balance.queue import FairQueue
from xpyd_sidecar.router.balance.rate import Rate
from xpyd_sidecar.router.balance.tickets import Ticket

TIMEOUT_S = 30.0


def queue(size: int = 64, *, shared: bool = True) -> FairQueue:
    """``shared``: another key was seen before."""
    made = FairQueue(size, TIMEOUT_S)
    for key in ("", "another")[: 1 + shared]:
        made.note(key)
    return made


def drain(waiting: FairQueue, now: float) -> list[Ticket]:
    out = []
    while (ticket := waiting.take(now)) is not None:
        out.append(ticket)
    return out


def test_one_key_is_served_in_the_order_of_arrival() -> None:
    waiting = queue()
    numbers = [waiting.put(float(at), "a").number for at in range(5)]
    assert [ticket.number for ticket in drain(waiting, 9.0)] == numbers
    assert len(waiting) == 0


def test_a_lower_priority_goes_first_and_time_makes_up_for_it() -> None:
    waiting = queue(shared=False)
    late = waiting.put(0.0, "", priority=2)
    first = waiting.put(0.1, "", priority=-1)
    second = waiting.put(0.2, "")
    assert drain(waiting, 1.0) == [first, second, late]
    step = TIMEOUT_S / 4 / PRIORITIES
    patient = waiting.put(10.0, "", priority=1)
    newcomer = waiting.put(10.0 + 2 * step, "")
    assert drain(waiting, 20.0) == [patient, newcomer], "it came more than a step before"


def test_priorities_have_a_bound() -> None:
    waiting = queue(shared=False)
    worst = waiting.put(0.0, "", priority=10**9)
    best = waiting.put(0.0, "", priority=-(10**9))
    assert (best.rank, worst.rank) == (-TIMEOUT_S / 4, TIMEOUT_S / 4)


def test_keys_take_turns_whatever_their_numbers_and_priorities() -> None:
    waiting = queue(100)
    for at in range(30):
        waiting.put(float(at) / 100, "flood", priority=-8)
    quiet = [waiting.put(0.5, "quiet", priority=8) for _ in range(3)]
    order = [ticket.key for ticket in drain(waiting, 1.0)]
    assert len(quiet) == 3
    assert max(index for index, key in enumerate(order) if key == "quiet") <= 6, order


def test_costs_count_in_a_keys_share() -> None:
    waiting = queue(1000)
    for _ in range(40):
        waiting.put(0.0, "long", cost=4)
        waiting.put(0.0, "short", cost=1)
    served = Counter(ticket.key for ticket in drain(waiting, 1.0)[:25])
    assert served["short"] == pytest.approx(20, abs=1)


def test_a_full_queue_refuses_everybody_and_a_share_only_its_key() -> None:
    waiting = queue(8)
    for _ in range(4):
        waiting.put(0.0, "a")
    with pytest.raises(HttpFault) as full:
        waiting.put(0.0, "a")
    assert (full.value.status, full.value.message) == (429, "4 requests of this key wait, which is its share")
    for key in "bbcd":
        waiting.put(0.0, key)
    with pytest.raises(HttpFault) as full:
        waiting.put(0.0, "e")
    assert (full.value.status, full.value.message) == (503, "8 requests wait, which is the limit")


def test_who_is_alone_may_have_every_place_until_somebody_else_comes() -> None:
    waiting = queue(8, shared=False)
    for _ in range(8):
        waiting.put(0.0, "")
    with pytest.raises(HttpFault) as full:
        waiting.put(0.0, "")
    assert full.value.status == 503
    waiting.note("b")
    for _ in range(3):
        waiting.take(1.0)
    with pytest.raises(HttpFault) as full:
        waiting.put(1.0, "")
    assert full.value.status == 429
    waiting.put(1.0, "b")


def test_a_queue_of_size_0_refuses_at_once() -> None:
    with pytest.raises(HttpFault, match="the instances are busy"):
        FairQueue(0, TIMEOUT_S).put(0.0, "a")


def test_retry_after_follows_the_rate_at_which_it_drains() -> None:
    waiting = queue(400, shared=False)
    for _ in range(400):
        waiting.put(0.0, "")
    assert waiting.retry_after(0.0, 400) == 60, "nothing has moved yet"
    for step in range(200):
        waiting.take(step * 0.1)
    assert waiting.retry_after(20.0, 200) == pytest.approx(20, abs=3), "10 a second"
    assert waiting.retry_after(20.0, 1) == 1
    assert waiting.retry_after(200.0, 200) == 60, "it does not move any more"


def test_who_waits_too_long_leaves_and_the_deadline_is_that_of_the_oldest() -> None:
    waiting = queue()
    first, second = waiting.put(0.0, "a", priority=8), waiting.put(5.0, "b")
    assert waiting.deadline == TIMEOUT_S
    assert waiting.take_expired(TIMEOUT_S - 0.1) == []
    assert waiting.take_expired(TIMEOUT_S) == [first]
    assert waiting.deadline == 5.0 + TIMEOUT_S
    assert not waiting.remove(first)
    assert waiting.remove(second)
    assert waiting.take(40.0) is None


def test_a_key_that_comes_and_goes_leaves_nothing_behind() -> None:
    """Clients that go away while nothing is served must not let it grow."""
    waiting = queue(8)
    stays = waiting.put(0.0, "stays")
    for number in range(20_000):
        assert waiting.remove(waiting.put(0.0, f"key {number}"))
    assert len(waiting._heap) < 200
    assert not waiting._finish
    assert waiting.take(1.0) == stays


def test_a_key_that_leaves_and_returns_gets_no_second_share() -> None:
    waiting = queue(100)
    for _ in range(20):
        waiting.put(0.0, "steady")
    served: Counter[str] = Counter()
    for turn in range(20):
        waiting.put(turn / 10, "returns")
        ticket = waiting.take(turn / 10)
        assert ticket is not None
        served[ticket.key] += 1
    assert abs(served["steady"] - served["returns"]) <= 1, served


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 6), st.floats(1.2, 4.0))
def test_nobody_starves_who_asks_for_less_than_his_share(seed: int, keys: int, overload: float) -> None:
    """A flooding key with the best priority, quiet ones with the worst: each quiet request is served in two rounds."""
    draw = random.Random(seed)
    service_s = 0.1
    waiting = queue(200)
    now, free_at, quiet_at = 0.0, 0.0, 0.0
    waits: list[float] = []
    refused: Counter[str] = Counter()
    while now < 120.0:
        now += draw.expovariate(overload / service_s)
        while free_at <= now:
            for ticket in waiting.take_expired(free_at):
                refused[ticket.key] += 1
            taken = waiting.take(free_at)
            if taken is not None and taken.key != "flood":
                waits.append(free_at - taken.arrived)
            free_at += service_s
        try:
            waiting.put(now, "flood", priority=-8)
        except HttpFault as full:
            refused["flood" if full.status == 429 else "everybody"] += 1
        if now >= quiet_at:  # all quiet keys together ask for less than their shares
            quiet_at = now + 2 * keys * service_s
            for key in range(keys - 1):
                waiting.put(now, f"quiet {key}", priority=8)
    assert max(waits) <= 2 * keys * service_s + 1e-6
    assert not [key for key in refused if key != "flood"]
    assert refused["flood"]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_within_a_key_the_worst_priority_waits_half_of_the_timeout_longer_at_most(seed: int) -> None:
    """A stream of the best priority at 90 % of the capacity, and now and then one of the worst."""
    draw = random.Random(seed)
    service_s, waiting = 0.05, FairQueue(1000, TIMEOUT_S)
    now = free_at = 0.0
    worst: list[float] = []
    for _ in range(4000):
        now += draw.expovariate(0.9 / service_s)
        while free_at <= now:
            taken = waiting.take(free_at)
            if taken is None:
                free_at = now + 1e-9
                break
            if taken.rank > taken.arrived:
                worst.append(free_at - taken.arrived)
            free_at += service_s
        waiting.put(now, "", priority=8 if draw.random() < 0.05 else -8)
        assert not waiting.take_expired(now)
    assert max(worst) < TIMEOUT_S


def keys_of(tickets: list[Ticket]) -> str:
    return "".join(ticket.key for ticket in tickets)


def test_in_a_full_queue_a_newcomer_takes_the_place_of_the_youngest_of_the_longest() -> None:
    waiting = FairQueue(8, TIMEOUT_S)
    flood = [waiting.put(float(at), "flood", priority=-at % 3) for at in range(8)]
    assert waiting.make_room("flood") is None, "not for one of its own"
    waiting.note("b")
    assert waiting.make_room("b") == flood[7], "it came last, whatever its priority"
    assert not waiting.remove(flood[7]), "it has left"
    first = waiting.put(8.0, "b")
    assert waiting.make_room("b") == flood[6]
    second = waiting.put(9.0, "b")
    assert waiting.make_room("b") is None, "it has its share"
    with pytest.raises(HttpFault) as full:
        waiting.put(10.0, "b")
    assert full.value.status == 503
    assert waiting.make_room("c") == flood[5]
    third = waiting.put(10.0, "c")
    assert sorted(drain(waiting, 11.0)) == sorted([*flood[:5], first, second, third])


def test_equals_do_not_push_each_other_out() -> None:
    waiting = queue(4)
    for key in "abcd":
        waiting.put(0.0, key)
    assert waiting.make_room("e") is None, "everybody has one"
    assert waiting.make_room("a") is None


def test_a_queue_of_size_0_makes_no_room() -> None:
    assert FairQueue(0, TIMEOUT_S).make_room("a") is None


def test_whose_client_has_heard_a_byte_never_gives_way() -> None:
    waiting = FairQueue(4, TIMEOUT_S)
    tickets = [waiting.put(float(at), "a") for at in range(4)]
    for ticket in tickets[1:]:
        waiting.keep(ticket)
    assert waiting.make_room("b") == tickets[0], "the youngest of those that have heard nothing"
    waiting.put(4.0, "b")
    assert waiting.make_room("c") is None, "the others have"
    with pytest.raises(HttpFault) as full:
        waiting.put(5.0, "c")
    assert full.value.status == 503


def test_who_may_not_give_way_shields_no_shorter_queue() -> None:
    waiting = FairQueue(12, TIMEOUT_S)
    for at in range(8):
        waiting.keep(waiting.put(float(at), "kept"))
    others = [waiting.put(5.0, "b") for _ in range(4)]
    assert waiting.make_room("c") == others[3], "the longest that can"


def test_a_key_with_nothing_in_flight_catches_up_and_then_they_take_turns() -> None:
    waiting = queue(100)
    for _ in range(6):
        waiting.on_begun("flood", 100)
    for _ in range(20):
        waiting.put(0.0, "flood", cost=100)
        waiting.put(0.0, "quiet", cost=100)
    order = keys_of(drain(waiting, 1.0)).replace("flood", "f").replace("quiet", "q")
    assert order[:6] == "qqqqqq"
    assert order[6:26].count("f") == 10, "turns, once they are level"


def test_what_is_in_flight_is_a_debt_of_its_tokens_and_not_for_as_long_as_it_runs() -> None:
    """One stream of an hour must not keep its key waiting for an hour."""
    waiting = queue(1000)
    waiting.on_begun("stream", 5_000)
    waiting.put(0.0, "stream", cost=100)
    for _ in range(40):
        waiting.put(0.0, "other", cost=1_000)
    order = [ticket.key for ticket in drain(waiting, 1.0)]
    assert order.index("stream") == pytest.approx(5, abs=1)


def test_tokens_that_were_not_used_are_given_back_and_more_are_charged() -> None:
    for used, share in ((10, 36), (100, 20), (400, 8)):
        waiting = queue(1000)
        for _ in range(60):
            waiting.put(0.0, "asks", cost=100)
            waiting.put(0.0, "knows", cost=100)
        served: Counter[str] = Counter()
        for _ in range(40):
            ticket = waiting.take(1.0)
            assert ticket is not None
            waiting.on_begun(ticket.key, 100, waited=True)
            waiting.on_ended(ticket.key, 100, used if ticket.key == "asks" else 100)
            served[ticket.key] += 1
        assert served["asks"] == pytest.approx(share, abs=2), (used, served)


def test_nothing_is_kept_of_what_is_over() -> None:
    waiting = queue()
    for number in range(1000):
        waiting.on_begun(f"key {number}", 7)
    assert waiting.in_flight("key 5") == 7
    for number in range(1000):
        waiting.on_ended(f"key {number}", 7, 3)
    assert not waiting._in_flight
    ticket = waiting.put(0.0, "a")
    for _ in range(20_000):  # requests that pass while one waits, and end
        waiting.on_begun("a", 7)
        waiting.on_ended("a", 7, 7)
    assert len(waiting._heap) < 200
    assert waiting.take(1.0) == ticket


def test_who_needs_no_prefill_can_go_before_those_that_wait_for_it() -> None:
    waiting = queue()
    pairs = [waiting.put(0.0, "a"), waiting.put(0.0, "b")]
    assert waiting.peek(alone=True) is None
    late = waiting.put(1.0, "b", alone=True)
    soon = waiting.put(1.0, "a", priority=-8, alone=True)
    assert waiting.alone == 2
    assert waiting.peek() == soon, "its key's best"
    assert waiting.take(2.0, late) == late
    assert waiting.peek(alone=True) == soon
    assert drain(waiting, 3.0) == [soon, *pairs]
    assert waiting.alone == 0


class Random(RuleBasedStateMachine):
    """Against a list of everything that waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = FairQueue(12, 10.0)
        self.waiting.note("a")
        self.waiting.note("b")
        self.model: list[Ticket] = []
        self.kept: set[int] = set()
        self.flying: list[tuple[str, int]] = []
        self.now = 0.0

    @rule(key=st.sampled_from("abcdefg"), priority=st.integers(-9, 9), cost=st.integers(1, 5), alone=st.booleans())
    def put(self, key: str, priority: int, cost: int, alone: bool) -> None:
        own = sum(ticket.key == key for ticket in self.model)
        counts = Counter(ticket.key for ticket in self.model)
        share = max(1, 12 // (len(counts.keys() | {key}) + 1))
        gone = self.waiting.make_room(key)
        if gone is not None:
            assert len(self.model) == 12
            assert own < share
            assert own + 2 <= counts[gone.key]
            assert gone.number not in self.kept
            able = [one for one in self.model if one.number not in self.kept]
            assert counts[gone.key] == max(counts[one.key] for one in able)
            assert gone.number == max(one.number for one in able if one.key == gone.key)
            self.model.remove(gone)
        if len(self.model) < 12 and own < share:
            self.model.append(self.waiting.put(self.now, key, priority, cost, alone=alone))
            return
        with pytest.raises(HttpFault) as full:
            self.waiting.put(self.now, key, priority, cost)
        assert full.value.status == (429 if len(self.model) < 12 else 503)
        assert 1 <= full.value.retry_after_s <= 60

    @rule()
    def take(self) -> None:
        ahead = self.waiting.peek()
        ticket = self.waiting.take(self.now)
        assert ticket == ahead
        assert (ticket is None) == (not self.model)
        if ticket is not None:
            assert ticket.rank == min(one.rank for one in self.model if one.key == ticket.key)
            self.model.remove(ticket)
            self.waiting.on_begun(ticket.key, ticket.cost, waited=True)
            self.flying.append((ticket.key, ticket.cost))

    @rule()
    def take_alone(self) -> None:
        ticket = self.waiting.peek(alone=True)
        assert (ticket is None) == (not any(one.alone for one in self.model))
        if ticket is not None:
            assert ticket.rank == min(one.rank for one in self.model if one.key == ticket.key and one.alone)
            assert self.waiting.take(self.now, ticket) == ticket
            self.model.remove(ticket)

    @rule(key=st.sampled_from("abc"), tokens=st.integers(1, 50))
    def pass_by(self, key: str, tokens: int) -> None:
        self.waiting.on_begun(key, tokens)
        self.flying.append((key, tokens))

    @rule(index=st.integers(0, 11), used=st.integers(0, 60))
    def end(self, index: int, used: int) -> None:
        if self.flying:
            key, tokens = self.flying.pop(index % len(self.flying))
            self.waiting.on_ended(key, tokens, used)

    @rule(index=st.integers(0, 11))
    def keep(self, index: int) -> None:
        if self.model:
            ticket = self.model[index % len(self.model)]
            self.waiting.keep(ticket)
            self.kept.add(ticket.number)

    @rule(index=st.integers(0, 11))
    def remove(self, index: int) -> None:
        if self.model:
            ticket = self.model.pop(index % len(self.model))
            assert self.waiting.remove(ticket)
            assert not self.waiting.remove(ticket)

    @rule(seconds=st.floats(0, 6))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        out = self.waiting.take_expired(self.now)
        assert out == [ticket for ticket in self.model if self.now - ticket.arrived >= 10.0]
        self.model = [ticket for ticket in self.model if ticket not in out]

    @invariant()
    def same(self) -> None:
        assert len(self.waiting) == len(self.model)
        assert self.waiting.alone == sum(ticket.alone for ticket in self.model)
        for key in "abcdefg":
            assert self.waiting.in_flight(key) == sum(tokens for whose, tokens in self.flying if whose == key)


TestRandom = Random.TestCase
TestRandom.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)


def test_the_rate_is_right_from_the_start_and_forgets() -> None:
    rate = Rate()
    assert rate.per_s(5.0) == 0.0
    for step in range(50):
        rate.add(100.0 + step / 10)
    assert rate.per_s(105.0) == pytest.approx(10, rel=0.1)
    assert rate.per_s(205.0) < 0.01
