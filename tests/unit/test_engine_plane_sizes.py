"""What one rank takes for its data plane: what was stated, and no more than its model asks for beside that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from render_service import service

from xpyd_operator.render.engine import kv_options
from xpyd_operator.render.unsupported import kube_refusals
from xpyd_sidecar.contract.launch import DEVICE_KEEP_BYTES, DEVICE_RING_BYTES, KEEP_BYTES, NIXL_SLOT_BYTES, KvOptions
from xpyd_sidecar.engine.worker.data_plane import BUFFER_MOST, PlaneSizes, plane_sizes
from xpyd_sidecar.engine.worker.memory_sizes import StepLoad

GIB = 1 << 30
BLOCK = 36 * 2 * 32 << 10
"""Bytes of 16 tokens of a model with 8 billion parameters, of all its arrays."""
STEP = 8192 // 16 * BLOCK


def sizes(options: KvOptions, *, device: bool = True, blocks: int = 4096, load: StepLoad = StepLoad()) -> PlaneSizes:  # noqa: B008
    cache: Any = SimpleNamespace(
        device=SimpleNamespace(type="cuda" if device else "cpu"), at_once=not device, block_bytes=(BLOCK // 72,) * 72,
        cache_block_bytes=BLOCK, total_block_bytes=BLOCK, token_bytes=BLOCK // 16)
    return plane_sizes(options, cache, blocks, load, 0)


def test_a_host_pool_of_64_gib_takes_so_much_on_either_side_and_nothing_is_rounded() -> None:
    load = StepLoad(8192, 4, 512 * GIB, 2 * GIB)
    without = sizes(KvOptions(), load=load)
    assert without.store == 5 * STEP // 2
    found = sizes(KvOptions(host_pool_bytes=64 * GIB), load=load)
    assert (found.store, found.pool) == (64 * GIB + 5 * STEP // 2, 64 * GIB)
    assert found._replace(store=without.store, pool=0) == without
    stated = sizes(KvOptions(host_pool_bytes=64 * GIB, keep_bytes=3 * GIB), load=load)
    assert stated.store == 67 * GIB


def test_prefill_may_keep_a_buffer_more_where_decode_pulls() -> None:
    for mode, more in (("put", 0), ("put_async", 0), ("get", 2 * GIB)):
        assert sizes(KvOptions(mode=mode, buffer_bytes=2 * GIB)).store == DEVICE_KEEP_BYTES + more  # type: ignore[arg-type]


def test_a_buffer_that_nobody_has_stated_is_a_tenth_of_the_cache_and_a_gibibyte_at_most() -> None:
    assert sizes(KvOptions(), blocks=1000).buffer == 1000 * BLOCK // 10
    assert sizes(KvOptions(), blocks=1 << 20).buffer == BUFFER_MOST
    assert sizes(KvOptions(buffer_share=0.5), blocks=1000).buffer == 500 * BLOCK
    assert sizes(KvOptions(), device=False)._replace(buffer=0)[:5] == (KEEP_BYTES, 0, 0, 0, 0)


@pytest.mark.parametrize("device", [True, False])
@pytest.mark.parametrize("kv", [
    {}, {"transport": "shm"}, {"transport": "rdma"}, {"memory": "4Gi"}, {"memory": "512Mi"},
    {"memory": "6Gi", "transport": "rdma"}], ids=str)
def test_the_operator_counts_what_an_engine_takes_at_least(kv: dict[str, Any], device: bool) -> None:
    def refused(most: int) -> bool:
        role = {"parallelism": {} if device else {"device": "none"}, "resources": {"limits": {"memory": most}}}
        return bool(list(kube_refusals(service(None, kv=kv, decode=role))))

    options = kv_options(service(None, kv=kv))
    found = sizes(options, device=device, blocks=0)
    taken = found.store + found.buffer + found.pool + (NIXL_SLOT_BYTES if options.transport == "rdma" else 0)
    taken += DEVICE_RING_BYTES if device and options.transport != "shm" else 0
    assert found.ring == (DEVICE_RING_BYTES if device else 0)
    assert not refused(taken)
    assert refused(taken - 1)
