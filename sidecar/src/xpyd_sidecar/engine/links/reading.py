"""What sender and receiver know of links over NIXL; made by ``links.nixl`` and ``links.nixl_taker``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from xpyd_sidecar.engine.links.base import Link
from xpyd_sidecar.engine.links.grouping import Context, Taker
from xpyd_sidecar.kv import messages
from xpyd_sidecar.kv.frames import Header

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


class ReadLink(Link, Protocol):
    """Prefill's side."""

    def shown(self) -> messages.NixlMemory:
        """What decode needs to read this process's copies in this session."""


class Reading(Protocol):
    """Makes them."""

    def link(self, context: Context, theirs: messages.NixlReader) -> ReadLink | None:
        """Prefill's side of a session; None: too many are open."""

    def taker(self, context: Context, wanted: Placing, memory: messages.NixlMemory, told: Told) -> Taker:
        """Decode's side of a session. It begins to reach prefill's memory, and says once how that has ended."""

    def stop(self) -> None:
        """End every session, and the thread."""
