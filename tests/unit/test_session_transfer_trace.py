"""What engines note of transfers: bounded, packed, and by whom."""

from __future__ import annotations

import time

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.contract.timeline import KEPT, First, Span, TransferSide
from xpyd_sidecar.engine.scheduler.recent_transfers import RANKS_MOST, RecentTransfers
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.session.transfer_trace import (
    MOST,
    OPEN_MOST,
    Forwards,
    Pieces,
    TransferTrace,
    pack_first,
    pack_note,
)


def key(n: int = 0, attempt: int = 1) -> Key:
    return Key(TransferId(f"{n:032x}"), Attempt(attempt), 1)


def test_a_rank_notes_marks_once_and_pieces_until_the_end() -> None:
    noting = TransferTrace()
    before = time.monotonic()
    noting.mark(key(), "heard")
    after = time.monotonic()
    while time.monotonic() <= after:
        pass
    noting.mark(key(), "heard")
    noting.piece(key(), 1.0, 2.0, 100, "tcp")
    noted = noting.end(key())
    assert noted is not None
    assert noted.marks.keys() == {"heard"}
    assert before <= noted.marks["heard"] <= after, "the first time counts"
    assert noted.pieces == [Span(1.0, 2.0, 100, 1, "tcp")]
    assert noting.end(key()) is None
    side = msgspec.msgpack.decode(pack_note(3, noted, [Span(0.5, 1.0, 7)]), type=TransferSide)
    assert (side.rank, side.marks, side.forwards) == (3, noted.marks, [Span(0.5, 1.0, 7)])


def test_open_transfers_are_bounded_and_the_oldest_are_forgotten() -> None:
    noting, forwards = TransferTrace(), Forwards()
    for n in range(OPEN_MOST + 5):
        noting.mark(key(n), "heard")
        forwards.begin()
        forwards.end(1, [key(n)])
    assert noting.end(key(4)) is None
    assert noting.end(key(5)) is not None
    assert forwards.take_pushing_spans(key(4)) == []
    assert len(forwards.take_pushing_spans(key(OPEN_MOST + 4))) == 1


def test_forwards_are_those_that_pushed_and_the_last_ones() -> None:
    forwards = Forwards()
    spans = []
    for n in range(4):
        forwards.begin()
        spans.append(forwards.end(n + 1, [key()] if n % 2 else []))
    assert forwards.take_pushing_spans(key()) == [spans[1], spans[3]]
    assert forwards.spans_since(spans[2].until - 1e-9) == spans[2:]
    assert msgspec.msgpack.decode(pack_first(spans[0]), type=First).forward == spans[0]


def test_an_engine_tells_both_sides_of_what_it_is_asked_for_and_nothing_else() -> None:
    ring = RecentTransfers()
    ring.mark(key(1), "arrived", sends=True, tokens=300)
    ring.mark(key(1), "ended", sends=True, outcome="ok")
    ring.mark(key(1), "arrived", sends=False, tokens=300)
    ring.mark(key(2), "arrived", sends=False)
    ring.side(key(1), b"side", sends=True)
    ring.first(key(1), b"first")
    send, receive = ring.notes_of([key(1).transfer, key(9).transfer])
    assert (send.sends, send.tokens, send.outcome, send.ranks) == (True, 300, "ok", (b"side",))
    assert list(send.marks) == ["arrived", "ended"]
    assert (receive.sends, receive.outcome, receive.first) == (False, "", b"first")


def test_the_ring_is_bounded_in_transfers_and_ranks() -> None:
    ring = RecentTransfers()
    for n in range(KEPT + 3):
        ring.mark(key(n), "arrived", sends=True)
    assert len(ring._entries) == KEPT
    assert ring.notes_of([key(2).transfer]) == ()
    for _ in range(RANKS_MOST + 3):
        ring.side(key(5), b"x", sends=True)
    [one] = ring.notes_of([key(5).transfer])
    assert len(one.ranks) == RANKS_MOST


def test_a_newer_attempt_takes_the_older_ones_place_at_prefill_and_goes_on_at_decode() -> None:
    ring = RecentTransfers()
    for sends in (True, False):
        ring.mark(key(1, 1), "arrived", sends=sends)
        ring.mark(key(1, 2), "announced", sends=sends)
        ring.mark(key(1, 1), "ended", sends=sends, outcome="aborted")
    send, receive = ring.notes_of([key(1).transfer])
    assert (send.attempt, list(send.marks), send.outcome) == (2, ["announced"], "")
    assert (receive.attempt, list(receive.marks), receive.outcome) == (2, ["arrived", "announced"], "")


def test_the_try_that_decode_has_loaded_is_told_to_its_end_although_a_newer_one_is_known() -> None:
    ring = RecentTransfers()
    ring.mark(key(1, 1), "arrived", sends=False, tokens=300)
    ring.mark(key(1, 2), "announced", sends=False)
    ring.side(key(1, 1), b"rank 0", sends=False)
    ring.on_loaded(key(1, 1))
    ring.mark(key(1, 1), "admitted", sends=False)
    ring.mark(key(1, 1), "ended", sends=False, outcome="ok")
    ring.first(key(1, 1), b"first")
    [told] = ring.notes_of([key(1).transfer])
    assert list(told.marks) == ["arrived", "announced", "loaded", "admitted", "ended"]
    assert (told.outcome, told.ranks, told.first) == ("ok", (b"rank 0",), b"first")


def test_what_nobody_has_marked_is_not_kept_for_a_note_that_comes_late() -> None:
    ring = RecentTransfers()
    ring.side(key(1), b"rank 0", sends=False)
    assert len(ring._entries) == 0


def test_few_spans_stay_as_they_are() -> None:
    pieces = Pieces()
    for n in range(3):
        pieces.add(n, n + 0.5, 10, "tcp")
    assert pieces.take() == [Span(n, n + 0.5, 10, 1, "tcp") for n in range(3)]


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 10), st.integers(0, 1 << 30), st.sampled_from(["tcp", "arena"])),
                min_size=1, max_size=700))
def test_whatever_comes_is_kept_within_the_bound_and_nothing_is_forgotten(
        came: list[tuple[float, float, int, str]]) -> None:
    pieces = Pieces()
    for at, took, size, link in came:
        pieces.add(at, at + took, size, link)
        assert len(pieces) <= MOST
    kept = pieces.take()
    assert sum(span.size for span in kept) == sum(size for _, _, size, _ in came)
    assert sum(span.count for span in kept) == len(came)
    assert min(span.at for span in kept) == min(at for at, *_ in came)
    assert max(span.until for span in kept) == max(at + took for at, took, *_ in came)


def test_spans_of_two_links_in_one_say_so() -> None:
    pieces = Pieces()
    for n in range(MOST + 1):
        pieces.add(n, n, 1, "tcp" if n % 2 else "arena")
    assert {span.link for span in pieces.take()[:-1]} == {"several"}
