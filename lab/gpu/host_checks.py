"""A rank's own host memory: its store, which decodes of the host map, and memory that CUDA locks."""

from __future__ import annotations

import time
from typing import Any, Final

import torch

from lab.gpu.busy import wait_done
from lab.gpu.cache import copy_directly
from lab.gpu.findings import Figures, require
from lab.gpu.store_peers import read_by_peer, resident
from xpyd_sidecar.engine.worker.shm_setup import StoreMemory
from xpyd_sidecar.memory.device import CudaMark
from xpyd_sidecar.memory.registration import host_memory
from xpyd_sidecar.transport.shm.serve import ShmServer

SIZE: Final = 64 << 20
ODD_SIZE: Final = 130 << 20
"""Rounded up to a power of two it would be 256 MiB."""
SLACK: Final = 32 << 20
BYTE: Final = 0x5A
RIGHT: Final = {"read": "right", "copy_is_late": True}


def shared_memory(device: torch.device) -> Figures:
    """The memory of a store, twice: it is given up in between. On a GPU copies to it do not wait for the host."""
    server = ShmServer("this host", None, insists=True)
    memory = StoreMemory(server, SIZE, pinned=device.type == "cuda", insists=True)
    given_up: list[bool] = []
    memory.given_up = lambda: given_up.append(True)
    _filled(torch.zeros(1, dtype=torch.uint8), device)  # what a first copy loads is not to be counted
    before, found = resident("RssShmem"), dict[str, Any]()
    for turn in ("first", "again"):
        copies = server.copies
        assert copies is not None
        found |= {f"{turn}_{name}": value for name, value in _filled(memory.make(SIZE).tensor, device).items()}
        found[f"{turn}_read"] = read_by_peer(copies, BYTE)
        del copies
        memory.release()
    left = resident("RssShmem") - before
    figures = found | {"given_up": len(given_up), "left_mib": left >> 20}
    return require(figures, *_faults(found), f"{left} bytes are left of what was given up" if left > SIZE // 2 else None,
                   None if len(given_up) == 2 else f"sessions were told {len(given_up)} times, not twice")


def locked_memory(device: torch.device) -> Figures:
    """Memory that CUDA locks takes as much as is asked for, copies to it do not wait for the host, and it goes back."""
    pinned = device.type == "cuda"
    _filled(host_memory(1 << 20, pinned=pinned).tensor, device)  # what a first copy loads is not to be counted
    before = resident("RssAnon")
    chunk = host_memory(ODD_SIZE, pinned=pinned)
    found = _filled(chunk.tensor, device)
    size, is_pinned = len(chunk.view), bool(chunk.tensor.is_pinned()) if pinned else False
    grown = resident("RssAnon") - before
    del chunk
    left = resident("RssAnon") - before
    figures = found | {"asked_mib": ODD_SIZE >> 20, "taken_mib": grown >> 20, "left_mib": left >> 20}
    return require(figures, *_faults(found), None if size == ODD_SIZE else f"{size} bytes, not {ODD_SIZE}",
                   None if is_pinned is pinned else "torch does not take it for locked memory",
                   f"{ODD_SIZE} bytes take {grown}" if abs(grown - ODD_SIZE) > SLACK else None,
                   f"{left} bytes are left of it" if left > SLACK else None)


def _faults(found: Figures) -> list[str]:
    wanted = {name: RIGHT.get(name.removeprefix("first_").removeprefix("again_")) for name in found}
    return [f"{name}: {value}" for name, value in found.items() if wanted[name] not in {None, value}]


def _filled(host: torch.Tensor, device: torch.device) -> Figures:
    """Fill host memory, on a GPU by a copy behind other work; whether the host waited for it."""
    if device.type != "cuda":
        host.fill_(BYTE)
        return {}
    source = torch.full((len(host),), BYTE, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(100_000_000)
    began = time.perf_counter()
    copy_directly(host, source, host)
    host_ms = (time.perf_counter() - began) * 1e3
    event = torch.cuda.Event()
    event.record()
    mark = CudaMark(event, device)
    late = not mark.done()
    wait_done(mark)
    return {"copy_host_ms": round(host_ms, 3), "copy_is_late": late}
