"""What sender and receiver ask of a link, whatever moves the bytes.

A session between two ranks always runs over TCP (``connection``): who the peer is, READY, DONE, CANCEL, GONE, liveness.
A link is how blocks travel beside it; it belongs to one session and is chosen when the session begins
(``session.link_choice``). Blocks of one transfer may arrive in any order; a link says that a put
has left, the receiver counts what is in place.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from xpyd_sidecar.errors import PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv import bodies, frames
from xpyd_sidecar.kv.blocks import runs
from xpyd_sidecar.kv.frames import FRAME_BYTES, NO_TRANSFER, FrameKind, Header
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.memory.staging import Chunk
from xpyd_sidecar.transport import moves
from xpyd_sidecar.transport.moves import Scatter

logger = logging.getLogger(__name__)

READ: Final = bodies.Taken(read=True)
"""A piece is here, or is not wanted."""


class Session:
    """An authenticated connection to one rank of a peer. Used on its I/O thread, but for ``post``."""

    peer: str
    """Name and address, for messages."""

    @property
    def left(self) -> bool:
        """Whether the peer has closed it, as far as is known."""
        return False

    def post(self, call: Callable[[], None]) -> None:
        """Have a call made (``run``) on its I/O thread."""
        raise NotImplementedError

    def run(self, call: Callable[[], None]) -> None:
        """Make a call outside of a frame; what the peer did wrong, or we, ends the session."""
        try:
            call()
        except PeerError as error:
            self.close(error)
        except Exception as error:
            logger.exception("xpyd: the session with %s is ended: a callback failed", self.peer)
            self.mistaken(error)

    def mistaken(self, error: Exception) -> None:
        """A mistake of ours in what was done for this session costs it: its transfers would wait for their deadlines."""
        self.close(PeerGone(self.peer, f"{type(error).__name__} on this side"))

    def close(self, error: PeerError) -> None:
        """End it, once."""
        raise NotImplementedError

    def say(self, kind: FrameKind, body: bodies.Body | None = None, key: Key = NO_TRANSFER, *, region: int = 0,
            first: int = 0, blocks: int = 0) -> None:
        """Send a frame other than DATA."""
        payload = bodies.body(body) if body is not None else b""
        self.queue(frames.encode(kind, key, payload, region=region, first=first, blocks=blocks), payload)

    def queue(self, header: bytes | Callable[[], bytes], payload: memoryview | bytes,
              sent: Callable[[], None] | None = None) -> None:
        """Send a frame after those queued before; ``sent`` is called once, when it has left or never will.

        A header that has a checksum of much in it is best made when its turn comes: what was read for it then is still in
        the processor's cache when it is copied out.
        """
        raise NotImplementedError

    def spend(self, size: int) -> None:
        """Bytes were moved for it beside the connection: they count where sessions take turns."""
        raise NotImplementedError


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

    ``sums``: of more blocks, of which these begin with number ``at``. ``cover``: they are to have a sum.
    """

    region: int
    first: int
    blocks: int
    data: memoryview
    sums: Sums | None = None
    at: int = 0
    cover: bool = True

    def part(self, first: int, count: int) -> Blocks:
        """So many of them from block ``first`` of the region on."""
        each, skip = len(self.data) // self.blocks, first - self.first
        data = self.data[skip * each:(skip + count) * each]
        return Blocks(self.region, first, count, data, self.sums, self.at + skip, self.cover)

    def cut(self, most: int) -> list[Blocks]:
        """All of them, in parts of ``most`` bytes or one block."""
        each = len(self.data) // self.blocks
        return [self.part(*one) for one in runs(self.first, self.blocks, each, most)]

    def total(self) -> int | None:
        """The payload sum of them in one frame, where there is to be one."""
        if not self.cover:
            return None
        sums = self.sums or Sums(self.data, self.blocks)
        return frames.total(sums.of(self.at if self.sums else 0, self.blocks))


class BlockLink:
    """Puts blocks where a session's peer asked for them. Used on the sender's I/O thread."""

    name: str
    from_store = False
    """Whether it reaches the store of copies alone: what is made for one send is best made there."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def put(self, key: Key, blocks: Blocks, sent: Callable[[], None], *, most: int = FRAME_BYTES) -> None:
        """Begin to move blocks, in pieces of ``most`` bytes or one block. Never waits.

        ``sent`` is called once, when ``data`` may be freed.
        """
        raise NotImplementedError

    def taken(self, *, read: bool) -> None:
        """The peer is done with the oldest offer: it has it or does not want it (``read``), or cannot take it.

        Raises:
            ProtocolError: nothing is on offer, or what is cannot be taken although the peer has agreed on this link.
        """
        raise ProtocolError(self.session.peer, "took what was not on offer")

    def told(self, kind: FrameKind, body: memoryview) -> None:
        """The peer receives the oldest offer from now on (POSTED), or has left a group (UNGROUP).

        Raises:
            ProtocolError: there are no groups on this link, or nothing is on offer.
        """
        raise ProtocolError(self.session.peer, f"sent {kind.name} over a link without groups")

    @property
    def busy(self) -> bool:
        """Whether blocks wait to be taken."""
        return False

    def close(self) -> None:
        """The session has ended: nothing is taken any more, what waits may be freed."""


class PieceOwner(Protocol):
    """Whose pieces come beside a session of decode's. Offers are wanted, or not; what has come is theirs to place."""

    def wants(self, header: Header, offer: bodies.Offer, most: int) -> bool:
        """Whether an offer is still wanted. ``most``: bytes that it may have; 0: as many as were asked for at once.

        Raises:
            ProtocolError: it is not what was asked for.
        """

    def received(self, header: Header, chunk: Chunk, size: int) -> None:
        """Blocks are here, intact, in GPU memory.

        Raises:
            ProtocolError: they have come before.
        """

    def place(self, header: Header, offer: bodies.Offer, bring: Callable[[Scatter], str]) -> bool:
        """Have blocks brought to their places. False: no memory is free for them now.

        ``bring``: copies all of them, and says what they have come over.

        Raises:
            ChecksumError, ProtocolError: they are not what was sent, or have come before; what ``bring`` raises.
        """


@dataclass
class OfferedPiece:
    """An offer that is not answered. ``slot``: where it comes to, where that is begun at once; ``come``: it is there."""

    header: Header
    offer: bodies.Offer
    slot: int | None = None
    come: bool = True


class PieceTaker:
    """Decode's side of a link that brings pieces beside the session. Offers are answered in their order."""

    name: bodies.LinkName

    def __init__(self, session: Session, wanted: PieceOwner, piece: int, ahead: int) -> None:
        """``piece``: bytes of the largest piece, 0: what was asked for at once; ``ahead``: offers that may wait."""
        self.piece = piece
        self.session = session
        self._wanted = wanted
        self._ahead = ahead
        self._offers: deque[OfferedPiece] = deque()
        self._closed = False

    def post(self, call: Callable[[], None]) -> None:
        """Have a call made on the session's I/O thread."""
        self.session.post(call)

    def grouped(self, kind: FrameKind, message: bodies.Group) -> None:
        """Prefill makes a group (GROUP), or has left one (UNGROUP).

        Raises:
            ProtocolError: there are none on this link, or the number of one that is made is not a new one.
        """
        raise ProtocolError(self.session.peer, f"sent {kind.name} {message.number} over a link without groups")

    def offered(self, header: Header, offer: bodies.Offer) -> None:
        """Prefill has a piece.

        Raises:
            ProtocolError: not what was asked for, or more than may be offered at once.
        """
        before = len(self._offers)
        if before >= self._ahead or 0 < self.piece < offer.size:
            reason = f"offered {offer.size} bytes and {before} pieces before; bounds {self.piece}, {self._ahead}"
            raise ProtocolError(self.session.peer, reason)
        one = OfferedPiece(header, offer)
        self._begin(one)
        self._offers.append(one)
        self._pump()

    def resume(self) -> None:
        """Memory that was missing may be free."""
        self.session.run(self._pump)

    def close(self) -> None:
        """The session has ended."""
        raise NotImplementedError

    def _begin(self, one: OfferedPiece) -> None:
        """What can be done with an offer before it is its turn."""

    def _pump(self) -> None:
        """Go on with the oldest offers as far as that can be done now. Raises what the session says against them."""
        raise NotImplementedError

    def _taken(self, answer: bodies.Taken = READ) -> None:
        """Answer the oldest offer."""
        self.session.say(FrameKind.TAKEN, answer, self._offers.popleft().header.key)
