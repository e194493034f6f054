"""What sender and receiver know of links over NIXL; made by ``prefill`` and ``decode``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from xpyd_sidecar.kv import messages
from xpyd_sidecar.kv.frames import Header
from xpyd_sidecar.transport.link import BlockLink, LinkContext, PieceTaker

Told = Callable[[str, bool], None]
"""How an attempt to reach prefill's memory has ended: why it cannot be read (empty: it can), and whether that is only that
prefill has not answered in time."""


class Placing(Protocol):
    """What decode's side asks of the session that it belongs to."""

    def wants(self, header: Header, offer: messages.Offer) -> bool:
        """Whether an offer is still wanted.

        Raises:
            ProtocolError: it is not what was asked for.
        """

    def place(self, header: Header, offer: messages.Offer, address: int) -> bool:
        """Put blocks, which are at an address of this process, to their places. False: no memory is free for them now.

        Raises:
            ChecksumError, ProtocolError: they are not what was sent, or have come before.
        """


class ReadLink(BlockLink, Protocol):
    """Prefill's side."""

    def shown(self) -> messages.NixlMemory:
        """What decode needs to read this process's copies in this session."""


class Reading(Protocol):
    """Makes both sides."""

    def link(self, context: LinkContext, theirs: messages.NixlReader) -> ReadLink | None:
        """Prefill's side of a session; None: too many are open."""

    def taker(self, context: LinkContext, wanted: Placing, memory: messages.NixlMemory, told: Told) -> PieceTaker:
        """Decode's side of a session. It begins to reach prefill's memory, and says once how that has ended."""

    def stop(self) -> None:
        """End every session, and the thread."""
