"""Sizes of a rank's memory: what a step brings, within bounds, and in words."""

from __future__ import annotations

import pytest

from xpyd_sidecar.contract.launch import DEVICE_KEEP_BYTES, DEVICE_STAGING_BYTES, KEEP_BYTES, STAGING_BYTES, pinned_bytes
from xpyd_sidecar.engine.memory_sizes import (
    KEEP_MOST,
    ROUNDS,
    SLAB_LEAST,
    SLAB_MOST,
    STAGING_MOST,
    StepLoad,
    memory_sizes,
    slab_bytes,
    told,
)
from xpyd_sidecar.errors import ConfigError

EIGHT_B = 36 * 4096
"""Bytes of a token of a model with 8 billion parameters: keys and values of 8 heads of 128 in 16 bits, 36 layers."""
GIB = 1 << 30
ROOM = SLAB_MOST


@pytest.mark.parametrize(("tokens", "keep", "staging", "slab"), [
    (0, DEVICE_KEEP_BYTES, DEVICE_STAGING_BYTES, SLAB_LEAST),
    (512, DEVICE_KEEP_BYTES, DEVICE_STAGING_BYTES, SLAB_LEAST),
    (8192, 2 * GIB, GIB, 8192 * EIGHT_B // ROUNDS),
    (16384, 4 * GIB, STAGING_MOST, SLAB_MOST),
    (1 << 20, KEEP_MOST, STAGING_MOST, SLAB_MOST),
])
def test_sizes_follow_what_a_step_brings(tokens: int, keep: int, staging: int, slab: int) -> None:
    found = memory_sizes(None, EIGHT_B, StepLoad(tokens, device_room=ROOM), device=True)
    assert found[:3] == (keep, staging, slab)


def test_a_host_has_constants_and_what_was_stated() -> None:
    load = StepLoad(16384, device_room=ROOM)
    assert memory_sizes(None, EIGHT_B, load, device=False)[:3] == (KEEP_BYTES, STAGING_BYTES, 0)
    assert memory_sizes(7, EIGHT_B, load, device=False).keep == 7


def test_all_ranks_choose_no_more_than_a_quarter_of_their_memory_together() -> None:
    for ranks in (1, 2, 4, 8):
        for memory in (16 * GIB, 48 * GIB, 200 * GIB):
            found = memory_sizes(None, EIGHT_B, StepLoad(16384, ranks, memory), device=True)
            least = DEVICE_KEEP_BYTES + DEVICE_STAGING_BYTES
            assert found.keep + found.staging <= max(least, memory // 4 // ranks)
            assert found.keep.bit_count() == found.staging.bit_count() == 1, "torch pins no more than that"


def test_what_was_stated_holds_but_for_the_least_of_a_device_and_is_told_with_what_it_costs() -> None:
    load = StepLoad(16384, 1, 64 * GIB, ROOM)
    assert memory_sizes(3 * GIB, EIGHT_B, load, device=True).keep == 3 * GIB
    small = memory_sizes(1, EIGHT_B, load, device=True)
    assert small.keep == DEVICE_KEEP_BYTES
    assert told(small, 3) == ("xpyd: rank 3 keeps 512 MiB of KV to send and 2048 MiB of what arrives in pinned memory, and "
                              "copies pass through 1024 MiB of the device: a step of 16384 tokens brings 2304 MiB of KV, "
                              "more than there is room for: some of it waits in prefill's cache")
    assert "waits" not in memory_sizes(None, EIGHT_B, load, device=True).why
    assert memory_sizes(None, 0, load, device=True).why == "what a step brings is not known"


def test_pinned_memory_takes_a_power_of_two() -> None:
    assert [pinned_bytes(size) for size in (0, 1, 2, 3, 1 << 30, (1 << 30) + 1)] == [0, 1, 2, 4, 1 << 30, 1 << 31]


def test_more_than_the_machine_has_is_refused_with_the_field() -> None:
    with pytest.raises(ConfigError, match=r"keep_bytes \(kv\.keep\): 9216 MiB for each of 2 ranks is more than the 163"):
        memory_sizes(9 * GIB, EIGHT_B, StepLoad(16384, 2, 16 * GIB), device=True)
    assert memory_sizes(8 * GIB, EIGHT_B, StepLoad(16384, 2, 16 * GIB), device=True).keep == 8 * GIB


@pytest.mark.parametrize(("room", "slab"), [(0, SLAB_LEAST), (SLAB_LEAST, SLAB_LEAST), (600 << 20, 600 << 20),
                                            (4 * GIB, SLAB_MOST)])
def test_no_more_of_the_device_is_taken_than_is_left(room: int, slab: int) -> None:
    assert slab_bytes(1 << 34, room) == slab
