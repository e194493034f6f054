"""Sending, rule by rule: nothing before READY, only what was asked for, every copy freed or sent once."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.kv.bodies import Ready
from xpyd_sidecar.kv.copies import Copy, Free, RefuseTransfer, Send, TransferEnded, Uses
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.leases import LOOKS
from xpyd_sidecar.kv.mapping import ArrayKind, Cut
from xpyd_sidecar.kv.reach import ArraySpan, Reach
from xpyd_sidecar.kv.sending import EARLY_MAX, Sending

KEY = Key(TransferId("a" * 32), Attempt(1), 1)
ALL = Ready(0, 10, 2, 64, checksum=False)


def machine(*, cover: bool = False) -> Sending[str]:
    return Sending(keep_s=60, send_s=30, regions=2, block_bytes=64, cover=cover)


def silence(sending: Sending[str], start: float, end: float) -> list[object]:
    """Nothing comes, and this side looks every second: what it says at ``end``, having said nothing before."""
    while (start := start + 1.0) < end:
        assert sending.tick(start) == []
    return [*sending.tick(end)]


def copy(name: str = "c", first: int = 0, blocks: int = 2) -> Copy[str]:
    return Copy(0, first, blocks, name)


def test_copies_are_kept_until_they_are_asked_for_and_then_sent_at_once() -> None:
    sending = machine()
    assert sending.copy(KEY, copy("a"), 0.0) == []
    assert sending.ready(1, KEY, ALL, 1.0) == [Send(1, KEY, copy("a"), 0, 2, False, Uses(1))]
    assert sending.copy(KEY, copy("b", 2), 2.0) == [Send(1, KEY, copy("b", 2), 2, 2, False, Uses(1))]
    assert sending.done(1, KEY) == [TransferEnded(KEY, Outcome.OK, "", True)]
    assert sending.open == 0


def test_only_blocks_that_decode_lacks_are_sent() -> None:
    sending = machine()
    sending.copy(KEY, copy("a", 0, 2), 0.0)
    sending.copy(KEY, copy("b", 2, 2), 0.0)
    steps = sending.ready(1, KEY, Ready(3, 2, 2, 64, checksum=False), 1.0)
    assert steps == [Free(copy("a", 0, 2)), Send(1, KEY, copy("b", 2, 2), 3, 1, False, Uses(1))]


def test_ready_may_come_before_the_first_copy() -> None:
    sending = machine()
    assert sending.ready(1, KEY, ALL, 0.0) == []
    assert sending.busy(1)
    assert sending.copy(KEY, copy(), 1.0) == [Send(1, KEY, copy(), 0, 2, False, Uses(1))]


def test_requests_ahead_of_their_copies_are_bounded() -> None:
    sending = machine()
    steps = [one for n in range(EARLY_MAX + 1)
             for one in sending.ready(1, Key(TransferId(f"{n:032x}"), Attempt(1), 1), ALL, 0.0)]
    assert [(type(one), one.key.transfer) for one in steps] == [(RefuseTransfer, "0" * 32)]  # type: ignore[union-attr]


def test_payloads_are_covered_if_either_side_wants_it() -> None:
    for ours, theirs in ((True, False), (False, True)):
        sending = machine(cover=ours)
        sending.copy(KEY, copy(), 0.0)
        (send,) = sending.ready(1, KEY, ALL.__class__(0, 10, 2, 64, checksum=theirs), 0.0)
        assert isinstance(send, Send)
        assert send.cover


@pytest.mark.parametrize("ready", [Ready(0, 10, 3, 64, checksum=True), Ready(0, 10, 2, 65, checksum=True)])
def test_another_geometry_is_refused_with_both(ready: Ready) -> None:
    sending = machine()
    sending.copy(KEY, copy(), 0.0)
    refuse, free, ended = sending.ready(1, KEY, ready, 0.0)
    assert isinstance(refuse, RefuseTransfer)
    assert "2 arrays of 64 bytes a block here" in refuse.reason
    assert free == Free(copy())
    assert isinstance(ended, TransferEnded)
    assert ended.outcome is Outcome.INCOMPATIBLE


def test_copies_nobody_asks_for_are_dropped_after_their_time() -> None:
    sending = machine()
    sending.copy(KEY, copy(), 0.0)
    assert sending.tick(59.9) == []
    free, ended = sending.tick(60.0)
    assert free == Free(copy())
    assert isinstance(ended, TransferEnded)
    assert (ended.outcome, ended.confirmed) == (Outcome.DEADLINE, False)
    assert sending.ready(1, KEY, ALL, 61.0) == [
        RefuseTransfer(1, KEY, Outcome.DEADLINE, "decode did not ask for it in time", False, ended=True)]


def test_a_peer_that_never_confirms_is_not_waited_for_for_ever() -> None:
    sending = machine()
    sending.copy(KEY, copy(), 0.0)
    sending.ready(1, KEY, ALL, 50.0)
    assert silence(sending, 50.0, 79.0) == []
    refuse, ended = sending.tick(80.0)
    assert isinstance(refuse, RefuseTransfer)
    assert isinstance(ended, TransferEnded)


def test_a_lost_link_ends_what_went_over_it_and_nothing_else() -> None:
    sending = machine()
    other = Key(TransferId("b" * 32), Attempt(1), 1)
    for link, key in ((1, KEY), (2, other)):
        sending.copy(key, copy(), 0.0)
        sending.ready(link, key, ALL, 0.0)
    assert sending.lost(1, Outcome.PEER_LOST, "x") == [TransferEnded(KEY, Outcome.PEER_LOST, "x", False)]
    assert (sending.open, sending.busy(1), sending.busy(2)) == (1, False, True)
    assert sending.copy(KEY, copy("late", 2), 1.0) == [Free(copy("late", 2))]


def test_only_the_link_that_asked_may_confirm_or_cancel() -> None:
    sending = machine()
    sending.copy(KEY, copy(), 0.0)
    sending.ready(1, KEY, ALL, 0.0)
    assert sending.done(2, KEY) == sending.cancel(2, KEY, Outcome.STALE, "x") == []
    assert sending.cancel(1, KEY, Outcome.STALE, "x") == [TransferEnded(KEY, Outcome.STALE, "x", False)]


def test_a_cancelled_request_that_was_early_ends_too() -> None:
    sending = machine()
    sending.ready(1, KEY, ALL, 0.0)
    assert sending.cancel(1, KEY, Outcome.ABORTED, "x") == [TransferEnded(KEY, Outcome.ABORTED, "x", False)]
    assert sending.copy(KEY, copy(), 1.0) == [Free(copy())]


def test_being_asked_twice_is_refused() -> None:
    sending = machine()
    sending.copy(KEY, copy(), 0.0)
    sending.ready(1, KEY, ALL, 0.0)
    one, other, ended = sending.ready(2, KEY, ALL, 0.0)
    assert isinstance(one, RefuseTransfer)
    assert isinstance(other, RefuseTransfer)
    assert isinstance(ended, TransferEnded)
    assert {one.link, other.link} == {1, 2}
    assert ended.outcome is Outcome.PROTOCOL


def test_releasing_tells_decode_where_it_has_asked_and_reports_even_what_was_never_begun() -> None:
    sending = machine()
    assert sending.release(KEY, Outcome.UNUSED, "x") == [TransferEnded(KEY, Outcome.UNUSED, "x", False)]
    assert sending.release(KEY, Outcome.UNUSED, "x") == []
    early = Key(TransferId("b" * 32), Attempt(1), 1)
    sending.ready(1, early, ALL, 0.0)
    assert sending.release(early, Outcome.ABORTED, "y", retry=True) == [
        RefuseTransfer(1, early, Outcome.ABORTED, "y", True), TransferEnded(early, Outcome.ABORTED, "y", False)]
    assert sending.ready(3, early, ALL, 0.0) == [RefuseTransfer(3, early, Outcome.ABORTED, "y", True, ended=True)]


def sent(limit_s: float = math.inf) -> Sending[str]:
    """Decode has asked at 0."""
    sending: Sending[str] = Sending(keep_s=60, send_s=30, regions=2, block_bytes=64, cover=False, limit_s=limit_s)
    sending.copy(KEY, copy("c", 0, 1), 0.0)
    assert len(sending.ready(1, KEY, ALL, 0.0)) == 1
    return sending


PROGRESS: dict[str, Callable[[Sending[str], int], object]] = {
    "copy": lambda sending, nth: sending.copy(KEY, copy("c", nth, 1), 29.0 * nth),
    "left or work": lambda sending, _: sending.progressed(KEY)}


@pytest.mark.parametrize("what", PROGRESS)
def test_a_transfer_lasts_while_there_is_progress(what: str) -> None:
    sending = sent()
    for nth in range(1, 8):
        assert silence(sending, 29.0 * (nth - 1), 29.0 * nth - 1.0) == []
        PROGRESS[what](sending, nth)
        assert sending.tick(29.0 * nth) == []
    assert silence(sending, 203.0, 232.0) == []
    refuse, ended = sending.tick(233.0)
    assert ended == TransferEnded(KEY, Outcome.DEADLINE, "decode did not confirm in time", False)
    assert isinstance(refuse, RefuseTransfer)
    assert sending.progressed(KEY) is None
    assert sending.tick(234.0) == []


def test_what_a_taker_fetches_is_progress_and_what_it_has_fetched_is_not() -> None:
    sending = machine()
    sending.ready(1, KEY, ALL.__class__(0, 10, 2, 64, checksum=False, window=1), 0.0)
    sending.copy(KEY, copy("c", 0, 10), 0.0)
    for nth in range(1, 4):
        assert silence(sending, 29.0 * (nth - 1), 29.0 * nth - 1.0) == []
        assert len(sending.fetch(1, KEY, nth + 1)) == 1
        assert sending.tick(29.0 * nth) == []
    for second in range(88, 117):
        assert sending.fetch(1, KEY, 4) == []
        assert sending.tick(float(second)) == []
    assert TransferEnded(KEY, Outcome.DEADLINE, "decode did not confirm in time", False) in sending.tick(117.0)


def test_the_limit_ends_a_transfer_however_much_leaves() -> None:
    sending = sent(limit_s=100.0)
    for second in range(1, 100):
        sending.progressed(KEY)
        assert sending.tick(float(second)) == []
    sending.progressed(KEY)
    assert sending.tick(100.0)[-1] == TransferEnded(KEY, Outcome.DEADLINE, "it took longer than a load may", False)


def test_copies_are_kept_while_their_prompt_is_computed() -> None:
    sending: Sending[str] = Sending(keep_s=60, send_s=30, regions=2, block_bytes=64, cover=False, limit_s=100)
    sending.copy(KEY, copy("a", 0, 1), 0.0)
    sending.copy(KEY, copy("b", 1, 1), 50.0)
    assert sending.tick(109.0) == []
    sending.progressed(KEY)
    assert sending.tick(109.5) == []
    assert silence(sending, 109.5, 169.0) == []
    assert len(sending.ready(1, KEY, ALL, 169.0)) == 2
    assert silence(sending, 169.0, 199.0 - 0.5) == [], "what was before READY counts for nothing after it"
    assert sending.tick(199.5)[-1] == TransferEnded(KEY, Outcome.DEADLINE, "decode did not confirm in time", False)


def test_a_clock_that_jumps_ends_no_transfer_at_once() -> None:
    sending = sent()
    assert sending.tick(1000.0) == []
    assert sending.tick(900.0) == []
    assert silence(sending, 900.0, 922.0) == []
    assert len(silence(sending, 922.0, 923.0)) == 2
    held_up = sent()
    looks = [bool(held_up.tick(at * 1000.0)) for at in range(1, 6)]
    assert looks == [False, False, False, True, False]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["copy", "word", "fetch", "nothing"]), st.integers(1, 400)), max_size=40),
       st.integers(4, 40), st.integers(4, 40), st.integers(1, 2000), st.integers(0, 200))
def test_a_transfer_ends_by_silence_or_by_its_limit_and_by_nothing_else(
        course: list[tuple[str, int]], keep_s: int, send_s: int, limit_s: int, asked_at: int) -> None:
    """Law 4, before READY by the clock, after it by the time in which this side listens; every copy comes back once."""
    sending: Sending[str] = Sending(keep_s=keep_s, send_s=send_s, regions=1, block_bytes=16, cover=False, limit_s=limit_s)
    ready = Ready(0, 1000, 1, 16, checksum=False, window=1)
    sending.copy(KEY, Copy(0, 0, 1, "0"), 0.0)
    names, out = ["0"], []
    now, silent, asked, fetched = 0.0, 0.0, math.inf, 1
    for what, gap in [*course, *[("nothing", 1)] * (keep_s + send_s)]:
        now += gap
        counts, silent = True, silent + (gap if asked == math.inf else min(gap, send_s / LOOKS))
        if asked == math.inf and now >= asked_at:
            out += sending.ready(1, KEY, ready, now)
            asked = now
        elif what == "copy":
            names.append(str(len(names)))
            out += sending.copy(KEY, Copy(0, len(names) - 1, 1, names[-1]), now)
        elif what == "word":
            sending.progressed(KEY)
        elif what == "fetch" and asked < math.inf:
            fetched += 1
            out += sending.fetch(1, KEY, fetched)
        else:
            counts = False
        silent = 0.0 if counts else silent
        step = sending.tick(now)
        out += step
        over = now >= asked + limit_s or silent >= (keep_s if asked == math.inf else send_s)
        assert any(isinstance(one, TransferEnded) for one in step) == over
        if over:
            back = [one.copy.data for one in out if isinstance(one, Send | Free)]
            assert sorted(back) == sorted(names)
            return
    raise AssertionError("it never ended")


def taker(half: int, takers: int = 2) -> Ready:
    """One of two decode ranks that each take one of two heads."""
    return Ready(0, 10, 2, 32, checksum=False, cuts=(Cut(0, 2, half, 1, 16),), takers=takers)


def shared() -> Sending[str]:
    return Sending(keep_s=60, send_s=30, regions=2, block_bytes=64, cover=False,
                   kinds=[ArrayKind("uint8", 2, (16,), 16, 2)] * 2)


def both() -> Sending[str]:
    sending = shared()
    sending.copy(KEY, copy(), 0.0)
    assert sending.ready(1, KEY, taker(0), 0.0) == []
    assert len(sending.ready(2, KEY, taker(1), 0.0)) == 2
    return sending


def test_a_copy_goes_to_each_of_its_takers_once_all_have_asked_and_is_free_when_the_last_has_left() -> None:
    sending = shared()
    assert sending.copy(KEY, copy(), 0.0) == []
    assert sending.ready(2, KEY, taker(1), 0.0) == []
    one, other = sending.ready(1, KEY, taker(0), 50.0)
    assert isinstance(one, Send)
    assert isinstance(other, Send)
    assert [(each.link, each.cut) for each in (one, other)] == [(2, Cut(0, 2, 1, 1, 16)), (1, Cut(0, 2, 0, 1, 16))]
    assert one.uses is other.uses
    assert [one.uses.over(), one.uses.over()] == [False, True]
    assert len(sending.copy(KEY, copy("later", 2), 51.0)) == 2
    assert sending.tick(79.0) == sending.done(2, KEY) == sending.done(3, KEY) == sending.done(2, KEY) == []
    assert sending.done(1, KEY) == [TransferEnded(KEY, Outcome.OK, "", True)]


def test_takers_may_ask_before_the_first_copy() -> None:
    sending = shared()
    assert sending.ready(1, KEY, taker(0), 0.0) == sending.ready(2, KEY, taker(1), 0.0) == []
    assert sending.busy(1)
    assert sending.busy(2)
    assert len(sending.copy(KEY, copy(), 1.0)) == 2


def test_a_taker_that_is_lost_before_the_first_copy_ends_the_transfer_for_the_others() -> None:
    sending = shared()
    sending.ready(1, KEY, taker(0), 0.0)
    sending.ready(2, KEY, taker(1), 0.0)
    assert sending.lost(1, Outcome.PEER_LOST, "gone") == [RefuseTransfer(2, KEY, Outcome.PEER_LOST, "gone", True),
                                                          TransferEnded(KEY, Outcome.PEER_LOST, "gone", False)]
    assert sending.copy(KEY, copy(), 1.0) == [Free(copy())]
    assert not sending.busy(1)
    assert not sending.busy(2)


NOTHING = Ready(0, 10, 0, 0, checksum=False, takers=2)


@pytest.mark.parametrize("copied", [False, True])
def test_a_taker_of_nothing_that_is_lost_before_the_others_have_asked_asks_again(*, copied: bool) -> None:
    sending = shared()
    if copied:
        sending.copy(KEY, copy(), 0.0)
    assert sending.ready(1, KEY, NOTHING, 0.0) == sending.lost(1, Outcome.PEER_LOST, "gone") == []
    assert sending.ready(2, KEY, taker(1), 0.0) == []
    steps = sending.ready(3, KEY, NOTHING, 0.0) or sending.copy(KEY, copy(), 0.0)
    assert [one.link for one in steps if isinstance(one, Send)] == [2]


def test_what_a_lost_link_asked_for_before_the_first_copy_is_forgotten() -> None:
    sending = machine()
    assert sending.ready(1, KEY, ALL, 0.0) == sending.lost(1, Outcome.PEER_LOST, "gone") == []
    assert not sending.busy(1)
    assert sending.copy(KEY, copy(), 1.0) == [], "nobody is there to take it"
    assert sending.ready(2, KEY, ALL, 2.0) == [Send(2, KEY, copy(), 0, 2, False, Uses(1))]


def test_a_taker_of_nothing_that_is_lost_or_asks_again_ends_no_transfer_that_is_sent() -> None:
    sending = shared()
    sending.copy(KEY, copy(), 0.0)
    sending.ready(1, KEY, NOTHING, 0.0)
    assert len(sending.ready(2, KEY, taker(1), 0.0)) == 1
    assert sending.lost(1, Outcome.PEER_LOST, "gone") == sending.ready(3, KEY, NOTHING, 0.0) == []
    assert sending.busy(3)
    assert len(sending.copy(KEY, copy("b", 2), 0.0)) == 1
    assert sending.done(2, KEY) == []  # nor has it confirmed
    assert sending.cancel(3, KEY, Outcome.STALE, "x")[-1] == TransferEnded(KEY, Outcome.STALE, "x", False)


def test_a_transfer_that_not_all_takers_ask_for_waits_no_longer_than_an_unasked_one() -> None:
    sending = shared()
    sending.copy(KEY, copy(), 0.0)
    sending.ready(1, KEY, taker(0), 59.0)
    refuse, free, ended = sending.tick(60.0)
    assert isinstance(refuse, RefuseTransfer)
    assert refuse.link == 1
    assert free == Free(copy())
    assert isinstance(ended, TransferEnded)


@pytest.mark.parametrize("end", [
    lambda sending: sending.cancel(1, KEY, Outcome.STALE, "x"), lambda sending: sending.lost(1, Outcome.PEER_LOST, "x")],
    ids=["cancel", "lost"])
def test_when_one_taker_goes_the_other_is_told_that_another_try_may_come(end: Callable[[Sending[str]], list[object]]
                                                                         ) -> None:
    refuse, ended = end(both())
    assert isinstance(refuse, RefuseTransfer)
    assert (refuse.link, refuse.retry) == (2, True)
    assert isinstance(ended, TransferEnded)
    sending = both()
    sending.done(2, KEY)
    # One that has confirmed owes nothing and is owed nothing.
    assert [type(step) for step in end(sending)] == [TransferEnded]


def test_a_taker_that_goes_before_the_first_copy_takes_the_others_along() -> None:
    sending = shared()
    sending.ready(1, KEY, taker(0), 0.0)
    sending.ready(2, KEY, taker(1), 0.0)
    refuse, ended = sending.cancel(2, KEY, Outcome.ABORTED, "x")
    assert refuse == RefuseTransfer(1, KEY, Outcome.ABORTED, "x", True)
    assert isinstance(ended, TransferEnded)


@pytest.mark.parametrize("third", [taker(0), taker(0, takers=3)])
def test_one_taker_too_many_ends_the_transfer_for_all(third: Ready) -> None:
    steps = both().ready(3, KEY, third, 0.0)
    assert {one.link for one in steps if isinstance(one, RefuseTransfer)} == {1, 2, 3}
    assert isinstance(steps[-1], TransferEnded)


def test_arrays_that_nobody_asks_for_are_not_sent() -> None:
    sending = shared()
    sending.ready(1, KEY, Ready(0, 10, 1, 32, checksum=False, cuts=(Cut(1, 1, 0, 0, 32),)), 0.0)
    assert sending.copy(KEY, copy("a"), 0.0) == [Free(copy("a"))]
    other = Copy(1, 0, 2, "b")
    assert sending.copy(KEY, other, 0.0) == [Send(1, KEY, other, 0, 2, False, Uses(1))]
    nothing = shared()
    nothing.ready(1, KEY, Ready(0, 10, 0, 0, checksum=False), 0.0)
    assert nothing.copy(KEY, copy(), 0.0) == [Free(copy())]
    assert nothing.done(1, KEY) == [TransferEnded(KEY, Outcome.OK, "", True)]


@pytest.mark.parametrize("cuts", [
    (Cut(0, 3, 0, 0, 32),), (Cut(2, 1, 0, 0, 32),), (Cut(1, 1, 0, 0, 32), Cut(0, 1, 0, 0, 32)), (Cut(0, 0, 0, 0, 32),),
    (Cut(0, 1, 1, 2, 32),), (Cut(0, 1, -1, 1, 16),), (Cut(0, 1, 0, -1, 16),), (Cut(0, 1, 0, 1, 32),),
    (Cut(0, 1, 1, 0, 32),)])
def test_cuts_of_what_is_not_there_are_refused(cuts: tuple[Cut, ...]) -> None:
    sending = shared()
    sending.copy(KEY, copy(), 0.0)
    size = sum(one.count * one.size for one in cuts)
    asked = Ready(0, 10, sum(one.count for one in cuts), size, checksum=False, cuts=cuts)
    refuse, _, ended = sending.ready(1, KEY, asked, 0.0)
    assert isinstance(refuse, RefuseTransfer)
    assert "geometry: 2 arrays of 64 bytes a block here" in refuse.reason
    assert isinstance(ended, TransferEnded)
    assert ended.outcome is Outcome.INCOMPATIBLE


def grouped() -> Sending[str]:
    """Arrays that reach over all, over a window, and one of a state."""
    reaches = Reach("all", 16), Reach("window", 16, 40), Reach("state", 0)
    kinds = [ArrayKind("uint8", 1, (16,), 16, 1, reach) for reach in reaches]
    return Sending(keep_s=60, send_s=30, regions=3, block_bytes=48, cover=False, kinds=kinds)


SPANS = (ArraySpan(1, 1, 7, 2), ArraySpan(2, 1, 0, 1))


def test_of_each_array_the_blocks_are_sent_that_are_asked_for_of_it() -> None:
    sending = grouped()
    made = [Copy(0, 0, 6, "all"), Copy(0, 6, 3, "rest"), Copy(1, 5, 3, "window"), Copy(1, 8, 1, "tail"),
            Copy(2, 0, 1, "state")]
    for one in made[:3]:
        sending.copy(KEY, one, 0.0)
    first = sending.ready(1, KEY, Ready(2, 7, 3, 48, checksum=False, spans=SPANS), 1.0)
    last = [step for one in made[3:] for step in sending.copy(KEY, one, 2.0)]
    assert [(one.copy.data, one.first, one.blocks) for one in (*first, *last) if isinstance(one, Send)] == [
        ("all", 2, 4), ("rest", 6, 3), ("window", 7, 1), ("tail", 8, 1), ("state", 0, 1)]


@pytest.mark.parametrize(("spans", "window", "text"), [
    ((ArraySpan(1, 1, 7, 2),), 0, "array 2 is a state, which is one block"),
    ((ArraySpan(2, 1, 0, 2),), 0, "array 2 is a state, which is one block"),
    ((ArraySpan(2, 1, 0, 1), ArraySpan(1, 1, 7, 2)), 0, "spans: arrays 1 to 1 of 3"),
    ((ArraySpan(1, 3, 0, 1),), 0, "spans: arrays 1 to 3 of 3"),
    ((ArraySpan(1, 0, 0, 1),), 0, "spans: arrays 1 to 0 of 3"),
    ((ArraySpan(1, 1, -1, 2),), 0, "spans: blocks -1 to 0"),
    ((ArraySpan(1, 1, 7, 0),), 0, "spans: blocks 7 to 6"),
    (SPANS, 4, "spans: blocks are pulled in their order"),
])
def test_spans_that_prefill_cannot_have_are_refused_with_the_reason(spans: tuple[ArraySpan, ...], window: int, text: str
                                                                    ) -> None:
    sending = grouped()
    sending.copy(KEY, Copy(0, 0, 6, "all"), 0.0)
    refuse, *_ = sending.ready(1, KEY, Ready(0, 9, 3, 48, checksum=False, window=window, spans=spans), 1.0)
    assert isinstance(refuse, RefuseTransfer)
    assert refuse.outcome is Outcome.INCOMPATIBLE
    assert text in refuse.reason
