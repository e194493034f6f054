"""A small paged KV cache whose every byte is known, copies out of it and into it, and what they must have.

    cache     [blocks, heads, tokens, size], tokens before heads in memory, as attention kernels have it
    packed    layer by layer, as ``kv.packing`` says: runs of blocks, and heads first within a run
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lab.gpu.host_copies import HostCopies, HostSums
from xpyd_sidecar.engine.worker.kv_cache import CacheRows, KvCache
from xpyd_sidecar.kv.packing import PackedArray, run_blocks, sums_of
from xpyd_sidecar.memory.chunk import Chunk
from xpyd_sidecar.memory.device import DeviceCopies, PackedRows
from xpyd_sidecar.memory.device_rows import view_of
from xpyd_sidecar.memory.launch_memory import MadeSums
from xpyd_sidecar.memory.marks import CopyMark
from xpyd_sidecar.memory.registration import host_memory, parts

BLOCKS, HEADS, TOKENS, SIZE = 128, 4, 16, 64
HEAD_BYTES: Final = TOKENS * SIZE * 4
BLOCK_BYTES: Final = HEADS * HEAD_BYTES
LAYERS: Final = 4
RUN: Final = run_blocks(HEAD_BYTES, opaque=False)
SLAB_BYTES: Final = 2 << 20
RING_BYTES: Final = 4 << 20
Copies = DeviceCopies | HostCopies
Sums = MadeSums | HostSums


class Blocks(NamedTuple):
    """Of a prompt: its blocks from ``first`` on are ``ids`` of the cache, of which ``heads`` from ``head`` on are meant.

    An id below 0: a block that is packed and not wanted.
    """

    ids: tuple[int, ...]
    first: int = 0
    head: int = 0
    heads: int = HEADS

    @property
    def layout(self) -> PackedArray:
        """How each layer of them is packed."""
        return PackedArray(self.first, len(self.ids), self.heads, HEAD_BYTES, RUN)

    @property
    def size(self) -> int:
        """Packed bytes of all layers."""
        return LAYERS * self.layout.size

    def arrays(self, at: int) -> list[tuple[PackedArray, int]]:
        """All layers, packed one behind the other from ``at`` on."""
        return [(self.layout, at + layer * self.layout.size) for layer in range(LAYERS)]

    def rows(self, at: int) -> CacheRows:
        """Where they lie in the cache and, packed, from ``at`` on."""
        return CacheRows([*range(LAYERS)], self.arrays(at), np.array(self.ids, np.int64), self.head)


class Cache:
    """Layers of 32-bit words, all different within a layer."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.layers = [torch.zeros((BLOCKS, TOKENS, HEADS, SIZE), dtype=torch.int32, device=device).transpose(1, 2)
                       for _ in range(LAYERS)]
        self.memory, self.copies = with_copies({f"layer{at}": layer for at, layer in enumerate(self.layers)}, BLOCKS)
        self.copies.prepare(SLAB_BYTES, RING_BYTES)
        for heads in (1, HEADS):
            self.copies.compile(view_of(self.layers[0].narrow(1, 0, heads)).shape, heads)

    def fill(self, salt: int) -> None:
        """Every layer, by kernels of the compute stream."""
        for at, layer in enumerate(self.layers):
            layer.copy_(content(at, salt, self.device))

    def ruin(self) -> None:
        """Write over everything, by kernels of the compute stream."""
        for layer in self.layers:
            layer.fill_(-1)

    def gather(self, requests: Sequence[tuple[Blocks, Chunk]]) -> tuple[CopyMark, Sums]:
        """Copy blocks of every layer out, each request's into host memory of its own."""
        at, rows, spans = 0, list[CacheRows](), list[tuple[Any, int]]()
        arrays: list[tuple[PackedArray, int]] = []
        for blocks, out in requests:
            rows.append(blocks.rows(at))
            arrays += blocks.arrays(at)
            spans.append((out.tensor, at))
            at += blocks.size
        return self.copies.gather(PackedRows(self.memory.rows(rows), arrays, at), spans)

    def scatter(self, blocks: Blocks, at: int, after: Sequence[CopyMark]) -> tuple[CopyMark, Sums]:
        """Copy blocks of every layer out of the ring, where they lie from ``at`` on."""
        packed = PackedRows(self.memory.rows([blocks.rows(0)]), blocks.arrays(0), blocks.size)
        return self.copies.scatter(packed, at, after)

    def bytes_of(self, layer: int) -> NDArray[np.uint8]:
        """What a layer has now, ``[blocks, heads, bytes of a head]``."""
        return _as_bytes(self.layers[layer].cpu())


def with_copies(caches: dict[str, torch.Tensor], blocks: int) -> tuple[KvCache, Copies]:
    """A rank's caches, and what copies their blocks: on a CPU what stands for a device's copies."""
    memory = KvCache(caches, blocks)
    if memory.copies is None:
        made: Any = HostCopies()
        memory.copies = made
    copies: Copies = memory.copies
    return memory, copies


def content(layer: int, salt: int, device: torch.device) -> torch.Tensor:
    """What ``fill`` writes."""
    count = BLOCKS * HEADS * TOKENS * SIZE
    return (torch.arange(count, dtype=torch.int32, device=device) + (1_000_003 * salt + 7919 * layer)).view(
        BLOCKS, HEADS, TOKENS, SIZE)


def _as_bytes(layer: torch.Tensor) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = layer.contiguous().numpy().view(np.uint8).reshape(BLOCKS, HEADS, HEAD_BYTES)
    return found


def packed(blocks: Blocks, salt: int, more: int = 0) -> bytes:
    """Those blocks of a filled cache, packed on the host. ``more``: is added to every word."""
    heads, found = slice(blocks.head, blocks.head + blocks.heads), []
    for layer in range(LAYERS):
        whole = _as_bytes(content(layer, salt, torch.device("cpu")) + more)
        some = whole[list(blocks.ids), heads]
        found += [some[run].swapaxes(0, 1).tobytes() for run in _runs(blocks)]
    return b"".join(found)


def unpacked(blocks: Blocks, payload: bytes) -> NDArray[np.uint8]:
    """A packed payload as ``[layers, blocks, heads, bytes of a head]``."""
    layers = np.frombuffer(payload, np.uint8).reshape(LAYERS, -1)
    found = np.empty((LAYERS, len(blocks.ids), blocks.heads, HEAD_BYTES), np.uint8)
    for layer, part in zip(found, layers, strict=True):
        at = 0
        for run in _runs(blocks):
            size = layer[run].nbytes
            layer[run] = part[at:at + size].reshape(blocks.heads, -1, HEAD_BYTES).swapaxes(0, 1)
            at += size
    return found


def _runs(blocks: Blocks) -> Iterator[slice]:
    """The blocks of each run."""
    numbers = [(blocks.first + nth) // RUN for nth in range(len(blocks.ids))]
    for number in sorted(set(numbers)):
        begin = numbers.index(number)
        yield slice(begin, begin + numbers.count(number))


def right_sums(requests: Sequence[tuple[Blocks, bytes]], sums: Sums) -> bool:
    """Whether sums that were made are those of these payloads."""
    expected = [sums_of(np.frombuffer(payload, np.uint8)[at:at + layout.size], layout) for blocks, payload in requests
                for layout, at in blocks.arrays(0)]
    return bool(np.array_equal(np.concatenate(expected), sums.read()))


def host(size: int, device: torch.device) -> Chunk:
    """Memory for copies of that device."""
    return host_memory(size, pinned=device.type == "cuda")


def copy_directly(target: torch.Tensor, source: torch.Tensor, locked: torch.Tensor) -> None:
    """Enqueue a copy by CUDA itself, cut where one copy cannot have both sides. ``locked``: the one on the host."""
    for offset, size in parts(locked.data_ptr(), len(locked)):
        target[offset:offset + size].copy_(source[offset:offset + size], non_blocking=True)
