from __future__ import annotations

from itertools import pairwise

import pytest
from buddy_judge import run
from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_sidecar.kv.buddy import Buddy


def test_blocks_are_split_from_the_lowest_and_merge_back() -> None:
    buddy = Buddy(13 * 4, unit=4)
    assert buddy.usage == (52, 0, 32)
    assert [buddy.allocate(n) for n in (4, 4, 5, 16, 8)] == [48, 32, 40, 0, 16]
    assert buddy.usage.used == 4 + 4 + 8 + 16 + 8
    for offset in (32, 48, 0, 40, 16):
        buddy.free(offset)
    assert buddy.usage == (52, 0, 32)
    assert buddy.allocate(32) == 0


def test_what_does_not_fit_is_none_even_if_the_free_bytes_would_do() -> None:
    buddy = Buddy(4096 * 4)
    held = [buddy.allocate(4096) for _ in range(4)]
    assert buddy.allocate(1) is None
    buddy.free(0)
    buddy.free(2 * 4096)
    assert held == [0, 4096, 8192, 12288]
    assert buddy.allocate(8192) is None
    assert Buddy(4095).allocate(1) is None
    assert Buddy(0).allocate(1) is None


@pytest.mark.parametrize(("size", "unit"), [(-1, 4096), (100, 0), (100, 48)])
def test_sizes_that_make_no_sense_are_refused(size: int, unit: int) -> None:
    with pytest.raises(ValueError, match=f"size {size} .* unit {unit}"):
        Buddy(size, unit)


def test_what_was_not_handed_out_cannot_be_given_back() -> None:
    buddy = Buddy(1 << 20)
    offset = buddy.allocate(4096)
    assert offset == 0
    buddy.free(offset)
    for wrong in (0, 4096, -4096):
        with pytest.raises(ValueError, match=f"at {wrong}"):
            buddy.free(wrong)
    with pytest.raises(ValueError, match="0 bytes"):
        buddy.allocate(0)


@given(st.integers(0, 300), st.lists(st.tuples(st.booleans(), st.integers(1, 90)), max_size=120))
@settings(max_examples=150)
def test_blocks_never_overlap_and_always_merge_back(units: int, steps: list[tuple[bool, int]]) -> None:
    held: dict[int, int] = {}
    buddy = Buddy(units * 2, unit=2)
    start = buddy.usage
    for free, number in steps:
        if free and held:
            offset = sorted(held)[number % len(held)]
            del held[offset]
            buddy.free(offset)
        elif (offset_or_none := buddy.allocate(number)) is not None:
            held[offset_or_none] = number
        spans = sorted((offset, offset + size) for offset, size in held.items())
        assert all(end <= other for (_, end), (other, _) in pairwise(spans))
        assert all(offset >= 0 and end <= buddy.size for offset, end in spans)
        assert sum(held.values()) <= buddy.usage.used
    for offset in held:
        buddy.free(offset)
    assert buddy.usage == start


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 3 * 4096 + 17])
def test_thousands_of_random_operations(size: int) -> None:
    seen = run(7, 4000, size, 4096, 300_000)
    assert (seen.overlaps, seen.unmerged) == (0, 0)
    assert seen.refused > 0
