"""Blocks from GPU to GPU: the link of a session whose ranks form an NCCL group of two. Prefill's side.

    prefill                                                decode
    GROUP(number, id) ────────────────────────────────▶    joins; both make their communicators meanwhile
    OFFER(number, size) ──────────────────────────────▶    takes a slot of GPU memory, launches ncclRecv
    ncclSend                     ◀──────── POSTED          …
    the copy is freed                                      compares the sums, hands the blocks over

Metadata goes first, over the session, for each piece; an array of which a rank has nothing (a layer of another stage,
one without KV) is never offered. Each offer is answered once, in order: POSTED, or TAKEN where nobody wants it (read) or
it must come over TCP (not read). So both sides launch the same pieces of a group in the same order, and prefill launches
only what decode has launched: a send never occupies the GPU for want of its receive.

A group is made when there is something to send, and ends with the session, when idle, when another one needs its place, or
when NCCL fails. While nothing was under way, what is left goes over TCP, and after a while a new group is tried. Else the
session ends, as it does when its connection breaks: nobody knows which pieces have come.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from xpyd_sidecar.errors import PeerGone
from xpyd_sidecar.kv import bodies
from xpyd_sidecar.kv.frames import FrameKind
from xpyd_sidecar.kv.groups import Way
from xpyd_sidecar.transport.link import Session
from xpyd_sidecar.transport.nccl.driver import Piece
from xpyd_sidecar.transport.nccl.thread import NcclThread
from xpyd_sidecar.transport.offers import OfferedBlocks, OfferLink
from xpyd_sidecar.transport.tcp.link import TcpLink

OFFERS_AHEAD: Final = 4
RETRY_S: Final = 60.0
"""How long a session goes without a group after one could not be made."""


class NcclLink(OfferLink):
    """Prefill's side. ``where`` of an offer: the group that it was made in."""

    name = "nccl"

    def __init__(self, hub: NcclThread, session: Session, piece: int) -> None:
        """``piece``: bytes of the largest piece that both sides take; a block fits."""
        super().__init__(session, OFFERS_AHEAD, piece)
        self._hub = hub
        self._tcp = TcpLink(session)
        self._number = 0
        self._open = False
        self._not_before = 0.0
        self._moving = 0

    def post(self, call: Callable[[], None]) -> None:
        """Have a call made on the session's I/O thread."""
        self.session.post(call)

    def _pump(self) -> None:
        """Offer what waits, in a group that is made if there is none."""
        if not self.waiting or self._closed:
            return
        if self._open:
            super()._pump()
        elif not self._number and time.monotonic() >= self._not_before:
            self._number = self._hub.join(self, Way.SEND)
        elif not self._number:
            while self.waiting:
                self._over_tcp(self.waiting.popleft())

    def _offer(self, one: OfferedBlocks) -> OfferedBlocks:
        self._hub.hold(self._number, 1)
        self._tell(one, self._number, 0 if one.blocks.cover else None)
        return one._replace(where=self._number)

    def _over_tcp(self, one: OfferedBlocks) -> None:
        self._tcp.put(one.key, one.blocks, one.done)

    def _read(self, one: OfferedBlocks) -> None:
        self._hub.hold(one.where, -1)
        one.done()

    def _unread(self, one: OfferedBlocks) -> None:
        self._hub.hold(one.where, -1)
        self._over_tcp(one)

    def told(self, kind: FrameKind, body: memoryview) -> None:
        """As of ``BlockLink``."""
        if kind is FrameKind.UNGROUP:
            message = bodies.read_body(body, bodies.Group)
            if self._number and message.number == self._number:
                self._hub.leave(self._number, f"decode: {message.reason}")
            return
        one = self._answered()
        if one.where != self._number or not self._open:
            one.done()
            self.session.close(PeerGone(self.session.peer, "receives in a group that has ended here"))
            return
        self._moving += 1
        data = one.blocks.data
        self._hub.move(one.where, Piece(len(data), one.blocks.cover, data, tag=one), self)
        self._hub.hold(one.where, -1)
        self._pump()

    @property
    def busy(self) -> bool:
        """Whether decode has still to answer or to receive."""
        return bool(self._moving) or super().busy

    def close(self) -> None:
        """The session has ended: what the GPU does not read may be freed, the rest when the group has ended."""
        if self._number:
            self._hub.leave(self._number, "the session has ended")
        super().close()

    # --- told by the communicator thread, on the session's thread ---

    def begun(self, uid: bytes) -> None:
        """The group is being made: decode may join."""
        if not self._closed:
            self.session.say(FrameKind.GROUP, bodies.Group(self._number, uid))

    def opened(self, number: int) -> None:
        """Decode has joined."""
        self._open = number == self._number
        self._pump()

    def posted(self, piece: Piece) -> None:
        """Of receivers alone."""

    def moved(self, piece: Piece) -> None:
        """A piece is out."""
        self._moving -= 1
        piece.tag.done()

    def lost(self, number: int, reason: str, *, busy: bool) -> None:
        """The group does no more."""
        was_open = self._open
        self._number, self._open = 0, False
        if self._closed:
            return
        if busy or self._moving:
            self.session.close(PeerGone(self.session.peer, f"nccl: {reason}"))
            return
        if not was_open:
            self._not_before = time.monotonic() + RETRY_S
        self.session.say(FrameKind.UNGROUP, bodies.Group(number, reason=reason))
        self._pump()

    def over(self, given_back: tuple[Piece, ...]) -> None:
        """The GPU has let go of pieces that were not done."""
        for piece in given_back:
            self.moved(piece)
