"""Publishing, rule by rule: whom a manifest is told to, when its copy is freed, and how a try ends."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_sidecar.contract.ids import Attempt, Incarnation, TransferId
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.leases import LOOKS
from xpyd_sidecar.kv.manifests import Ask, Manifest
from xpyd_sidecar.kv.publishing import (
    EARLY_MAX,
    EndSession,
    FreeCopy,
    Press,
    PublishEnded,
    Publishing,
    RefuseTry,
    Step,
    Tell,
)

KEY = Key(TransferId("a" * 32), Attempt(1), 1)
OTHER = Key(TransferId("b" * 32), Attempt(1), 1)
A, B = Incarnation("a"), Incarnation("b")
ONE, TWO = Ask(1), Ask(2)
KEEP_S, SEND_S, GRACE_S, LIMIT_S = 60.0, 30.0, 5.0, 600.0


def machine() -> Publishing[str]:
    return Publishing(keep_s=KEEP_S, send_s=SEND_S, grace_s=GRACE_S, limit_s=LIMIT_S)


def manifest(number: int) -> Manifest:
    return Manifest(number, 0, 2, 0, 4, 4096 * number)


def publish(one: Publishing[str], data: str, key: Key = KEY, now: float = 0.0) -> list[Step[str]]:
    return one.publish(key, manifest, (data, 100), now)


def look(one: Publishing[str], start: float, end: float) -> list[Step[str]]:
    """This side looks again and again: what it says at ``end``, having said nothing before."""
    while (start := start + SEND_S / LOOKS / 2) < end:
        assert one.tick(start) == []
    return one.tick(end)


def test_a_copy_waits_until_it_is_asked_for_and_goes_when_it_is_taken() -> None:
    one = machine()
    assert publish(one, "x") == []
    assert one.ask(1, A, KEY, ONE, 1.0) == [Tell(1, KEY, manifest(0))]
    assert publish(one, "y", now=2.0) == [Tell(1, KEY, manifest(1))]
    assert one.on_taken(1, A, KEY, 1) == [FreeCopy("y")]
    assert one.on_taken(1, A, KEY, 1) == [], "said twice"
    assert one.on_taken(1, A, KEY, 7) == [], "of what there is not"
    assert one.on_done(1, A, KEY) == [FreeCopy("x"), PublishEnded(KEY, Outcome.OK, "", confirmed=True)]
    assert one.open == 0


def test_who_asks_before_the_first_copy_is_told_of_it() -> None:
    one = machine()
    assert one.ask(1, A, KEY, ONE, 0.0) == []
    assert one.busy(1)
    assert publish(one, "x") == [Tell(1, KEY, manifest(0))]


def test_a_copy_goes_when_the_last_of_its_takers_has_it() -> None:
    one = machine()
    publish(one, "x")
    assert one.ask(1, A, KEY, TWO, 0.0) == [Tell(1, KEY, manifest(0))]
    assert one.on_taken(1, A, KEY, 0) == []
    assert one.ask(2, B, KEY, TWO, 0.0) == [Tell(2, KEY, manifest(0))]
    assert one.on_taken(2, B, KEY, 0) == [FreeCopy("x")]
    assert one.on_done(1, A, KEY) == []
    assert one.on_done(2, B, KEY) == [PublishEnded(KEY, Outcome.OK, "", confirmed=True)]


def test_one_that_wants_nothing_holds_up_nobody() -> None:
    one = machine()
    publish(one, "x")
    one.ask(1, A, KEY, TWO, 0.0)
    assert one.ask(2, B, KEY, Ask(2, nothing=True), 0.0) == []
    assert one.on_taken(1, A, KEY, 0) == [FreeCopy("x")]
    assert publish(one, "y") == [Tell(1, KEY, manifest(1))]
    assert one.on_done(1, A, KEY) == [FreeCopy("y"), RefuseTry(2, KEY, Outcome.OK, "all have what they wanted", False),
                                   PublishEnded(KEY, Outcome.OK, "", confirmed=True)]


def test_a_rank_that_nobody_wants_anything_of_lets_go_at_once_and_ends_with_its_taker() -> None:
    one = machine()
    publish(one, "x")
    assert one.ask(1, A, KEY, Ask(1, nothing=True), 0.0) == [FreeCopy("x")]
    assert publish(one, "y") == [FreeCopy("y")]
    assert one.on_done(1, A, KEY) == [PublishEnded(KEY, Outcome.OK, "", confirmed=True)]


def test_what_was_not_taken_is_told_again_to_the_next_session_of_that_rank() -> None:
    one = machine()
    one.ask(1, A, KEY, ONE, 0.0)
    publish(one, "x")
    publish(one, "y")
    one.on_taken(1, A, KEY, 0)
    assert one.on_session_lost(1, 1.0) == []
    assert one.on_taken(1, A, KEY, 1) == [], "a session that has ended says nothing"
    assert publish(one, "z") == []
    assert one.ask(2, A, KEY, ONE, 2.0) == [Tell(2, KEY, manifest(1)), Tell(2, KEY, manifest(2))]
    assert look(one, 2.0, 2.0 + GRACE_S + 1) == []


def test_a_rank_that_does_not_come_back_ends_the_try_and_the_others_are_told() -> None:
    one = machine()
    one.ask(1, A, KEY, TWO, 0.0)
    one.ask(2, B, KEY, TWO, 0.0)
    publish(one, "x")
    one.on_session_lost(1, 1.0)
    refuse, ended = look(one, 1.0, 1.0 + GRACE_S)
    assert refuse == RefuseTry(2, KEY, Outcome.PEER_LOST, "a rank of decode is lost", retry=True)
    assert isinstance(ended, PublishEnded)
    assert not ended.confirmed
    assert one.cancel(2, B, KEY, Outcome.PEER_LOST, "gone") == [FreeCopy("x")]


@pytest.mark.parametrize("ask", [Ask(2, nothing=True), TWO])
def test_one_that_wants_nothing_or_is_done_need_not_come_back(ask: Ask) -> None:
    one = machine()
    one.ask(1, A, KEY, ask, 0.0)
    one.ask(2, B, KEY, TWO, 0.0)
    publish(one, "x")
    if not ask.nothing:
        one.on_done(1, A, KEY)
    one.on_session_lost(1, 1.0)
    assert look(one, 1.0, 1.0 + GRACE_S + 1) == []
    assert one.on_done(2, B, KEY)[-1] == PublishEnded(KEY, Outcome.OK, "", confirmed=True)


def test_what_has_ended_is_refused_with_its_reason() -> None:
    one = machine()
    publish(one, "x")
    assert one.release(KEY, Outcome.ABORTED, "why", retry=True) == [
        FreeCopy("x"), PublishEnded(KEY, Outcome.ABORTED, "why", confirmed=False)]
    assert one.ask(1, A, KEY, ONE, 0.0) == [RefuseTry(1, KEY, Outcome.ABORTED, "why", retry=True, ended=True)]
    assert publish(one, "y") == [FreeCopy("y")]
    assert one.release(KEY, Outcome.OK, "again") == []


def test_a_try_that_never_began_ends_too() -> None:
    one = machine()
    one.ask(1, A, KEY, ONE, 0.0)
    assert one.release(KEY, Outcome.ABORTED, "why") == [
        RefuseTry(1, KEY, Outcome.ABORTED, "why", retry=False), PublishEnded(KEY, Outcome.ABORTED, "why", confirmed=False)]


def test_copies_that_nobody_asks_for_go_after_their_time() -> None:
    one = machine()
    publish(one, "x")
    publish(one, "y", now=10.0)
    assert one.tick(10.0) == []
    assert one.tick(10.0 + KEEP_S - 0.1) == []
    assert one.tick(10.0 + KEEP_S + 0.1)[-1] == PublishEnded(KEY, Outcome.DEADLINE, "decode did not ask for it in time",
                                                             confirmed=False)


def test_a_peer_that_says_nothing_more_is_not_waited_for_for_ever() -> None:
    one = machine()
    publish(one, "x")
    one.ask(1, A, KEY, ONE, 0.0)
    one.tick(1.0)
    refuse, ended = look(one, 1.0, 1.0 + SEND_S)
    assert isinstance(refuse, RefuseTry)
    assert isinstance(ended, PublishEnded)
    assert ended.outcome is Outcome.DEADLINE
    assert one.on_session_lost(1, 2.0 + SEND_S) == [FreeCopy("x")]


def test_news_keep_a_try_but_not_for_ever() -> None:
    one = machine()
    publish(one, "x")
    one.ask(1, A, KEY, ONE, 0.0)
    now = 0.0
    while now < LIMIT_S - 10:
        now += SEND_S / LOOKS
        one.on_progress(KEY)
        assert one.tick(now) == []
    assert one.tick(LIMIT_S + 1)[-1] == PublishEnded(KEY, Outcome.DEADLINE, "it took longer than a load may",
                                                     confirmed=False)


PROGRESS: dict[str, Callable[[Publishing[str], int, float], object]] = {
    "a copy": lambda one, nth, now: publish(one, f"{nth}", now=now), "TAKEN": lambda one, nth,
    _: one.on_taken(1, A, KEY, nth),
    "a word of work or of a fetch": lambda one, *_: one.on_progress(KEY)}


@pytest.mark.parametrize("what", PROGRESS)
def test_whatever_shows_that_it_goes_on_is_news(what: str) -> None:
    one = machine()
    one.ask(1, A, KEY, ONE, 0.0)
    for number in range(20):
        publish(one, f"c{number}")
    one.tick(0.0)
    for nth in range(4):
        look(one, 29.0 * nth, 29.0 * nth + 28.0)
        PROGRESS[what](one, nth, 29.0 * nth + 28.5)
        assert one.tick(29.0 * nth + 29.0) == []
    assert [type(step) for step in look(one, 29.0 * 4, 29.0 * 4 + SEND_S)][-1] is PublishEnded


def test_what_is_said_of_what_was_not_told_or_not_by_who_has_asked_is_no_news() -> None:
    one = machine()
    publish(one, "x")
    one.ask(1, A, KEY, ONE, 0.0)
    one.tick(0.0)
    now = 0.0
    while now < SEND_S - 1:
        now += 1.0
        assert one.on_taken(1, A, KEY, 7) == one.on_taken(2, A, KEY, 0) == one.on_taken(1, B, KEY, 0) == []
        assert one.on_done(2, A, KEY) == []
        one.on_busy(1, A, KEY, 0, now)
        assert one.tick(now) == []
    assert one.tick(SEND_S)[-1] == PublishEnded(KEY, Outcome.DEADLINE, "decode did not confirm in time", confirmed=False)


def test_copies_are_kept_while_their_prompt_is_computed_and_that_counts_for_nothing_once_they_are_asked_for() -> None:
    one = machine()
    publish(one, "x")
    assert one.tick(50.0) == []
    one.on_progress(KEY)
    assert one.tick(50.5) == []
    assert one.tick(110.0) == []
    one.ask(1, A, KEY, ONE, 110.0)
    one.tick(110.0)
    assert look(one, 110.0, 110.0 + SEND_S - 0.5) == []
    assert one.tick(110.0 + SEND_S)[-1] == PublishEnded(KEY, Outcome.DEADLINE, "decode did not confirm in time",
                                                        confirmed=False)


def test_a_try_that_not_all_takers_ask_for_waits_no_longer_than_one_that_nobody_asks_for() -> None:
    one = machine()
    publish(one, "x")
    one.tick(0.0)
    one.ask(1, A, KEY, TWO, KEEP_S - 1)
    assert one.tick(KEEP_S - 0.5) == []
    refuse, ended = one.tick(KEEP_S)
    assert refuse == RefuseTry(1, KEY, Outcome.DEADLINE, "decode did not ask for it in time", retry=False)
    assert isinstance(ended, PublishEnded)
    assert one.cancel(1, A, KEY, Outcome.DEADLINE, "it is gone") == [FreeCopy("x")]


def test_a_clock_that_jumps_ends_no_try_at_once() -> None:
    one = machine()
    publish(one, "x")
    one.ask(1, A, KEY, ONE, 0.0)
    one.tick(0.0)
    assert one.tick(500.0) == one.tick(400.0) == []
    held_up = machine()
    publish(held_up, "x")
    held_up.ask(1, A, KEY, ONE, 0.0)
    held_up.tick(0.0)
    assert [bool(held_up.tick(at * 100.0)) for at in range(1, 5)] == [False, False, False, True]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["copy", "word", "taken", "nothing"]), st.integers(1, 400)), max_size=40),
       st.integers(4, 40), st.integers(4, 40), st.integers(1, 2000), st.integers(0, 200))
def test_a_try_ends_by_silence_or_by_its_limit_and_by_nothing_else(
        course: list[tuple[str, int]], keep_s: int, send_s: int, limit_s: int, asked_at: int) -> None:
    """Law 4: by the clock before it is asked for, by the time in which this side listens afterwards."""
    one: Publishing[str] = Publishing(keep_s=keep_s, send_s=send_s, grace_s=GRACE_S, limit_s=limit_s)
    publish(one, "0")
    one.tick(0.0)
    now, silent, asked, made, taken = 0.0, 0.0, math.inf, 1, 0
    for what, gap in [*course, *[("nothing", 1)] * (keep_s + send_s)]:
        now += gap
        counts, silent = True, silent + (gap if asked == math.inf else min(gap, send_s / LOOKS))
        if asked == math.inf and now >= asked_at:
            one.ask(1, A, KEY, ONE, now)
            asked = now
        elif what == "copy":
            publish(one, str(made), now=now)
            made += 1
        elif what == "word":
            one.on_progress(KEY)
        elif what == "taken" and asked < math.inf and taken < made:
            one.on_taken(1, A, KEY, taken)
            taken += 1
        else:
            counts = False
        silent = 0.0 if counts else silent
        over = now >= asked + limit_s or silent >= (keep_s if asked == math.inf else send_s)
        assert any(isinstance(step, PublishEnded) for step in one.tick(now)) == over
        if over:
            return
    raise AssertionError("it never ended")


@pytest.mark.parametrize("second", [(1, A, ONE), (2, B, ONE), (2, B, TWO), (2, B, Ask(0))])
def test_asks_that_do_not_go_together_end_the_try(second: tuple[int, Incarnation, Ask]) -> None:
    one = machine()
    publish(one, "x")
    one.ask(1, A, KEY, ONE, 0.0)
    link, taker, ask = second
    steps = one.ask(link, taker, KEY, ask, 0.0)
    assert {each.link for each in steps if isinstance(each, RefuseTry)} == {1, link}
    assert steps[-1] == PublishEnded(KEY, Outcome.PROTOCOL, steps[-1].reason, confirmed=False)  # type: ignore[union-attr]


def test_a_taker_that_cancels_ends_the_try_for_all() -> None:
    one = machine()
    publish(one, "x")
    one.ask(1, A, KEY, TWO, 0.0)
    one.ask(2, B, KEY, TWO, 0.0)
    assert one.cancel(3, A, KEY, Outcome.ABORTED, "over a session that is not its own") == []
    assert one.cancel(1, A, KEY, Outcome.ABORTED, "gone") == [
        RefuseTry(2, KEY, Outcome.ABORTED, "gone", retry=True), PublishEnded(KEY, Outcome.ABORTED, "gone", confirmed=False)]
    assert one.cancel(1, A, KEY, Outcome.ABORTED, "gone") == [], "the other one may be reading"
    assert one.busy(2)
    assert one.cancel(2, B, KEY, Outcome.ABORTED, "gone") == [FreeCopy("x")]
    assert not one.busy(2)


@pytest.mark.parametrize("how", ["answers", "is lost"])
def test_what_a_taker_was_told_of_is_kept_until_it_has_heard_that_it_is_gone(how: str) -> None:
    one = machine()
    one.ask(1, A, KEY, TWO, 0.0)
    one.ask(2, B, KEY, TWO, 0.0)
    publish(one, "x")
    publish(one, "y")
    one.on_taken(1, A, KEY, 0)
    one.on_taken(1, A, KEY, 1)
    one.on_taken(2, B, KEY, 1)
    publish(one, "z")
    assert one.release(KEY, Outcome.ABORTED, "x")[-1] == PublishEnded(KEY, Outcome.ABORTED, "x", confirmed=False)
    assert one.on_taken(2, B, KEY, 0) == [], "it still has to hear of it"
    assert one.cancel(3, B, KEY, Outcome.ABORTED, "over a session that is not its own") == []
    assert one.cancel(1, A, KEY, Outcome.ABORTED, "x") == []
    freed = one.cancel(2, B, KEY, Outcome.ABORTED, "x") if how == "answers" else one.on_session_lost(2, 1.0)
    assert freed == [FreeCopy("x"), FreeCopy("z")]
    assert one.cancel(2, B, KEY, Outcome.ABORTED, "x") == []


def test_a_taker_that_never_answers_that_a_try_is_gone_loses_its_session() -> None:
    one = machine()
    one.ask(1, A, KEY, ONE, 0.0)
    publish(one, "x")
    one.release(KEY, Outcome.ABORTED, "x")
    began, now = 0.0, 0.0
    while not (steps := one.tick(now)):
        now += 1.0
        assert now < 2 * SEND_S
    assert (steps, now - began >= SEND_S) == ([EndSession(1)], True)
    assert one.on_session_lost(1, now) == [FreeCopy("x")]
    assert one.tick(now + SEND_S) == []


def test_a_try_that_is_cancelled_before_its_first_copy_ends_for_all_too() -> None:
    one = machine()
    one.ask(1, A, KEY, TWO, 0.0)
    one.ask(2, B, KEY, TWO, 0.0)
    assert one.cancel(1, A, KEY, Outcome.ABORTED, "gone") == [
        RefuseTry(2, KEY, Outcome.ABORTED, "gone", retry=True), PublishEnded(KEY, Outcome.ABORTED, "gone", confirmed=False)]
    assert publish(one, "x") == [FreeCopy("x")]
    assert not one.busy(2)


def test_a_rank_that_is_lost_before_the_first_copy_asks_again_and_counts_once() -> None:
    one = machine()
    one.ask(1, A, KEY, TWO, 0.0)
    one.ask(2, B, KEY, TWO, 0.0)
    assert one.on_session_lost(1, 0.0) == []
    assert not one.busy(1)
    assert publish(one, "x") == [Tell(2, KEY, manifest(0))]
    assert one.ask(3, A, KEY, TWO, 1.0) == [Tell(3, KEY, manifest(0))]
    assert [one.on_taken(3, A, KEY, 0), one.on_taken(2, B, KEY, 0)] == [[], [FreeCopy("x")]]


def test_the_word_of_one_that_wants_nothing_outlives_its_session() -> None:
    """It has its blocks already, and need not connect again for others' sake."""
    one = machine()
    one.ask(1, A, KEY, Ask(2, nothing=True), 0.0)
    one.on_session_lost(1, 0.0)
    assert one.ask(2, B, KEY, TWO, 0.0) == []
    assert publish(one, "x") == [Tell(2, KEY, manifest(0))]
    assert one.on_taken(2, B, KEY, 0) == [FreeCopy("x")]
    assert one.on_done(2, B, KEY) == [PublishEnded(KEY, Outcome.OK, "", confirmed=True)]


def test_done_of_what_was_only_asked_for_ends_it() -> None:
    one = machine()
    one.ask(1, A, KEY, ONE, 0.0)
    assert one.on_done(1, A, KEY) == [PublishEnded(KEY, Outcome.OK, "", confirmed=True)]
    assert publish(one, "x") == [FreeCopy("x")]


def test_asks_ahead_of_their_copies_are_bounded() -> None:
    one = machine()
    steps = [each for n in range(EARLY_MAX + 1)
             for each in one.ask(1, A, Key(TransferId(f"{n:032x}"), Attempt(1), 1), ONE, 0.0)]
    assert [(type(each), each.key.transfer) for each in steps] == [(RefuseTry, "0" * 32)]  # type: ignore[union-attr]


def test_a_store_that_is_short_presses_the_oldest_first_and_waits_as_decode_says() -> None:
    one = machine()
    for key in (KEY, OTHER):
        publish(one, "x", key)
        publish(one, "y", key)
    assert one.press(1000, 0.0) == [], "nobody was told"
    one.ask(1, A, KEY, ONE, 0.0)
    one.ask(1, A, OTHER, ONE, 0.0)
    assert one.press(150, 0.0) == [Press(1, KEY, 0), Press(1, KEY, 1)]
    assert one.pressed_bytes == 200
    assert one.press(100, 0.0) == [Press(1, OTHER, 0)]
    one.on_busy(1, A, KEY, 0, 9.0)
    assert one.pressed_bytes == 200
    assert one.press(100, 8.0) == [Press(1, OTHER, 1)], "what is busy is not asked again"
    assert one.press(100, 9.0) == [Press(1, KEY, 0)]
    one.on_taken(1, A, KEY, 0)
    one.release(OTHER, Outcome.ABORTED, "x")
    assert one.pressed_bytes == 100


def test_what_was_pressed_in_a_session_that_has_ended_is_pressed_again_in_the_next() -> None:
    one = machine()
    publish(one, "x")
    one.ask(1, A, KEY, ONE, 0.0)
    assert one.press(100, 0.0) == [Press(1, KEY, 0)]
    one.on_session_lost(1, 1.0)
    assert one.pressed_bytes == 0
    one.ask(2, A, KEY, ONE, 1.1)
    assert one.press(100, 1.2) == [Press(2, KEY, 0)]


def test_takers_that_asked_ahead_and_do_not_go_together_end_the_try_once() -> None:
    one = machine()
    for link, (name, ask) in enumerate([(A, ONE), (B, TWO), (Incarnation("c"), TWO)]):
        one.ask(link, name, KEY, ask, 0.0)
    steps = publish(one, "x")
    assert [step for step in steps if isinstance(step, PublishEnded)] == [
        PublishEnded(KEY, Outcome.PROTOCOL, "asked for as one of 2, where 1 of 1 have", False)]
    assert {step.link for step in steps if isinstance(step, RefuseTry)} == {0, 1, 2}
    assert FreeCopy("x") in steps


def test_a_taker_that_is_done_with_what_it_asks_for_once_more_stays_so() -> None:
    one = machine()
    one.ask(1, A, KEY, TWO, 0.0)
    assert one.on_done(1, A, KEY) == []
    one.ask(2, A, KEY, TWO, 0.1)
    assert [step for step in one.ask(3, B, KEY, Ask(2, True), 0.2) if isinstance(step, PublishEnded)] == [
        PublishEnded(KEY, Outcome.OK, "", True)]


def test_a_look_at_a_short_store_goes_over_no_copies_that_nobody_was_told_of_or_that_decode_is_too_busy_for() -> None:
    """It is looked at with each word of each peer, however many copies wait for one that does not come."""
    class Unseen(OrderedDict[int, object]):
        def values(self) -> object:  # type: ignore[override]
            raise AssertionError("all copies of a try were looked at")

    one = machine()
    for key in (KEY, OTHER):
        publish(one, "x", key)
    one.ask(1, A, KEY, ONE, 0.0)
    one.ask(1, A, OTHER, ONE, 0.0)
    one.press(1, 0.0)
    one.on_busy(1, A, KEY, 0, 9.0)
    one.on_session_lost(1, 0.0)
    one.ask(2, A, KEY, ONE, 0.0)
    for each in one._open.values():
        each.open = Unseen(each.open)  # type: ignore[assignment]
    assert one.press(1000, 8.0) == []


EVENTS = st.lists(st.tuples(st.sampled_from(["publish", "ask", "taken", "done", "cancel", "lost", "tick", "release",
                                             "press", "refused"]),
                            st.integers(0, 3), st.integers(0, 2), st.integers(0, 3)), max_size=60)


@given(EVENTS)
def test_in_any_order_each_copy_is_freed_once_and_each_try_ends_once(events: list[tuple[str, int, int, int]]) -> None:
    one, now, link = machine(), 0.0, 0
    keys = [KEY, OTHER]
    links = {A: 0, B: 1}
    made: list[str] = []
    freed: Counter[str] = Counter()
    ended: Counter[Key] = Counter()
    began: set[Key] = set()

    def heed(steps: list[Step[str]]) -> None:
        for step in steps:
            if isinstance(step, FreeCopy):
                freed[step.data] += 1
            elif isinstance(step, PublishEnded):
                ended[step.key] += 1
            elif isinstance(step, Tell | Press | RefuseTry):
                assert step.link in links.values() or isinstance(step, RefuseTry), "said over a session that has ended"

    for what, a, b, c in events:
        key, taker = keys[a % 2], (A, B)[b % 2]
        link = links[taker]
        if what == "publish":
            made.append(f"{len(made)}")
            began.add(key)
            heed(one.publish(key, manifest, (made[-1], 100), now))
        elif what == "ask":
            heed(one.ask(link, taker, key, Ask(c % 3 or 1, nothing=a > 1), now))
        elif what == "taken":
            heed(one.on_taken(link, taker, key, c))
        elif what == "done":
            heed(one.on_done(link, taker, key))
        elif what == "cancel":
            heed(one.cancel(link, taker, key, Outcome.ABORTED, "x"))
        elif what == "lost":
            heed(one.on_session_lost(link, now))
            links[taker] = max(links.values()) + 1
        elif what == "release":
            heed(one.release(key, Outcome.ABORTED, "x"))
        elif what == "press":
            heed(one.press(100 * c, now))
        elif what == "refused":
            one.on_busy(link, taker, key, c, now + 1)
        else:
            now += 10.0 * (c + 1)
            heed(one.tick(now))
        assert max(freed.values(), default=0) <= 1
        assert max(ended.values(), default=0) <= 1
        assert one.pressed_bytes >= 0
    for key in keys:
        heed(one.release(key, Outcome.ABORTED, "at the end"))
    for last in range(max(links.values()) + 1):
        heed(one.on_session_lost(last, now))
    assert set(freed) == set(made), "every copy is freed"
    assert began <= set(ended)
    assert (one.open, one.pressed_bytes) == (0, 0)
