"""The flags of a ring: who may write and read which chunk, and when. Pure: the words are handed in, nobody waits here.

Messages are numbered from 1; message ``n`` goes into chunk ``(n - 1) mod c``. A flag holds the *number* of a message,
modulo 2^32, and not just 0 or 1: then no flag is ever reset, every store says something that stays true, and a process may
die between any two of them. Flags are compared for equality only, so the modulus is harmless.

    written = n, read = n         reader has given it back        written = n, read ≠ n     it may read message n
    all read = written            the chunk is free: message n + c may be written over n

    writer, message n                                reader r, message n
    W1  load every live read of the chunk: = n - c?  R1  load written of the chunk: = n?
    W2  store the bytes                              R2  load the bytes
    W3  store written := n                           R3  load dropped r: 0?
    W4  full fence                                   R4  store read := n
    W5  load every parked; wake where one is set     R5  full fence
                                                     R6  load awaiting; wake the writer where it is r's

Laws, in the order of their proof (``tests/unit/test_broadcast_ring_model.py`` holds them under a model of x86's store
buffers, with deaths between any two accesses):
1. *Nothing torn.* W2 comes after W1, R2 after R1 and before R4. The writer stores bytes of n + c only after it has seen
   read = n of every live reader. A dropped reader may be overwritten: dropped was stored before, so R3 shows it.
2. *Nothing lost or reordered.* Both sides count by themselves; a chunk is read once, for one number.
3. *No lost wake-up.* A reader that sleeps has stored parked before the kernel compared written with the old value (the
   system call is a full fence). The writer loads parked after written is visible (W4). One of the two sees the other.
   The same holds for awaiting and R5. Sleeps are cut into slices all the same, since peers die.

The order of accesses: x86 keeps loads in order, stores in order, and no store before an earlier load (TSO); only W4 and R5
need an instruction. Other processors need a fence wherever the table goes from words to bytes or back (``order``).
CPython stores and loads an item of a memoryview of format "I" with one aligned 32-bit move.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from xpyd_sidecar.broadcast.layout import MASK, PER_LINE, Layout

CLOSED: Final = 1


class Words(Protocol):
    """The words of a ring: a memoryview of format "I"."""

    def __getitem__(self, at: int, /) -> int: ...

    def __setitem__(self, at: int, value: int, /) -> None: ...


Fence = Callable[[], object]


class WriteSide:
    """The writer's half. A reader is live until ``drop``."""

    def __init__(self, layout: Layout, words: Words, *, full: Fence, order: Fence | None = None) -> None:
        self.layout = layout
        self.number = 1
        """Of the next message."""
        self.live: tuple[int, ...] = tuple(range(layout.readers))
        self._chunks = layout.chunks
        self._written = tuple(layout.written_word(chunk) for chunk in range(layout.chunks))
        self._words = words
        self._full = full
        self._order = order
        self._look_at_live()

    def laggard(self, number: int) -> int | None:
        """A live reader that has not given back message ``number``, which was published; None when all have."""
        if number <= 0 or number < self.number - self._chunks:  # written over since: so they had
            return None
        words, value, at = self._words, number & MASK, self._written[(number - 1) % self._chunks]
        for offset in self._offsets:
            if words[at + offset] != value:
                return offset // PER_LINE - 1
        if self._order is not None:
            self._order()
        return None

    def lagging_readers(self, number: int) -> tuple[int, ...]:
        """Every live reader that has not given back message ``number``, which is at most ``chunks`` old."""
        at = self.layout.written_word(self.layout.chunk(number))
        return tuple(reader for reader in self.live if self._words[at + (1 + reader) * PER_LINE] != number & MASK)

    def blocking_reader(self) -> int | None:
        """The reader whose chunk is needed for the next message; None when that may be written."""
        return self.laggard(self.number - self._chunks)

    def publish(self) -> int | None:
        """The bytes of the next message are in its chunk. Returns the word to wake where a reader sleeps."""
        words, at = self._words, self._written[(self.number - 1) % self._chunks]
        if self._order is not None:
            self._order()
        words[at] = self.number & MASK
        self.number += 1
        self._full()
        for parked in self._parked:
            if words[parked]:
                return at
        return None

    def await_reader(self, reader: int, number: int) -> tuple[int, int]:
        """Say that the writer sleeps for ``reader`` to give back ``number``: the word to sleep on, and its value.

        Equal to ``number`` only if the reader was faster: then do not sleep.
        """
        self._words[self.layout.awaiting_word] = 1 + reader
        self._full()
        at = self.layout.read_word(self.layout.chunk(number), reader)
        return at, self._words[at]

    def awake(self) -> None:
        """The writer sleeps no more."""
        self._words[self.layout.awaiting_word] = 0

    def drop(self, reader: int) -> int:
        """Stop waiting for a reader for ever. Returns a word to wake, in case it only sleeps."""
        self._words[self.layout.dropped_word(reader)] = 1
        self._full()
        self.live = tuple(other for other in self.live if other != reader)
        self._look_at_live()
        return self.layout.written_word(self.layout.chunk(self.number))

    def close(self) -> int:
        """No more messages. Returns the word to wake."""
        self._words[self.layout.state_word] = CLOSED
        self._full()
        return self.layout.written_word(self.layout.chunk(self.number))

    def _look_at_live(self) -> None:
        self._offsets = tuple((1 + reader) * PER_LINE for reader in self.live)
        self._parked = tuple(self.layout.parked_word(reader) for reader in self.live)


class ReadSide:
    """One reader's half of the ring."""

    def __init__(self, layout: Layout, reader: int, words: Words, *, full: Fence, order: Fence | None = None) -> None:
        self.layout = layout
        self.reader = reader
        self.number = 1
        """Of the message that is read next."""
        self._words = words
        self._full = full
        self._order = order
        self._written = tuple(layout.written_word(chunk) for chunk in range(layout.chunks))
        self._at = self._written[0]
        self._mine = (1 + reader) * PER_LINE
        self._awaiting = layout.awaiting_word
        self._dropped = layout.dropped_word(reader)

    @property
    def chunk(self) -> int:
        """Index of the chunk of the message that is read next."""
        return self.layout.chunk(self.number)

    def ready(self) -> bool:
        """The next message is there."""
        if self._words[self._at] != self.number & MASK:
            return False
        if self._order is not None:
            self._order()
        return True

    def dropped(self) -> bool:
        """The writer waits for this reader no more. Asked after the bytes were read: they may be torn if it is so."""
        if self._order is not None:
            self._order()
        return bool(self._words[self._dropped])

    def give_back(self) -> int | None:
        """The message has been read and may be written over. Returns the word to wake where the writer sleeps for it."""
        words, at = self._words, self._at + self._mine
        if self._order is not None:
            self._order()
        words[at] = self.number & MASK
        self.number += 1
        self._at = self._written[(self.number - 1) % len(self._written)]
        self._full()
        return at if words[self._awaiting] == 1 + self.reader else None

    def closed(self) -> bool:
        """The writer has closed; what it published before can still be read."""
        return self._words[self.layout.state_word] == CLOSED

    def park(self) -> tuple[int, int]:
        """Say that this reader sleeps: the word to sleep on, and its value. Ask ``ready`` again before sleeping."""
        self._words[self.layout.parked_word(self.reader)] = 1
        self._full()
        return self._at, self._words[self._at]

    def awake(self) -> None:
        """The reader sleeps no more."""
        self._words[self.layout.parked_word(self.reader)] = 0
