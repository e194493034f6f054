"""Copies out of a paged cache and into it by ``xpyd_sidecar.engine.kv_cache``, while kernels keep the compute stream busy.

On a CPU every copy is made at once and its mark has passed: that shows the checks themselves, and the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from gpu_cache import BLOCK_BYTES, BLOCKS, HEADS, LAYERS, Busy, Cache, gather, host, packed, settle, wait_done
from gpu_seen import Figures, held

from xpyd_sidecar.engine.kv_cache import Move

IDS = (5, 0, 127, 64, 63, 62, 90, 17)
BUSY_MS = 20.0
LATE_MS = 100.0
SOON_S = 0.05
"""How long after the work before it a copy of 128 KiB may take."""
WARM = 2
"""Rounds in which memory is taken and kernels are loaded, which may wait for the stream: their marks are not counted."""
KEPT = 1000


def copies_out(device: torch.device, rounds: int = 6) -> Figures:
    """Blocks are written by a kernel that waits behind others, copied out, and written over at once.

    In turn one request, and two that need the memory on the device twice.
    """
    cache, busy = Cache(device), Busy(device)
    size = LAYERS * len(IDS) * BLOCK_BYTES
    wrong = late = copies = 0
    for kind in busy.kinds:
        for salt in range(rounds + WARM):
            requests = [IDS, tuple(reversed(IDS)), IDS][:1 + 2 * (salt % 2)]
            chunks = [host(size, device) for _ in requests]
            cache.ruin()
            kind(BUSY_MS)
            cache.fill(salt)
            mark = gather(cache, list(zip(requests, chunks, strict=True)))
            late += not mark.done() and salt >= WARM
            cache.memory.fence()
            cache.ruin()
            wait_done(mark)
            for ids, chunk in zip(requests, chunks, strict=True):
                found = bytes(chunk.view)
                each = len(found) // LAYERS
                wrong += sum(found[layer * each:(layer + 1) * each] != packed(layer, salt, ids) for layer in range(LAYERS))
                copies += LAYERS
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
            staging = host(cache.memory.largest_frame, device)
            payload = packed(0, salt, range(BLOCKS))[:size]
            staging.view[:size] = payload
            kind(BUSY_MS)
            cache.ruin()
            mark = cache.memory.scatter([Move(0, np.array(ids, np.int64), staging.tensor, head=head, heads=heads)])
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
    out = host(LAYERS * len(IDS) * BLOCK_BYTES, device)
    cache.fill(1)
    gather(cache, [(IDS, out)])
    settle(device)  # what a first copy allocates and loads is not to be timed
    if device.type != "cuda":
        return held({"late_ms": 0.0}, None if gather(cache, [(IDS, out)]).done() else "a copy on a CPU is late")
    busy.sleep(LATE_MS)
    before = torch.cuda.Event()
    before.record()
    mark = gather(cache, [(IDS, out)])
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
    size = LAYERS * len(IDS) * BLOCK_BYTES
    if allocated is None:
        allocated = (lambda: torch.cuda.memory_allocated(device)) if device.type == "cuda" else (lambda: 0)
    held_copies, before = [], 0
    for at in range(copies):
        out = host(size, device)
        mark = gather(cache, [(IDS, out)])
        wait_done(mark)
        held_copies.append((out, mark))
        if at == min(9, copies - 1):
            before = allocated()
    grown = allocated() - before
    figures = {"copies": len(held_copies), "kept_bytes": size * len(held_copies), "grown_bytes": grown}
    more = f"{copies} copies in host memory hold {grown} bytes more of the device than the first 10"
    return held(figures, more if grown > size else None)


def _never_late(device: torch.device, figures: Figures) -> str | None:
    """A mark that is done while the stream is busy shows nothing of order."""
    if device.type == "cuda" and figures["late"] != figures["rounds"]:
        return f"{figures['rounds'] - figures['late']} marks were done while the stream was busy"
    return None
