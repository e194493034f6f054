"""The link ``nccl``, decode's side (``serve`` draws it): receives what it fetches into memory of its device.

What NCCL writes into is never the cache, and is not used again before NCCL has let go of it: what a dead peer or an aborted
kernel leaves behind is in memory that nobody reads.

    no group ──asked for──▶ asked ──GROUP──▶ joined ──both have──▶ open ──idle, evicted──▶ no group
        ▲                     └───────── refused, too late ────────────┴── broken ──▶ none with that GPU for a while
        └───────────────────────────────────────────────────────────────────────────────────────────────────┘

Fetches wait while a group is being made. Those that no group takes come over tcp: while there is to be none,
where they go into other memory than the ring, and what is larger than a slot of prefill's. A group that ends with fetches
under way ends the session, so that they are asked for again at once: when NCCL lets go of their memory is not known.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from xpyd_sidecar.errors import PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv import session_bodies as bodies
from xpyd_sidecar.kv.groups import Way
from xpyd_sidecar.kv.packing import NO_SUMS
from xpyd_sidecar.kv.selection import places
from xpyd_sidecar.kv.wire import Frame, FrameKind
from xpyd_sidecar.transport.links import FetchLink, FetchOrder, FetchOwner, RingMemory, Session
from xpyd_sidecar.transport.nccl.driver import Message
from xpyd_sidecar.transport.nccl.thread import NcclThread

RETRY_S: Final = 60.0
"""How long there is no group with a GPU after one could not be made, or broke."""
Settled = Callable[[FetchLink | None, str], None]
MakeTcp = Callable[[Session, FetchOwner, bodies.LinkWelcome, Settled], bool]
"""Makes the link ``tcp`` of a session."""


class NcclFetching:
    """What a rank has for this link (``session.link_trial.OtherLink``). Used on one thread."""

    def __init__(self, hub: NcclThread, gpu: bodies.Gpu, ring: RingMemory, tcp: MakeTcp) -> None:
        """``gpu``: of this rank; ``ring``: what fetches go into; ``tcp``: makes what those go over that no group takes."""
        self.hub = hub
        self.gpu = gpu
        self.ring = ring
        self.tcp = tcp
        self._shunned: dict[str, float] = {}
        """By GPU: until when there is no group with it."""

    def __call__(self, session: Session, owner: FetchOwner, welcome: bodies.LinkWelcome, settled: Settled) -> bool:
        """Make decode's side of a session's link."""
        if welcome.gpu is None:
            raise ProtocolError(session.peer, "has welcomed with no GPU")
        settled(NcclFetchLink(self, session, owner, welcome, welcome.gpu), "")
        return False

    def shun(self, gpu: str) -> None:
        """Make no group with a GPU for a while."""
        now = time.monotonic()
        self._shunned = {name: until for name, until in self._shunned.items() if until > now} | {gpu: now + RETRY_S}

    def shuns(self, gpu: str) -> bool:
        """Whether there is to be no group with a GPU now."""
        return time.monotonic() < self._shunned.get(gpu, 0.0)


@dataclass(eq=False)
class GroupFetch:
    """A fetch that was given to the communicator thread. ``group``: as that numbers it."""

    order: FetchOrder
    group: int
    asked: bool = False
    """Prefill was told: it sends."""
    here: bool = False
    """All bytes have come."""
    there: bool | None = None
    """What prefill has said of the manifest; None: nothing yet."""


class NcclFetchLink(FetchLink):
    """Decode's side of the NCCL link, of one session."""

    at_hand = True
    reads_into_device = True

    def __init__(self, maker: NcclFetching, session: Session, owner: FetchOwner, welcome: bodies.LinkWelcome,
                 gpu: bodies.Gpu) -> None:
        """``gpu``: prefill's."""
        self.name: bodies.LinkName = "nccl"
        self._maker = maker
        self._session = session
        self._owner = owner
        self._welcome = welcome
        self._gpu = gpu.name
        self._most = min(gpu.piece, maker.gpu.piece)
        self._tcp: FetchLink | None = None
        self._for_tcp: list[FetchOrder] = []
        """Until there is that link."""
        self._asks = False
        """A group was asked for, and prefill has not answered."""
        self._number = 0
        """Of the group, in this process; 0: there is none. What is told of one before it no longer counts."""
        self._last = 0
        """Prefill's number of the last group."""
        self._open = False
        self._waiting: list[FetchOrder] = []
        """Until there is a group, or it is known that there is none."""
        self._receives: dict[int, GroupFetch] = {}
        """By number of the fetch, in their order: those that prefill sends."""
        self._closed = False

    def fetch(self, order: FetchOrder) -> None:
        """Fetch pieces, as ``FetchLink`` has it."""
        if self._closed:
            self._session.post(partial(self._owner.on_fetch_failed, order.number))
        elif order.at is None or places(order.batch)[-1] > self._most:
            self._over_tcp(order)
        elif self._open:
            self._receive(order)
        elif self._number or self._asks:
            self._waiting.append(order)
        elif self._maker.shuns(self._gpu):
            self._over_tcp(order)
        else:
            self._waiting.append(order)
            self._asks = True
            self._session.send(FrameKind.GROUP, bodies.Group(0))

    def _receive(self, order: FetchOrder) -> None:
        assert order.at is not None
        self.name = "nccl"
        size = places(order.batch)[-1]
        message = Message(size, self._maker.ring.device(order.at, size), tag=GroupFetch(order, self._number))
        self._maker.hub.move(self._number, message, self)

    def _over_tcp(self, order: FetchOrder) -> None:
        if self._tcp is None:
            self._for_tcp.append(order)
            if len(self._for_tcp) == 1:
                try:
                    self._maker.tcp(self._session, self._owner, self._welcome, self._over)
                except PeerError as error:
                    self._session.post(partial(self._session.close, error))
            return
        self.name = "tcp"
        if order.at is not None:
            order = order._replace(rows=self._maker.ring.host_places(order.batch, order.at), at=None)
        self._tcp.fetch(order)

    def _over(self, link: FetchLink | None, reason: str) -> None:
        assert link is not None, reason
        self._tcp = link
        if self._closed:
            link.close()
        orders, self._for_tcp = self._for_tcp, []
        for order in orders:
            self._over_tcp(order)

    def tick(self, now: float, timeout: float) -> None:
        """Do what is due, as ``FetchLink`` has it."""
        if self._tcp is not None:
            self._tcp.tick(now, timeout)

    def on_frame(self, frame: Frame) -> bool:
        """Take a frame of prefill's, as ``FetchLink`` has it."""
        if frame.kind is FrameKind.GROUP:
            self._join(bodies.read_body(frame.body, bodies.Group))
        elif frame.kind is FrameKind.UNGROUP:
            self._ungroup(bodies.read_body(frame.body, bodies.Group))
        elif frame.kind is FrameKind.SENT:
            self._sent(bodies.read_body(frame.body, bodies.FetchSent))
        else:
            return False
        return True

    def _join(self, group: bodies.Group) -> None:
        if not self._asks or group.number <= self._last:
            raise ProtocolError(self._session.peer, f"made group {group.number} after {self._last}, unasked or again")
        self._asks, self._last = False, group.number
        self._number = self._maker.hub.join(self, Way.RECEIVE, group.uid)

    def _ungroup(self, group: bodies.Group) -> None:
        """Prefill makes no group, or has left the one that there is; of others this side knows."""
        if self._asks and group.number > self._last:
            self._asks, self._last = False, group.number
            self._ended(group.reason)
        elif self._number and group.number == self._last:
            self._maker.hub.leave(self._number, f"prefill: {group.reason}")
            self._ended(group.reason)

    def _sent(self, sent: bodies.FetchSent) -> None:
        one = next((one for one in self._receives.values() if one.there is None), None)
        if one is None or one.order.number != sent.number:
            raise ProtocolError(self._session.peer, f"sends fetch {sent.number} in a group, which is not the next")
        one.there = sent.there
        self._answer(one)

    def _answer(self, one: GroupFetch) -> None:
        """A fetch has an end once its bytes are here and prefill has said what they are."""
        if not one.here or one.there is None:
            return
        del self._receives[one.order.number]
        if one.there:
            self._owner.on_fetched(one.order.number, NO_SUMS)
        else:
            self._owner.on_fetch_failed(one.order.number)

    def _ended(self, reason: str) -> None:
        """There is no group any more, or none is made."""
        opened, self._open, self._number = self._open, False, 0
        broken = any(not one.here for one in self._receives.values())
        if broken or not opened:
            self._maker.shun(self._gpu)
        if broken:
            self._session.close(PeerGone(self._session.peer, f"nccl: {reason}"))
            return
        waiting, self._waiting = self._waiting, []
        for order in waiting:
            self.fetch(order)

    def close(self) -> None:
        """The session has ended: what the GPU may still write into is answered when the group has ended, all else now."""
        if self._closed:
            return
        self._closed = True
        if self._number:
            self._maker.hub.leave(self._number, "the session has ended")
        if self._tcp is not None:
            self._tcp.close()
        waiting, self._waiting, self._for_tcp = self._waiting + self._for_tcp, [], []
        for number in [order.number for order in waiting] + [n for n, one in self._receives.items() if one.here]:
            self._receives.pop(number, None)
            self._owner.on_fetch_failed(number)

    # --- told by the communicator thread, on the session's thread (``GroupMember``) ---

    def post(self, call: Callable[[], None]) -> None:
        """Have a call made on that thread."""
        self._session.post(call)

    def on_group_begun(self, number: int, uid: bytes) -> None:
        """Prefill has minted the id."""

    def on_group_open(self, number: int) -> None:
        """Both sides have joined the group."""
        if number == self._number and not self._closed:
            self._open = True
            waiting, self._waiting = self._waiting, []
            for order in waiting:
                self.fetch(order)

    def on_posted(self, message: Message) -> None:
        """A fetch is being received: prefill may send it. Of a group that has been left it is never told."""
        one: GroupFetch = message.tag
        if one.group == self._number and not self._closed:
            one.asked = True
            self._receives[one.order.number] = one
            asked = tuple(bodies.combs(piece.stretches) for piece in one.order.batch)
            self._session.send(FrameKind.FETCH, bodies.FetchBytes(one.order.number, one.order.manifest, asked, self._last),
                              one.order.key)

    def on_moved(self, message: Message) -> None:
        """All bytes of a fetch have come."""
        one: GroupFetch = message.tag
        one.here = True
        if self._closed or not one.asked:
            self._receives.pop(one.order.number, None)
            self._owner.on_fetch_failed(one.order.number)
        else:
            self._answer(one)

    def on_group_lost(self, number: int, reason: str) -> None:
        """A group does no more."""
        if number == self._number and not self._closed:
            self._session.send(FrameKind.UNGROUP, bodies.Group(self._last, reason=reason))
            self._ended(reason)

    def on_released(self, messages: tuple[Message, ...]) -> None:
        """The GPU has let go of memory: what prefill never heard of is fetched otherwise."""
        for message in messages:
            one: GroupFetch = message.tag
            self._receives.pop(one.order.number, None)
            if self._closed or one.asked:
                self._owner.on_fetch_failed(one.order.number)
            else:
                self.fetch(one.order)
