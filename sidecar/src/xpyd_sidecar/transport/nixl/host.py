"""Whether this host lets a process use RDMA: a device, and memory that may be locked. Looks at files alone."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Final

DEVICES: Final = Path("/dev/infiniband")
STATUS: Final = Path("/proc/self/status")
IPC_LOCK: Final = 14
"""Number of the capability that lifts the limit (capabilities(7))."""


def no_device(folder: Path = DEVICES) -> str:
    """Why this process sees no RDMA device (a device plugin puts some into a pod, or the host has them); empty: it does."""
    return "" if any(folder.glob("uverbs*")) else f"no RDMA device is here (no {folder}/uverbs*)"


def unlocked(needed: int, status: Path = STATUS, limit: int | None = None) -> str:
    """Why ``needed`` bytes cannot be locked, which an RDMA device wants of memory that it reads; empty: they can.

    ``limit``: of memory that may be locked, in bytes; None: this process's own.
    """
    allowed = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if allowed in {resource.RLIM_INFINITY, -1} or needed <= allowed or _unlimited(status):
        return ""
    return (f"{-(-needed >> 20)} MiB must be locked, and the limit (memlock) is {allowed >> 20} MiB: raise it for the "
            "container runtime, or add the capability IPC_LOCK")


def _unlimited(status: Path) -> bool:
    try:
        lines = status.read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    held = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(held, 16) >> IPC_LOCK & 1)
