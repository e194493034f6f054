"""Laws of ``kv.ring``: ranges that do not overlap, an eighth for each session, and what is stuck is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.kv.ring import SHARE, UNIT, Ring

SIZE = 64 * UNIT


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, SIZE // 4), st.booleans()), max_size=60))
def test_ranges_never_overlap_and_no_session_has_more_than_its_share(events: list[tuple[int, int, bool]]) -> None:
    ring = Ring(SIZE)
    held: list[tuple[int, int, int]] = []
    for session, size, back in events:
        if back and held:
            ring.give(*held.pop(size % len(held)))
            continue
        at = ring.take(session, size)
        if at is not None:
            assert all(at + size <= other or other + many <= at for _, other, many in held)
            held.append((session, at, size))
        mine = [-(-many // UNIT) * UNIT for one, _, many in held if one == session]
        assert sum(mine) <= max([ring.session_bytes_max, *mine])
        assert ring.used_bytes == sum(-(-many // UNIT) * UNIT for _, _, many in held)
    for one in held:
        ring.give(*one)
    assert (ring.used_bytes, ring.stuck_bytes) == (0, 0)


def test_one_range_is_a_sessions_however_large() -> None:
    ring = Ring(SIZE)
    assert ring.session_bytes_max == SIZE // SHARE
    assert ring.take(1, SIZE // 2) is not None
    assert ring.take(1, 1) is None, "a second one is beyond its share"
    assert ring.take(2, 1) is not None


@pytest.mark.parametrize("size", [0, SIZE + 1])
def test_what_never_will_be_there_is_no_wait(size: int) -> None:
    with pytest.raises(ValueError, match="ring"):
        Ring(SIZE).take(1, size)


def test_what_a_session_leaves_behind_is_stuck_until_it_is_given_back() -> None:
    ring = Ring(SIZE)
    at, other = ring.take(1, 100), ring.take(2, UNIT)
    assert at is not None
    assert other is not None
    ring.on_session_ended(1)
    ring.on_session_ended(3)
    assert ring.stuck_bytes == UNIT
    ring.give(2, other, UNIT)
    assert ring.stuck_bytes == UNIT
    ring.give(1, at, 100)
    assert ring.stuck_bytes == 0


def test_a_range_is_given_back_once() -> None:
    ring = Ring(SIZE)
    at = ring.take(1, 100)
    assert at is not None
    ring.give(1, at, 100)
    with pytest.raises(ValueError, match="not handed out"):
        ring.give(1, at, 100)
