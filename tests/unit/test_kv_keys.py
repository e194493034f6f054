"""Keys order by attempt, then generation; what has ended is remembered up to a bound."""

from __future__ import annotations

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.kv.keys import Key, Recent

T = TransferId("a" * 32)


def test_the_greater_attempt_wins_and_then_the_greater_generation() -> None:
    tries = [Key(T, Attempt(2), 1), Key(T, Attempt(1), 9), Key(T, Attempt(2), 3)]
    assert [key.order for key in sorted(tries, key=lambda key: key.order)] == [(1, 9), (2, 1), (2, 3)]


def test_a_key_reads_well_in_a_log() -> None:
    assert str(Key(T, Attempt(2), 1)) == f"{T}/2.1"


def test_recent_forgets_the_oldest_beyond_its_bound() -> None:
    recent: Recent[int, str] = Recent(2)
    recent.put(1, "a")
    recent.put(2, "b")
    recent.put(1, "c")  # again: now the newest
    recent.put(3, "d")
    assert (recent.get(1), recent.get(2), recent.get(3), len(recent)) == ("c", None, "d", 2)
    assert 2 not in recent


def test_recent_makes_what_is_not_there_once_and_forgets_what_is_taken_out() -> None:
    recent: Recent[int, list[int]] = Recent(2)
    recent.get_or_make(1, list).append(7)
    assert recent.get_or_make(1, list) == [7]
    recent.get_or_make(2, list)
    recent.get_or_make(3, list)
    assert 1 not in recent, "the oldest, since looking makes nothing newer"
    assert (recent.pop(2), recent.pop(2), len(recent)) == ([], None, 1)


def test_what_is_used_is_not_forgotten_for_what_is_not() -> None:
    recent: Recent[int, str] = Recent(2)
    recent.put(1, "a")
    recent.put(2, "b")
    assert (recent.touch(1), recent.touch(3)) == ("a", None)
    recent.put(4, "d")
    assert (recent.get(1), recent.get(2)) == ("a", None)
