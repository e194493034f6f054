"""The shared memory itself: a memfd, sealed against changes of its size.

A memfd has no name. It is passed on as a descriptor (``local``), and the kernel frees it when the last process that has it
is gone, however that ended: nothing is left behind by kill -9, and nothing has to be swept. Nor does the size of /dev/shm
limit it, which is 64 MiB in most containers. The seals keep a peer from shrinking it, which would turn reads into SIGBUS.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import Final

from xpyd_sidecar.errors import OurFault

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """Mapped shared memory. ``bytes``: all of it; ``fd``: to be passed on."""

    def __init__(self, fd: int) -> None:
        """Map what ``fd`` is; the segment owns the descriptor from then on.

        Raises:
            OSError: it is no memfd, or cannot be mapped.
            ValueError: it is not sealed.
        """
        try:
            _check_sealed(fd)
            self.size = os.fstat(fd).st_size
            self._map = mmap.mmap(fd, self.size)
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd
        self.bytes = memoryview(self._map)

    @classmethod
    def create(cls, name: str, size: int) -> Segment:
        """A new one, zeroed; memory is taken page by page when it is first touched.

        Args:
            name: shown in /proc, no more.
            size: bytes.

        Raises:
            OSError: no descriptor or no address space is left.
        """
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd)

    def words(self, count: int) -> memoryview:
        """The first ``count`` words, as a view of format "I"."""
        return self.bytes[:4 * count].cast("I")

    def address(self) -> int:
        """Where it is mapped in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def close(self) -> None:
        """Let go of it. Views that a caller still holds keep the memory mapped until they go, too."""
        if self.fd < 0:
            raise OurFault("a shared memory segment was closed twice")
        os.close(self.fd)
        self.fd = -1
        self.bytes.release()
        try:
            self._map.close()
        except BufferError:
            return  # a view of the caller's: the mapping ends with it


def _check_sealed(fd: int) -> None:
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError("a shared memory segment that is not sealed against changes of its size")
