"""How messages lie in chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.broadcast import message
from xpyd_sidecar.broadcast.layout import LINE

lengths_of_parts = st.lists(st.integers(0, 5000), min_size=1, max_size=20).map(tuple)


@given(lengths_of_parts, st.integers(0, 3).map(lambda lines: lines * LINE))
def test_parts_lie_one_after_the_other_aligned_and_after_the_head(lengths: tuple[int, ...], start: int) -> None:
    place = message.places(lengths, start)
    before = start
    for offset, length in zip(place.offsets, lengths, strict=True):
        assert offset % LINE == 0
        assert offset >= before
        before = offset + length
    assert place.end == before
    assert message.head_bytes(len(lengths)) % LINE == 0


@given(lengths_of_parts, st.integers(0, 2**32 - 1), st.sampled_from([0, 64, 128]))
def test_a_head_is_read_as_it_was_written(lengths: tuple[int, ...], side: int, at: int) -> None:
    chunk = memoryview(bytearray(2048))
    message.write_head(chunk, at, side, lengths)
    assert message.read_head(chunk, at) == message.Head(side, lengths)
    assert message.head_bytes(len(lengths)) >= 8 + 8 * len(lengths)


def test_a_head_of_too_many_parts_is_refused() -> None:
    chunk = memoryview(bytearray(64))
    chunk[:4] = (message.PARTS_MAX + 1).to_bytes(4, "little")
    with pytest.raises(ValueError, match="1025 parts"):
        message.read_head(chunk, 0)
