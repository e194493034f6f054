"""What prefill has for one decode rank over a link whose pieces decode asks for itself: told of, and waiting to be told of.

    put ─▶ waiting ─▶ on offer (OFFER) ─▶ taken (TAKEN), in the order of the offers

Belongs here: the order, and when a put is done. Does not belong here: how many may be on offer, and where a piece lies:
each link knows that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from xpyd_sidecar.errors import ProtocolError
from xpyd_sidecar.kv import bodies, frames
from xpyd_sidecar.kv.blocks import runs
from xpyd_sidecar.kv.frames import Kind
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.transport.link import Blocks, Session


class OfferedBlocks(NamedTuple):
    """A piece that decode has been told of, or will be. ``done``: to be called once, when its bytes may be freed."""

    session: Session
    key: Key
    blocks: Blocks
    done: Callable[[], None]
    cover: bool
    where: int = 0
    """The link's own word on it: a slot, or a group."""


class OfferQueue:
    """Of one session."""

    def __init__(self) -> None:
        self.waiting: deque[OfferedBlocks] = deque()
        self.offered: deque[OfferedBlocks] = deque()

    def __bool__(self) -> bool:
        """Whether decode has still to take something."""
        return bool(self.waiting or self.offered)

    def put(self, session: Session, key: Key, blocks: Blocks, sent: Callable[[], None], *, cover: bool, most: int) -> None:
        """Blocks wait, in pieces of ``most`` bytes or one block. ``sent`` is called when all pieces are done."""
        cuts = list(runs(blocks.first, blocks.blocks, len(blocks.data) // blocks.blocks, most))
        done = _all_of(len(cuts), sent)
        self.waiting.extend(OfferedBlocks(session, key, blocks.part(*cut), done, cover) for cut in cuts)

    def next(self, where: int = 0) -> OfferedBlocks:
        """The one that has waited longest, which is on offer from now on."""
        one = self.waiting.popleft()._replace(where=where)
        self.offered.append(one)
        return one

    def taken(self, session: Session) -> OfferedBlocks:
        """Decode has answered the oldest offer.

        Raises:
            ProtocolError: nothing is on offer.
        """
        if not self.offered:
            raise ProtocolError(session.peer, "took what was not on offer")
        return self.offered.popleft()

    def clear(self) -> list[OfferedBlocks]:
        """Nothing is on offer any more, and nothing waits; what was and did."""
        held = [*self.offered, *self.waiting]
        self.offered.clear()
        self.waiting.clear()
        return held


def offer(one: OfferedBlocks, address: int, within: bodies.Within | None = None) -> None:
    """Tell decode where a piece lies."""
    piece = one.blocks
    body = bodies.body(bodies.Offer(address, len(piece.data), piece.total() if one.cover else None, within))
    tell(one, body)


def tell(one: OfferedBlocks, offered: bytes) -> None:
    """Send an OFFER of a piece, with its body."""
    piece = one.blocks
    one.session.queue(frames.encode(Kind.OFFER, one.key, offered, region=piece.region, first=piece.first,
                                    blocks=piece.blocks), offered)


def _all_of(count: int, sent: Callable[[], None]) -> Callable[[], None]:
    """Calls ``sent`` when it has been called so often itself."""
    left = count

    def done() -> None:
        nonlocal left
        left -= 1
        if not left:
            sent()
    return done
