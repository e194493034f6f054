"""Caches as backends lay them out: blocks go out and into another cache, all heads or some, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from lab.gpu.busy import wait_done
from lab.gpu.cache import host, with_copies
from lab.gpu.findings import Figures, require
from xpyd_sidecar.engine.worker.kv_cache import CacheRows, KvCache
from xpyd_sidecar.kv.packing import PackedArray, run_blocks, sums_of
from xpyd_sidecar.memory.device import PackedRows

BLOCKS: Final = 64
LEAVE: Final = (5, 9, 3, 40, 41, 42, 60, 7, 11, *range(20, 30))
COME: Final = (8, -1, 2, 30, 33, 35, 61, 62, 63, *range(50, 60))
"""Where they go: they are wanted but for one."""
FIRST: Final = 3
"""The number of the first block in its prompt: runs begin elsewhere than blocks do."""


class Layout(NamedTuple):
    """Of a cache: ``make`` on a device, with ``heads`` KV heads (0: a block is one piece)."""

    make: Callable[[Any], torch.Tensor]
    heads: int


LAYOUTS: Final[Mapping[str, Layout]] = {
    "heads first": Layout(lambda on: torch.randn(BLOCKS, 8, 16, 256, device=on).to(torch.bfloat16), 8),
    "tokens first": Layout(lambda on: torch.randn(BLOCKS, 16, 8, 256, device=on).to(torch.bfloat16).transpose(1, 2), 8),
    "keys apart": Layout(lambda on: torch.randn(2, BLOCKS, 16, 8, 128, device=on).to(torch.bfloat16).transpose(2, 3), 8),
    "kernel blocks": Layout(lambda on: torch.randn(2 * BLOCKS, 8, 4, 64, device=on).transpose(1, 2), 4),
    "latent": Layout(lambda on: torch.randn(BLOCKS, 16, 576, device=on).to(torch.bfloat16), 0),
    "fp8 with scale": Layout(lambda on: torch.randint(0, 255, (BLOCKS, 64, 132), dtype=torch.uint8, device=on), 0),
    "odd": Layout(lambda on: torch.randint(0, 255, (BLOCKS, 7, 3), dtype=torch.uint8, device=on), 0),
    "state": Layout(lambda on: torch.randn(BLOCKS, 48, 64, 128, device=on), 0),
}


def layouts(device: torch.device) -> Figures:
    """Each of them, whole and, where there are heads, some of these."""
    faults, trips = [], 0
    for name, layout in LAYOUTS.items():
        parts = [(0, layout.heads or 1)] + ([(1, layout.heads // 2)] if layout.heads > 2 else [])
        for first, count in parts:
            found = there_and_back(device, layout, first, count)
            faults += [f"{name}, {count} heads from {first}: {fault}" for fault in found]
            trips += 1
    return require({"layouts": len(LAYOUTS), "trips": trips, "wrong": len(faults)}, *faults)


def there_and_back(device: torch.device, layout: Layout, head: int, heads: int) -> list[str]:
    """``heads`` heads of some blocks, out of a cache and into another one. What went wrong."""
    source, target = layout.make(device), layout.make(device).zero_()
    memory, copies = with_copies({"layer": source}, BLOCKS)
    other = KvCache({"layer": target}, BLOCKS)
    regions = [*range(len(memory.regions))]
    block_bytes = memory.block_bytes[0]
    head_bytes = block_bytes // (layout.heads or 1)
    packed = PackedArray(FIRST, len(LEAVE), heads, head_bytes, run_blocks(head_bytes, opaque=False))
    arrays = [(packed, region * packed.size) for region in regions]
    size = len(regions) * packed.size
    copies.prepare(size, size)
    chunk = host(size, device)

    def rows(cache: KvCache, ids: tuple[int, ...]) -> PackedRows:
        return PackedRows(cache.rows([CacheRows(regions, arrays, np.array(ids, np.int64), head)]), arrays, size)

    mark, made = copies.gather(rows(memory, LEAVE), [(chunk.tensor, 0)])
    wait_done(mark)
    data = np.frombuffer(chunk.view, np.uint8)
    sums = np.concatenate([sums_of(data[at:at + packed.size], packed) for _, at in arrays])
    mark, again = copies.scatter(rows(other, COME), 0, [copies.bring([(chunk.tensor, 0)]), copies.moment()])
    wait_done(mark)
    narrow = slice(head, head + heads) if layout.heads else slice(None)
    wanted = [nth for nth, block in enumerate(COME) if block >= 0]
    same = all(torch.equal(old[[LEAVE[nth] for nth in wanted], narrow], new[[COME[nth] for nth in wanted], narrow])
               for old, new in zip(memory.regions, other.regions, strict=True))
    for new in other.regions:
        new[[COME[nth] for nth in wanted], narrow] = 0
    return [fault for fault, there in (
        ("other bytes have come", not same), ("something else was written", bool(target.any())),
        ("wrong sums of what left", not np.array_equal(made.read(), sums)),
        ("wrong sums of what came", not np.array_equal(again.read(), sums))) if there]

