"""A small paged KV cache whose every byte is known, and work that keeps the compute stream busy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from gpu_seen import NotHeldError

from xpyd_sidecar.engine.kv_cache import KvCache, Move, chunk
from xpyd_sidecar.memory.marks import CopyMark
from xpyd_sidecar.memory.staging import Chunk

BLOCKS, HEADS, TOKENS, SIZE = 128, 4, 16, 64
BLOCK_BYTES = HEADS * TOKENS * SIZE * 4
LAYERS = 4
SLAB_BYTES = 1 << 20
WAIT_S = 20.0


class Cache:
    """Layers of ``[blocks, heads, tokens, size]`` in 32-bit words, all different within a layer."""

    def __init__(self, device: torch.device, layers: int = LAYERS) -> None:
        self.device = device
        shape = (BLOCKS, HEADS, TOKENS, SIZE)
        self.layers = [torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(layers)]
        self.memory = KvCache({f"layer{at}": layer for at, layer in enumerate(self.layers)}, BLOCKS)
        self.memory.prepare(SLAB_BYTES)

    def fill(self, salt: int) -> None:
        """Every layer, by kernels of the compute stream."""
        for at, layer in enumerate(self.layers):
            layer.copy_(content(at, salt, self.device))

    def ruin(self) -> None:
        """Write over everything, by kernels of the compute stream."""
        for layer in self.layers:
            layer.fill_(-1)


def content(layer: int, salt: int, device: torch.device) -> torch.Tensor:
    """What ``fill`` writes."""
    count = BLOCKS * HEADS * TOKENS * SIZE
    return (torch.arange(count, dtype=torch.int32, device=device) + (1_000_003 * salt + 7919 * layer)).view(
        BLOCKS, HEADS, TOKENS, SIZE)


def packed(layer: int, salt: int, ids: Sequence[int]) -> bytes:
    """The bytes of blocks of a filled layer, made on the host."""
    data: bytes = content(layer, salt, torch.device("cpu"))[list(ids)].contiguous().numpy().tobytes()
    return data


def gather(cache: Cache, moves: Sequence[tuple[Sequence[int], Chunk]], layers: int = LAYERS) -> CopyMark:
    """Blocks of every layer out, into one chunk for each request: a layer's behind the layer's before."""
    return cache.memory.gather([
        Move(0, np.array(ids, np.int64), chunk.tensor, [layer * len(ids) * BLOCK_BYTES for layer in range(layers)])
        for ids, chunk in moves])


def host(size: int, device: torch.device) -> Chunk:
    """Memory for copies of that device."""
    return chunk(size, pinned=device.type == "cuda")


class Busy:
    """Work for the compute stream of about so many milliseconds; nothing on a CPU, whose copies wait for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._real = device.type == "cuda"
        self.kinds: tuple[Callable[[float], None], ...] = (self.sleep, self.multiply) if self._real else (self.sleep,)
        if self._real:
            self._one = torch.randn(4096, 4096, dtype=torch.float16, device=device)
            self._out = torch.empty_like(self._one)
            self._cycles = 1e7 / self._measure(lambda: torch.cuda._sleep(10_000_000))
            self._products = 10 / self._measure(lambda: self._multiply(10))

    def sleep(self, ms: float) -> None:
        """One kernel that spins, on one multiprocessor."""
        if self._real:
            torch.cuda._sleep(int(ms * self._cycles))

    def multiply(self, ms: float) -> None:
        """Products of matrices, on all of them."""
        self._multiply(max(1, round(ms * self._products)))

    def _multiply(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._one, self._one, out=self._out)

    def _measure(self, work: Callable[[], None]) -> float:
        """Milliseconds, the second time."""
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(2):
            began.record()
            work()
            ended.record()
            ended.synchronize()
        return max(0.001, float(began.elapsed_time(ended)))


def settle(device: torch.device) -> None:
    """Wait for all that the device has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wait_done(mark: CopyMark) -> float:
    """Seconds until a mark is done, asked for without waiting.

    Raises:
        NotHeldError: it does not come to be done.
    """
    began = time.monotonic()
    while not mark.done():
        if time.monotonic() - began > WAIT_S:
            raise NotHeldError(f"a mark is not done after {WAIT_S:.0f} s", {})
    return time.monotonic() - began
