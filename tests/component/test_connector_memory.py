"""The KV cache as arrays of blocks: how a core and how a kernel sees them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from copies import moved
from numpy.typing import NDArray
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheTensor,
    create_kv_cache_views,
    group_kernel_blocks,
)

from xpyd_sidecar.engine.worker import kv_cache
from xpyd_sidecar.engine.worker.kv_cache import CacheRows, KvCache
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv.mapping import UNKNOWN, ArrayKind
from xpyd_sidecar.kv.packing import PackedArray
from xpyd_sidecar.memory.device_rows import BlockRows
from xpyd_sidecar.transport.moves import Scatter
from xpyd_sidecar.transport.moves_plain import address_of

BLOCKS = 16
WAYS = pytest.mark.parametrize("way", ["host", "kernel"])
"""A core copies whole blocks as they lie; a kernel moves values in logical order, by the tables that it is given."""


@pytest.fixture(autouse=True)
def logical(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel moves is a device's, where bytes are values in the order of the dimensions."""
    if "kernel" in request.node.name.split("[")[-1]:
        monkeypatch.setattr(kv_cache, "logical", lambda _: True)


def cache(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def numbers(ids: Sequence[int]) -> NDArray[np.int64]:
    return np.array(ids, np.int64)


def rows_of(memory: KvCache, region: int, ids: Sequence[int], size: int, *, head: int = 0,
            heads: int = 1) -> list[BlockRows]:
    """Blocks of one region with so many heads, packed one behind the other."""
    packed = PackedArray(0, len(ids), heads, size // len(ids) // heads, 1)
    return memory.rows([CacheRows([region], [(packed, 0)], numbers(ids), head)])


def copied_out(way: str, source: KvCache, region: int, ids: Sequence[int]) -> memoryview:
    """Blocks of one region, packed."""
    out = torch.zeros(len(ids) * source.block_bytes[region], dtype=torch.uint8)
    view = memoryview(out.numpy())
    if way == "kernel":
        moved(rows_of(source, region, ids, len(view)), address_of(view), out=True)
    else:
        source.copy_out([region], numbers(ids), out, [0])
    return view


def place(way: str, target: KvCache, region: int, ids: Sequence[int], data: memoryview, *, head: int = 0, heads: int = 1,
          ) -> None:
    """Packed blocks into one region."""
    if way == "kernel":
        moved(rows_of(target, region, ids, len(data), head=head, heads=heads), address_of(data), out=False)
        return
    into = target.caches({})[region]
    each = len(data) // len(ids)
    Scatter(into.view, each, len(ids), memoryview(numbers(ids)), into.block_bytes, head * each // heads, 0).copy(
        address_of(data))


@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("ids", [(3,), (2, 3, 4), (9, 0, 5)], ids=str)
def test_blocks_come_out_packed_and_go_in_where_they_belong(way: str, dtype: torch.dtype, ids: tuple[int, ...]) -> None:
    source = KvCache({"l0": cache(BLOCKS, 2, 8, 4, dtype=dtype)}, BLOCKS)
    target = KvCache({"l0": torch.zeros(BLOCKS, 2, 8, 4, dtype=dtype)}, BLOCKS)
    into = tuple(BLOCKS - 1 - block for block in ids)
    place(way, target, 0, into, copied_out(way, source, 0, ids))
    for block in range(BLOCKS):
        expected = source.regions[0][BLOCKS - 1 - block] if block in into else torch.zeros_like(source.regions[0][0])
        assert torch.equal(target.regions[0][block], expected)


def test_what_was_copied_out_on_a_host_is_not_changed_by_later_writes() -> None:
    source = KvCache({"l0": cache(BLOCKS, 64, 1024)}, BLOCKS)
    expected = bytes(kv_cache._bytes(source.regions[0][4:8].clone()))
    out = copied_out("host", source, 0, (4, 5, 6, 7))
    source.regions[0].fill_(-1)
    assert bytes(out) == expected


def test_caches_of_keys_and_values_apart_are_two_regions_and_shared_caches_one() -> None:
    split = cache(2, BLOCKS, 8, 4)
    found = KvCache({"l0": split, "l1": cache(BLOCKS, 8), "l2": split}, BLOCKS)
    assert found.of_layer == {"l0": (0, 1), "l1": (2,), "l2": (0, 1)}
    assert found.block_bytes == (128, 128, 32)
    assert found.total_block_bytes == 288
    assert [one.name for one in found.arrays({})] == ["l0#0", "l0#1", "l1"]


def test_arrays_are_told_with_what_they_may_be_cut_by() -> None:
    found = KvCache({"l0": cache(BLOCKS, 2, 8, 4), "l1": cache(BLOCKS, 8, 4, dtype=torch.uint8),
                     "l2": cache(BLOCKS, 8)}, BLOCKS)
    assert [one.kind for one in found.arrays({"l0": 4, "l1": 0})] == [
        ArrayKind("float32", 2, (8, 4), 128, 4), ArrayKind("uint8", 1, (8, 4), 32, 0),
        ArrayKind("float32", 1, (8,), 32, UNKNOWN)]
    assert [one.kind.block_bytes for one in found.arrays({})] == list(found.block_bytes)


@WAYS
@pytest.mark.parametrize("ids", [(3,), (2, 3, 4), (9, 0, 5)], ids=str)
def test_heads_go_into_their_places_in_each_block_and_nowhere_else(way: str, ids: tuple[int, ...]) -> None:
    target = KvCache({"l0": torch.zeros(BLOCKS, 4, 8, 2)}, BLOCKS)
    part = torch.arange(1, len(ids) * 2 * 8 * 2 + 1, dtype=torch.float32).reshape(len(ids), 2, 8, 2)
    place(way, target, 0, ids, kv_cache._bytes(part), head=1, heads=2)
    expected = torch.zeros(BLOCKS, 4, 8, 2)
    for at, block in enumerate(ids):
        expected[block, 1:3] = part[at]
    assert torch.equal(target.regions[0], expected)


@WAYS
def test_a_cache_that_is_not_contiguous_is_packed_by_a_kernel_in_logical_order_and_on_a_host_as_it_lies(way: str) -> None:
    source = KvCache({"l0": cache(BLOCKS, 4, 8).transpose(1, 2)}, BLOCKS)
    out = torch.frombuffer(copied_out(way, source, 0, (1,)), dtype=torch.float32)
    expected = source.regions[0][1]
    assert torch.equal(out.reshape(8, 4), expected) if way == "kernel" else torch.equal(out.reshape(4, 8), expected.T)


def test_a_cache_whose_blocks_do_not_lie_together_is_refused_on_a_host_with_its_layer() -> None:
    apart = KvCache({"l7": cache(BLOCKS, 4, 8)[:, :, :3]}, BLOCKS)
    with pytest.raises(ConfigError, match="a block of layer l7 does not lie together"):
        apart.caches({})


def test_heads_that_do_not_lie_together_on_a_host_are_not_to_be_cut() -> None:
    turned = KvCache({"l0": cache(BLOCKS, 8, 2, 4).transpose(1, 2)}, BLOCKS)
    (one,) = turned.arrays({"l0": 4})
    assert (one.kind.heads, one.kind.total) == (1, UNKNOWN)


@pytest.mark.parametrize("shape", [(7, 8), (2, 7, 8), (8,)])
def test_a_cache_without_blocks_where_expected_is_refused_with_its_layer(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"layer l7 has a KV cache of shape .*16 blocks"):
        KvCache({"l7": torch.zeros(shape)}, BLOCKS)


def test_a_model_without_caches_is_refused() -> None:
    with pytest.raises(ConfigError, match="no KV cache"):
        KvCache({}, BLOCKS)


def test_arrays_of_one_copy_lie_where_they_are_said_to() -> None:
    source = KvCache({"l0": cache(BLOCKS, 2, 8, 4), "l1": -cache(BLOCKS, 2, 8, 4), "l2": cache(BLOCKS, 6)}, BLOCKS)
    out = torch.zeros(4096, dtype=torch.uint8)
    source.copy_out(range(3), numbers((3, 9)), out, (0, 1024, 2048))
    for region, start in zip(source.regions, (0, 1024, 2048), strict=True):
        expected = region[[3, 9]].flatten()
        assert torch.equal(out[start:start + 4 * len(expected)].view(torch.float32), expected)


LAYOUTS = pytest.mark.parametrize("layout", [KVCacheLayout.LBNHC, KVCacheLayout.LBHNC], ids=lambda one: one.name)


def views(raw: torch.Tensor, layout: KVCacheLayout, kernel: int, kind: type[FullAttentionSpec] = FullAttentionSpec,
          heads: int = 2) -> torch.Tensor:
    """vLLM's own view of a layer's cache, for a backend whose kernels take blocks of ``kernel`` tokens."""
    spec = kind(block_size=128, num_kv_heads=heads, head_size=32, dtype=torch.bfloat16)
    page = spec.page_size_bytes
    assert len(raw) == page * BLOCKS
    tensor = KVCacheTensor(size=len(raw), layers=["l0"], layer_stride=len(raw), block_stride=page)
    return create_kv_cache_views(raw, spec, BLOCKS, layout, tensor, kernel_block_size=kernel)[0]


def raw(heads: int = 2, values: int = 64, *, empty: bool = False) -> torch.Tensor:
    size = BLOCKS * heads * 128 * values * 2
    return torch.zeros(size, dtype=torch.int8) if empty else torch.randint(-128, 127, (size,), dtype=torch.int8)


@LAYOUTS
@WAYS
@pytest.mark.parametrize("tokens", [128, 64, 16])
def test_blocks_come_out_whole_whatever_the_backend_makes_of_them(tokens: int, layout: KVCacheLayout, way: str) -> None:
    here, there = raw(), raw(empty=True)
    source, target = (KvCache({"l0": views(one, layout, tokens)}, BLOCKS) for one in (here, there))
    page = len(here) // BLOCKS
    assert source.block_bytes == (page,)
    if tokens < 128:
        theirs = group_kernel_blocks(views(here, layout, tokens), BLOCKS)
        assert torch.equal(source.regions[0].transpose(1, 2).view(torch.int16), theirs.view(torch.int16))
    place(way, target, 0, (1, 2, 3), copied_out(way, source, 0, (9, 0, 5)))
    blocks, placed = (one.view(BLOCKS, page) for one in (here, there))
    assert torch.equal(placed[1:4], blocks[[9, 0, 5]])
    assert not placed[[0, *range(4, BLOCKS)]].any()


@LAYOUTS
@pytest.mark.parametrize(("p", "d"), [(64, 128), (128, 64), (16, 64)])
def test_what_each_token_has_stays_its_own_whatever_the_layout_and_the_blocks_of_kernels(
        layout: KVCacheLayout, p: int, d: int) -> None:
    """Prefill's cache has the layout, decode's has its heads first; both are seen as vLLM's own kernels see them."""
    other = KVCacheLayout.LBHNC
    seen, found = views(raw(), layout, p).clone(memory_format=torch.preserve_format), views(raw(empty=True), other, d)
    out = copied_out("kernel", KvCache({"l0": seen}, BLOCKS), 0, (3, 7))
    place("kernel", KvCache({"l0": found}, BLOCKS), 0, (8, 2), out)
    for block, into in ((3, 8), (7, 2)):
        for token in range(128):
            there = found[into * (128 // d) + token // d, :, token % d].view(torch.int16)
            assert torch.equal(there, seen[block * (128 // p) + token // p, :, token % p].view(torch.int16))


@LAYOUTS
def test_a_head_of_blocks_that_a_backend_splits_is_one_run_of_bytes(monkeypatch: pytest.MonkeyPatch,
                                                                   layout: KVCacheLayout) -> None:
    """So a prefill rank of two heads can give each of two decode ranks one, as it does with blocks in one piece."""
    monkeypatch.setattr(kv_cache, "logical", lambda _: True)  # as on a device
    seen = views(raw(), layout, 64)
    source = KvCache({"l0": seen}, BLOCKS)
    (one,) = source.arrays({"l0": 2})
    assert (one.kind.heads, one.kind.head_bytes, one.kind.total) == (2, source.block_bytes[0] // 2, 2)
    whole = copied_out("kernel", source, 0, (5,))
    for head in (0, 1):
        found = views(raw(1, empty=True), layout, 64, heads=1)
        target = KvCache({"l0": found}, BLOCKS)
        part = whole[head * one.kind.head_bytes:(head + 1) * one.kind.head_bytes]
        place("kernel", target, 0, (6,), part)
        assert torch.equal(found[12:14, 0].view(torch.int16), seen[10:12, head].view(torch.int16))
        joined = views(raw(empty=True), layout, 64)
        place("kernel", KvCache({"l0": joined}, BLOCKS), 0, (6,), part, head=head, heads=1)
        assert torch.equal(joined[12:14, head].view(torch.int16), seen[10:12, head].view(torch.int16))
        assert not joined[:, 1 - head].view(torch.int16).any()


@pytest.mark.parametrize("shape", ["with heads", "a latent", "a latent without the dimension of heads"])
def test_blocks_that_a_backend_splits_are_like_others_only_where_nothing_is_packed_inside(
        monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    heads, total = (2, 4) if shape == "with heads" else (1, 0)
    made = [views(raw(heads, empty=True), KVCacheLayout.LBHNC, kernel, heads=heads) for kernel in (128, 64)]
    if shape == "a latent without the dimension of heads":
        made = [one.squeeze(1) for one in made]
    whole, split = (KvCache({"l0": one}, BLOCKS).arrays({"l0": total}) for one in made)
    assert whole != split, "a CPU packs keys across the tokens of a block"
    assert split[0].kind.dims[-3:] == (2, 64, 64)
    monkeypatch.setattr(kv_cache, "logical", lambda region: region.dtype is torch.bfloat16)
    whole, split = (KvCache({"l0": one}, BLOCKS).arrays({"l0": total}) for one in made)
    assert whole == split


@pytest.mark.parametrize(("device", "dtype", "hip", "expected"), [
    ("cuda", torch.bfloat16, None, True), ("cuda", torch.float16, None, True), ("cuda", torch.uint8, None, False),
    ("cuda", torch.bfloat16, "6.4", False), ("cpu", torch.bfloat16, None, False)])
def test_only_nvidias_devices_and_types_of_one_value_are_in_logical_order(
        monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, hip: str | None, expected: bool) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    region: Any = SimpleNamespace(is_cuda=device == "cuda", dtype=dtype)
    assert kv_cache.logical(region) == expected
