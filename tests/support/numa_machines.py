"""Machines with NUMA nodes, as sysfs describes them, and what the kernel says of memory of this one."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import pytest

GPU = "0000:9b:00.0"
MIB = 1 << 20
HERE = frozenset(os.sched_getaffinity(0))
"""Processors that this process may use."""
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}


def machine(folder: Path, processors: Mapping[int, str], *, memory: str | None = None,
            devices: Mapping[str, str] | None = None) -> Path:
    """A made-up sysfs. ``processors``: cpulist by node; ``memory``: nodes that have some; ``devices``: numa_node."""
    numbers = ",".join(map(str, processors))
    nodes = folder / "devices/system/node"
    nodes.mkdir(parents=True)
    (nodes / "online").write_text(numbers + "\n")
    (nodes / "has_memory").write_text((numbers if memory is None else memory) + "\n")
    for number, listed in processors.items():
        (nodes / f"node{number}").mkdir()
        (nodes / f"node{number}/cpulist").write_text(listed + "\n")
    for address, node in (devices or {}).items():
        (folder / "bus/pci/devices" / address).mkdir(parents=True)
        (folder / "bus/pci/devices" / address / "numa_node").write_text(node + "\n")
    return folder


def policy_of(address: int) -> tuple[int, int]:
    """Mode and nodes (a mask) of the memory at an address, by get_mempolicy(2)."""
    mode, mask = ctypes.c_int(-1), (ctypes.c_uint64 * 16)()
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    done = syscall(ctypes.c_long(GET_MEMPOLICY[platform.machine()]), ctypes.byref(mode), mask, ctypes.c_ulong(16 * 64 + 1),
                   ctypes.c_void_p(address), ctypes.c_ulong(2))
    if done and (code := ctypes.get_errno()) in {errno.EPERM, errno.ENOSYS}:
        pytest.skip(f"get_mempolicy: {os.strerror(code)}")
    assert not done, os.strerror(ctypes.get_errno())
    return mode.value, mask[0]
