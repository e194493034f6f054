"""Copies out of a paged cache and into it by ``xpyd_sidecar.engine.memory``, while kernels keep the compute stream busy.

On a CPU every copy is made at once and its mark has passed: that shows the checks themselves, and the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from gpu_cache import BLOCK_BYTES, BLOCKS, HEADS, LAYERS, Busy, Cache, packed, settle, wait_done
from gpu_seen import Figures, held

from xpyd_sidecar.engine import memory

IDS = (5, 0, 127, 64, 63, 62, 90, 17)
BUSY_MS = 20.0
LATE_MS = 100.0
SOON_S = 0.05
"""How long after the work before it a copy of 128 KiB may take."""
WARM = 2
"""Rounds in which memory is taken and kernels are loaded, which may wait for the stream: their marks are not counted."""
KEPT = 100


def copies_out(device: torch.device, rounds: int = 6) -> Figures:
    """Blocks are written by a kernel that waits behind others, copied out, and written over at once."""
    cache, busy = Cache(device), Busy(device)
    index = cache.memory.index(IDS)
    wrong = late = copies = 0
    for kind in busy.kinds:
        for salt in range(rounds + WARM):
            chunks = [memory.chunk(len(IDS) * BLOCK_BYTES, pinned=device.type == "cuda") if salt % 2 else None
                      for _ in range(LAYERS)]
            cache.ruin()
            kind(BUSY_MS)
            cache.fill(salt)
            outs = [cache.memory.copy_out(layer, index, chunks[layer]) for layer in range(LAYERS)]
            late += not outs[0].mark.done() and salt >= WARM
            cache.memory.fence()
            cache.ruin()
            for layer, out in enumerate(outs):
                wait_done(out.mark)
                wrong += bytes(out.data) != packed(layer, salt, IDS)
            copies += len(outs)
    figures = {"copies": copies, "wrong": wrong, "rounds": rounds * len(busy.kinds), "late": late}
    return held(figures, f"{wrong} copies have other bytes" if wrong else None, _never_late(device, figures))


def copies_in(device: torch.device, rounds: int = 6) -> Figures:
    """Earlier kernels still write to the blocks when a payload is placed; what is read after the mark is the payload.

    In turn whole blocks, a run of them, and one head of each. Staging is written over as soon as the mark is done.
    """
    cache, busy = Cache(device), Busy(device)
    ways = ((IDS, 0, 0), (tuple(range(32, 40)), 0, 0), (IDS, 1, 1))
    wrong = late = copies = 0
    for kind in busy.kinds:
        for salt in range(rounds + WARM + 1):
            ids, head, heads = ways[salt % len(ways)]
            size = len(ids) * BLOCK_BYTES // (HEADS if heads else 1)
            staging = memory.chunk(cache.memory.largest_frame, pinned=device.type == "cuda")
            payload = packed(0, salt, range(BLOCKS))[:size]
            staging.view[:size] = payload
            kind(BUSY_MS)
            cache.ruin()
            mark = cache.memory.place(0, ids, staging, size, head=head, heads=heads)
            late += not mark.done() and salt > WARM
            wait_done(mark)
            staging.view[:size] = bytes(size)
            found = cache.layers[0].cpu()
            took = found[list(ids), head:head + heads] if heads else found[list(ids)]
            kept = [block for block in range(BLOCKS) if block not in ids]
            wrong += took.contiguous().numpy().tobytes() != payload or bool((found[kept] != -1).any())
            copies += 1
    figures = {"copies": copies, "wrong": wrong, "rounds": rounds * len(busy.kinds), "late": late}
    return held(figures, f"after {wrong} copies the cache has other bytes" if wrong else None, _never_late(device, figures))


def marks(device: torch.device) -> Figures:
    """A mark is not done before the work that it stands behind, and done soon after it."""
    cache, busy = Cache(device), Busy(device)
    index = cache.memory.index(IDS)
    cache.fill(1)
    cache.memory.copy_out(0, index)
    cache.memory.fence()
    settle(device)  # what a first copy allocates and loads is not to be timed
    if device.type != "cuda":
        return held({"late_ms": 0.0}, None if cache.memory.copy_out(0, index).mark.done() else "a copy on a CPU is late")
    busy.sleep(LATE_MS)
    before = torch.cuda.Event()
    before.record()
    mark = cache.memory.copy_out(0, index).mark
    began, early, looks = time.monotonic(), 0, 0
    while not before.query():
        early += mark.done() and not before.query()
        looks += 1
    passed = time.monotonic()
    wait_done(mark)
    done = time.monotonic()
    figures = {"busy_ms": round((passed - began) * 1e3, 2), "late_ms": round((done - passed) * 1e3, 3), "looks": looks,
               "early": early}
    return held(figures, f"done {early} times before the work that it stands behind" if early else None,
                "the stream was not busy" if passed - began < LATE_MS / 2e3 else None,
                f"done {done - passed:.3f} s after it" if done - passed > SOON_S else None)


def kept(device: torch.device, allocated: Callable[[], int] | None = None, copies: int = KEPT) -> Figures:
    """Copies that wait in host memory keep nothing of the device's."""
    cache = Cache(device)
    index = cache.memory.index(IDS)
    size = len(IDS) * BLOCK_BYTES
    if allocated is None:
        allocated = (lambda: torch.cuda.memory_allocated(device)) if device.type == "cuda" else (lambda: 0)
    held_copies, before = [], 0
    for at in range(copies):
        out = cache.memory.copy_out(at % LAYERS, index)
        cache.memory.fence()
        wait_done(out.mark)
        held_copies.append(out)
        if at == min(9, copies - 1):
            before = allocated()
    grown = allocated() - before
    figures = {"copies": len(held_copies), "kept_bytes": size * len(held_copies), "grown_bytes": grown}
    more = f"{copies} copies in host memory hold {grown} bytes more of the device than the first 10"
    return held(figures, more if grown > size else None)


def costs(device: torch.device, copies: int = 64) -> Figures:
    """What the engine's thread spends for a copy of 128 KiB, and how fast many go. Figures alone."""
    cache = Cache(device)
    index = cache.memory.index(IDS)
    size = len(IDS) * BLOCK_BYTES
    chunks = [memory.chunk(size, pinned=device.type == "cuda") for _ in range(copies)]
    figures: Figures = {"bytes_each": size}

    def out(at: int) -> memory.Mark:
        return cache.memory.copy_out(at % LAYERS, index, chunks[at]).mark

    def into(at: int) -> memory.Mark:
        return cache.memory.place(at % LAYERS, IDS, chunks[at], size)

    for name, order in (("out", out), ("in", into)):
        for at in range(copies):  # the first time, memory is taken and kernels are loaded
            wait_done(order(at))
        settle(device)
        began = time.perf_counter()
        ordered = [order(at) for at in range(copies)]
        host = time.perf_counter() - began
        for mark in ordered:
            wait_done(mark)
        whole = time.perf_counter() - began
        figures |= {f"{name}_host_us": round(host / copies * 1e6, 1), f"{name}_gb_s": round(size * copies / whole / 1e9, 2)}
    cache.memory.fence()
    settle(device)
    return figures


def _never_late(device: torch.device, figures: Figures) -> str | None:
    """A mark that is done while the stream is busy shows nothing of order."""
    if device.type == "cuda" and figures["late"] != figures["rounds"]:
        return f"{figures['rounds'] - figures['late']} marks were done while the stream was busy"
    return None
