"""The writer's half of a ring in shared memory: flags, waiting, bytes and side segments put together.

Side segments are where the parts of messages lie that are larger than a chunk. The writer keeps at most ``LANES`` of them
and uses them again and again, so that their pages are there already; one is free again when every live reader has given
back the message that lay in it. One that is too small is replaced. So a queue's memory is bounded by the ring and ``LANES``
times its largest message.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from xpyd_sidecar.broadcast import message, wire
from xpyd_sidecar.broadcast.errors import ReaderStuck
from xpyd_sidecar.broadcast.futex import Fences, Futex
from xpyd_sidecar.broadcast.layout import MASK, PAGE, Layout
from xpyd_sidecar.broadcast.local import Door
from xpyd_sidecar.broadcast.ring import WriteSide
from xpyd_sidecar.broadcast.segment import Segment
from xpyd_sidecar.errors import PeerGone

SLICE_S: Final = 0.05
"""A sleeping writer looks after the readers it waits for that often."""
LANES: Final = 2


class Lane:
    """One side segment. ``number`` names it and is never used again; ``used_by`` is the last message in it."""

    def __init__(self, number: int, segment: Segment) -> None:
        self.number = number
        self.segment = segment
        self.used_by = 0


class Sides:
    """The writer's side segments."""

    def __init__(self, queue: str, door: Door) -> None:
        self._queue = queue
        self._door = door
        self._lanes: list[Lane] = []
        self._made = 0

    def awaited_message(self) -> int:
        """The message that must be given back before the next one can be placed; 0 where none must."""
        return min(lane.used_by for lane in self._lanes) if len(self._lanes) == LANES else 0

    def place(self, number: int, size: int) -> tuple[Lane, dict[str, str]]:
        """A lane of at least ``size`` bytes for message ``number``, known to every reader; and the readers found gone.

        Raises:
            OSError: no descriptor or no memory is left; nothing has changed.
        """
        old = min(self._lanes, key=lambda lane: lane.used_by) if len(self._lanes) == LANES else None
        gone: dict[str, str] = {}
        if old is None or old.segment.size < size:
            lane = Lane(self._made + 1, Segment.create(f"xpyd-{self._queue}-side", -(-size // PAGE) * PAGE))
            self._made += 1
            if old is not None:
                self._lanes.remove(old)
                old.segment.close()
            self._lanes.append(lane)
            for name, link in self._door.links.items():
                try:
                    link.send(wire.SideSegment(lane.number, old.number if old is not None else 0), lane.segment.fd)
                except PeerGone as error:
                    gone[name] = error.reason
        else:
            lane = old
        lane.used_by = number
        return lane, gone

    def close(self) -> None:
        """Let go of all of them."""
        for lane in self._lanes:
            lane.segment.close()
        self._lanes.clear()


class Patience(NamedTuple):
    """How long a call may wait, and what it does meanwhile."""

    end: float
    """``time.monotonic``."""
    timeout_s: float
    meanwhile: Callable[[], None] | None

    def reader_stuck(self, queue: str, readers: tuple[str, ...], number: int) -> ReaderStuck:
        """The error when it is over."""
        return ReaderStuck(queue, readers, f"message {number} not given back for {self.timeout_s:.1f} s")


class SharedWriter:
    """Writes messages for the readers of this host."""

    def __init__(self, queue: str, token: bytes, names: tuple[str, ...], layout: Layout, *, spin_s: float,
                 lose: Callable[[str, str], None]) -> None:
        """Make ring and door.

        Args:
            queue: its name.
            token: shown by readers that join.
            names: of the readers, by rank in the ring.
            layout: of the ring.
            spin_s: how long to look again and again before sleeping.
            lose: called with a reader's name and the reason when its process has ended; calls ``drop``.
        """
        self.layout = layout
        self.names = names
        self._queue = queue
        self._spin_s = spin_s
        self._lose = lose
        self._segment = Segment.create(f"xpyd-{queue}"[:200], layout.size)
        fences = Fences()
        self.flags = WriteSide(layout, self._segment.words(layout.words), full=fences.full, order=fences.order)
        self._bytes = self._segment.bytes
        self._offsets = tuple(layout.chunk_offset(chunk) for chunk in range(layout.chunks))
        self._futex = Futex(self._segment.address())
        self.door = Door(queue, token, names, self._segment)
        self._sides = Sides(queue, self.door)

    def live(self) -> tuple[str, ...]:
        """Readers that are not dropped."""
        return tuple(self.names[reader] for reader in self.flags.live)

    def awaited_message(self, aside: bool) -> int:
        """The message that must be given back before the next one can be written; 0 where none must.

        ``aside``: it goes into a side segment, being larger than a chunk.
        """
        flags = self.flags
        number = flags.number - self.layout.chunks
        if aside:  # who has given back a message has given back all before it
            number = max(number, self._sides.awaited_message())
        return 0 if flags.laggard(number) is None else number

    def wait_taken(self, number: int, patience: Patience) -> None:
        """Wait until every live reader has given back message ``number``.

        Raises:
            ReaderStuck: a live one has not in time; the error names all who have not.
        """
        flags = self.flags
        spin_end = min(time.monotonic() + self._spin_s, patience.end)
        while time.monotonic() < spin_end:
            if flags.laggard(number) is None:
                return
            os.sched_yield()
        while (reader := flags.laggard(number)) is not None:
            name = self.names[reader]
            if self.door.is_gone(name):
                self._lose(name, "its process has ended")
                continue
            left = patience.end - time.monotonic()
            if left <= 0:
                raise patience.reader_stuck(self._queue,
                                            tuple(self.names[each] for each in flags.lagging_readers(number)), number)
            word, value = flags.await_reader(reader, number)
            if value != number & MASK:
                self._futex.wait(word, value, min(SLICE_S, left))
            flags.awake()
            if patience.meanwhile is not None:
                patience.meanwhile()

    def fits(self, lengths: tuple[int, ...]) -> bool:
        """Parts of these lengths fit into a chunk.

        Raises:
            ValueError: not even their head does.
        """
        if len(lengths) == 1:
            return message.HEAD_OF_ONE + lengths[0] <= self.layout.chunk_bytes
        head = message.head_bytes(len(lengths))
        if head > self.layout.chunk_bytes:
            raise ValueError(f"{self._queue}: a message of {len(lengths)} parts, whose head does not fit into a chunk")
        return message.places(lengths, head).end <= self.layout.chunk_bytes

    def write(self, parts: Sequence[bytes | memoryview], lengths: tuple[int, ...], aside: bool) -> None:
        """Write and publish the next message, when there is room (``awaited_message``).

        Raises:
            OSError: no memory or descriptor for a side segment; nothing was published.
        """
        flags, count = self.flags, len(lengths)
        at = self._offsets[(flags.number - 1) % self.layout.chunks]
        if not aside and count == 1:  # most messages
            message.write_head(self._bytes, at, 0, lengths)
            at += message.HEAD_OF_ONE
            self._bytes[at:at + lengths[0]] = parts[0]
            self._publish()
            return
        if not aside:
            place = message.places(lengths, message.head_bytes(count))
            target, base, side = self._bytes, at, 0
        else:
            place = message.places(lengths, 0)
            lane, gone = self._sides.place(flags.number, place.end)
            for name, reason in gone.items():
                self._lose(name, reason)
            target, base, side = lane.segment.bytes, 0, lane.number
        message.write_head(self._bytes, at, side, lengths)
        for offset, length, part in zip(place.offsets, lengths, parts, strict=True):
            start = base + offset
            target[start:start + length] = part
        self._publish()

    def drop(self, name: str) -> None:
        """Wait for this reader no more; it sees that."""
        self._futex.wake(self.flags.drop(self.names.index(name)))
        self.door.forget(name)

    def check(self) -> None:
        """Drop readers whose process has ended."""
        for name in self.live():
            if self.door.is_gone(name):
                self._lose(name, "its process has ended")

    def close(self) -> None:
        """No more messages. What was published can still be read."""
        self._futex.wake(self.flags.close())
        self.door.close()
        self._sides.close()
        self._segment.close()

    def _publish(self) -> None:
        word = self.flags.publish()
        if word is not None:
            self._futex.wake(word)
