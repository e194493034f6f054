"""What sender and receiver know of links over NCCL; made by ``prefill`` and ``decode``, which need torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from xpyd_sidecar.kv import bodies
from xpyd_sidecar.transport.link import BlockLink, LinkContext, PieceOwner, PieceTaker, Session


class GroupLink(BlockLink, Protocol):
    """Prefill's side."""

    def received(self, session: Session) -> None:
        """Decode receives the oldest offer from now on.

        Raises:
            ProtocolError: nothing is on offer.
        """

    def ungrouped(self, message: bodies.Group) -> None:
        """Decode has left a group."""


class Grouping(Protocol):
    """Makes both sides."""

    def link(self, context: LinkContext, piece: int) -> GroupLink:
        """Prefill's side of a session; ``piece``: bytes of the largest piece that both take."""

    def taker(self, context: LinkContext, wanted: PieceOwner) -> PieceTaker:
        """Decode's side of a session."""

    def on_free(self, call: Callable[[], None] | None) -> None:
        """Call this, from any thread, whenever a slot to receive into is free again."""
