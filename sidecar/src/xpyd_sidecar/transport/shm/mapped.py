"""Host memory of prefill's that decode maps: one copy, made by decode's own instructions, no system call for each page.

    prefill                                                   decode
    memfd: name | copies …  ◀── sealed: it never shrinks
    OFFER(address, within: name, fd, offset) ──────────────▶  maps /proc/PID/fd/FD once, and sees the name in it
                                                              copies the blocks, then reads the ticket (``process_vm``)

Only copies that wait to be sent lie there, never the cache. Who may read a process's memory may open its descriptors: so
mapping adds no permission, and where it fails the bytes are read as before. Decode maps for reading only, and only what
cannot shrink below what it maps: nothing that the peer does makes a read fail.

A memory's name is never drawn twice, so that one made later, at the same address or with the same descriptor, is not taken
for it. When its owner lets go of it, its pages go back to the system, whoever still has it mapped.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import stat
import weakref
from pathlib import Path
from typing import Final, NamedTuple

from xpyd_sidecar.kv.bodies import Within
from xpyd_sidecar.transport.moves_plain import address_of

NAME_BYTES: Final = 32
HEAD_BYTES: Final = 4096
LABEL: Final = "xpyd-copies"
SIZE_MAX: Final = 1 << 46
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PUNCH: Final = 3
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, of fallocate(2)."""
_libc: Final = ctypes.CDLL(None, use_errno=True)


class _Made(NamedTuple):
    """Of this process."""

    name: bytes
    fd: int
    size: int
    base: int
    pid: int


_made: Final[dict[bytes, _Made]] = {}
"""By name, the newest last. Not by where each begins: a memory is unmapped before its end is told, and another thread may
have made the next one at that place by then."""


def make(size: int) -> memoryview:
    """Memory of ``size`` bytes that peers may map. It lives as long as any view of it.

    Raises:
        OSError: this system makes none.
    """
    fd = os.memfd_create(LABEL, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        whole = HEAD_BYTES + size
        os.ftruncate(fd, whole)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        memory = mmap.mmap(fd, whole)
    except BaseException:
        os.close(fd)
        raise
    name = secrets.token_bytes(NAME_BYTES)
    memory[:NAME_BYTES] = name
    base = address_of(memoryview(memory))
    _made[name] = _Made(name, fd, whole, base, os.getpid())
    weakref.finalize(memory, _over, name).atexit = False  # a peer may still be reading when the interpreter ends
    return memoryview(memory)[HEAD_BYTES:]


def _over(name: bytes) -> None:
    """Nobody here has a view of a memory any more, so nothing in it is on offer."""
    one = _made.pop(name)
    if one.pid == os.getpid():  # a child that was forked has let go of its parent's
        _libc.fallocate(one.fd, _PUNCH, ctypes.c_long(0), ctypes.c_long(one.size))
    os.close(one.fd)


def find(address: int, size: int) -> Within | None:
    """Where bytes of this process lie, if peers may map that."""
    for one in reversed(_all()):
        if one.base <= address and address + size <= one.base + one.size:
            return Within(one.name, one.fd, one.size, address - one.base)
    return None


def _all() -> list[_Made]:
    """The newest last. Another thread may make one or let go of one meanwhile, and so may the collector in this thread."""
    while True:
        try:
            return list(_made.values())
        except RuntimeError:  # changed while it was copied
            continue


def map_file(path: str | Path, size: int, head: bytes, *, flags: int = 0, seal: int = 0) -> mmap.mmap:
    """A file of a peer's of ``size`` bytes, which begins with ``head`` and has a seal, mapped to be read.

    Raises:
        OSError: it cannot be opened, with ``flags`` of open(2), or mapped.
        ValueError: it is not what the peer says, or could shrink.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            raise ValueError(f"a file of {found.st_size} bytes, not {size}")
        if seal and not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seal:
            raise ValueError("a file that may shrink")
        memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    if memory[:len(head)] != head:
        memory.close()
        raise ValueError("another file or another memory is there")
    return memory


class Mapping:
    """A peer's memory, mapped to be read. ``base``: where it lies here."""

    def __init__(self, pid: int, within: Within) -> None:
        """Map it. Raises as ``map_file``."""
        if len(within.name) != NAME_BYTES or not HEAD_BYTES < within.size < SIZE_MAX or within.fd < 0:
            raise ValueError("no memory's name and size")
        path = f"/proc/{pid}/fd/{within.fd}"
        if not os.readlink(path).startswith(f"/memfd:{LABEL}"):
            raise ValueError("another file")
        self._memory = map_file(path, within.size, within.name, seal=fcntl.F_SEAL_SHRINK)
        self.name = within.name
        self.size = within.size
        self.base = address_of(memoryview(self._memory))

    def close(self) -> None:
        """Let go of it."""
        self._memory.close()
