"""Manifests: how many blocks one may have, so that its sums can be told."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.kv.array_layout import ArrayLayout
from xpyd_sidecar.kv.manifests import SUMS_MOST, Manifest, Sums, most_blocks
from xpyd_sidecar.kv.packing import WORD
from xpyd_sidecar.kv.selection import sums_in
from xpyd_sidecar.kv.wire import SUMS_MAX, FrameKind, Wire

ARRAYS = st.lists(st.builds(ArrayLayout, st.integers(1, 64), st.just(256), st.sampled_from([1, 2, 16])), min_size=1,
                  max_size=200)


@given(ARRAYS, st.integers(0, 40))
def test_sums_of_as_many_blocks_as_a_manifest_may_have_go_into_one_frame(arrays: list[ArrayLayout], first: int) -> None:
    count = most_blocks(arrays)
    assert sums_in(Manifest(0, 0, len(arrays), first, count, 0), arrays) <= SUMS_MOST
    with pytest.raises(ValueError, match="sums"):  # no fewer blocks than there may be; a peer that tells of more is refused
        sums_in(Manifest(0, 0, len(arrays), first, 2 * count + 100, 0), arrays)


def test_a_frame_has_room_for_the_most_sums() -> None:
    body = msgspec.msgpack.encode(Sums((1 << 32) - 1, bytes(WORD * SUMS_MOST)))
    assert SUMS_MAX - 64 <= len(body) <= SUMS_MAX
    assert Wire().frame(FrameKind.SUMS, body)
    with pytest.raises(ValueError, match="a body of"):
        Wire().frame(FrameKind.SUMS, bytes(SUMS_MAX + 1))
