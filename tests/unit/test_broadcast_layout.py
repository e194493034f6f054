"""Offsets of a ring: every word and chunk has a place of its own."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.broadcast.layout import LINE, PAGE, WORD, Layout

layouts = st.builds(Layout, readers=st.integers(1, 40), chunks=st.integers(2, 60),
                    chunk_bytes=st.integers(4, 400).map(lambda lines: lines * LINE))


@given(layouts)
def test_no_two_words_share_a_cache_line_and_none_lies_among_the_chunks(layout: Layout) -> None:
    words = [layout.state_word, layout.awaiting_word,
             *(layout.dropped_word(reader) for reader in range(layout.readers)),
             *(layout.parked_word(reader) for reader in range(layout.readers)),
             *(layout.written_word(chunk) for chunk in range(layout.chunks)),
             *(layout.read_word(chunk, reader) for chunk in range(layout.chunks) for reader in range(layout.readers))]
    lines = [word * WORD // LINE for word in words]
    assert len(set(lines)) == len(words)
    assert max(words) < layout.words
    assert layout.words * WORD <= layout.data_offset


@given(layouts)
def test_chunks_follow_each_other_on_pages_of_their_own_and_end_with_the_segment(layout: Layout) -> None:
    assert layout.data_offset % PAGE == 0
    ends = [layout.chunk_offset(chunk) + layout.chunk_bytes for chunk in range(layout.chunks)]
    assert [layout.chunk_offset(chunk) for chunk in range(layout.chunks)] == [layout.data_offset, *ends[:-1]]
    assert ends[-1] == layout.size


@given(layouts, st.integers(1, 1000))
def test_a_message_uses_the_chunk_of_the_one_that_is_a_lap_older(layout: Layout, number: int) -> None:
    assert layout.chunk(number) == layout.chunk(number + layout.chunks)
    assert len({layout.chunk(number + ahead) for ahead in range(layout.chunks)}) == layout.chunks


def test_the_default_is_ten_chunks_of_ten_mebibytes() -> None:
    layout = Layout(readers=4)
    assert (layout.chunks, layout.chunk_bytes) == (10, 10 << 20)
    assert layout.size - layout.data_offset == 100 << 20


@pytest.mark.parametrize(("field", "value"), [("readers", 0), ("readers", 1025), ("chunks", 1), ("chunks", 5000),
                                              ("chunk_bytes", 0), ("chunk_bytes", 1000), ("chunk_bytes", 1 << 40)])
def test_a_size_out_of_bounds_is_refused_by_name_also_where_it_comes_in_a_handle(field: str, value: int) -> None:
    sizes = {"readers": 2, "chunks": 4, "chunk_bytes": 4096} | {field: value}
    with pytest.raises(ValueError, match=field):
        Layout(**sizes)
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(sizes, Layout)
