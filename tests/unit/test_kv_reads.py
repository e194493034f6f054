"""Which reads may be believed: the ticket after them, their order, silence; and what of a peer's word is not used."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.kv.bodies import NixlMemory
from xpyd_sidecar.kv.reads import METADATA_MAX, HandOver, Prove, Reads, SessionLost, unusable

MEMORY = NixlMemory("xpyd-1", b"metadata", "1.5.1", 4096, 1 << 20, 64, b"\1" * 32)


def test_a_piece_counts_when_the_ticket_was_read_after_it() -> None:
    reads = Reads(5)
    assert [reads.begin(0.0), reads.begin(0.0)] == [0, 1]
    assert reads.done(0, 0.1) == [Prove()]
    assert reads.done(1, 0.2) == []  # the ticket that is being read does not speak for it
    assert reads.proven(right=True, now=0.3) == [HandOver(1), Prove()]
    assert reads.proven(right=True, now=0.4) == [HandOver(1)]
    assert not reads.busy


def test_pieces_are_handed_over_in_order_though_they_are_done_in_another() -> None:
    reads = Reads(5)
    for _ in range(3):
        reads.begin(0.0)
    assert reads.done(2, 0.1) == [Prove()]
    assert reads.proven(right=True, now=0.2) == []
    assert reads.done(1, 0.3) == [Prove()]
    assert reads.done(0, 0.3) == []
    assert reads.proven(right=True, now=0.4) == [Prove()]
    assert reads.proven(right=True, now=0.5) == [HandOver(3)]


def test_a_ticket_that_was_wiped_ends_the_session_with_all_that_was_read() -> None:
    reads = Reads(5)
    reads.begin(0.0)
    reads.begin(0.0)
    reads.done(0, 0.1)
    assert reads.proven(right=False, now=0.2) == [SessionLost("has given this session up")]
    assert reads.done(1, 0.3) == reads.proven(right=True, now=0.3) == reads.lost("again") == reads.tick(9.0) == []
    assert not reads.busy


def test_silence_counts_from_the_last_piece_and_only_while_one_is_under_way() -> None:
    reads = Reads(5)
    assert reads.tick(100.0) == []
    reads.begin(100.0)
    assert reads.tick(104.9) == []
    reads.begin(104.9)
    reads.done(0, 104.9)
    assert reads.proven(right=True, now=105.0) == [HandOver(1)]
    assert reads.tick(110.0) == []
    assert reads.tick(110.1) == [SessionLost("nothing of its memory has come for 5 s")]


@given(st.data())
def test_every_piece_is_handed_over_once_in_order_and_after_a_ticket_that_began_later(data: st.DataObject) -> None:
    reads = Reads(5)
    under_way: set[int] = set()
    done: set[int] = set()
    spoken: set[int] = set()
    covered: set[int] = set()
    begun = handed = 0
    proving = False

    def take(steps: list[Prove | HandOver | SessionLost]) -> None:
        nonlocal proving, handed
        for step in steps:
            if isinstance(step, Prove):
                assert not proving
                proving = True
                spoken.clear()
                spoken.update(done)
            else:
                assert isinstance(step, HandOver)
                assert set(range(handed, handed + step.pieces)) <= covered
                handed += step.pieces

    for _ in range(data.draw(st.integers(1, 60))):
        choice = data.draw(st.sampled_from(["begin", "done", "proven"]))
        if choice == "begin" and len(under_way) < 16:
            assert reads.begin(0.0) == begun
            under_way.add(begun)
            begun += 1
        elif choice == "done" and under_way:
            which = data.draw(st.sampled_from(sorted(under_way)))
            under_way.remove(which)
            done.add(which)
            take(reads.done(which, 0.0))
        elif choice == "proven" and proving:
            proving = False
            covered |= spoken
            take(reads.proven(right=True, now=0.0))
    for which in sorted(under_way):
        done.add(which)
        take(reads.done(which, 0.0))
    while proving:
        proving = False
        covered |= spoken
        take(reads.proven(right=True, now=0.0))
    assert handed == begun
    assert not reads.busy


@pytest.mark.parametrize(("changed", "why"), [
    ({}, ""),
    ({"metadata": b""}, "NIXL's description has 0 bytes, not 1 to 32768"),
    ({"metadata": bytes(METADATA_MAX + 1)}, "NIXL's description has 32769 bytes, not 1 to 32768"),
    ({"ticket": b"\1" * 31}, "no agent's name and ticket"),
    ({"ticket": bytes(32)}, "no agent's name and ticket"),  # a wiped one would be one
    ({"agent": ""}, "no agent's name and ticket"),
    ({"agent": "a" * 65}, "no agent's name and ticket"),
    ({"size": 0}, "no memory's place and size"),
    ({"size": -1}, "no memory's place and size"),
    ({"base": 0}, "no memory's place and size"),
    ({"base": (1 << 64) - 1}, "no memory's place and size"),
    ({"ticket_at": 0}, "no memory's place and size"),
    ({"ticket_at": 1 << 64}, "no memory's place and size"),
])
def test_what_of_a_peers_word_is_not_used(changed: dict[str, object], why: str) -> None:
    fields = {name: getattr(MEMORY, name) for name in MEMORY.__struct_fields__}
    assert unusable(NixlMemory(**fields | changed)) == why
