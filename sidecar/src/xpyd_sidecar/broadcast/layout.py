"""Where everything of a ring lies in its segment: arithmetic alone.

One writer, ``n`` readers, ``c`` chunks. Words are 32 bits, native byte order, each on a cache line of its own (64 bytes),
so that nobody's stores slow down somebody else's spinning. **Every word has one process that stores it**; nothing is ever
changed by two, so no atomic read-modify-write is needed, which Python does not have.

    0          writer's lines                                   readers' lines
    +----------+----------+-----------+-----+-------------+----------+-----+------------+
    |  state   | awaiting | dropped 0 | ... | dropped n-1 | parked 0 | ... | parked n-1 |   control: 2 + 2n lines
    +----------+----------+-----------+-----+-------------+----------+-----+------------+
    +-----------+----------+-----+------------+
    | written 0 | read 0,0 | ... | read 0,n-1 |      flags of chunk 0: 1 + n lines
    +-----------+----------+-----+------------+
      ...
    +-------------+------------+-----+--------------+
    | written c-1 | read c-1,0 | ... | read c-1,n-1 |      flags of chunk c-1
    +-------------+------------+-----+--------------+
    (up to a whole page)
    +---------+---------+-----+-----------+
    | chunk 0 | chunk 1 | ... | chunk c-1 |      chunk_bytes each
    +---------+---------+-----+-----------+

    state      0 open, 1 closed by the writer
    awaiting   0, or 1 + the reader for which the writer sleeps
    dropped    1 when the writer has dropped that reader: what it reads from then on may be overwritten
    parked     1 while that reader sleeps
    written    number of the message in the chunk
    read       number of the last message that this reader has given back there
"""

from __future__ import annotations

from typing import Final

import msgspec

LINE: Final = 64
WORD: Final = 4
PAGE: Final = 4096
MASK: Final = 0xFFFF_FFFF
READERS_MAX: Final = 1024
CHUNKS_MAX: Final = 4096
CHUNK_MIN: Final = 256
SIZE_MAX: Final = 1 << 40
PER_LINE: Final = LINE // WORD


class Layout(msgspec.Struct, frozen=True):
    """The sizes of a ring; all offsets follow from them.

    Raises:
        ValueError: a size is out of bounds; the message names it.
    """

    readers: int
    chunks: int = 10
    chunk_bytes: int = 10 << 20
    """A multiple of 64."""

    def __post_init__(self) -> None:
        if not 1 <= self.readers <= READERS_MAX:
            raise ValueError(f"readers: {self.readers} is not between 1 and {READERS_MAX}")
        if not 2 <= self.chunks <= CHUNKS_MAX:
            raise ValueError(f"chunks: {self.chunks} is not between 2 and {CHUNKS_MAX}")
        if self.chunk_bytes < CHUNK_MIN or self.chunk_bytes % LINE:
            raise ValueError(f"chunk_bytes: {self.chunk_bytes} is not a multiple of {LINE} of at least {CHUNK_MIN}")
        if self.size > SIZE_MAX:
            raise ValueError(f"chunk_bytes: {self.chunks} chunks of {self.chunk_bytes} bytes are more than {SIZE_MAX}")

    @property
    def size(self) -> int:
        """Bytes of the whole segment."""
        return self.data_offset + self.chunks * self.chunk_bytes

    @property
    def data_offset(self) -> int:
        """Where chunk 0 begins, in bytes: on a page of its own."""
        return -(-self.words * WORD // PAGE) * PAGE

    @property
    def words(self) -> int:
        """Words of control and flags together, with the unused ones between them."""
        return (2 + 2 * self.readers + self.chunks * (1 + self.readers)) * PER_LINE

    @property
    def state_word(self) -> int:
        """Index of the 32-bit word ``state``, which the writer stores."""
        return 0

    @property
    def awaiting_word(self) -> int:
        """Index of the word ``awaiting``, which the writer stores."""
        return PER_LINE

    def dropped_word(self, reader: int) -> int:
        """Index of the word ``dropped`` of a reader, which the writer stores."""
        return (2 + reader) * PER_LINE

    def parked_word(self, reader: int) -> int:
        """Index of the word ``parked`` of a reader, which that reader stores."""
        return (2 + self.readers + reader) * PER_LINE

    def written_word(self, chunk: int) -> int:
        """Index of the word ``written`` of a chunk, which the writer stores."""
        return (2 + 2 * self.readers + chunk * (1 + self.readers)) * PER_LINE

    def read_word(self, chunk: int, reader: int) -> int:
        """Index of the word ``read`` of a chunk and a reader, which that reader stores."""
        return self.written_word(chunk) + (1 + reader) * PER_LINE

    def chunk(self, number: int) -> int:
        """Index of the chunk that holds message ``number`` (from 1)."""
        return (number - 1) % self.chunks

    def chunk_offset(self, chunk: int) -> int:
        """Where a chunk begins in the segment, in bytes."""
        return self.data_offset + chunk * self.chunk_bytes
