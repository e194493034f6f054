"""What sender and receiver ask of a link, whatever moves the bytes.

A session between two ranks always runs over TCP (``connection``): who the peer is, READY, DONE, CANCEL, GONE, liveness.
A link is how blocks travel beside it; it belongs to one session and is chosen when the session begins
(``session.link_choice``). Blocks of one transfer may arrive in any order; a link says that a put
has left, the receiver counts what is in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from xpyd_sidecar.errors import PeerError
from xpyd_sidecar.kv import frames, messages
from xpyd_sidecar.kv.frames import FRAME_BYTES, NO_TRANSFER, Header, Kind
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.transport import moves


class Session(Protocol):
    """An authenticated connection to one rank of a peer."""

    number: int
    """Never used twice in a process."""
    peer: str
    """Name and address, for messages."""

    def queue(self, header: bytes | Callable[[], bytes], payload: memoryview | bytes,
              sent: Callable[[], None] | None = None) -> None:
        """Send a frame after those queued before; ``sent`` is called once, when it has left or never will.

        A header that has a checksum of much in it is best made when its turn comes: what was read for it then is still in
        the processor's cache when it is copied out.
        """


class Sums:
    """The sums of packed blocks: made ahead while nobody waits for them, else of what is asked for, when it is."""

    def __init__(self, data: memoryview, blocks: int) -> None:
        self._data = data
        self._each = len(data) // blocks
        self._made = b""
        self._wanted = True

    def make(self) -> None:
        """Make all of them, unless some have been asked for already."""
        if self._wanted:
            self._made = moves.sums(self._data, self._each)

    @property
    def made(self) -> bool:
        """Whether they cost nothing any more."""
        return bool(self._made)

    def drop(self) -> None:
        """The data is given back."""
        self._wanted = False

    def of(self, first: int, count: int) -> bytes:
        """Those of ``count`` blocks from ``first`` on (``frames.sums``)."""
        if self._made:
            each = len(self._made) // (len(self._data) // self._each)
            return self._made[first * each:(first + count) * each]
        self._wanted = False
        return moves.sums(self._data[first * self._each:(first + count) * self._each], self._each)


class Blocks(NamedTuple):
    """Blocks to be put: so many of one region from ``first`` on, packed in ``data``.

    ``sums``: of more blocks, of which these begin with number ``at``.
    """

    region: int
    first: int
    blocks: int
    data: memoryview
    sums: Sums | None = None
    at: int = 0

    def part(self, first: int, count: int) -> Blocks:
        """So many of them from block ``first`` of the region on."""
        each, skip = len(self.data) // self.blocks, first - self.first
        return Blocks(self.region, first, count, self.data[skip * each:(skip + count) * each], self.sums, self.at + skip)

    def total(self) -> int:
        """The payload sum of them in one frame."""
        sums = self.sums or Sums(self.data, self.blocks)
        return frames.total(sums.of(self.at if self.sums else 0, self.blocks))


class BlockLink(Protocol):
    """Puts blocks where a session's peer asked for them. Used on the sender's I/O thread."""

    name: str

    def put(self, session: Session, key: Key, blocks: Blocks, sent: Callable[[], None], *, cover: bool,
            most: int = FRAME_BYTES) -> None:
        """Begin to move blocks, in pieces of ``most`` bytes or one block. Never waits.

        ``sent`` is called once, when ``data`` may be freed.
        """

    def taken(self, session: Session, *, read: bool) -> None:
        """The peer is done with the oldest offer.

        Raises:
            ProtocolError: nothing is on offer.
        """

    @property
    def busy(self) -> bool:
        """Whether blocks wait to be taken."""

    def close(self) -> None:
        """The session has ended: nothing is taken any more, what waits may be freed."""


class LinkContext(NamedTuple):
    """A session, for the link that belongs to it. ``post``: have a call made on its I/O thread; ``fail``: end it."""

    session: Session
    post: Callable[[Callable[[], None]], None]
    fail: Callable[[PeerError], None]

    def say(self, kind: Kind, body: messages.Body, key: Key = NO_TRANSFER) -> None:
        """Send a frame of the session."""
        payload = messages.body(body)
        self.session.queue(frames.encode(kind, key, payload), payload)

    def run(self, call: Callable[[], None]) -> None:
        """Make a call on the I/O thread, outside of a frame; what the peer did wrong ends the session."""
        try:
            call()
        except PeerError as error:
            self.fail(error)


class PieceTaker(Protocol):
    """Decode's side of a link that brings pieces beside the session."""

    piece: int
    """Bytes of the largest piece."""

    def group(self, message: messages.Group) -> None:
        """Prefill makes a group.

        Raises:
            ProtocolError: its number is not a new one.
        """

    def ungrouped(self, message: messages.Group) -> None:
        """Prefill has left a group."""

    def offered(self, header: Header, offer: messages.Offer) -> None:
        """Prefill has a piece.

        Raises:
            ProtocolError: not what was asked for, or more than may be offered at once.
        """

    def resume(self) -> None:
        """A slot is free."""

    def close(self) -> None:
        """The session has ended."""
