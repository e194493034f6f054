"""Sizes of a rank's memory: what a step brings, within bounds, and in words."""

from __future__ import annotations

import pytest

from xpyd_sidecar.contract.launch import DEVICE_KEEP_BYTES, KEEP_BYTES
from xpyd_sidecar.engine.worker.memory_sizes import (
    KEEP_MOST,
    RING_LEAST,
    RING_MOST,
    ROUNDS,
    SLAB_LEAST,
    SLAB_MOST,
    StepLoad,
    describe,
    memory_sizes,
    ring_bytes,
    slab_bytes,
)
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.memory.chunk import Chunk
from xpyd_sidecar.memory.store import CopyStore

EIGHT_B = 36 * 4096
"""Bytes of a token of a model with 8 billion parameters: keys and values of 8 heads of 128 in 16 bits, 36 layers."""
GIB = 1 << 30
ROOM = SLAB_MOST + RING_MOST


@pytest.mark.parametrize(("tokens", "keep", "ring", "slab"), [
    (0, DEVICE_KEEP_BYTES, RING_LEAST, SLAB_LEAST),
    (512, DEVICE_KEEP_BYTES, RING_LEAST, SLAB_LEAST),
    (8192, 5 * 8192 * EIGHT_B // 2, RING_MOST, 8192 * EIGHT_B // ROUNDS),
    (16384, 5 * 16384 * EIGHT_B // 2, RING_MOST, SLAB_MOST),
    (1 << 20, KEEP_MOST, RING_MOST, SLAB_MOST),
])
def test_sizes_follow_what_a_step_brings(tokens: int, keep: int, ring: int, slab: int) -> None:
    found = memory_sizes(None, EIGHT_B, StepLoad(tokens, device_room=ROOM), device=True)
    assert found[:3] == (keep, ring, slab)


@pytest.mark.parametrize(("tokens", "block"), [(2048, 16), (8192, 16), (8192, 128), (16384, 32)])
def test_a_single_decode_may_have_the_copies_of_two_steps(tokens: int, block: int) -> None:
    size = EIGHT_B * block
    keep = memory_sizes(None, EIGHT_B, StepLoad(tokens, device_room=ROOM), device=True).keep
    store = CopyStore(lambda _: Chunk(None, memoryview(b"")), keep)
    for _ in range(2):
        assert store.most_units(size, "d") >= tokens // block
        assert store.lease(size * (tokens // block), "d") is not None
    assert store.most_units(size, "d") < tokens // block


def test_a_host_has_constants_and_what_was_stated() -> None:
    load = StepLoad(16384, device_room=ROOM)
    assert memory_sizes(None, EIGHT_B, load, device=False)[:3] == (KEEP_BYTES, 0, 0)
    assert memory_sizes(7, EIGHT_B, load, device=False).keep == 7


def test_all_ranks_choose_no_more_than_a_quarter_of_their_memory_together() -> None:
    for ranks in (1, 2, 4, 8):
        for memory in (16 * GIB, 48 * GIB, 200 * GIB):
            found = memory_sizes(None, EIGHT_B, StepLoad(16384, ranks, memory), device=True)
            least = DEVICE_KEEP_BYTES + RING_LEAST
            assert found.keep + found.ring <= max(least, memory // 4 // ranks)


def test_what_was_stated_holds_but_for_the_least_of_a_device_and_is_told_with_what_it_costs() -> None:
    load = StepLoad(16384, 1, 64 * GIB, ROOM)
    assert memory_sizes(3 * GIB, EIGHT_B, load, device=True).keep == 3 * GIB
    small = memory_sizes(1, EIGHT_B, load, device=True)
    assert small.keep == DEVICE_KEEP_BYTES
    assert describe(small, 3) == (
        "xpyd: rank 3 keeps 512 MiB of KV to send in pinned memory; copies pass through 1024 MiB of the device on their "
        "way out and 1024 MiB on their way in: a step of 16384 tokens brings 2304 MiB of KV, more than there is room for: "
        "some of it waits in prefill's cache")
    assert "waits" not in memory_sizes(None, EIGHT_B, load, device=True).why
    assert memory_sizes(None, 0, load, device=True).why == "what a step brings is not known"


def test_more_than_the_machine_has_is_refused_with_the_field() -> None:
    with pytest.raises(ConfigError, match=r"host_pool_bytes: 9216 MiB and 0 MiB for each of 2 ranks are more than the 163"):
        memory_sizes(9 * GIB, EIGHT_B, StepLoad(16384, 2, 16 * GIB), device=True)
    with pytest.raises(ConfigError, match=r"1024 MiB and 7680 MiB for each of 2 ranks"):
        memory_sizes(GIB, EIGHT_B, StepLoad(16384, 2, 16 * GIB), device=False, pool=15 * GIB // 2)
    with pytest.raises(ConfigError, match=r"0 MiB and 9216 MiB for each of 2 ranks"):
        memory_sizes(None, EIGHT_B, StepLoad(16384, 2, 16 * GIB), device=True, pool=9 * GIB)
    assert memory_sizes(8 * GIB, EIGHT_B, StepLoad(16384, 2, 16 * GIB), device=True).keep == 8 * GIB


@pytest.mark.parametrize(("room", "slab"), [(0, SLAB_LEAST), (SLAB_LEAST, SLAB_LEAST), (600 << 20, 600 << 20),
                                            (4 * GIB, SLAB_MOST)])
def test_no_more_of_the_device_is_taken_than_is_left(room: int, slab: int) -> None:
    assert slab_bytes(1 << 34, room) == slab


@pytest.mark.parametrize(("room", "ring"), [(0, RING_LEAST), (600 << 20, 600 << 20), (4 * GIB, RING_MOST)])
def test_the_ring_is_within_what_is_left(room: int, ring: int) -> None:
    assert ring_bytes(1 << 34, room) == ring


def test_slab_and_ring_share_what_is_left_where_it_is_not_enough_for_both() -> None:
    found = memory_sizes(None, EIGHT_B, StepLoad(16384, device_room=1200 << 20), device=True)
    assert (found.ring, found.slab) == (600 << 20, 600 << 20)
