"""Decode's half of what is pushed ahead: the lookup buffer with memory under it, on the receiver's I/O thread.

    D: EXPECT ──▶ P: STORE (so many blocks) ──▶ D: ROOM ──▶ P: DATA …        or ──▶ D: BUSY, and P asks again later

The engine's thread gives back what it has placed, says what is unwanted, and resets all of it; nothing else is called by
another thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.contract.ids import HostPort, Incarnation
from xpyd_sidecar.kv.blocks import runs
from xpyd_sidecar.kv.bodies import Ready
from xpyd_sidecar.kv.buddy import Buddy
from xpyd_sidecar.kv.buffer import Buffer, BufferedCut, BufferPlace, Item
from xpyd_sidecar.kv.frames import FRAME_BYTES, Header
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.stores import Expect
from xpyd_sidecar.memory.staging import Chunk
from xpyd_sidecar.memory.store import Allocation
from xpyd_sidecar.threads.increments import Increments

logger = logging.getLogger(__name__)

RETRY_S: Final = 0.1
LACK_S: Final = 10.0
"""How long no memory is asked for after none was to be had: to pin some takes long."""


class Expecting(NamedTuple):
    """Tell a prefill rank that it may push ahead."""

    address: HostPort
    incarnation: Incarnation
    key: Key
    identity: bytes
    slots: int
    """Blocks of all arrays together that come for the whole prompt."""


class Slot(NamedTuple):
    """Where a frame that no load has asked for goes."""

    place: BufferPlace
    chunk: Chunk


class LookupBuffer:
    """The buffer of one rank."""

    def __init__(self, make: Callable[[int], Chunk], *, buffer_bytes: int, pool_bytes: int, block_bytes: tuple[int, ...],
                 cover: bool, ttl_s: float, post: Callable[[Callable[[], None]], None]) -> None:
        """``make``: memory of a size; ``post``: have a call made on the I/O thread."""
        self.counted = Increments()
        """Metrics, for the engine's thread to take."""
        self._arenas = (Allocation(make, buffer_bytes), Allocation(make, pool_bytes))
        self._buffer = Buffer(Buddy(buffer_bytes), Buddy(pool_bytes), ttl_s=ttl_s, usable=self._has_memory)
        self._block_bytes = block_bytes
        self._cover = cover
        self._post = post
        self._bytes = buffer_bytes + pool_bytes
        self._spare = False
        self._asks_at = 0.0
        """When memory may be asked for."""

    @property
    def used(self) -> tuple[int, int]:
        """Bytes in use, of the buffer and of the host pool."""
        return self._buffer.used

    def __contains__(self, key: object) -> bool:
        return key in self._buffer

    def spare(self, *, spare: bool) -> None:
        """Whether nobody has a use for the buffer: nothing is pushed ahead then, and its memory goes back when empty."""
        self._post(partial(self._set_spare, spare))

    def _set_spare(self, spare: bool) -> None:
        self._spare = spare
        self._drop_if_spare()

    def _drop_if_spare(self) -> None:
        if self._spare and self.used == (0, 0):
            for arena in self._arenas:
                arena.drop()

    def expect(self, step: Expecting, now: float) -> tuple[Expect | None, list[Key]]:
        """A transfer may be pushed ahead: what to tell prefill (None: nothing new), and entries that had to give way."""
        if not self._bytes or self._spare or step.key in self._buffer:
            return None, []
        regions = len(self._block_bytes)
        gone = self._buffer.expect(step.key, step.identity, step.slots, now)
        return Expect(regions, sum(self._block_bytes), self._cover), gone

    def store(self, header: Header) -> bool:
        """Prefill asks for room for blocks. False: busy.

        Raises:
            ValueError: blocks that it cannot have, or has asked for before.
        """
        if not 0 <= header.region < len(self._block_bytes) or header.blocks < 1:
            raise ValueError(f"{header.blocks} blocks of array {header.region}")
        each = self._block_bytes[header.region]
        room = self._buffer.offer(header.key, (BufferedCut(header.region, first, blocks, blocks * each)
                                               for first, blocks in runs(header.first, header.blocks, each, FRAME_BYTES)))
        if not room:
            self.counted.add(metrics.BUFFER_BUSY, 1)
        return room

    def _has_memory(self, tier: int) -> bool:
        """Before any of it is promised: what prefill has sent it does not send again, and no session is to end for it."""
        if self._arenas[tier].made:
            return True
        if time.monotonic() < self._asks_at:
            return False
        try:
            self._arenas[tier].prepare()
        except Exception as error:  # noqa: BLE001  # torch's, Python's and the system's have no common root
            self._asks_at = time.monotonic() + LACK_S
            logger.warning("xpyd: nothing can be pushed ahead for %g s: no memory for the buffer: %s: %s", LACK_S,
                           type(error).__name__, error)
            return False
        return True

    def begin(self, header: Header) -> Slot | None:
        """A frame comes that no load has asked for: where it goes; None where nothing was granted for it."""
        place = self._buffer.take(header.key, self._cut(header))
        return None if place is None else Slot(place, self._chunk(place, 0, place.size))

    def complete(self, header: Header, slot: Slot) -> None:
        """That frame is here and intact."""
        if self._buffer.insert(header.key, self._cut(header), slot.place):
            self.counted.add(metrics.BUFFERED_BYTES, slot.place.size)

    def claim(self, key: Key, identity: bytes, ready: Ready) -> list[tuple[Item, Chunk]]:
        """A load has begun: what the buffer has of what it asks for, of its try, else by content. The entry is gone.

        The reader gives the chunks back.
        """
        roi = ready.first, ready.count, ready.spans
        items = self._buffer.drop_select(key, *roi) or self._buffer.drop_select_content(key.transfer, identity, *roi)
        return [(one, self._chunk(one.place, one.skip, one.size)) for one in items]

    def forget(self, key: Key) -> None:
        """A try will not come, or is not wanted."""
        self._buffer.forget(key)

    def reset(self) -> None:
        """Nothing that has come so far will be wanted; called by the engine's thread."""
        self._post(self._buffer.clear)

    def unwanted(self, key: Key) -> None:
        """The request of a try has ended without it; called by the engine's thread.

        Prefill is told to drop the try, and its GONE has it forgotten too, unless their link has ended meanwhile.
        """
        self._post(partial(self.forget, key))

    def lost(self, key: Key) -> None:
        """The link of a try has ended: what is whole may still be claimed."""
        self._buffer.broken(key)

    def tick(self, now: float) -> list[Key]:
        """Time passes: tries that no request has claimed in time."""
        over = self._buffer.tick(now)
        if over:
            self.counted.add(metrics.UNCLAIMED, len(over))
        self._drop_if_spare()
        return over

    def _cut(self, header: Header) -> BufferedCut:
        return BufferedCut(header.region, header.first, header.blocks, header.length)

    def _chunk(self, place: BufferPlace, skip: int, size: int) -> Chunk:
        memory = self._arenas[place.tier].at(place.offset + skip, size)
        return Chunk(memory.tensor, memory.view, partial(self._back, place))

    def _back(self, place: BufferPlace) -> None:
        self._post(partial(self._buffer.free, place))
