"""The KV cache as arrays of blocks, and copies of blocks out of it.

On a CPU a copy is done when it is called, and blocks are written by the thread that fetches (``transport.landing``). On
CUDA ``memory.device`` has the copies, on streams of their own:

    compute  ──[forward writes KV]──┬──────────────[next forward]──        the blocks are kept until the mark has passed
    leave                           └─[gather, sums]─[copy to host]──▶ Mark

    compute  ──[earlier steps]─┬ moment ───────────────────────────        blocks are read only after the mark
    come       [copy to the device]──┐
    place                      └─────┴[scatter, sums]──▶ Mark

Nothing here needs vLLM, so that it can be tested with torch alone.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv.array_layout import ArrayLayout
from xpyd_sidecar.kv.mapping import UNKNOWN, Array, ArrayKind
from xpyd_sidecar.kv.packing import PackedArray, run_blocks
from xpyd_sidecar.kv.reach import LayerGroup
from xpyd_sidecar.memory import device, device_rows
from xpyd_sidecar.memory.marks import CopyMark
from xpyd_sidecar.transport.landing import CacheArray


class CacheRows(NamedTuple):
    """Blocks of some arrays, and how each array is packed, from where on."""

    regions: list[int]
    packed: list[tuple[PackedArray, int]]
    ids: NDArray[np.int64]
    """Which blocks of the cache they are; below 0: none."""
    head: int = 0
    """The first of the array's heads that is meant."""


class KvCache:
    """All block arrays of one rank, those of one group together."""

    def __init__(self, caches: dict[str, torch.Tensor], num_blocks: int,
                 groups: Mapping[str, LayerGroup] = MappingProxyType({})) -> None:
        """Take the caches as vLLM registers them, by layer name, in layer order.

        ``groups``: by layer; empty: all are of one group. A layer that is not there has no blocks of its own: it uses those
        of another, or they are not moved. Groups have the same memory at other times, so two layers with one address have
        the same blocks only within a group.

        Raises:
            ConfigError: a layer's cache has no dimension of blocks where one is expected, or a layer has no cache.
        """
        if missing := [name for name in groups if name not in caches]:
            raise ConfigError(f"kv connector: layer {missing[0]} has a group of KV blocks and no KV cache")
        self.regions: list[torch.Tensor] = []
        self.of_layer: dict[str, tuple[int, ...]] = {}
        """In the order in which a forward computes them: that of the numbers in their names."""
        self._names: list[str] = []
        self._whole: list[bool] = []
        """By region: it has blocks of smaller ones, whose bytes are those of blocks in one piece."""
        known: dict[tuple[int, int, tuple[int, ...]], tuple[int, ...]] = {}
        self._of: list[LayerGroup] = []
        listed = [(groups[name] if groups else LayerGroup(0), name, cache) for name, cache in caches.items()
                  if name in groups or not groups]
        for of, name, cache in sorted(listed, key=lambda one: one[0].group):
            identity = (of.group, cache.data_ptr(), tuple(cache.shape))
            if identity not in known:  # layers that share one cache are moved once
                parts = _arrays(name, cache, num_blocks)
                known[identity] = tuple(range(len(self.regions), len(self.regions) + len(parts)))
                self.regions += parts
                self._of += [of] * len(parts)
                self._whole += [part.dim() > cache.dim() and logical(part) for part in parts]
                self._names += [name] if len(parts) == 1 else [f"{name}#{at}" for at in range(len(parts))]
            self.of_layer[name] = known[identity]
        self.of_layer = dict(sorted(self.of_layer.items(), key=lambda one: _place(one[0])))
        if not self.regions:
            raise ConfigError("kv connector: the model has no KV cache to move")
        self.groups = tuple(of.group for of in self._of)
        """By array."""
        self.block_bytes = tuple(region[0].numel() * region.element_size() for region in self.regions)
        self.device = self.regions[0].device
        self.copies = device.DeviceCopies(self.device) if self.device.type == "cuda" else None
        """Of a device; None: a host's are made here."""
        self._views: dict[tuple[int, int, int], tuple[device_rows.RowView, int]] = {}

    def of_group(self, group: int) -> range:
        """The arrays of a group; a pipeline stage may have none of it."""
        first = bisect.bisect_left(self.groups, group)
        return range(first, bisect.bisect_right(self.groups, group))

    @property
    def cache_block_bytes(self) -> int:
        """Bytes of one block of the cache: over the arrays of the group that has the most, since groups share blocks."""
        return max(sum(self.block_bytes[region] for region in self.of_group(group)) for group in set(self.groups))

    @property
    def token_bytes(self) -> int:
        """Bytes of KV that one token brings, rounded up; states, of which a prompt has one, are left out."""
        return math.ceil(sum(size / of.reach.block_tokens for size, of in zip(self.block_bytes, self._of, strict=True)
                             if of.reach.block_tokens))

    @property
    def total_block_bytes(self) -> int:
        """Bytes of one block over all arrays."""
        return sum(self.block_bytes)

    def arrays(self, heads: Mapping[str, int]) -> tuple[Array, ...]:
        """What the regions are, in order. ``heads``: by layer, its KV heads over all ranks, 0 for none (MLA).

        A layer that is missing there is ``UNKNOWN``: it goes between equal sizes only. Blocks have heads first.
        """
        return tuple(Array(name, _kind(region, heads.get(name.partition("#")[0], UNKNOWN), of, whole=whole))
                     for name, region, of, whole in zip(self._names, self.regions, self._of, self._whole, strict=True))

    def layouts(self, heads: Mapping[str, int]) -> tuple[ArrayLayout, ...]:
        """How blocks of the regions are packed. ``heads``: as of ``arrays``."""
        return tuple(one.kind.layout for one in self.arrays(heads))

    def caches(self, heads: Mapping[str, int]) -> list[CacheArray]:
        """Arrays of a host, whose blocks other threads may write as bytes, inside a gate. ``heads``: as of ``arrays``.

        Raises:
            ConfigError: the bytes of a block do not lie together.
        """
        found = []
        for name, region, layout in zip(self._names, map(in_memory, self.regions), self.layouts(heads), strict=True):
            if not region[0].is_contiguous():
                raise ConfigError(f"kv connector: a block of layer {name} does not lie together in its KV cache")
            found.append(CacheArray(_bytes(region), region.stride(0) * region.element_size(), layout.head_bytes))
        return found

    @property
    def at_once(self) -> bool:
        """Whether layers are copied out as they are written: what runs on the host is done when it is called."""
        return self.copies is None

    def prepare(self, slab_bytes: int, ring_bytes: int, heads: Mapping[str, int]) -> None:
        """Take the device memory that copies pass through, and have the kernels compiled; nothing on a CPU."""
        if self.copies is None:
            return
        self.copies.prepare(slab_bytes, ring_bytes)
        for shape, count in {(self.view(region, 0, layout.heads, layout.head_bytes)[0].shape, layout.heads)
                             for region, layout in enumerate(self.layouts(heads))}:
            self.copies.compile(shape, count)

    @property
    def capturing(self) -> bool:
        """Whether nothing can be copied out now, since a device records a graph."""
        return self.copies is not None and self.copies.capturing

    @property
    def most_bytes(self) -> int | None:
        """Packed bytes that one ``gather`` may have; None: no bound."""
        return None if self.copies is None else self.copies.slab_bytes

    def copy_out(self, regions: Sequence[int], ids: NDArray[np.int64], packed: torch.Tensor, starts: Sequence[int]) -> None:
        """Copy blocks of arrays out of the cache, on a CPU: whole blocks, one behind the other, as they lie in memory.

        ``packed``: bytes; array ``regions[i]`` begins at byte ``starts[i]``.
        """
        index = torch.from_numpy(ids)
        for region, start in zip(regions, starts, strict=True):
            source = in_memory(self.regions[region])
            size = len(index) * self.block_bytes[region]
            place = packed[start:start + size].view(source.dtype).view(len(index), *source.shape[1:])
            torch.index_select(source, 0, index, out=place)

    def rows(self, parts: Sequence[CacheRows]) -> list[device_rows.BlockRows]:
        """Rows of blocks for a device, of arrays that look alike together."""
        found: list[device_rows.BlockRows] = []
        for regions, packed, ids, head in parts:
            alike: dict[tuple[device_rows.RowView, PackedArray], tuple[list[int], list[int]]] = {}
            for region, (layout, start) in zip(regions, packed, strict=True):
                view, address = self.view(region, head, layout.heads, layout.head_bytes)
                arrays, starts = alike.setdefault((view, layout), ([], []))
                arrays.append(address)
                starts.append(start)
            found += [device_rows.BlockRows(view, arrays, starts, layout, ids)
                      for (view, layout), (arrays, starts) in alike.items()]
        return found

    def fence(self) -> None:
        """Later work of the compute stream waits for the copies out that are under way; the host does not."""
        if self.copies is not None:
            self.copies.fence()

    def view(self, region: int, head: int, heads: int, head_bytes: int) -> tuple[device_rows.RowView, int]:
        """How so many heads of an array lie in device memory, and where. ``head_bytes``: of one head of a block."""
        found = self._views.get((region, head, heads))
        if found is None:
            whole = self.regions[region]
            part = whole if heads * head_bytes == self.block_bytes[region] else whole.narrow(1, head, heads)
            found = self._views[region, head, heads] = device_rows.view_of(part), part.data_ptr()
        return found

    def moment(self) -> CopyMark | None:
        """Now, in the order of the compute stream; None: a host has no order but that of calls."""
        return self.copies.moment() if self.copies is not None else None


def _place(name: str) -> list[int]:
    """Where a layer stands in the model: ``model.layers.11.self_attn.attn`` is the 11th."""
    return [int(number) for number in re.findall(r"\d+", name)]


def _arrays(name: str, cache: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    """The arrays of blocks of a cache, heads first inside a block where there are any.

    A backend whose kernels take smaller blocks has each block as ``ratio`` of them: (blocks * ratio, heads, tokens,
    values). They become (blocks, heads, ratio, tokens, values), which is one block's logical order again.
    """
    if cache.dim() >= 2 and cache.shape[0] == num_blocks:
        return [cache]
    if cache.dim() >= 3 and cache.shape[0] == 2 and cache.shape[1] == num_blocks:
        return [cache[0], cache[1]]
    if cache.dim() >= 3 and cache.shape[0] > 0 and cache.shape[0] % num_blocks == 0:
        grouped = cache.unflatten(0, (num_blocks, -1))
        return [grouped if cache.dim() == 3 else grouped.transpose(1, 2)]
    raise ConfigError(f"kv connector: layer {name} has a KV cache of shape {tuple(cache.shape)}; "
                      f"the first dimension must be {num_blocks} blocks, or a multiple of them, "
                      "or the second one these blocks")


def logical(region: torch.Tensor) -> bool:
    """Whether a block's bytes are its values in the order of the dimensions: no backend packs its own inside them.

    For an engine's types ``compat.common.plain`` says so; this is for the smaller blocks of one array.
    """
    return region.is_cuda and torch.version.hip is None and region.dtype.is_floating_point


def in_memory(region: torch.Tensor) -> torch.Tensor:
    """An array of blocks with the dimensions of a block in the order in which they lie in memory."""
    order = sorted(range(1, region.dim()), key=region.stride, reverse=True)
    return region.permute(0, *order)


def _kind(region: torch.Tensor, total: int, of: LayerGroup, *, whole: bool) -> ArrayKind:
    shape, size = tuple(region.shape[1:]), region[0].numel() * region.element_size()
    if of.state:
        return ArrayKind(of.state, 1, shape, size, UNKNOWN, of.reach)
    opaque = not logical(region)
    dtype = str(region.dtype).removeprefix("torch.")
    if whole:
        shape = (*shape[:-3], shape[-3] * shape[-2], shape[-1])
    apart = opaque and region.device.type == "cpu" and not region[0].is_contiguous()  # heads do not lie together
    if total <= 0 or region.dim() < 3 or apart:
        run = run_blocks(size, opaque=opaque)
        return ArrayKind(dtype, 1, shape, size, total if total <= 0 else UNKNOWN, of.reach, run)
    each = size // shape[0]
    return ArrayKind(dtype, shape[0], shape[1:], each, total, of.reach, run_blocks(each, opaque=opaque))


def _bytes(region: torch.Tensor) -> memoryview:
    """The memory of an array whose blocks lie together each, and perhaps apart from each other."""
    each = region.element_size()
    size = ((len(region) - 1) * region.stride(0) + region[0].numel()) * each
    whole = torch.empty(0, dtype=torch.uint8).set_(region.untyped_storage(), region.storage_offset() * each, (size,))
    return memoryview(whole.numpy())
