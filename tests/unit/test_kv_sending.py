"""Sending, rule by rule: nothing before READY, only what was asked for, every copy freed or sent once."""

from __future__ import annotations

import pytest

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.messages import Ready
from xpyd_sidecar.kv.sending import EARLY_MAX, Copy, Ended, Free, Refuse, Send, Sending

KEY = Key(TransferId("a" * 32), Attempt(1), 1)
ALL = Ready(0, 10, 2, 64, checksum=False)


def machine(*, cover: bool = False) -> Sending[str]:
    return Sending(keep_s=60, send_s=30, regions=2, block_bytes=64, cover=cover)


def copy(name: str = "c", first: int = 0, blocks: int = 2) -> Copy[str]:
    return Copy(0, first, blocks, name)


def test_copies_are_kept_until_they_are_asked_for_and_then_sent_at_once() -> None:
    sending = machine()
    assert sending.copy(KEY, copy("a"), 0.0) == []
    assert sending.ready(1, KEY, ALL, 1.0) == [Send(1, KEY, copy("a"), 0, 2, False)]
    assert sending.copy(KEY, copy("b", 2), 2.0) == [Send(1, KEY, copy("b", 2), 2, 2, False)]
    assert sending.done(1, KEY) == [Ended(KEY, Outcome.OK, "", True)]
    assert sending.open == 0


def test_only_blocks_that_decode_lacks_are_sent() -> None:
    sending = machine()
    sending.copy(KEY, copy("a", 0, 2), 0.0)
    sending.copy(KEY, copy("b", 2, 2), 0.0)
    steps = sending.ready(1, KEY, Ready(3, 2, 2, 64, checksum=False), 1.0)
    assert steps == [Free(copy("a", 0, 2)), Send(1, KEY, copy("b", 2, 2), 3, 1, False)]


def test_ready_may_come_before_the_first_copy() -> None:
    sending = machine()
    assert sending.ready(1, KEY, ALL, 0.0) == []
    assert sending.busy(1)
    assert sending.copy(KEY, copy(), 1.0) == [Send(1, KEY, copy(), 0, 2, False)]


def test_requests_ahead_of_their_copies_are_bounded() -> None:
    sending = machine()
    steps = [one for n in range(EARLY_MAX + 1)
             for one in sending.ready(1, Key(TransferId(f"{n:032x}"), Attempt(1), 1), ALL, 0.0)]
    assert [(type(one), one.key.transfer) for one in steps] == [(Refuse, "0" * 32)]  # type: ignore[union-attr]


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
    assert isinstance(refuse, Refuse)
    assert "2 arrays of 64 bytes a block here" in refuse.reason
    assert free == Free(copy())
    assert isinstance(ended, Ended)
    assert ended.outcome is Outcome.INCOMPATIBLE


def test_copies_nobody_asks_for_are_dropped_after_their_time() -> None:
    sending = machine()
    sending.copy(KEY, copy(), 0.0)
    assert sending.tick(59.9) == []
    free, ended = sending.tick(60.0)
    assert free == Free(copy())
    assert isinstance(ended, Ended)
    assert (ended.outcome, ended.confirmed) == (Outcome.DEADLINE, False)
    assert sending.ready(1, KEY, ALL, 61.0) == [
        Refuse(1, KEY, Outcome.DEADLINE, "decode did not ask for it in time", False)]


def test_a_peer_that_never_confirms_is_not_waited_for_for_ever() -> None:
    sending = machine()
    sending.copy(KEY, copy(), 0.0)
    sending.ready(1, KEY, ALL, 50.0)
    assert sending.tick(79.0) == []
    refuse, ended = sending.tick(80.0)
    assert isinstance(refuse, Refuse)
    assert isinstance(ended, Ended)


def test_a_lost_link_ends_what_went_over_it_and_nothing_else() -> None:
    sending = machine()
    other = Key(TransferId("b" * 32), Attempt(1), 1)
    for link, key in ((1, KEY), (2, other)):
        sending.copy(key, copy(), 0.0)
        sending.ready(link, key, ALL, 0.0)
    assert sending.lost(1, Outcome.PEER_LOST, "x") == [Ended(KEY, Outcome.PEER_LOST, "x", False)]
    assert (sending.open, sending.busy(1), sending.busy(2)) == (1, False, True)
    assert sending.copy(KEY, copy("late", 2), 1.0) == [Free(copy("late", 2))]


def test_only_the_link_that_asked_may_confirm_or_cancel() -> None:
    sending = machine()
    sending.copy(KEY, copy(), 0.0)
    sending.ready(1, KEY, ALL, 0.0)
    assert sending.done(2, KEY) == sending.cancel(2, KEY, Outcome.STALE, "x") == []
    assert sending.cancel(1, KEY, Outcome.STALE, "x") == [Ended(KEY, Outcome.STALE, "x", False)]


def test_a_cancelled_request_that_was_early_ends_too() -> None:
    sending = machine()
    sending.ready(1, KEY, ALL, 0.0)
    assert sending.cancel(1, KEY, Outcome.ABORTED, "x") == [Ended(KEY, Outcome.ABORTED, "x", False)]
    assert sending.copy(KEY, copy(), 1.0) == [Free(copy())]


def test_being_asked_twice_is_refused() -> None:
    sending = machine()
    sending.copy(KEY, copy(), 0.0)
    sending.ready(1, KEY, ALL, 0.0)
    refuse, ended = sending.ready(2, KEY, ALL, 0.0)
    assert isinstance(refuse, Refuse)
    assert isinstance(ended, Ended)
    assert refuse.link == 2
    assert ended.outcome is Outcome.PROTOCOL


def test_releasing_tells_decode_where_it_has_asked_and_reports_even_what_was_never_begun() -> None:
    sending = machine()
    assert sending.release(KEY, Outcome.UNUSED, "x") == [Ended(KEY, Outcome.UNUSED, "x", False)]
    assert sending.release(KEY, Outcome.UNUSED, "x") == []
    early = Key(TransferId("b" * 32), Attempt(1), 1)
    sending.ready(1, early, ALL, 0.0)
    assert sending.release(early, Outcome.ABORTED, "y", retry=True) == [
        Refuse(1, early, Outcome.ABORTED, "y", True), Ended(early, Outcome.ABORTED, "y", False)]
    assert sending.ready(3, early, ALL, 0.0) == [Refuse(3, early, Outcome.ABORTED, "y", True)]
