"""A copy in prefill's store: what is told of it, its sums, and that its memory goes back once and not before."""

from __future__ import annotations

import numpy as np
import pytest
from manifest_sizes import size_of

from xpyd_sidecar.kv.array_layout import ArrayLayout
from xpyd_sidecar.kv.manifests import Manifest, layout
from xpyd_sidecar.kv.packing import sums_of
from xpyd_sidecar.memory.chunk import Chunk
from xpyd_sidecar.memory.store import CopyStore
from xpyd_sidecar.session.stored_copy import StoredCopy

ARRAYS = [ArrayLayout(2, 100, 1), ArrayLayout(4, 256, 1), ArrayLayout(2, 100, 4), ArrayLayout(1, 8, 16)]
"""On a host a run is one block; on a device there are several."""


def store_of(size: int = 1 << 16) -> CopyStore:
    memory = np.random.default_rng(2).integers(0, 256, size, np.uint8)
    return CopyStore(lambda size: Chunk(None, memory.data[:size]), size)


def copy_in(store: CopyStore, regions: range, first: int, count: int, gone: list[str] | None = None) -> StoredCopy:
    size = size_of(Manifest(0, regions.start, len(regions), first, count, 0), ARRAYS)
    lease = store.lease(size)
    assert lease is not None
    return StoredCopy(lease, ARRAYS, regions, (first, count), gone=None if gone is None else lambda: gone.append("gone"))


@pytest.mark.parametrize("regions", [range(4), range(1, 3), range(3, 4)])
def test_it_is_told_with_where_it_lies_and_summed_up_array_by_array(regions: range) -> None:
    store = store_of()
    copy_in(store, range(1), 0, 1)
    copy = copy_in(store, regions, 3, 7)
    manifest = copy.manifest(5)
    assert manifest == Manifest(5, regions.start, len(regions), 3, 7, 256)
    assert (copy.offset, copy.size) == (256, size_of(manifest, ARRAYS))
    copy.sum_up()
    wanted = [sums_of(copy.view[offset - 256:][:packed.size], packed).tolist() for _, packed, offset in
              layout(manifest, ARRAYS)]
    assert np.frombuffer(copy.sums, "<u8").tolist() == [one for array in wanted for one in array]


def test_its_memory_goes_back_when_it_is_freed() -> None:
    store, gone = store_of(), list[str]()
    copy = copy_in(store, range(2), 0, 3, gone)
    copy.free(store)
    assert (copy.freed, store.used_bytes, gone) == (True, 0, ["gone"])


def test_while_it_is_sent_its_memory_is_nobody_elses_and_then_it_goes_back_once() -> None:
    store, gone = store_of(), list[str]()
    copy = copy_in(store, range(2), 0, 3, gone)
    copy.hold()
    copy.hold()
    copy.free(store)
    assert copy.freed
    assert store.used_bytes
    copy.let_go()
    assert (bool(store.used_bytes), gone) == (True, [])
    copy.let_go()
    assert (store.used_bytes, gone) == (0, ["gone"])


def test_what_was_sent_before_it_is_freed_holds_nothing() -> None:
    store, gone = store_of(), list[str]()
    copy = copy_in(store, range(2), 0, 3, gone)
    copy.hold()
    copy.let_go()
    assert (bool(store.used_bytes), gone) == (True, [])
    copy.free(store)
    assert (store.used_bytes, gone) == (0, ["gone"])
