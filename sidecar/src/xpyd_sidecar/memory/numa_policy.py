"""Where the kernel is to make the pages of some memory (mbind(2)). Python has no call for it: ctypes makes it.

A node is preferred, so that pages come from another one where it is full. Of memory that is shared the policy belongs to
the memory itself, whoever writes into it first.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from typing import Final

PREFERRED: Final = 1
"""MPOL_PREFERRED."""
MBIND: Final = {"x86_64": 237, "aarch64": 235}
"""The system call on each processor."""
WORD_BITS: Final = 64


def prefer_node(address: int, size: int, node: int, machine: str = platform.machine()) -> None:
    """Have the pages that lie wholly in ``size`` bytes from an address on be made at a node, if they are not there yet.

    Raises:
        OSError: the kernel refuses (EPERM: by the container's seccomp profile; EINVAL: by a cpuset), or has no such call.
    """
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if length <= 0:
        return
    if machine not in MBIND:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    words = node // WORD_BITS + 1
    mask = (ctypes.c_uint64 * words)()
    mask[-1] = 1 << node % WORD_BITS
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    done = syscall(ctypes.c_long(MBIND[machine]), ctypes.c_void_p(begin), ctypes.c_ulong(length), ctypes.c_long(PREFERRED),
                   mask, ctypes.c_ulong(words * WORD_BITS + 1), ctypes.c_ulong(0))  # the kernel counts one bit less
    if done:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
