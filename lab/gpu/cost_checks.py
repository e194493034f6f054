"""What copies cost on a device: the thread that launches them, the bus, and a forward beside them. Sizes of an 8B model.

On a CPU small sizes show that the checks run; their times mean nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from lab.gpu.busy import settle, wait_done
from lab.gpu.cache import copy_directly, host, with_copies
from lab.gpu.findings import Figures, require
from xpyd_sidecar.engine.worker.kv_cache import CacheRows
from xpyd_sidecar.kv.packing import PackedArray, run_blocks
from xpyd_sidecar.memory.device import PackedRows
from xpyd_sidecar.memory.marks import CopyMark
from xpyd_sidecar.memory.registration import parts

LAUNCHES: Final = 4
"""Of kernels and copies for all layers and blocks, at most, beside those of bytes between the device and the host."""
REPEATS: Final = 6
BLOCK_TOKENS: Final = 16
HEADS: Final = 8
HEAD_VALUES: Final = 256
"""Of one token, keys and values."""
AHEAD_CYCLES: Final = 200_000_000
"""Some 0.1 s, in which the host enqueues what the device is then to do at once."""

TIMES: Final = 4
"""Steps that are copied beside a forward, so that copies last as long as it does."""


class Size(NamedTuple):
    """Of a cache, of prompts whose copies are timed, in tokens, and of requests that share a step."""

    layers: int
    blocks: int
    lengths: tuple[int, ...]
    requests: int


MODEL: Final = Size(36, 2048, (256, 1024, 4096), 16)
"""Keys and values in 16 bits: 64 KiB a block and layer, 144 KiB a token."""
TINY: Final = Size(2, 16, (64, 128), 2)


class Step(NamedTuple):
    """Blocks of some requests, packed one request behind the other, each a span of host memory."""

    packed: PackedRows
    spans: Sequence[tuple[Any, int]]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.packed.size

    @property
    def copies(self) -> int:
        """Between the device and the host: one for each span, and one more where a part that CUDA has locked ends in it."""
        return sum(len([*parts(host.data_ptr(), len(host))]) for host, _ in self.spans)


class Model:
    """A cache of that size, and memory for the longest prompt."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.size = MODEL if device.type == "cuda" else TINY
        shape = self.size.blocks, BLOCK_TOKENS, HEADS, HEAD_VALUES
        caches = {f"layer{at}": torch.zeros(shape, dtype=torch.bfloat16, device=device).transpose(1, 2)
                  for at in range(self.size.layers)}
        self.memory, self.copies = with_copies(caches, self.size.blocks)
        self.head_bytes = self.memory.block_bytes[0] // HEADS
        self.bytes = self.size.lengths[-1] // BLOCK_TOKENS * self.memory.total_block_bytes
        self.copies.prepare(self.bytes, self.bytes)
        view, _ = self.memory.view(0, 0, HEADS, self.head_bytes)
        self.copies.compile(view.shape, HEADS)
        self.host = host(self.bytes, device)
        self.ids = np.random.default_rng(1).permutation(self.size.blocks).astype(np.int64)

    def step(self, tokens: int, requests: int = 1) -> Step:
        """So many tokens, divided among requests."""
        at, rows, arrays, spans = 0, [], list[tuple[PackedArray, int]](), []
        for ids in np.array_split(self.ids[:tokens // BLOCK_TOKENS], requests):
            layout = PackedArray(0, len(ids), HEADS, self.head_bytes, run_blocks(self.head_bytes, opaque=False))
            size = self.size.layers * layout.size
            some = [(layout, at + layer * layout.size) for layer in range(self.size.layers)]
            rows.append(CacheRows([*range(self.size.layers)], some, ids))
            arrays += some
            spans.append((self.host.tensor[at:at + size], at))
            at += size
        return Step(PackedRows(self.memory.rows(rows), arrays, at), spans)

    def gather(self, step: Step) -> CopyMark:
        """All of it out."""
        return self.copies.gather(step.packed, step.spans)[0]

    def bring(self, step: Step) -> CopyMark:
        """All of it into the ring."""
        return self.copies.bring(step.spans)

    def scatter(self, step: Step, after: CopyMark) -> CopyMark:
        """All of it out of the ring into the cache."""
        return self.copies.scatter(step.packed, 0, [after])[0]


def costs(device: torch.device) -> Figures:
    """By length of prompt: ms of each of the three moves, µs of the thread that launches it, GB/s beside one plain copy.

    What must hold is that launches do not grow with tokens, blocks, layers or requests, but for one copy of each request
    and of each part that CUDA has locked.
    """
    model = Model(device)
    figures: Figures = _plain(model) if device.type == "cuda" else {}
    launches: dict[str, int] = {}
    longest = model.size.lengths[-1]
    for tokens, requests in (*((length, 1) for length in model.size.lengths), (longest, model.size.requests)):
        step = model.step(tokens, requests)
        name = f"{tokens}" + (f"x{requests}" if requests > 1 else "")
        moves = {"gather": partial(model.gather, step), "bring": partial(model.bring, step),
                 "scatter": partial(model.scatter, step, model.bring(step))}
        figures[name] = {"mib": step.size >> 20}
        for move, order in moves.items():
            before = model.copies.launches
            figures[name][move] = _timed(model, step.size, order)
            copies = 0 if move == "scatter" else step.copies
            launches[f"{move} of {name}"] = (model.copies.launches - before) // REPEATS - copies
    figures["launches"] = max(launches.values())
    return require(figures, *(f"{name}: {count} launches beside copies to and from the host, {LAUNCHES} are allowed"
                              for name, count in launches.items() if count > LAUNCHES))


def _timed(model: Model, size: int, order: Callable[[], CopyMark]) -> Figures:
    """Medians, without the first."""
    hosts, wholes = [], []
    for _ in range(REPEATS):
        settle(model.device)
        began = time.perf_counter()
        mark = order()
        hosts.append(time.perf_counter() - began)
        wait_done(mark)
        wholes.append(time.perf_counter() - began)
    whole = statistics.median(wholes[1:])
    return {"ms": round(whole * 1e3, 3), "host_us": round(statistics.median(hosts[1:]) * 1e6),
            "gb_s": round(size / whole / 1e9, 1)}


def _plain(model: Model) -> Figures:
    """One copy of the longest prompt's bytes by CUDA itself, both ways."""
    there = torch.empty(model.bytes, dtype=torch.uint8, device=model.device)
    out = {}
    on_host = model.host.tensor
    for name, copy in (("memcpy_out_gb_s", partial(copy_directly, on_host, there, on_host)),
                       ("memcpy_in_gb_s", partial(copy_directly, there, on_host, on_host))):
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
    """How much longer a forward takes while KV is copied. Figures alone."""
    model = Model(device)
    if device.type != "cuda":
        return {"model": "none: a CPU copies before it goes on"}
    one = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(one)
    large = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    copy = torch.empty_like(large)
    works: dict[str, Callable[[], object]] = {
        "products": lambda: [torch.mm(one, one, out=out) for _ in range(240)],
        "reads": lambda: [copy.copy_(large) for _ in range(80)]}
    step, figures = model.step(model.size.lengths[-1], model.size.requests), Figures()

    def leave() -> list[CopyMark]:
        return [model.gather(step) for _ in range(TIMES)]

    def come() -> list[CopyMark]:
        return [model.scatter(step, model.bring(step)) for _ in range(TIMES)]

    for name, work in works.items():
        alone = min(_milliseconds(work) for _ in range(3))
        figures[f"{name}_ms"] = round(alone, 1)
        for way, order, behind in (("out", leave, False), ("in", come, True)):
            for mark in order():  # once before, so that nothing is allocated beside
                wait_done(mark)
            settle(device)
            figures[f"{name}_beside_{way}"] = round(_milliseconds(work, order, behind=behind) / alone, 3)
    return figures


def _milliseconds(work: Callable[[], object], order: Callable[[], Sequence[CopyMark]] | None = None, *,
                  behind: bool = False) -> float:
    """What work takes on the compute stream, with copies beside it.

    ``behind``: copies that wait for nothing, which are ordered as the work begins; others wait for what was enqueued before
    them, so they are ordered before the work, and begin with it.
    """
    torch.cuda.synchronize()
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(AHEAD_CYCLES)
    copies = order() if order is not None and not behind else []
    began.record()
    work()
    ended.record()
    if order is not None and behind:
        began.synchronize()
        copies = order()
    ended.synchronize()
    for mark in copies:
        wait_done(mark)
    return float(began.elapsed_time(ended))
