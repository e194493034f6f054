"""The order of copies beside the compute stream: out behind what writes the blocks, in behind what still uses them.

On a CPU every copy is made at once and its mark has passed: that shows the checks themselves, the bytes, and the sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from lab.gpu.busy import Busy, settle, wait_done
from lab.gpu.cache import RING_BYTES, Blocks, Cache, host, packed, right_sums, unpacked
from lab.gpu.findings import Figures, require

IDS = Blocks((5, 0, 127, 64, 63, 62, 90, 17))
MANY = Blocks((*range(40, 60), 3), 11)
"""Over three runs, of which the first and the last are not whole."""
COMING = (IDS, Blocks(tuple(range(32, 40)), 5), Blocks((9, -1, 8, -1, 70), 14, 1, 1), MANY)
"""Whole blocks, a row of them, one head of some in two runs, many."""
BUSY_MS = 20.0
LATE_MS = 100.0
SOON_S = 0.05
"""How long after the work before it a copy of 512 KiB may take."""
WARM = 4
"""Rounds in which memory is taken and kernels are loaded, which may wait for the stream: their marks are not counted."""
KEPT = 1000


def copies_out(device: torch.device, rounds: int = 6) -> Figures:
    """Blocks are written by a kernel that waits behind others, copied out, and written over at once.

    In turn one request, and two together with one more behind them, which passes through the same memory of the device.
    """
    cache, busy = Cache(device), Busy(device)
    wrong = late = copies = summed = 0
    for kind in busy.kinds:
        for salt in range(rounds + WARM):
            steps = [[IDS, MANY], [IDS]] if salt % 2 else [[IDS]]
            out = [[(blocks, host(blocks.size, device)) for blocks in step] for step in steps]
            cache.ruin()
            kind(BUSY_MS)
            cache.fill(salt)
            made = [cache.gather(step) for step in out]
            late += not any(mark.done() for mark, _ in made) and salt >= WARM
            cache.memory.fence()
            cache.ruin()
            for (mark, sums), step in zip(made, out, strict=True):
                wait_done(mark)
                wrong += sum(bytes(chunk.view) != packed(blocks, salt) for blocks, chunk in step)
                summed += not right_sums([(blocks, packed(blocks, salt)) for blocks, _ in step], sums)
                copies += len(step)
    figures = {"copies": copies, "wrong": wrong, "wrong_sums": summed, "rounds": rounds * len(busy.kinds), "late": late}
    return require(figures, f"{wrong} copies have other bytes" if wrong else None,
                   f"{summed} times the sums are others" if summed else None, never_late(device, figures))


def copies_in(device: torch.device, rounds: int = 8) -> Figures:
    """Earlier kernels still write to the blocks when a payload is placed; what is read after the mark is the payload.

    It comes to the device meanwhile, which waits for no kernel: then the host memory is written over, and the blocks still
    wait for the moment from when on they may be written.
    """
    cache, busy = Cache(device), Busy(device)
    wrong = late = copies = summed = 0
    for kind in busy.kinds:
        for salt in range(rounds + WARM):
            blocks = COMING[salt % len(COMING)]
            payload = np.random.default_rng(salt).bytes(blocks.size)
            chunk = host(blocks.size, device)
            chunk.view[:] = payload
            at = (salt % 2) * (RING_BYTES // 2)
            kind(BUSY_MS)
            cache.ruin()
            moment = cache.copies.moment()
            brought = cache.copies.bring([(chunk.tensor, at)])
            placed, sums = cache.scatter(blocks, at, [brought, moment])
            wait_done(brought)
            chunk.view[:] = bytes(blocks.size)
            late += not placed.done() and salt >= WARM
            wait_done(placed)
            wrong += not _placed(cache, blocks, payload)
            summed += not right_sums([(blocks, payload)], sums)
            copies += 1
    figures = {"copies": copies, "wrong": wrong, "wrong_sums": summed, "rounds": rounds * len(busy.kinds), "late": late}
    return require(figures, f"after {wrong} copies the cache has other bytes" if wrong else None,
                   f"{summed} times the sums are others" if summed else None, never_late(device, figures))


def _placed(cache: Cache, blocks: Blocks, payload: bytes) -> bool:
    """Whether a ruined cache has a payload in its blocks and heads, and is as it was everywhere else."""
    heads = slice(blocks.head, blocks.head + blocks.heads)
    wanted = [nth for nth, block in enumerate(blocks.ids) if block >= 0]
    ids = [blocks.ids[nth] for nth in wanted]
    for layer, part in enumerate(unpacked(blocks, payload)):
        found = cache.bytes_of(layer)
        if not np.array_equal(found[ids, heads], part[wanted]):
            return False
        found[ids, heads] = 0xFF
        if not (found == 0xFF).all():
            return False
    return True


def marks(device: torch.device) -> Figures:
    """A mark is not done before the work that it stands behind, and done soon after it."""
    cache, busy = Cache(device), Busy(device)
    out = host(IDS.size, device)
    cache.fill(1)
    wait_done(cache.gather([(IDS, out)])[0])
    settle(device)  # what a first copy allocates and loads is not to be timed
    if device.type != "cuda":
        return require({"late_ms": 0.0}, None if cache.gather([(IDS, out)])[0].done() else "a copy on a CPU is late")
    busy.sleep(LATE_MS)
    before = torch.cuda.Event()
    before.record()
    mark, _ = cache.gather([(IDS, out)])
    began, early, looks = time.monotonic(), 0, 0
    while not before.query():
        early += mark.done() and not before.query()
        looks += 1
    passed = time.monotonic()
    wait_done(mark)
    done = time.monotonic()
    figures = {"busy_ms": round((passed - began) * 1e3, 2), "late_ms": round((done - passed) * 1e3, 3), "looks": looks,
               "early": early}
    return require(figures, f"done {early} times before the work that it stands behind" if early else None,
                   "the stream was not busy" if passed - began < LATE_MS / 2e3 else None,
                   f"done {done - passed:.3f} s after it" if done - passed > SOON_S else None)


def kept(device: torch.device, allocated: Callable[[], int] | None = None, copies: int = KEPT) -> Figures:
    """Copies that wait in host memory, with their sums, keep nothing of the device's."""
    cache = Cache(device)
    if allocated is None:
        allocated = (lambda: torch.cuda.memory_allocated(device)) if device.type == "cuda" else (lambda: 0)
    waiting, before = [], 0
    for at in range(copies):
        out = host(IDS.size, device)
        mark, sums = cache.gather([(IDS, out)])
        wait_done(mark)
        waiting.append((out, mark, sums))
        if at == min(9, copies - 1):
            before = allocated()
    grown = allocated() - before
    figures = {"copies": len(waiting), "kept_bytes": IDS.size * len(waiting), "grown_bytes": grown}
    more = f"{copies} copies in host memory hold {grown} bytes more of the device than the first 10"
    return require(figures, more if grown > IDS.size else None)


def never_late(device: torch.device, figures: Figures) -> str | None:
    """A mark that is done while the stream is busy shows nothing of order."""
    if device.type == "cuda" and figures["late"] != figures["rounds"]:
        return f"{figures['rounds'] - figures['late']} marks were done while the stream was busy"
    return None
