"""Decode's side of the shared-memory link (``shm``) between two engines of one host: maps prefill's memory and copies KV
out of it. ``transport.shm.serve`` shows the layout of the memory.

Decode maps it for reading only, and only where it is sealed against shrinking: nothing that prefill does makes a read
fail. The mapping keeps the memory even when prefill has ended, of which decode learns by the end of the session. After
each copy decode looks at the session's ticket in the memory, which prefill wipes before it reuses the memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
from collections.abc import Sequence
from functools import partial
from typing import Final

from xpyd_sidecar.errors import PeerGone, ProtocolError
from xpyd_sidecar.kv.packing import NO_SUMS, Stretch
from xpyd_sidecar.kv.reads import TICKET_BYTES
from xpyd_sidecar.kv.selection import PackedSpan, Piece, packed_spans
from xpyd_sidecar.kv.session_bodies import LinkName, SharedStore
from xpyd_sidecar.memory.addresses import address_of
from xpyd_sidecar.transport.landing import sums_of
from xpyd_sidecar.transport.links import FetchLink, FetchOrder, FetchOwner, Session, StoreReader
from xpyd_sidecar.transport.moves import Scatter
from xpyd_sidecar.transport.shm.serve import HEAD_BYTES, NAME_BYTES, SIZE_MAX, TICKETS_AT

GIVEN_UP: Final = "has given this session up"


class Mapping:
    """A read-only mapping of prefill's shared memory for copies of KV. ``base``: its address in this process."""

    def __init__(self, fd: int | None, shown: SharedStore) -> None:
        """Map the memory that prefill describes as ``shown``. ``fd``: its file descriptor, which is closed in any case;
        None where none was received.

        Raises:
            OSError: the kernel does not map it.
            ValueError: there is no descriptor, ``shown`` makes no sense, or the file is not as described or could shrink.
        """
        try:
            self._memory = _mapped(fd, shown)
        finally:
            if fd is not None:
                os.close(fd)
        self.base = address_of(memoryview(self._memory))

    @property
    def view(self) -> memoryview:
        """All bytes of the mapping."""
        return memoryview(self._memory)

    def holds(self, at: int, ticket: bytes) -> bool:
        """Whether the bytes ``at`` bytes into the mapping equal ``ticket`` now."""
        return self._memory[at:at + len(ticket)] == ticket

    def close(self) -> None:
        """Unmap the memory; while a view of it exists, it stays mapped. Closing again does nothing."""
        with contextlib.suppress(BufferError):  # an error that is being told has one
            self._memory.close()


def _mapped(fd: int | None, shown: SharedStore) -> mmap.mmap:
    if len(shown.name) != NAME_BYTES or not HEAD_BYTES < shown.size < SIZE_MAX:
        raise ValueError("prefill names no memory")
    if len(shown.ticket) != TICKET_BYTES or not TICKETS_AT <= shown.ticket_at <= HEAD_BYTES - TICKET_BYTES:
        raise ValueError("prefill names no ticket")
    if fd is None:
        raise ValueError("the descriptor of prefill's memory has not come")
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size != shown.size:
        raise ValueError(f"a file of {found.st_size} bytes, not {shown.size}")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("a file that may shrink")
    memory = mmap.mmap(fd, shown.size, prot=mmap.PROT_READ)
    if memory[:NAME_BYTES] != shown.name:
        memory.close()
        raise ValueError("another memory")
    return memory


class ShmFetchLink(FetchLink):
    """Decode's side of the shared-memory link, of one session. A fetch is one copy out of the mapping, made by a core into
    host memory, or by a ``StoreReader`` into a device's memory; it begins on the session's I/O thread.
    """

    name: LinkName = "shm"
    at_hand = True

    def __init__(self, session: Session, owner: FetchOwner, mapping: Mapping, shown: SharedStore,
                 reader: StoreReader | None = None) -> None:
        """``shown``: prefill's description of the mapped memory. ``reader``: copies into a device; None: a core copies into
        host memory.
        """
        self.reads_into_device = reader is not None
        self._session = session
        self._owner = owner
        self._mapping = mapping
        self._shown = shown
        self._reader = reader
        self._flying = 0
        """Copies into the device that have not ended."""
        self._closed = False

    def fetch(self, order: FetchOrder) -> None:
        """Have the I/O thread copy the pieces of an order; it then tells the owner once, that they are here or that they do
        not come. Returns at once.
        """
        into_device = self.reads_into_device and order.at is not None
        self._session.post(partial(self._begin if into_device else self._bring, order))

    def close(self) -> None:
        """End the link with its session: orders that have not begun fail on the I/O thread. The memory is unmapped now, or
        when no copy into a device is under way any more.
        """
        self._closed = True
        self._close_mapping()

    def _close_mapping(self) -> None:
        if self._reader is None:
            self._mapping.close()
        elif not self._flying:
            self._reader.close(self._mapping.close)

    # --- into host memory ---

    def _bring(self, order: FetchOrder) -> None:
        came = False
        try:
            came = not self._closed and self._copy(order)
        finally:
            if came:
                self._owner.on_fetched(order.number, sums_of(order.rows))
            else:
                self._owner.on_fetch_failed(order.number)

    def _copy(self, order: FetchOrder) -> bool:
        """Copy all pieces of an order into host memory. False: the load that wanted them is over, and nothing was written.

        Raises:
            ProtocolError: pieces lie outside of prefill's memory.
            PeerGone: prefill has wiped this session's ticket.
        """
        gate = order.gate
        if gate is not None and not gate.enter():
            return False
        try:
            for piece, rows in zip(order.batch, order.rows, strict=True):
                self._read(piece.stretches, rows)
        finally:
            if gate is not None:
                gate.leave()
        return True

    def _read(self, stretches: Sequence[Stretch], rows: Scatter) -> None:
        """Copy one piece, whose rows lie equally far apart in prefill's store, and look at the ticket afterwards."""
        base, shown, first = self._mapping.base, self._shown, stretches[0]
        self._check(stretches)
        step = stretches[1].offset - first.offset if len(stretches) > 1 else rows.row
        if not rows.read(base + HEAD_BYTES + first.offset, step, base + shown.ticket_at, shown.ticket):
            raise PeerGone(self._session.peer, GIVEN_UP)

    def _check(self, stretches: Sequence[Stretch]) -> None:
        room, last = self._shown.size - HEAD_BYTES, stretches[-1]
        if stretches[0].offset < 0 or last.offset + last.size > room:
            raise ProtocolError(self._session.peer, f"told of {last.offset + last.size} bytes of a store of {room}")

    # --- into a device ---

    def _begin(self, order: FetchOrder) -> None:
        """Have the device copy all pieces of an order.

        Raises:
            ProtocolError: pieces lie outside of prefill's memory.
        """
        begun = False
        try:
            if not self._closed:
                for piece in order.batch:
                    self._check(piece.stretches)
                assert self._reader is not None
                assert order.at is not None
                spans = spans_of(order.batch, order.at)
                self._reader.read(order.at, spans, partial(self._session.post, partial(self._ended, order)))
                self._flying += 1
                begun = True
        finally:
            if not begun:
                self._owner.on_fetch_failed(order.number)

    def _ended(self, order: FetchOrder) -> None:
        """The device has copied an order: tell the owner that it is here if the session and its ticket still stand.

        Raises:
            PeerGone: prefill has wiped this session's ticket.
        """
        self._flying -= 1
        if self._closed:
            self._close_mapping()
            self._owner.on_fetch_failed(order.number)
        elif self._mapping.holds(self._shown.ticket_at, self._shown.ticket):
            self._owner.on_fetched(order.number, NO_SUMS)
        else:
            self._owner.on_fetch_failed(order.number)
            raise PeerGone(self._session.peer, GIVEN_UP)


def spans_of(batch: Sequence[Piece], at: int) -> list[PackedSpan]:
    """The copies out of the mapping that put pieces one behind the other into a device's ring of bytes from ``at`` on.
    ``PackedSpan.offset`` counts from the begin of the mapping, ``PackedSpan.at`` from that of the ring; both in bytes.
    """
    return [PackedSpan(HEAD_BYTES + one.offset, one.size, at + one.at) for one in packed_spans(batch)]
