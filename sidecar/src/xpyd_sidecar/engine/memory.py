"""The KV cache as arrays of blocks, and the copies out of it and into it.

Only the engine's own thread calls ``copy_out`` and ``place``; what else may write is in ``engine.gates``. On CPU both are
plain copies. On CUDA both run on one side stream, ordered against the compute stream by events in both directions:

    compute  ──[layer writes KV]──┬────────────────────▶ fence() ▲──[a later step may reuse the blocks]──▶
    side                          └─[gather, copy to pinned host]─┘           (wait_event, no host waits)

    compute  ──[earlier steps]──┬──────────────────────────────────────▶ (blocks are read only after ``Mark.done``)
    side                        └─[pinned host to device, scatter]──▶ Mark

Nothing here needs vLLM, so that it can be tested with torch alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from xpyd_sidecar.engine.bounds import NOW, Chunk, Mark
from xpyd_sidecar.engine.gates import Cache
from xpyd_sidecar.engine.links import mapped
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv.frames import FRAME_BYTES
from xpyd_sidecar.kv.mapping import UNKNOWN, Array, Kind

logger = logging.getLogger(__name__)


class Outgoing(NamedTuple):
    """Blocks copied out: valid once ``mark`` is done, for as long as it is referenced."""

    data: memoryview
    mark: Mark


class Memory:
    """All block arrays of one rank."""

    def __init__(self, caches: dict[str, torch.Tensor], num_blocks: int) -> None:
        """Take the caches as vLLM registers them, by layer name, in layer order.

        Raises:
            ConfigError: a layer's cache has no dimension of blocks where one is expected.
        """
        self.regions: list[torch.Tensor] = []
        self.of_layer: dict[str, tuple[int, ...]] = {}
        self._names: list[str] = []
        self._whole: list[bool] = []
        """By region: it has blocks of smaller ones, whose bytes are those of blocks in one piece."""
        known: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
        for name, cache in caches.items():
            identity = (cache.data_ptr(), tuple(cache.shape))
            if identity not in known:  # layers that share one cache are moved once
                parts = _arrays(name, cache, num_blocks)
                known[identity] = tuple(range(len(self.regions), len(self.regions) + len(parts)))
                self.regions += parts
                self._whole += [part.dim() > cache.dim() and logical(part) for part in parts]
                self._names += [name] if len(parts) == 1 else [f"{name}#{at}" for at in range(len(parts))]
            self.of_layer[name] = known[identity]
        if not self.regions:
            raise ConfigError("kv connector: the model has no KV cache to move")
        self.block_bytes = tuple(region[0].numel() * region.element_size() for region in self.regions)
        self.device = self.regions[0].device
        self._side: Any = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._last: Any = None

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
        return tuple(Array(name, _kind(region, heads.get(name.partition("#")[0], UNKNOWN), whole=whole))
                     for name, region, whole in zip(self._names, self.regions, self._whole, strict=True))

    def caches(self) -> list[Cache | None]:
        """Arrays whose blocks other threads may write as bytes, inside a gate; None on a device, or where strided."""
        return [_cache(region) if self._side is None and region.is_contiguous() else None for region in self.regions]

    @property
    def capturing(self) -> bool:
        """Whether what is enqueued now is recorded into a graph, and runs later, maybe never."""
        return self._side is not None and torch.cuda.is_current_stream_capturing()

    def index(self, ids: Sequence[int]) -> torch.Tensor:
        """Block ids as a tensor on the cache's device, to be used for several regions."""
        index = torch.tensor(ids, dtype=torch.int64)
        return index if self._side is None else index.pin_memory().to(self.device, non_blocking=True)

    def copy_out(self, region: int, index: torch.Tensor, into: Chunk | None = None) -> Outgoing:
        """Copy blocks out of one region, in the order of ``index``, packed; ``into`` memory of their size, if given."""
        source = self.regions[region]
        shape = (len(index), *source.shape[1:])
        place = into.tensor.view(source.dtype).view(shape) if into is not None else None
        if self._side is None:
            if place is None:
                return Outgoing(_bytes(source.index_select(0, index)), NOW)
            torch.index_select(source, 0, index, out=place)
            return Outgoing(_bytes(place), NOW)
        compute = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._side):
            self._side.wait_stream(compute)
            packed = source.index_select(0, index)
            host = place if place is not None else torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            host.copy_(packed, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._side)
        self._last = event
        return Outgoing(_bytes(host), CudaMark(event, (packed, index), self.device))

    def fence(self) -> None:
        """Later work of the compute stream waits for the copies out; the host does not."""
        if self._last is not None:
            torch.cuda.current_stream(self.device).wait_event(self._last)
            self._last = None

    def place(self, region: int, ids: Sequence[int], chunk: Chunk, size: int, *, head: int = 0, heads: int = 0) -> Mark:
        """Write packed blocks into one region, or ``heads`` heads of each from ``head`` on.

        The chunk is in use until the mark is done.
        """
        target = self.regions[region]
        if heads:
            target = target.narrow(1, head, heads)
        packed = chunk.tensor[:size].view(target.dtype).view(len(ids), *target.shape[1:])
        if self._side is None:
            if ids[-1] - ids[0] == len(ids) - 1 and list(ids) == list(range(ids[0], ids[0] + len(ids))):
                target[ids[0]:ids[0] + len(ids)].copy_(packed)
            else:
                target.index_copy_(0, torch.tensor(ids, dtype=torch.int64), packed)
            return NOW
        compute = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._side):
            self._side.wait_stream(compute)
            index = torch.tensor(ids, dtype=torch.int64).pin_memory().to(self.device, non_blocking=True)
            target.index_copy_(0, index, packed.to(self.device, non_blocking=True))
            event = torch.cuda.Event()
            event.record(self._side)
        return CudaMark(event, (index,), self.device)


class CudaMark:
    """A mark that a CUDA event stands for; it keeps alive what the copies read. Asked by any thread."""

    def __init__(self, event: Any, keep: tuple[torch.Tensor, ...], device: torch.device) -> None:
        self._event = event
        self._keep = keep
        self._device = device

    def done(self) -> bool:
        """Whether the event has passed; never waits."""
        with torch.cuda.device(self._device):  # a thread begins with device 0, where asking would make a context
            return bool(self._event.query())


def chunk(size: int, *, pinned: bool) -> Chunk:
    """Staging memory of ``size`` bytes; pinned, so that copies to a GPU need not wait."""
    tensor = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    return Chunk(tensor, memoryview(tensor.numpy()))


def mapped_chunk(size: int) -> Chunk:
    """Host memory of ``size`` bytes that peers on this host may map; where the system makes none, memory as any other."""
    try:
        view = mapped.make(size)
    except OSError as error:
        logger.warning("xpyd: peers cannot map the copies of this rank: %s", error)
        return chunk(size, pinned=False)
    return Chunk(torch.frombuffer(view, dtype=torch.uint8), view)


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


def _kind(region: torch.Tensor, total: int, *, whole: bool) -> Kind:
    dtype = str(region.dtype).removeprefix("torch.")
    size = region[0].numel() * region.element_size()
    shape = tuple(region.shape[1:])
    if whole:
        shape = (*shape[:-3], shape[-3] * shape[-2], shape[-1])
    if total <= 0 or region.dim() < 3:
        return Kind(dtype, 1, shape, size, total if total <= 0 else UNKNOWN)
    return Kind(dtype, shape[0], shape[1:], size // shape[0], total)


def _cache(region: torch.Tensor) -> Cache:
    view = _bytes(region)
    return Cache(view, region.data_ptr(), len(view) // region.shape[0])


def _bytes(packed: torch.Tensor) -> memoryview:
    return memoryview(packed.contiguous().reshape(-1).view(torch.uint8).numpy())
