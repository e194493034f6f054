"""What ``_moves`` does, in Python: the way that is taken where it could not be compiled, and what it is compared with."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from xpyd_sidecar.kv import frames

REVISION: Final = 7
"""Of ``_moves``, which is not loaded when it was built for other files."""
RUNS_MAX: Final = 512
"""Pieces of one call; the kernel takes 1,024 at once."""


class Scatter:
    """Blocks in their places, and how many of their bytes have come."""

    def __init__(self, memory: Any, size: int, count: int, ids: Any,  # noqa: PLR0917  # as the compiled one
                 stride: int, offset: int, cover: bool, /) -> None:
        """``count`` blocks of ``size`` bytes, the nth in ``memory`` at ``ids[n] * stride + offset``, or at n * size.

        ``memory``: writable bytes; ``ids``: 64-bit integers; ``cover``: sum up what comes.

        Raises:
            ValueError: no blocks, or some outside of the memory.
        """
        view = memoryview(memory)
        starts = [n * size for n in range(count)] if ids is None else [
            n * stride + offset for n in memoryview(ids).cast("B").cast("q")]
        if min(size, count) < 1 or len(starts) != count or min(starts) < offset or max(starts) + size > len(view):
            raise ValueError("blocks outside of the memory")
        self.low = 1
        """Least bytes for which the socket wakes a reader, as it was last set."""
        self.missing = size * count
        self._view = view
        self._size = size
        self._starts = starts
        self._cover = cover
        self._summed = 0
        self._sums = bytearray()
        self._per_block = -(-size // frames.SUM_BYTES)

    def receive(self, fd: int, tail: Any, patience_ms: int, low: int, follow: tuple[Any, ...],  # noqa: PLR0917  # as above
                watch: int = -1, beside: bool = False, /) -> tuple[int, bytes]:
        """Read once from a socket, without waiting: the blocks, and what follows them into ``tail``. Bytes of both.

        ``patience_ms``: wait so long for more, if need be (here: not); ``low``: as ``self.low``. 0: the peer has closed.
        ``follow``: what the headers of the next frames begin with (``frames.known``) and their places, one after the other.
        What comes of them is received, too; the headers of those that were begun are returned (here: none is).
        ``watch``: an epoll instance; the call ends early when it has another file ready. ``beside``: the peer is on this
        host, so after a wait this thread leaves the processor that the peer works on: the kernel likes to wake a thread
        where that runs which it waits for, and then each of the two waits for the other (here: none waits).

        Raises:
            OSError: as of recvmsg(2).
        """
        del patience_ms, follow, watch, beside
        self.low = low
        views, bytes_ = self._stretch()
        if bytes_ == self.missing:
            views.append(memoryview(tail))
        got = os.readv(fd, views)
        self._came(min(got, self.missing))
        return got, b""

    def read(self, address: int, ticket_at: int, ticket: bytes, threads: int, /) -> bool:
        """Copy all from memory that another process has, too. False: the ticket, looked at afterwards, is not this one.

        ``threads``: that copy (here: one).
        """
        del threads
        self.copy(address)
        return ctypes.string_at(ticket_at, len(ticket)) == ticket

    def copy(self, address: int, /) -> None:
        """Copy all from this process's memory."""
        while self.missing:
            views, many = self._stretch()
            for view in views:
                ctypes.memmove(address_of(view), address, len(view))
                address += len(view)
            self._came(many)

    def sums(self) -> bytes:
        """Of what has come, as ``frames.sums`` of the blocks packed; empty: they are not summed up."""
        return bytes(self._sums)

    def _done(self) -> int:
        return self._size * len(self._starts) - self.missing

    def _stretch(self) -> tuple[list[memoryview], int]:
        """Memory of the next bytes, in pieces that one call takes."""
        block, skip = divmod(self._done(), self._size)
        views: list[memoryview] = []
        for start in self._starts[block:block + RUNS_MAX]:
            views.append(self._view[start + skip:start + self._size])
            skip = 0
        return views, sum(map(len, views))

    def _came(self, many: int) -> None:
        self.missing -= many
        done = self._done()
        while self._cover and self._summed < len(self._starts) * self._per_block:
            block, piece = divmod(self._summed, self._per_block)
            first = piece * frames.SUM_BYTES
            last = min(first + frames.SUM_BYTES, self._size)
            if block * self._size + last > done:
                break
            start = self._starts[block]
            self._sums += frames.piece_sum(self._view[start + first:start + last])
            self._summed += 1


def sums(data: Any, size: int, /) -> bytes:
    """The sums of packed blocks of ``size`` bytes."""
    return frames.sums(data, size)


def receive(fd: int, tail: Any, patience_ms: int, low: int,  # noqa: PLR0917  # as the compiled one
            follow: tuple[Any, ...], watch: int = -1, beside: bool = False, /) -> tuple[int, bytes]:
    """As ``Scatter.receive``, from the header of the first of ``follow`` on (here: no more than into ``tail``).

    Raises:
        OSError: as of read(2).
    """
    del patience_ms, watch, beside
    follow[1].low = low
    return os.readv(fd, [tail]), b""


def send(fd: int, views: Sequence[Any], patience_ms: int, watch: int = -1, beside: bool = False, /) -> int:
    """Write once into a socket, without waiting; how many bytes it took.

    ``patience_ms``: wait so long for more room, if need be (here: not); ``watch``, ``beside``: as of ``Scatter.receive``.

    Raises:
        OSError: as of sendmsg(2).
    """
    del patience_ms, watch, beside
    return os.writev(fd, views)


def come_home() -> None:
    """May run again wherever this thread could before a call with ``beside``."""


def address_of(view: memoryview) -> int:
    """Where bytes lie in this process."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
