"""Host memory in which copies of an engine on a GPU wait, as decode engines of the same host map it."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import torch
from gpu_cache import wait_done
from gpu_seen import Figures, held

from xpyd_sidecar.engine.shm_setup import StoreMemory
from xpyd_sidecar.memory.device import CudaMark
from xpyd_sidecar.session.link_choice import LinkOptions
from xpyd_sidecar.transport.shm.mailbox import MailboxSender
from xpyd_sidecar.transport.shm.prefill import HEAD_BYTES, SharedCopies

SIZE = 8 << 20
PEER = """
import mmap, os, sys
from xpyd_sidecar.transport.shm.mailbox import Mailbox
box = Mailbox(None)
print(box.name, flush=True)
name, size, at = bytes.fromhex(input()), int(input()), int(input())
_, fd = box.take(lambda letter: letter == name)
box.close()
memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
print("right" if memory[at:] == b"\\x5a" * (size - at) else "wrong", flush=True)
"""
"""Another process, which needs no torch: maps the memory and says what it sees."""


def shared_memory(device: torch.device) -> Figures:
    """The memory of a store, twice: it is given back in between. On a GPU copies to it do not wait for the host."""
    memory = StoreMemory(LinkOptions("shm"), SIZE, pinned=device.type == "cuda")
    found: dict[str, Any] = {}
    for turn in ("first", "again"):
        host = memory.make(SIZE).tensor
        assert memory.sharing is not None
        if device.type == "cuda":
            found |= {f"{turn}_{name}": value for name, value in _copied(host, device).items()}
        else:
            host.fill_(0x5A)
        found[f"{turn}_read"] = _read(memory.sharing)
        memory.emptied()
        found[f"{turn}_left"] = int(host.sum())
    right = {"left": 0, "read": "right", "copy_is_late": True}
    return held(found, *(f"{name}: {value}" for name, value in found.items()
                         if right.get(name.partition("_")[2], value) != value))


def _copied(host: torch.Tensor, device: torch.device) -> dict[str, Any]:
    source = torch.full((SIZE,), 0x5A, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(100_000_000)
    began = time.perf_counter()
    host.copy_(source, non_blocking=True)
    host_ms = (time.perf_counter() - began) * 1e3
    event = torch.cuda.Event()
    event.record()
    mark = CudaMark(event, device)
    late = not mark.done()
    wait_done(mark)
    return {"copy_host_ms": round(host_ms, 3), "copy_is_late": late}


def _read(sharing: SharedCopies) -> str:
    """What another process sees."""
    with subprocess.Popen([sys.executable, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        box = peer.stdout.readline().strip()
        sender = MailboxSender(box, None)
        sender.send(sharing.name, sharing.shown_fd)
        sender.close()
        told, _ = peer.communicate(f"{sharing.name.hex()}\n{sharing.size}\n{HEAD_BYTES}\n", timeout=60)
    return told.strip() or f"exit code {peer.returncode}"
