"""What sender and receiver know of links over NCCL; made by ``links.nccl`` and ``links.nccl_taker``, which need torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from xpyd_sidecar.engine.bounds import Chunk
from xpyd_sidecar.engine.links.base import Link, Session
from xpyd_sidecar.errors import PeerError
from xpyd_sidecar.kv import frames, messages
from xpyd_sidecar.kv.frames import NO_TRANSFER, Header, Kind
from xpyd_sidecar.kv.keys import Key


class Context(NamedTuple):
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


class GroupLink(Link, Protocol):
    """Prefill's side."""

    def received(self, session: Session) -> None:
        """Decode receives the oldest offer from now on.

        Raises:
            ProtocolError: nothing is on offer.
        """

    def ungrouped(self, message: messages.Group) -> None:
        """Decode has left a group."""


class Wanted(Protocol):
    """What decode's side asks of the session that it belongs to."""

    def wants(self, header: Header, offer: messages.Offer) -> bool:
        """Whether an offer is still wanted.

        Raises:
            ProtocolError: it is not what was asked for.
        """

    def received(self, header: Header, chunk: Chunk, size: int) -> None:
        """Blocks are here, intact, in GPU memory.

        Raises:
            ProtocolError: they have come before.
        """


class Taker(Protocol):
    """Decode's side."""

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


class Grouping(Protocol):
    """Makes them."""

    def link(self, context: Context, piece: int) -> GroupLink:
        """Prefill's side of a session; ``piece``: bytes of the largest piece that both take."""

    def taker(self, context: Context, wanted: Wanted) -> Taker:
        """Decode's side of a session."""

    def on_free(self, call: Callable[[], None] | None) -> None:
        """Call this, from any thread, whenever a slot to receive into is free again."""
