"""What sender and receiver know of links over NCCL; made by ``prefill`` and ``decode``, which need torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from xpyd_sidecar.kv import bodies
from xpyd_sidecar.kv.frames import Header
from xpyd_sidecar.memory.staging import Chunk
from xpyd_sidecar.transport.link import BlockLink, LinkContext, PieceTaker, Session


class GroupLink(BlockLink, Protocol):
    """Prefill's side."""

    def received(self, session: Session) -> None:
        """Decode receives the oldest offer from now on.

        Raises:
            ProtocolError: nothing is on offer.
        """

    def ungrouped(self, message: bodies.Group) -> None:
        """Decode has left a group."""


class Wanted(Protocol):
    """What decode's side asks of the session that it belongs to."""

    def wants(self, header: Header, offer: bodies.Offer) -> bool:
        """Whether an offer is still wanted.

        Raises:
            ProtocolError: it is not what was asked for.
        """

    def received(self, header: Header, chunk: Chunk, size: int) -> None:
        """Blocks are here, intact, in GPU memory.

        Raises:
            ProtocolError: they have come before.
        """


class Grouping(Protocol):
    """Makes both sides."""

    def link(self, context: LinkContext, piece: int) -> GroupLink:
        """Prefill's side of a session; ``piece``: bytes of the largest piece that both take."""

    def taker(self, context: LinkContext, wanted: Wanted) -> PieceTaker:
        """Decode's side of a session."""

    def on_free(self, call: Callable[[], None] | None) -> None:
        """Call this, from any thread, whenever a slot to receive into is free again."""
