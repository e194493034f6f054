"""Ranges that are handed out never overlap; with everything given back all is one range."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.kv.extents import Extents

STEP = st.tuples(st.sampled_from(["take", "give", "part"]), st.integers(1, 60), st.integers(0, 10**6))


@given(st.integers(0, 200), st.sampled_from([1, 3, 8]), st.lists(STEP, max_size=80))
def test_laws(size: int, unit: int, steps: list[tuple[str, int, int]]) -> None:
    space = Extents(size, unit)
    held: list[tuple[int, int]] = []
    for what, amount, pick in steps:
        if what == "take":
            taken = {at for start, length in held for at in range(start, start + length)}
            want = space.round_up(amount)
            fits = [at for at in range(0, space.size - want + 1, unit) if taken.isdisjoint(range(at, at + want))]
            offset = space.take(amount)
            assert offset == (fits[0] if fits else None), "the lowest that fits"
            if offset is not None:
                held.append((offset, want))
        elif held:
            start, length = held.pop(pick % len(held))
            part = length if what == "give" else unit * (1 + pick % (length // unit))
            space.give(start, part)
            if part < length:
                held.append((start + part, length - part))
        assert space.used == sum(length for _, length in held)
    for start, length in held:
        space.give(start, length)
    assert space.used == 0
    assert space.largest == space.size == size // unit * unit
    if space.size:
        assert space.take(space.size) == 0


def test_a_gap_that_is_too_small_is_passed_over_wherever_it_lies() -> None:
    space = Extents(64, 1)
    assert space.take(40) == 0
    space.give(10, 5)
    assert space.take(12) == 40, "[10, 15) ends behind byte 12 and has five bytes"
    assert space.take(5) == 10


@pytest.mark.parametrize(("offset", "size"), [(0, 16), (8, 8), (4, 4), (16, 8), (0, 0), (24, 8), (-8, 8)])
def test_what_is_not_handed_out_is_not_taken_back(offset: int, size: int) -> None:
    space = Extents(24, 8)
    assert space.take(3) == 0
    with pytest.raises(ValueError, match="not handed out"):
        space.give(offset, size)
    assert space.used == 8


@pytest.mark.parametrize(("size", "unit"), [(-1, 8), (8, 0)])
def test_impossible_spaces_are_refused(size: int, unit: int) -> None:
    with pytest.raises(ValueError, match="extents"):
        Extents(size, unit)
    with pytest.raises(ValueError, match="cannot hand out"):
        Extents(8, 1).take(0)
