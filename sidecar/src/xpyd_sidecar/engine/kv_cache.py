"""The KV cache as arrays of blocks, and the copies out of it and into it.

Only the engine's own thread calls ``gather`` and ``scatter``; what else may write is in ``transport.gates``. On CPU both
are plain copies. On CUDA both run on one side stream (``memory.device``), after all work that the compute stream has by
then:

    compute  ──[forward writes KV]──┬──────────────[next forward]──        the blocks are kept until the mark has passed
    side                            └─[gather]─[copy to host]──▶ Mark

    compute  ──[earlier steps]──┬──────────────────────────────────        blocks are read only after the mark
    side                        └─[scatter from host]──▶ Mark

Nothing here needs vLLM, so that it can be tested with torch alone.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv.frames import FRAME_BYTES
from xpyd_sidecar.kv.mapping import UNKNOWN, Array, ArrayKind
from xpyd_sidecar.kv.reach import LayerGroup
from xpyd_sidecar.memory import device, device_rows
from xpyd_sidecar.memory.marks import NOW, CopyMark
from xpyd_sidecar.memory.staging import Chunk
from xpyd_sidecar.transport.gates import CacheArray


class Move(NamedTuple):
    """Blocks ``ids`` of as many arrays as there are ``starts``, from ``region`` on, and packed memory for them.

    Array ``region + i`` has its blocks, one behind the other, from byte ``starts[i]`` of ``packed`` (a tensor of bytes) on.
    """

    region: int
    ids: NDArray[np.int64]
    packed: Any
    starts: Sequence[int] = (0,)
    head: int = 0
    heads: int = 0
    """So many heads of each block, from ``head`` on; 0: whole blocks."""


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
        if not self.regions:
            raise ConfigError("kv connector: the model has no KV cache to move")
        self.groups = tuple(of.group for of in self._of)
        """By array."""
        self.block_bytes = tuple(region[0].numel() * region.element_size() for region in self.regions)
        self.device = self.regions[0].device
        self._mover = device.Mover(self.device) if self.device.type == "cuda" else None
        self._alike = functools.cache(self._alike_of)

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

    @property
    def largest_frame(self) -> int:
        """Bytes of the largest payload that one data frame may carry."""
        return max(FRAME_BYTES, *self.block_bytes)

    def arrays(self, heads: Mapping[str, int]) -> tuple[Array, ...]:
        """What the regions are, in order. ``heads``: by layer, its KV heads over all ranks, 0 for none (MLA).

        A layer that is missing there is ``UNKNOWN``: it goes between equal sizes only. Blocks have heads first.
        """
        return tuple(Array(name, _kind(region, heads.get(name.partition("#")[0], UNKNOWN), of, whole=whole))
                     for name, region, of, whole in zip(self._names, self.regions, self._of, self._whole, strict=True))

    def caches(self) -> list[CacheArray | None]:
        """Arrays whose blocks other threads may write as bytes, inside a gate; None on a device, or where strided."""
        return [CacheArray(_bytes(region), size) if self._mover is None and region.is_contiguous() else None
                for region, size in zip(self.regions, self.block_bytes, strict=True)]

    @property
    def at_once(self) -> bool:
        """Whether layers are copied out as they are written: what runs on the host is done when it is called."""
        return self._mover is None

    def prepare(self, slab_bytes: int) -> None:
        """Take the device memory that copies out pass through, and have the kernels compiled; nothing on a CPU."""
        if self._mover is not None:
            self._mover.prepare(slab_bytes)
            for shape in {self._view(region, 0, 0)[0].shape for region in range(len(self.regions))}:
                self._mover.compile(shape)

    @property
    def launches(self) -> int:
        """Kernels and copies that were enqueued on a device so far."""
        return self._mover.launches if self._mover is not None else 0

    @property
    def most_bytes(self) -> int | None:
        """Packed bytes that one ``Move`` of ``gather`` may have; None: no bound."""
        return None if self._mover is None else self._mover.slab_bytes

    def gather(self, moves: Sequence[Move]) -> CopyMark:
        """Copy blocks out of the cache, in the order of their ids. Packed memory is valid once the mark has passed."""
        if self._mover is not None:
            return self._mover.out([self._packed(move) for move in moves])
        for move in moves:
            index = torch.from_numpy(move.ids)
            for at, start in enumerate(move.starts):
                source = self.regions[move.region + at]
                size = len(index) * self.block_bytes[move.region + at]
                place = move.packed[start:start + size].view(source.dtype).view(len(index), *source.shape[1:])
                torch.index_select(source, 0, index, out=place)
        return NOW

    def scatter(self, moves: Sequence[Move]) -> CopyMark:
        """Copy packed blocks into the cache. Packed memory is in use until the mark has passed."""
        if self._mover is not None:
            return self._mover.into([self._packed(move) for move in moves])
        for move in moves:
            first, count = int(move.ids[0]), len(move.ids)
            run = first + count - 1 == move.ids[-1] and bool((np.diff(move.ids) == 1).all())
            for at, start in enumerate(move.starts):
                target = self._part(move.region + at, move.head, move.heads)
                size = count * target[0].numel() * target.element_size()
                packed = move.packed[start:start + size].view(target.dtype).view(count, *target.shape[1:])
                if run:
                    target[first:first + count].copy_(packed)
                else:
                    target.index_copy_(0, torch.from_numpy(move.ids), packed)
        return NOW

    def fence(self) -> None:
        """Later work of the compute stream waits for the copies out that are under way; the host does not."""
        if self._mover is not None:
            self._mover.fence()

    def _part(self, region: int, head: int, heads: int) -> torch.Tensor:
        return self.regions[region].narrow(1, head, heads) if heads else self.regions[region]

    def _view(self, region: int, head: int, heads: int) -> tuple[device_rows.RowView, int]:
        """How an array, or so many heads of it, lies in device memory, and where."""
        part = self._part(region, head, heads)
        return device_rows.view_of(part), part.data_ptr()

    def _packed(self, move: Move) -> device_rows.PackedRows:
        rows = [device_rows.BlockRows(view, arrays, [move.starts[at] for at in places], move.ids) for view, arrays, places
                in self._alike(move.region, len(move.starts), move.head, move.heads)]
        return device_rows.PackedRows(rows, move.packed, move.packed.data_ptr(), len(move.packed))

    def _alike_of(self, region: int, count: int, head: int, heads: int,
                  ) -> list[tuple[device_rows.RowView, list[int], list[int]]]:
        """Of so many arrays from one on: those that look alike, where they are, and which they are."""
        groups: dict[device_rows.RowView, tuple[list[int], list[int]]] = {}
        for at in range(count):
            view, array = self._view(region + at, head, heads)
            arrays, places = groups.setdefault(view, ([], []))
            arrays.append(array)
            places.append(at)
        return [(view, *group) for view, group in groups.items()]


def chunk(size: int, *, pinned: bool) -> Chunk:
    """Staging memory of ``size`` bytes; pinned, so that copies to a GPU need not wait."""
    tensor = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    return Chunk(tensor, memoryview(tensor.numpy()))


def give_back_pinned() -> None:
    """Give the system back what no chunk has any more; torch would keep it for later ones."""
    if torch.cuda.is_available():
        torch.accelerator.empty_host_cache()


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


def _kind(region: torch.Tensor, total: int, of: LayerGroup, *, whole: bool) -> ArrayKind:
    shape, size = tuple(region.shape[1:]), region[0].numel() * region.element_size()
    if of.state:
        return ArrayKind(of.state, 1, shape, size, UNKNOWN, of.reach)
    dtype = str(region.dtype).removeprefix("torch.")
    if whole:
        shape = (*shape[:-3], shape[-3] * shape[-2], shape[-1])
    if total <= 0 or region.dim() < 3:
        return ArrayKind(dtype, 1, shape, size, total if total <= 0 else UNKNOWN, of.reach)
    return ArrayKind(dtype, shape[0], shape[1:], size // shape[0], total, of.reach)


def _bytes(packed: torch.Tensor) -> memoryview:
    return memoryview(packed.contiguous().reshape(-1).view(torch.uint8).numpy())
