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
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from xpyd_sidecar.errors import PeerGone, ProtocolError
from xpyd_sidecar.kv import frames, messages
from xpyd_sidecar.kv.frames import Kind
from xpyd_sidecar.kv.groups import Way
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.transport.link import Blocks, LinkContext, Session
from xpyd_sidecar.transport.nccl.driver import Piece
from xpyd_sidecar.transport.nccl.thread import NcclThread
from xpyd_sidecar.transport.shm.process_vm import pieces
from xpyd_sidecar.transport.tcp.link import TcpLink

OFFERS_AHEAD: Final = 4
RETRY_S: Final = 60.0
"""How long a session goes without a group after one could not be made."""


class PiecesPut:
    """One put: its memory may be freed when all its pieces are done, in whatever way."""

    def __init__(self, sent: Callable[[], None]) -> None:
        self._sent = sent
        self.left = 0

    def done(self) -> None:
        """One piece less."""
        self.left -= 1
        if not self.left:
            self._sent()


class PieceWaiting(NamedTuple):
    """A piece of a put."""

    key: Key
    blocks: Blocks
    cover: bool
    put: PiecesPut


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
        self._waiting: deque[PieceWaiting] = deque()
        self._offered: deque[tuple[int, PieceWaiting]] = deque()
        """With the group that it was offered in."""
        self._moving = 0

    def post(self, call: Callable[[], None]) -> None:
        """Have a call made on the session's I/O thread."""
        self._context.post(partial(self._context.run, call))

    def put(self, session: Session, key: Key, blocks: Blocks, sent: Callable[[], None], *, cover: bool,
            most: int = frames.FRAME_BYTES) -> None:  # the interface's; pieces are as large as slots
        """Offer blocks, in a group that is made if there is none."""
        put = PiecesPut(sent)
        cuts = [one for one, _ in pieces(blocks, self._piece)]
        put.left = len(cuts)
        self._waiting.extend(PieceWaiting(key, one, cover, put) for one in cuts)
        self._pump()

    def _pump(self) -> None:
        if not self._waiting or self._closed:
            return
        if self._open:
            while self._waiting and len(self._offered) < OFFERS_AHEAD:
                self._offer(self._waiting.popleft())
        elif not self._number and time.monotonic() >= self._not_before:
            self._number = self._hub.join(self, Way.SEND)
        elif not self._number:
            waiting, self._waiting = self._waiting, deque()
            for one in waiting:
                self._over_tcp(one)

    def _offer(self, one: PieceWaiting) -> None:
        self._offered.append((self._number, one))
        self._hub.hold(self._number, 1)
        body = messages.body(messages.Offer(self._number, len(one.blocks.data), 0 if one.cover else None))
        self._context.session.queue(frames.encode(Kind.OFFER, one.key, body, region=one.blocks.region,
                                                  first=one.blocks.first, blocks=one.blocks.blocks), body)

    def _over_tcp(self, one: PieceWaiting) -> None:
        self._tcp.put(self._context.session, one.key, one.blocks, one.put.done, cover=one.cover)

    def _answered(self, session: Session) -> tuple[int, PieceWaiting]:
        if not self._offered:
            raise ProtocolError(session.peer, "took what was not on offer")
        return self._offered.popleft()

    def taken(self, session: Session, *, read: bool) -> None:
        """Decode does not want the oldest offer any more, or cannot receive it in the group."""
        number, one = self._answered(session)
        self._hub.hold(number, -1)
        if read:
            one.put.done()
        else:
            self._over_tcp(one)
        self._pump()

    def received(self, session: Session) -> None:
        """Decode receives the oldest offer from now on."""
        number, one = self._answered(session)
        if number != self._number or not self._open:
            one.put.done()
            self._context.fail(PeerGone(session.peer, "receives in a group that has ended here"))
            return
        self._moving += 1
        data = one.blocks.data
        self._hub.move(number, Piece(len(data), one.cover, data, tag=one), self)
        self._hub.hold(number, -1)
        self._pump()

    def ungrouped(self, message: messages.Group) -> None:
        """Decode has left a group."""
        if self._number and message.number == self._number:
            self._hub.leave(self._number, f"decode: {message.reason}")

    @property
    def busy(self) -> bool:
        """Whether decode has still to answer or to receive."""
        return bool(self._offered or self._waiting or self._moving)

    def close(self) -> None:
        """The session has ended: what the GPU does not read may be freed, the rest when the group has ended."""
        self._closed = True
        if self._number:
            self._hub.leave(self._number, "the session has ended")
        held = [*(one for _, one in self._offered), *self._waiting]
        self._offered.clear()
        self._waiting.clear()
        for one in held:
            one.put.done()

    # --- told by the communicator thread, on the session's thread ---

    def begun(self, uid: bytes) -> None:
        """The group is being made: decode may join."""
        if not self._closed:
            self._context.say(Kind.GROUP, messages.Group(self._number, uid))

    def opened(self) -> None:
        """Decode has joined."""
        self._open = bool(self._number)
        self._pump()

    def posted(self, piece: Piece) -> None:
        """Of receivers alone."""

    def moved(self, piece: Piece) -> None:
        """A piece is out."""
        self._moving -= 1
        piece.tag.put.done()

    def lost(self, reason: str, *, busy: bool) -> None:
        """The group does no more."""
        number, was_open = self._number, self._open
        self._number, self._open = 0, False
        if self._closed:
            return
        if busy or self._moving:
            self._context.fail(PeerGone(self._context.session.peer, f"nccl: {reason}"))
            return
        if not was_open:
            self._not_before = time.monotonic() + RETRY_S
        self._context.say(Kind.UNGROUP, messages.Group(number, reason=reason))
        self._pump()

    def over(self, given_back: tuple[Piece, ...]) -> None:
        """The GPU has let go of pieces that were not done."""
        for piece in given_back:
            self.moved(piece)
