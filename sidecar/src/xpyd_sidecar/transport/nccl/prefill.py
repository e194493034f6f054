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
from functools import partial
from typing import Final

from xpyd_sidecar.errors import PeerGone
from xpyd_sidecar.kv import bodies, frames
from xpyd_sidecar.kv.frames import Kind
from xpyd_sidecar.kv.groups import Way
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.transport.link import Blocks, LinkContext, Session
from xpyd_sidecar.transport.nccl.driver import Piece
from xpyd_sidecar.transport.nccl.thread import NcclThread
from xpyd_sidecar.transport.offers import OfferedBlocks, OfferQueue, tell
from xpyd_sidecar.transport.tcp.link import TcpLink

OFFERS_AHEAD: Final = 4
RETRY_S: Final = 60.0
"""How long a session goes without a group after one could not be made."""


class NcclLink:
    """Prefill's side."""

    name = "nccl"

    def __init__(self, hub: NcclThread, context: LinkContext, piece: int) -> None:
        """``piece``: bytes of the largest piece that both sides take; a block fits."""
        self._hub = hub
        self._context = context
        self._piece = piece
        self._tcp = TcpLink()
        self._number = 0
        self._open = False
        self._closed = False
        self._not_before = 0.0
        self._queue = OfferQueue()
        """``where``: the group that a piece was offered in."""
        self._moving = 0

    def post(self, call: Callable[[], None]) -> None:
        """Have a call made on the session's I/O thread."""
        self._context.post(partial(self._context.run, call))

    def put(self, session: Session, key: Key, blocks: Blocks, sent: Callable[[], None], *, cover: bool,
            most: int = frames.FRAME_BYTES) -> None:  # the interface's; pieces are as large as slots
        """Offer blocks, in a group that is made if there is none."""
        self._queue.put(session, key, blocks, sent, cover=cover, most=self._piece)
        self._pump()

    def _pump(self) -> None:
        queue = self._queue
        if not queue.waiting or self._closed:
            return
        if self._open:
            while queue.waiting and len(queue.offered) < OFFERS_AHEAD:
                self._offer(queue.next(self._number))
        elif not self._number and time.monotonic() >= self._not_before:
            self._number = self._hub.join(self, Way.SEND)
        elif not self._number:
            while queue.waiting:
                self._over_tcp(queue.waiting.popleft())

    def _offer(self, one: OfferedBlocks) -> None:
        self._hub.hold(one.where, 1)
        tell(one, bodies.body(bodies.Offer(one.where, len(one.blocks.data), 0 if one.cover else None)))

    def _over_tcp(self, one: OfferedBlocks) -> None:
        self._tcp.put(one.session, one.key, one.blocks, one.done, cover=one.cover)

    def taken(self, session: Session, *, read: bool) -> None:
        """Decode does not want the oldest offer any more, or cannot receive it in the group."""
        one = self._queue.taken(session)
        self._hub.hold(one.where, -1)
        if read:
            one.done()
        else:
            self._over_tcp(one)
        self._pump()

    def received(self, session: Session) -> None:
        """Decode receives the oldest offer from now on."""
        one = self._queue.taken(session)
        if one.where != self._number or not self._open:
            one.done()
            self._context.fail(PeerGone(session.peer, "receives in a group that has ended here"))
            return
        self._moving += 1
        data = one.blocks.data
        self._hub.move(one.where, Piece(len(data), one.cover, data, tag=one), self)
        self._hub.hold(one.where, -1)
        self._pump()

    def ungrouped(self, message: bodies.Group) -> None:
        """Decode has left a group."""
        if self._number and message.number == self._number:
            self._hub.leave(self._number, f"decode: {message.reason}")

    @property
    def busy(self) -> bool:
        """Whether decode has still to answer or to receive."""
        return bool(self._queue or self._moving)

    def close(self) -> None:
        """The session has ended: what the GPU does not read may be freed, the rest when the group has ended."""
        self._closed = True
        if self._number:
            self._hub.leave(self._number, "the session has ended")
        for one in self._queue.clear():
            one.done()

    # --- told by the communicator thread, on the session's thread ---

    def begun(self, uid: bytes) -> None:
        """The group is being made: decode may join."""
        if not self._closed:
            self._context.say(Kind.GROUP, bodies.Group(self._number, uid))

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
            self._context.fail(PeerGone(self._context.session.peer, f"nccl: {reason}"))
            return
        if not was_open:
            self._not_before = time.monotonic() + RETRY_S
        self._context.say(Kind.UNGROUP, bodies.Group(number, reason=reason))
        self._pump()

    def over(self, given_back: tuple[Piece, ...]) -> None:
        """The GPU has let go of pieces that were not done."""
        for piece in given_back:
            self.moved(piece)
