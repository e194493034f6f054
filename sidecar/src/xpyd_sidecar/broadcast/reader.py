"""The readers' end of a broadcast queue: a class for shared memory and one for ZMQ, with the same calls.

    reader = join(handle, "rank 1", note=b"…", timeout_s=60)
    with reader.take(None) as parts:     views without a copy, valid inside the block alone
    parts = reader.recv(5.0)             or copies

A reader waits ``timeout_s`` seconds for a message, or with None for as long as the writer lives; it may stay idle for any
time. One thread at a time may use it, but for ``cancel``, which any thread may call.
"""

from __future__ import annotations

import os
import struct
import time
from types import TracebackType
from typing import Final, Protocol

import zmq

from xpyd_sidecar.broadcast import local, message, wire
from xpyd_sidecar.broadcast.errors import NothingCame, QueueClosed, ReadCancelled, ReaderDropped
from xpyd_sidecar.broadcast.futex import Fences, Futex
from xpyd_sidecar.broadcast.queue import SPIN_S
from xpyd_sidecar.broadcast.remote import RemoteLink
from xpyd_sidecar.broadcast.ring import ReadSide
from xpyd_sidecar.broadcast.segment import Segment
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.errors import ConfigError, PeerGone, ProtocolError

SLICE_S: Final = 0.2
"""A sleeping reader looks after its writer that often."""
SIDE_S: Final = 5.0
"""For a side segment's descriptor, which was sent before the message."""
Views = tuple[memoryview, ...]
_OF_ONE: Final = (message.HEAD_OF_ONE,)


class Reader(Protocol):
    """A reader of a broadcast queue, whether messages come through shared memory or over ZMQ."""

    name: str

    def take(self, timeout_s: float | None) -> TakenMessage:
        """The next message as read-only views, for a ``with`` block: entering waits for it, leaving gives it back.

        On leaving, views that are not used by others are released, so that a late use raises. What is made from them
        (arrays) must not be used either: the memory is written over.

        Raises (the ``with`` statement, not this call):
            NothingCame: no message came in ``timeout_s`` seconds.
            QueueClosed: the writer has closed and everything was read.
            ReaderDropped: the writer waits for this reader no more; on leaving the block: what was read may be torn.
            PeerGone: the writer's process has ended and everything that came was read.
            ProtocolError: the writer sent what is not allowed.
            ReadCancelled: a thread has called ``cancel``.
        """

    def recv(self, timeout_s: float | None) -> list[bytes]:
        """The next message, a copy of each of its buffers; raises what a block of ``take`` raises."""

    def cancel(self) -> None:
        """Have the running or next wait raise ``ReadCancelled``, from any thread."""

    def close(self) -> None:
        """Leave the queue: the writer drops this reader when it next has to wait for it."""


class _Source(Protocol):
    def wait_views(self, timeout_s: float | None) -> Views: ...

    def give_back(self) -> None: ...


class TakenMessage:
    """The ``with`` block of one message: entering waits for it and returns its views, leaving gives it back."""

    def __init__(self, source: _Source, timeout_s: float | None) -> None:
        self._source = source
        self._timeout_s = timeout_s
        self._views: Views = ()

    def __enter__(self) -> Views:
        self._views = self._source.wait_views(self._timeout_s)
        return self._views

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        views, self._views = self._views, ()
        for view in views:
            try:
                view.release()
            except BufferError:
                continue  # an array was made from it; that it is not used any more is its owner's word
        self._source.give_back()


class LocalReader:
    """A reader on the writer's host, which reads messages from a ring in shared memory."""

    def __init__(self, handle: wire.Handle, name: str, note: bytes, timeout_s: float, spin_s: float = SPIN_S) -> None:
        """Join the queue; the function ``join`` explains the arguments.

        Raises:
            AuthError: the writer refuses; the reason is its own.
            PeerGone: the writer has ended or does not answer in time.
            ProtocolError: it answers what is not allowed.
        """
        self.name = name
        self._writer = f"writer of {handle.queue}"
        self._spin_s = spin_s
        self._layout = handle.layout
        self._link, self._segment = local.join(handle, name, note, timeout_s)
        fences = Fences()
        self._words = self._segment.words(handle.layout.words)
        self._flags = ReadSide(handle.layout, handle.local.index(name), self._words, full=fences.full, order=fences.order)
        self._bytes = self._segment.bytes
        self._offsets = tuple(handle.layout.chunk_offset(chunk) for chunk in range(handle.layout.chunks))
        self._futex = Futex(self._segment.address())
        self._canceller = Futex(self._segment.address())
        self._sides: dict[int, Segment] = {}
        self._cancelled = False

    def take(self, timeout_s: float | None) -> TakenMessage:
        """The next message as read-only views, for a ``with`` block; raises what ``Reader.take`` lists."""
        return TakenMessage(self, timeout_s)

    def recv(self, timeout_s: float | None) -> list[bytes]:
        """The next message, a copy of each of its buffers; raises what ``Reader.take`` lists."""
        self._wait(timeout_s)
        source, base, place, lengths = self._find()
        parts = [bytes(source[base + at:base + at + length]) for at, length in zip(place, lengths, strict=True)]
        self.give_back()
        return parts

    def cancel(self) -> None:
        """Have the running or next wait raise ``ReadCancelled``, from any thread."""
        self._cancelled = True
        self._canceller.wake(self._layout.written_word(self._flags.chunk))

    def close(self) -> None:
        """Leave the queue: end the connection to the writer, and unmap the shared memory."""
        self._link.close()
        for side in self._sides.values():
            side.close()
        self._sides.clear()
        self._words.release()
        self._segment.close()

    def wait_views(self, timeout_s: float | None) -> Views:
        """Wait for the next message, and return read-only views of its buffers; raises what ``Reader.take`` lists."""
        self._wait(timeout_s)
        source, base, place, lengths = self._find()
        return tuple(source[base + at:base + at + length].toreadonly() for at, length in zip(place, lengths, strict=True))

    def give_back(self) -> None:
        """Give the message that was read back to the writer.

        Raises:
            ReaderDropped: the writer has dropped this reader, so that what was read may be torn.
        """
        if self._flags.dropped():
            raise ReaderDropped(self._writer, f"it has dropped {self.name}: what was read last may be torn")
        word = self._flags.give_back()
        if word is not None:
            self._futex.wake(word)

    def _wait(self, timeout_s: float | None) -> None:
        flags = self._flags
        if flags.ready() and not self._cancelled:
            return
        start = time.monotonic()
        spin_end = start + (self._spin_s if timeout_s is None else min(self._spin_s, timeout_s))
        while time.monotonic() < spin_end and not self._cancelled:
            if flags.ready():
                return
            os.sched_yield()
        while True:
            self._raise_if_over()
            word, value = flags.park()
            try:
                if flags.ready():
                    return
                left = SLICE_S if timeout_s is None else start + timeout_s - time.monotonic()
                if left <= 0:
                    raise NothingCame(f"{self.name}: nothing from the {self._writer} in {timeout_s:.3f} s")
                self._futex.wait(word, value, min(SLICE_S, left))
            finally:
                flags.awake()
            if flags.ready() and not self._cancelled:
                return

    def _raise_if_over(self) -> None:
        """Raise what ends a wait: ReadCancelled, ReaderDropped, QueueClosed or PeerGone.

        A writer publishes a message, then sets its flag, then ends the connection; they are looked at in reverse, and a
        message that is there is still read. So an ended connection means a dead writer only where no flag is set.
        """
        if self._cancelled:
            self._cancelled = False
            raise ReadCancelled(f"{self.name}: the wait for the {self._writer} was cancelled")
        gone = self._link.gone()
        if self._flags.dropped():
            raise ReaderDropped(self._writer, f"it has dropped {self.name}")
        closed = self._flags.closed()
        if self._flags.ready():
            return
        if closed:
            raise QueueClosed(f"{self._writer}: closed after message {self._flags.number - 1}")
        if gone:
            raise PeerGone(self._writer, "its process has ended")

    def _find(self) -> tuple[memoryview, int, tuple[int, ...], tuple[int, ...]]:
        """Where the next message lies, in bytes: memory, offset in it; from there, offsets and lengths of its buffers."""
        layout = self._layout
        at = self._offsets[(self._flags.number - 1) % layout.chunks]
        try:
            side, lengths = message.read_head(self._bytes, at)
            if side == 0 and len(lengths) == 1:  # most messages
                _within(message.HEAD_OF_ONE + lengths[0], layout.chunk_bytes)
                return self._bytes, at, _OF_ONE, lengths
            if side == 0:
                place = message.places(lengths, message.head_bytes(len(lengths)))
                _within(place.end, layout.chunk_bytes)
                return self._bytes, at, place.offsets, lengths
            place = message.places(lengths, 0)
            segment = self._side(side)
            _within(place.end, segment.size)
        except (ValueError, struct.error) as error:
            if self._flags.dropped():
                raise ReaderDropped(self._writer, f"it has dropped {self.name}") from None
            raise ProtocolError(self._writer, f"message {self._flags.number}: {error}") from None
        return segment.bytes, 0, place.offsets, lengths

    def _side(self, number: int) -> Segment:
        while number not in self._sides:
            raw, fd = self._link.receive(SIDE_S)
            side = wire.expect(self._writer, raw, wire.SideSegment)
            old = self._sides.pop(side.replaces, None)
            if old is not None:
                old.close()
            self._sides[side.number] = local.open_segment(self._writer, fd, 1)
        return self._sides[number]


class RemoteReader:
    """A reader elsewhere, to which messages come over ZMQ."""

    def __init__(self, handle: wire.Handle, name: str, note: bytes, timeout_s: float, key: ServiceKey | None) -> None:
        """Join the queue; the function ``join`` explains the arguments.

        Raises:
            ConfigError: the queue wants the service's key and ``key`` is None, or its address is not valid.
            AuthError: the writer refuses; the reason is its own.
            PeerGone: the writer has ended, does not answer in time, or does not hold the same key.
            ProtocolError: it answers what is not allowed.
        """
        self.name = name
        self._link = RemoteLink(handle, name, note, key, timeout_s)
        self._number = 1
        self._frames: list[zmq.Frame] = []
        self._cancelled = False

    def take(self, timeout_s: float | None) -> TakenMessage:
        """The next message as read-only views, for a ``with`` block; raises what ``Reader.take`` lists."""
        return TakenMessage(self, timeout_s)

    def recv(self, timeout_s: float | None) -> list[bytes]:
        """The next message, a copy of each of its buffers; raises what ``Reader.take`` lists."""
        self.wait_views(timeout_s)
        parts = [frame.bytes for frame in self._frames]
        self.give_back()
        return parts

    def cancel(self) -> None:
        """Have the running or next wait raise ``ReadCancelled``, within ``SLICE_S`` seconds, from any thread."""
        self._cancelled = True

    def close(self) -> None:
        """Leave the queue: end the connections to the writer, which sees it."""
        self._link.close()

    def wait_views(self, timeout_s: float | None) -> Views:
        """Wait for the next message, and return read-only views of its buffers; raises what ``Reader.take`` lists."""
        start = time.monotonic()
        while not self._cancelled:
            left = SLICE_S if timeout_s is None else start + timeout_s - time.monotonic()
            got = self._link.message(min(SLICE_S, max(left, 0.0)))
            if got is not None:
                number, self._frames = got
                if number != self._number:
                    raise ProtocolError(self._link.writer, f"sent message {number} where {self._number} comes next")
                return tuple(memoryview(frame.buffer).toreadonly() for frame in self._frames)
            if left <= 0:
                raise NothingCame(f"{self.name}: nothing from the {self._link.writer} in {timeout_s:.3f} s")
        self._cancelled = False
        raise ReadCancelled(f"{self.name}: the wait for the {self._link.writer} was cancelled")

    def give_back(self) -> None:
        """Tell the writer that the message was read. Raises PeerGone when the writer does not take that."""
        self._frames = []
        self._link.give_back(self._number)
        self._number += 1


def join(handle: bytes, name: str, *, note: bytes = b"", timeout_s: float = 60.0, key: ServiceKey | None = None,
         spin_s: float = SPIN_S) -> LocalReader | RemoteReader:
    """Join a queue as the reader ``name``; the writer must be in ``wait_ready``, or get there in time.

    Args:
        handle: the writer's (``Writer.handle``).
        name: one of the names that the writer gave its readers, for shared memory or for ZMQ.
        note: at most 32 KiB for the writer (``wait_ready``), such as the handle of a queue in the other direction.
        timeout_s: seconds for joining as a whole.
        key: the service's key, for a reader on another host.
        spin_s: seconds in which a local reader that waits polls before it sleeps.

    Raises:
        ConfigError: the name is none of the writer's readers, the note is too long, or the key is missing.
        Incompatible: the handle is of another version.
        AuthError: the writer refuses; the reason is its own.
        PeerGone: the writer has ended or does not answer in time.
        ProtocolError: the writer answers what is not allowed, or ``handle`` is no handle.
    """
    known = wire.read_handle(handle)
    if len(note) > wire.NOTE_MAX:
        raise ConfigError(f"note: {len(note)} bytes, at most {wire.NOTE_MAX}")
    if name in known.local:
        return LocalReader(known, name, note, timeout_s, spin_s)
    if name in known.remote:
        return RemoteReader(known, name, note, timeout_s, key)
    raise ConfigError(f"{known.queue}: {name!r} is not one of its readers: {', '.join((*known.local, *known.remote))}")


def _within(end: int, size: int) -> None:
    if end > size:
        raise ValueError(f"its parts end at {end}, beyond the {size} bytes of their segment")
