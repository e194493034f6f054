"""What this host is like, for ``xpyd doctor``: limits, memory, devices, clock. What cannot be read is taken to be right."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import resource
import shutil
from pathlib import Path

from xpyd_operator.doctor.reading import HostReading

_PROC = Path("/proc")
_RDMA = Path("/sys/class/infiniband")
_SHM = "/dev/shm"  # noqa: S108 (looked at, not written to)
_UNSYNCHRONIZED = 5
"""What adjtimex returns (TIME_ERROR) where the kernel's clock is not kept right."""
_UP = "ACTIVE"


def host_facts() -> HostReading:
    """As it is now; takes milliseconds."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    lock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    memory, free = _memory()
    shm, shm_free = _shm()
    return HostReading(
        files=1 << 30 if files == resource.RLIM_INFINITY else files, memlock=-1 if lock == resource.RLIM_INFINITY else lock,
        memory=memory, memory_free=free, shm=shm, shm_free=shm_free, gpus=_gpus(), rdma=_rdma(),
        nixl=any(importlib.util.find_spec(name) is not None for name in ("nixl", "nixl_cu12", "nixl_cu13")), clock=_clock())


def _memory() -> tuple[int, int]:
    with contextlib.suppress(OSError, ValueError, KeyError):
        rows = dict(line.split(":", 1) for line in (_PROC / "meminfo").read_text().splitlines() if ":" in line)
        return int(rows["MemTotal"].split()[0]) * 1024, int(rows["MemAvailable"].split()[0]) * 1024
    return 0, 0


def _shm() -> tuple[int, int]:
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(_SHM)
        return usage.total, usage.free
    return 0, 0


def _gpus() -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(_PROC / "driver/nvidia/gpus"))
    return 0


def _rdma() -> tuple[str, ...]:
    """Devices with a port that is up."""
    found = []
    with contextlib.suppress(OSError):
        for device in sorted(_RDMA.iterdir()):
            with contextlib.suppress(OSError):
                if any(_UP in port.read_text() for port in device.glob("ports/*/state")):
                    found.append(device.name)
    return tuple(found)


def _clock() -> str:
    """Why the kernel takes its clock to be wrong; empty where it does not, or cannot be asked."""
    with contextlib.suppress(OSError, AttributeError):
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
        if state == _UNSYNCHRONIZED:
            return "the kernel says that nobody keeps its clock right (adjtimex)"
    return ""
