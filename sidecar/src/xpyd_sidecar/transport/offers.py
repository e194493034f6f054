"""Prefill's side of a link whose pieces decode takes for itself: told of, and waiting to be told of.

    put ─▶ waiting ─▶ on offer (OFFER) ─▶ taken (TAKEN), in the order of the offers

Belongs here: the order, and when a put is done. Does not belong here: where a piece lies, and what becomes of one that
decode cannot take: each link knows that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from xpyd_sidecar.errors import ProtocolError
from xpyd_sidecar.kv import bodies
from xpyd_sidecar.kv.frames import FRAME_BYTES, FrameKind
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.transport.link import BlockLink, Blocks, Session


class OfferedBlocks(NamedTuple):
    """A piece that decode has been told of, or will be. ``done``: to be called once, when its bytes may be freed."""

    key: Key
    blocks: Blocks
    done: Callable[[], None]
    where: int = 0
    """The link's own word on it: a slot, or a group."""


class OfferLink(BlockLink):
    """Of one session."""

    def __init__(self, session: Session, ahead: int, piece: int = 0) -> None:
        """``ahead``: offers that may be without an answer; ``piece``: bytes of one; 0: as whoever puts them says."""
        super().__init__(session)
        self.waiting: deque[OfferedBlocks] = deque()
        self.offered: deque[OfferedBlocks] = deque()
        self._ahead = ahead
        self._piece = piece
        self._closed = False

    def put(self, key: Key, blocks: Blocks, sent: Callable[[], None], *, most: int = FRAME_BYTES) -> None:
        """Offer blocks. ``sent`` is called when all pieces are done."""
        parts = blocks.cut(self._piece or most)
        done = _all_of(len(parts), sent)
        self.waiting.extend(OfferedBlocks(key, part, done) for part in parts)
        self._pump()

    def taken(self, *, read: bool) -> None:
        """Decode has answered the oldest offer. Raises as ``BlockLink`` says."""
        one = self._answered()
        if read:
            self._read(one)
        else:
            self._unread(one)
        self._pump()

    @property
    def busy(self) -> bool:
        """Whether decode has still to take something."""
        return bool(self.waiting or self.offered)

    def close(self) -> None:
        """The session has ended: what is on offer and what waits may be freed."""
        self._closed = True
        held = [*self.offered, *self.waiting]
        self.offered.clear()
        self.waiting.clear()
        for one in held:
            one.done()

    def _answered(self) -> OfferedBlocks:
        """The oldest offer, which is one no more."""
        if not self.offered:
            raise ProtocolError(self.session.peer, "took what was not on offer")
        return self.offered.popleft()

    def _pump(self) -> None:
        """Offer what waits, as long as that may be done."""
        while self.waiting and len(self.offered) < self._ahead:
            self.offered.append(self.waiting.popleft())  # whatever happens now, ``close`` knows of it
            self.offered[-1] = self._offer(self.offered[-1])

    def _tell(self, one: OfferedBlocks, address: int, checksum: int | None) -> None:
        """Tell decode where a piece lies."""
        piece = one.blocks
        offer = bodies.Offer(address, len(piece.data), checksum)
        self.session.say(FrameKind.OFFER, offer, one.key, region=piece.region, first=piece.first, blocks=piece.blocks)

    def _offer(self, one: OfferedBlocks) -> OfferedBlocks:
        """Tell decode of a piece; as it is on offer."""
        raise NotImplementedError

    def _read(self, one: OfferedBlocks) -> None:
        """Decode has it, or does not want it."""
        one.done()

    def _unread(self, one: OfferedBlocks) -> None:
        """Decode cannot take it."""
        self.offered.appendleft(one)
        raise ProtocolError(self.session.peer, f"cannot take a piece over {self.name}, which it has agreed on")


def _all_of(count: int, sent: Callable[[], None]) -> Callable[[], None]:
    """Calls ``sent`` when it has been called so often itself."""
    left = count

    def done() -> None:
        nonlocal left
        left -= 1
        if not left:
            sent()
    return done
