"""What ``_moves`` does, in Python: the way that is taken where it could not be compiled, and what it is compared with."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from xpyd_sidecar.kv.packing import sum_of
from xpyd_sidecar.kv.reads import TICKET_BYTES
from xpyd_sidecar.memory.addresses import address_of

REVISION: Final = 10
"""Of ``_moves``, which is not loaded when it was built for other files."""


class Scatter:
    """Rows in their places, and their sums once they have come."""

    def __init__(self, memory: Any, size: int, count: int, ids: Any,  # noqa: PLR0917  # as the compiled one
                 stride: int, offset: int, part: int, /) -> None:
        """``count`` rows of ``size`` bytes, the nth in ``memory`` at ``ids[n] * stride + offset``, or at n * size.

        ``memory``: writable bytes; ``ids``: 64-bit integers; ``part``: bytes of a row that have a sum; 0: nothing has.

        Raises:
            ValueError: no rows, some outside of the memory, or parts larger than they are.
        """
        view = memoryview(memory)
        starts = [n * size for n in range(count)] if ids is None else [
            n * stride + offset for n in memoryview(ids).cast("B").cast("q")]
        if min(size, count) < 1 or len(starts) != count or min(starts) < offset or max(starts) + size > len(view):
            raise ValueError("blocks outside of the memory")
        if not 0 <= part <= size:
            raise ValueError("no blocks, or too many")
        self.row = size
        """Bytes of one."""
        self.rows = count
        self._view = view
        self._starts = starts
        self._part = part
        self._sums = b""

    def read(self, address: int, step: int, ticket_at: int, ticket: bytes, /) -> bool:
        """Copy all from memory that another process has, too. False: the ticket, looked at afterwards, is not this one.

        ``step``: from the begin of one row there to that of the next.

        Raises:
            ValueError: rows that overlap, or no ticket.
        """
        if step < self.row or len(ticket) != TICKET_BYTES:
            raise ValueError(f"a ticket has {TICKET_BYTES} bytes, and rows do not overlap")
        self._bring(address, step)
        return ctypes.string_at(ticket_at, len(ticket)) == ticket

    def copy(self, address: int, /) -> None:
        """Copy all from this process's memory."""
        self._bring(address, self.row)

    def sums(self) -> bytes:
        """Sums of the parts, row by row, 8 bytes each; empty: nothing has come yet, or they are not summed up."""
        return self._sums

    def _bring(self, address: int, step: int) -> None:
        rows = [self._view[start:start + self.row] for start in self._starts]
        for nth, row in enumerate(rows):
            ctypes.memmove(address_of(row), address + nth * step, self.row)
        if self._part:
            self._sums = b"".join(sum_of(row[first:first + self._part]).to_bytes(8, "little")
                                  for row in rows for first in range(0, self.row, self._part))


def sums(data: Any, part: int, /) -> bytes:
    """The sums of packed parts of ``part`` bytes, 8 bytes each.

    Raises:
        ValueError: not whole parts.
    """
    view = memoryview(data).cast("B")
    if part < 1 or len(view) % part:
        raise ValueError("not whole parts")
    return b"".join(sum_of(view[at:at + part]).to_bytes(8, "little") for at in range(0, len(view), part))
