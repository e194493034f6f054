"""What sender and receiver ask of a link, whatever moves the bytes.

A session between two ranks always runs over TCP (``links.tcp``): who the peer is, READY, DONE, CANCEL, GONE, and liveness.
A link is how blocks travel beside it; it belongs to one session and is chosen when the session begins (``links.near``).
Blocks of one transfer may arrive in any order; a link says that a put has left, the receiver counts what is in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from xpyd_sidecar.kv.frames import FRAME_BYTES
from xpyd_sidecar.kv.keys import Key


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


class Blocks(NamedTuple):
    """Blocks to be put: so many of one region from ``first`` on, packed in ``data``."""

    region: int
    first: int
    blocks: int
    data: memoryview


class Link(Protocol):
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
