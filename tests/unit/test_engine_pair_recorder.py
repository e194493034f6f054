"""Peers whose KV cannot be taken: told for a while, then tried again, in bounded memory; written only when it changes."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from xpyd_sidecar.contract import pair_notes
from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.contract.pair_notes import (
    INCARNATION_MAX,
    MOST_LINKS,
    MOST_REFUSED,
    NAME_MAX,
    WORDS_MAX,
    PairNotes,
    RefusedPeer,
)
from xpyd_sidecar.engine.scheduler.pair_recorder import FIRST_S, MOST_S, PairRecorder
from xpyd_sidecar.router.fleet.heartbeat_listener import MAX_MESSAGE

OURS, P0 = Incarnation("d" * 32), InstanceName("p0")
LIFE = Incarnation("1" * 32)


@pytest.fixture
def pairs(tmp_path: Path) -> PairRecorder:
    made = PairRecorder(tmp_path, 0, OURS)
    step(made, 0.0)
    return made


def step(pairs: PairRecorder, now: float) -> PairNotes | None:
    """What is written now."""
    notes = pairs.due(now)
    if notes is not None:
        pairs.write(notes)
    return notes


def test_what_an_engine_of_before_has_found_is_written_over_at_the_start(tmp_path: Path) -> None:
    pair_notes.write(tmp_path, 0, PairNotes(LIFE, (RefusedPeer(P0, LIFE, "of before"),)))
    step(PairRecorder(tmp_path, 0, OURS), 0.0)
    assert pair_notes.read(tmp_path, 0) == PairNotes(OURS)


def test_a_refused_peer_is_told_once_for_a_while_and_then_no_more(pairs: PairRecorder, tmp_path: Path) -> None:
    pairs.refuse(P0, LIFE, "another model", 10.0)
    assert step(pairs, 10.0) == PairNotes(OURS, (RefusedPeer(P0, LIFE, "another model"),))
    assert pair_notes.read(tmp_path, 0) == PairNotes(OURS, (RefusedPeer(P0, LIFE, "another model"),))
    pairs.refuse(P0, LIFE, "another prompt that was under way", 11.0)
    assert step(pairs, 10.0 + FIRST_S - 0.1) is None
    assert step(pairs, 10.0 + FIRST_S) == PairNotes(OURS)
    assert step(pairs, 10.0 + FIRST_S + 1) is None


def test_one_that_is_refused_again_is_told_for_twice_as_long_within_a_bound(pairs: PairRecorder) -> None:
    now, told = 0.0, []
    for _ in range(7):
        pairs.refuse(P0, LIFE, "x", now)
        assert step(pairs, now) is not None
        until = now
        while pairs.due(until) is None:
            until += 10
        told.append(until - now)
        now = until
        step(pairs, now)
    assert told == [60, 120, 240, 480, 960, MOST_S, MOST_S]


def test_one_that_was_not_refused_for_as_long_again_is_forgotten(pairs: PairRecorder) -> None:
    pairs.refuse(P0, LIFE, "x", 0.0)
    step(pairs, 2 * FIRST_S)
    pairs.refuse(P0, LIFE, "x", 2 * FIRST_S)
    assert step(pairs, 3 * FIRST_S - 1) == PairNotes(OURS, (RefusedPeer(P0, LIFE, "x"),))
    assert step(pairs, 3 * FIRST_S) == PairNotes(OURS)


def test_another_start_of_a_peer_is_another_peer(pairs: PairRecorder) -> None:
    other = Incarnation("2" * 32)
    pairs.refuse(P0, LIFE, "x", 0.0)
    pairs.refuse(P0, other, "y", 30.0)
    assert step(pairs, 31.0) == PairNotes(OURS, (RefusedPeer(P0, LIFE, "x"), RefusedPeer(P0, other, "y")))
    assert step(pairs, 60.0) == PairNotes(OURS, (RefusedPeer(P0, other, "y"),))


def test_peers_and_words_are_bounded_and_every_bound_is_one_that_a_beat_takes(pairs: PairRecorder) -> None:
    names = [InstanceName(f"{number}".rjust(NAME_MAX, "p")) for number in range(MOST_REFUSED + 10)]
    for name in names:
        pairs.refuse(name, Incarnation("1" * INCARNATION_MAX), "x" * 1000, 0.0)
    pairs.links({rank: tuple(f"rank {rank} link {n}" + "y" * 1000 for n in range(MOST_LINKS)) for rank in range(4)})
    notes = step(pairs, 0.0)
    assert notes is not None
    assert [one.instance for one in notes.refused] == names[10:]
    assert {len(one.reason.encode()) for one in notes.refused} == {WORDS_MAX}
    assert {len(words.encode()) for words in notes.links} == {WORDS_MAX}
    assert len(notes.links) == MOST_LINKS
    assert len(msgspec.json.encode(notes)) < MAX_MESSAGE / 2
    assert msgspec.json.decode(msgspec.json.encode(notes), type=PairNotes) == notes


@pytest.mark.parametrize(("words", "left"), [
    ("", ""), ("x" * WORDS_MAX, "x" * WORDS_MAX), ("x" * 1000, "x" * (WORDS_MAX - 3) + "…"),
    ("ü" * 1000, "ü" * 98 + "…"), ("\ud800 is no character", "? is no character")])
def test_words_are_cut_between_characters(words: str, left: str) -> None:
    assert pair_notes.cut(words) == left
    assert len(left.encode()) <= WORDS_MAX


def test_words_of_ranks_are_said_once(pairs: PairRecorder) -> None:
    pairs.links({1: ("over tcp", "no NIXL"), 0: ("over tcp",)})
    assert step(pairs, 0.0) == PairNotes(OURS, (), ("over tcp", "no NIXL"))
    pairs.links({1: (), 0: ()})
    assert step(pairs, 0.0) == PairNotes(OURS)


@pytest.mark.parametrize(("name", "life"), [("", "1"), ("p" * 129, "1"), ("ü" * 65, "1"), ("p", "1" * 65)])
def test_a_peer_that_no_router_could_know_is_not_told(pairs: PairRecorder, name: str, life: str) -> None:
    pairs.refuse(InstanceName(name), Incarnation(life), "x", 0.0)
    assert pairs.due(0.0) is None


def test_without_an_agent_nothing_is_due() -> None:
    pairs = PairRecorder(None, 0, OURS)
    pairs.refuse(P0, LIFE, "x", 0.0)
    assert pairs.due(0.0) is None


def test_what_cannot_be_written_stays_due_and_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    folder = tmp_path / "gone"
    pairs = PairRecorder(folder, 0, OURS)
    notes = step(pairs, 0.0)
    assert step(pairs, 1.0) == notes == PairNotes(OURS)
    assert len(caplog.records) == 1
    folder.mkdir()
    assert step(pairs, 2.0) == notes
    assert step(pairs, 3.0) is None
    assert pair_notes.read(folder, 0) == notes


@pytest.mark.parametrize("raw", [b"{", b"[]", b'{"incarnation": 1}',
                                 b'{"incarnation": "a", "refused": [{"instance": ""}]}'])
def test_a_file_that_is_none_is_refused_by_its_name(tmp_path: Path, raw: bytes) -> None:
    pair_notes.path_of(tmp_path, 3).write_bytes(raw)
    with pytest.raises(ValueError, match=r"pairs-3\.json: "):
        pair_notes.read(tmp_path, 3)
    assert pair_notes.read(tmp_path, 4) is None
