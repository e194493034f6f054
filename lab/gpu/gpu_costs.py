"""What copies cost on a device: the engine's thread, the bus, and a forward beside them. Sizes of an 8B model.

On a CPU small sizes show that the checks run; their figures mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from gpu_cache import settle, wait_done
from gpu_seen import Figures, held

from xpyd_sidecar.engine.kv_cache import KvCache, Move, chunk
from xpyd_sidecar.memory.marks import CopyMark
from xpyd_sidecar.memory.staging import Chunk

LAUNCHES = 8
"""Of kernels and copies for all layers and requests of a step, at most."""


class Size(NamedTuple):
    """Of a cache and of a step."""

    layers: int
    blocks: int
    heads: int
    step_blocks: int
    """That one step computes."""
    slab_bytes: int


MODEL = Size(36, 2048, 8, 512, 256 << 20)
"""Blocks of 16 tokens, 8 heads of 128, keys and values in 16 bits: 64 KiB a layer, 1.1 GiB a step of 8,192 tokens."""
TINY = Size(2, 16, 2, 4, 1 << 20)


class Model:
    """A cache of that size, and host memory for a step of it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.size = MODEL if device.type == "cuda" else TINY
        shape = (self.size.blocks, self.size.heads, 16, 256)
        caches = {f"layer{at}": torch.zeros(shape, dtype=torch.float16, device=device) for at in range(self.size.layers)}
        self.memory = KvCache(caches, self.size.blocks)
        self.memory.prepare(self.size.slab_bytes)
        self.each = self.memory.block_bytes[0]
        self.bytes = self.size.step_blocks * self.memory.total_block_bytes
        self.host = chunk(self.bytes, pinned=device.type == "cuda")
        self.ids = np.random.default_rng(1).permutation(self.size.blocks)[:self.size.step_blocks].astype(np.int64)

    def moves(self, requests: int) -> list[Move]:
        """A step's blocks as those of so many requests, no part larger than the memory on the device."""
        out, at = [], 0
        for ids in np.array_split(self.ids, requests):
            most = max(1, self.size.slab_bytes // self.memory.total_block_bytes)
            for part in (ids[start:start + most] for start in range(0, len(ids), most)):
                size = len(part) * self.memory.total_block_bytes
                starts = [layer * len(part) * self.each for layer in range(self.size.layers)]
                out.append(Move(0, part, self.host.tensor[at:at + size], starts))
                at += size
        return out

    def frames(self) -> list[Move]:
        """The same as they arrive: frames of 1 MiB of one layer."""
        run = max(1, (1 << 20) // self.each)
        out, at = [], 0
        for layer in range(self.size.layers):
            for start in range(0, len(self.ids), run):
                part = self.ids[start:start + run]
                out.append(Move(layer, part, self.host.tensor[at:at + len(part) * self.each]))
                at += len(part) * self.each
        return out


def costs(device: torch.device) -> Figures:
    """Microseconds of the engine's thread for a step's copies, GB/s beside one plain copy, launches of one step."""
    model = Model(device)
    figures: Figures = {"step_mib": model.bytes >> 20}
    if device.type == "cuda":
        figures |= _plain(model)
    wrong = []
    orders = {"out_1": partial(model.memory.gather, model.moves(1)),
              "out_16": partial(model.memory.gather, model.moves(16)),
              "in_frames": partial(model.memory.scatter, model.frames())}
    for name, order in orders.items():
        before = model.memory.launches
        figures |= {f"{name}_{what}": value for what, value in _timed(model, order).items()}
        rounds = max(1, -(-model.bytes // model.size.slab_bytes))
        launches = (model.memory.launches - before) / REPEATS
        figures[f"{name}_launches"] = launches
        if name.startswith("out") and launches > LAUNCHES * rounds / 2:
            wrong.append(f"{name}: {launches:.0f} launches in {rounds} rounds, {LAUNCHES} are allowed for two")
    return held(figures, *wrong)


REPEATS = 4


def _timed(model: Model, order: Callable[[], CopyMark]) -> Figures:
    wait_done(order())
    hosts, wholes = [], []
    for _ in range(REPEATS - 1):
        settle(model.device)
        began = time.perf_counter()
        mark = order()
        hosts.append(time.perf_counter() - began)
        wait_done(mark)
        wholes.append(time.perf_counter() - began)
    return {"host_us": round(min(hosts) * 1e6), "gb_s": round(model.bytes / min(wholes) / 1e9, 2)}


def _plain(model: Model) -> Figures:
    """One copy of the same bytes by CUDA itself, both ways."""
    there = torch.empty(model.bytes, dtype=torch.uint8, device=model.device)
    out = {}
    for name, copy in (("memcpy_out_gb_s", lambda: model.host.tensor.copy_(there, non_blocking=True)),
                       ("memcpy_in_gb_s", lambda: there.copy_(model.host.tensor, non_blocking=True))):
        best = 1e9
        for _ in range(3):
            settle(model.device)
            began = time.perf_counter()
            copy()
            settle(model.device)
            best = min(best, time.perf_counter() - began)
        out[name] = round(model.bytes / best / 1e9, 2)
    return out


def beside(device: torch.device) -> Figures:
    """How much longer a forward takes while a step's KV is copied. Figures alone."""
    model = Model(device)
    if device.type != "cuda":
        return {"model": "none: a CPU copies before it goes on"}
    one = torch.randn(4096, 4096, dtype=torch.float16, device=device)
    out = torch.empty_like(one)
    large = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    copy = torch.empty_like(large)
    works: dict[str, Callable[[], object]] = {
        "products": lambda: [torch.mm(one, one, out=out) for _ in range(240)],
        "reads": lambda: [copy.copy_(large) for _ in range(80)]}
    figures: Figures = {}
    for work_name, work in works.items():
        alone = _milliseconds(work)
        figures[f"{work_name}_ms"] = round(alone, 1)
        for name, moves, call in (("out", model.moves(16), model.memory.gather),
                                  ("in", model.frames(), model.memory.scatter)):
            wait_done(call(moves))
            settle(device)
            torch.cuda._sleep(200_000_000)  # the host orders both while the device does neither
            mark = call(moves)
            took = _milliseconds(work, 1, settled=False)
            wait_done(mark)
            figures[f"{work_name}_beside_{name}"] = round(took / alone, 3)
    return figures


def _milliseconds(work: Callable[[], object], times: int = 3, *, settled: bool = True) -> float:
    best = 1e9
    for _ in range(times):
        if settled:
            torch.cuda.synchronize()
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        work()
        ended.record()
        ended.synchronize()
        best = min(best, float(began.elapsed_time(ended)))
    return best


def strided(device: torch.device) -> Figures:
    """Tokens before heads, some heads, bytes with a scale: out and back, whole."""
    shapes: dict[str, Callable[[], torch.Tensor]] = {
        "tokens first": lambda: torch.randn(64, 16, 8, 128, device=device, dtype=torch.float16).transpose(1, 2),
        "fp8 with scale": lambda: torch.randint(0, 99, (64, 64, 132), dtype=torch.uint8, device=device),
        "kernel blocks": lambda: torch.randn(128, 8, 4, 64, device=device).transpose(1, 2).unflatten(0, (64, 2)),
        "odd": lambda: torch.randint(0, 99, (64, 7, 3), dtype=torch.uint8, device=device)}
    wrong = []
    ids = np.array([5, 0, 63, 17], np.int64)
    for name, make in shapes.items():
        cache = make()
        memory = KvCache({"layer": cache}, 64)
        memory.prepare(1 << 20)
        packed: Chunk = chunk(len(ids) * memory.block_bytes[0], pinned=device.type == "cuda")
        moves = [Move(0, ids, packed.tensor)]
        wait_done(memory.gather(moves))
        before = cache.clone()
        if bytes(packed.view) != before[ids.tolist()].contiguous().view(torch.uint8).cpu().numpy().tobytes():
            wrong.append(f"{name}: other bytes came out")
        cache.zero_()
        wait_done(memory.scatter(moves))
        if not torch.equal(cache[ids.tolist()], before[ids.tolist()]) or bool(cache[1].any()):
            wrong.append(f"{name}: other bytes went in")
    return held({"shapes": len(shapes), "wrong": len(wrong)}, *wrong)
