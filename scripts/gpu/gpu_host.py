"""Pinned host memory as peers of one host would read it, and memory that they can map made pinned. Figures alone.

Copies of an engine on a GPU wait in pinned memory, and decode reads them from there. Whether ``process_vm_readv`` can, and
whether a memfd can be registered with CUDA instead, decides which link the engines of one host take.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from typing import Any

import torch
from gpu_cache import wait_done
from gpu_seen import Figures, LeftOutError

from xpyd_sidecar.engine import kv_cache
from xpyd_sidecar.memory.device import CudaMark
from xpyd_sidecar.transport.moves_plain import address_of
from xpyd_sidecar.transport.shm import mapped

SIZE = 8 << 20
READ = """
import ctypes, os, sys
pid, address, size = map(int, sys.argv[1:])
libc = ctypes.CDLL(None, use_errno=True)
class Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
into = ctypes.create_string_buffer(size)
libc.process_vm_readv.restype = ctypes.c_ssize_t
got = libc.process_vm_readv(pid, ctypes.byref(Span(ctypes.addressof(into), size)), ctypes.c_ulong(1),
                            ctypes.byref(Span(address, size)), ctypes.c_ulong(1), ctypes.c_ulong(0))
print(os.strerror(ctypes.get_errno()) if got < 0 else "right" if into.raw == b"\\x5a" * size else f"wrong, {got} bytes")
"""
"""A peer, which needs no torch: reads so many bytes of another process and says what came."""


def pinned_memory(device: torch.device) -> Figures:
    """What a process beside this one reads of a pinned chunk, and of one of ordinary memory."""
    found = {"plain_read": _read(kv_cache.chunk(SIZE, pinned=False).view)}
    if device.type != "cuda":
        return found
    return found | {"pinned_read": _read(kv_cache.chunk(SIZE, pinned=True).view)}


def registered_memory(device: torch.device) -> Figures:
    """A memfd that peers may map, registered with CUDA: whether copies to it are right, and do not wait."""
    if device.type != "cuda":
        raise LeftOutError("a CPU pins no memory")
    view = mapped.make(SIZE)
    host = torch.frombuffer(view, dtype=torch.uint8)
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(address_of(view), SIZE, 0))
    if code:
        return {"register": f"error {code} of CUDA"}
    try:
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
        return {"register": "ok", "copy_host_ms": round(host_ms, 3), "copy_is_late": late,
                "bytes": "right" if view == b"\x5a" * SIZE else "wrong", "read": _read(view)}
    finally:
        torch.cuda.synchronize(device)
        runtime.cudaHostUnregister(address_of(view))


def _read(view: memoryview) -> str:
    """What another process says of it."""
    libc = ctypes.CDLL(None)
    libc.prctl(0x59616D61, ctypes.c_ulong(2**64 - 1), 0, 0, 0)  # Yama: any process of this user may read this one
    view[:] = b"\x5a" * len(view)
    command = [sys.executable, "-c", READ, str(os.getpid()), str(address_of(view)), str(len(view))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]
