"""Laws of ``kv.packing``: stretches have what was asked for, neighbours are one, and sums see every change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.kv.packing import RUN_BYTES, RUN_MOST, PackedArray, run_blocks, sum_of, sums_of


@st.composite
def arrays(draw: st.DrawFn) -> PackedArray:
    return PackedArray(draw(st.integers(0, 40)), draw(st.integers(1, 40)), draw(st.integers(1, 5)),
                       draw(st.integers(1, 4)) * 8, draw(st.integers(1, RUN_MOST)))


def packed(array: PackedArray) -> list[tuple[int, int]]:
    """(block, head) by the place of each, in heads."""
    out: list[tuple[int, int]] = [(-1, -1)] * (array.blocks * array.heads)
    for block in range(array.first, array.first + array.blocks):
        for head in range(array.heads):
            at, rest = divmod(array.place(block, head), array.head_bytes)
            assert not rest
            assert out[at] == (-1, -1), "two of them lie in one place"
            out[at] = block, head
    return out


@given(arrays())
def test_every_head_of_every_block_has_a_place_of_its_own(array: PackedArray) -> None:
    assert (-1, -1) not in packed(array)
    assert array.size == len(packed(array)) * array.head_bytes


@given(arrays(), st.data())
def test_stretches_hold_what_is_wanted_of_whole_runs_and_no_more(array: PackedArray, data: st.DataObject) -> None:
    first = data.draw(st.integers(array.first, array.first + array.blocks - 1))
    count = data.draw(st.integers(1, array.first + array.blocks - first))
    head = data.draw(st.integers(0, array.heads - 1))
    heads = data.draw(st.integers(1, array.heads - head))
    lies, found = packed(array), []
    before = -1
    for one in array.stretches(first, count, head, heads):
        assert one.offset > before, "neighbours are one stretch"
        before = one.offset + one.size
        found += lies[one.offset // array.head_bytes:before // array.head_bytes]
    low, high = first // array.run * array.run, -(-(first + count) // array.run) * array.run
    assert sorted(found) == [(block, at) for block in range(max(low, array.first), min(high, array.first + array.blocks))
                             for at in range(head, head + heads)]


@given(arrays())
def test_a_whole_array_is_one_stretch(array: PackedArray) -> None:
    assert [*array.stretches(array.first, array.blocks, 0, array.heads)] == [(0, array.size)]


@given(arrays(), st.integers(0, 2**32 - 1))
def test_each_head_of_a_run_has_the_sum_of_its_bytes_alone(array: PackedArray, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, array.size, np.uint8)
    sums = sums_of(data, array)
    assert len(sums) == array.sums
    at = int(np.random.default_rng(seed + 1).integers(array.size))
    block, head = packed(array)[at // array.head_bytes]
    data[at] ^= 1
    assert [n for n, (one, other) in enumerate(zip(sums, sums_of(data, array), strict=True)) if one != other] == [
        array.sum_at(block, head)]


@given(st.binary(min_size=1, max_size=200), st.data())
def test_sums_of_parts_add_up(data: bytes, draw: st.DataObject) -> None:
    cut = draw.draw(st.integers(0, len(data) // 8)) * 8
    assert (sum_of(data[:cut]) + sum_of(data[cut:], cut)) % 2**64 == sum_of(data)


@given(st.lists(st.integers(0, 2**40 - 1), min_size=2, max_size=20), st.data())
def test_words_that_change_places_change_the_sum(words: list[int], draw: st.DataObject) -> None:
    one, other = draw.draw(st.tuples(*[st.integers(0, len(words) - 1)] * 2))
    swapped = list(words)
    swapped[one], swapped[other] = swapped[other], swapped[one]
    same = sum_of(np.array(swapped, np.uint64).tobytes()) == sum_of(np.array(words, np.uint64).tobytes())
    assert same == (swapped == words)


def test_the_highest_bits_of_two_words_do_not_cancel_out() -> None:
    assert sum_of(bytes(7) + b"\x80" + bytes(8)) != sum_of(bytes(15) + b"\x80")


@given(st.binary(min_size=8, max_size=200), st.integers(0, 24), st.integers(1, 2**64 - 1))
def test_whatever_changes_in_one_word_changes_the_sum(data: bytes, at: int, change: int) -> None:
    words = np.frombuffer(data[:len(data) // 8 * 8], np.uint64).copy()
    before = sum_of(words)
    words[at % len(words)] ^= np.uint64(change)
    assert sum_of(words) != before


@pytest.mark.parametrize(("head_bytes", "opaque", "blocks"), [(4096, False, 16), (RUN_BYTES, False, 1), (65536, False, 4),
                                                              (RUN_BYTES * 9, False, 1), (1, False, 16), (4096, True, 1)])
def test_a_run_has_some_bytes_of_a_head(head_bytes: int, *, opaque: bool, blocks: int) -> None:
    assert run_blocks(head_bytes, opaque=opaque) == blocks


@pytest.mark.parametrize("wrong", [lambda: run_blocks(0, opaque=False),
                                   lambda: [*PackedArray(2, 3, 2, 8, 4).runs(1, 1)],
                                   lambda: [*PackedArray(2, 3, 2, 8, 4).runs(4, 2)],
                                   lambda: [*PackedArray(2, 3, 2, 8, 4).stretches(2, 1, 1, 2)],
                                   lambda: sum_of(b"12345678", 4)])
def test_what_is_not_there_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"blocks|heads|head of|within a word"):
        wrong()  # type: ignore[operator]
