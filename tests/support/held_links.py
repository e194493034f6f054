"""A link whose reads nobody can stop, and memory of a device, into which a kernel puts what has come: both when told to.

    read.go()       the first half of a read: what it fills has bytes that mean nothing
    read.go()       the rest, and its answer: fetched, or failed where the session has ended meanwhile; it was written
                    all the same
    landing.give()  the oldest scatter: what lies in the ring or the buffer is in its blocks
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from xpyd_sidecar.errors import PeerGone
from xpyd_sidecar.kv.buffer import BufferPlace
from xpyd_sidecar.kv.packing import sums_of
from xpyd_sidecar.kv.selection import Piece, places
from xpyd_sidecar.kv.session_bodies import Able, LinkName, LinkWelcome, NixlMemory
from xpyd_sidecar.transport.landing import HostLanding, LoadTarget, Placed
from xpyd_sidecar.transport.links import FetchLink, FetchOrder, FetchOwner, ServeLink, Session
from xpyd_sidecar.transport.moves import Scatter

GARBAGE = 0xAA


class LateServeLink(ServeLink):
    """Prefill's side of one session."""

    name = "nixl"

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.vouched = True

    def close(self) -> None:
        self.vouched = False


class LateServer:
    """What a rank of prefill has: its store. ``links``: by the name that decode is told, of all ranks."""

    def __init__(self, view: memoryview, links: dict[str, LateServeLink]) -> None:
        self._view = view
        self._links = links

    def serve(self, session: Session, able: Able) -> tuple[ServeLink, LinkWelcome] | str:
        del session
        if not able.nixl:
            return "nixl: not at decode"
        name, link = str(len(self._links)), LateServeLink(self._view)
        self._links[name] = link
        return link, LinkWelcome(nixl=NixlMemory(name, b"", "late", 0, len(self._view), 0, b""))


class LateRead:
    """Of one order."""

    def __init__(self, link: LateLink, order: FetchOrder, into: memoryview) -> None:
        self.begun = False
        self._link = link
        self._order = order
        self._into = np.frombuffer(into, np.uint8)

    def go(self) -> bool:
        """Half of it; whether that was the end."""
        self._into[:] = GARBAGE
        if not self.begun:
            self.begun = True
            return False
        link, number = self._link, self._order.number
        if link.closed or not link.served.vouched:
            link.session.post(lambda: link.fails(number))
            return True
        store = np.frombuffer(link.served.view, np.uint8)
        for piece, start in zip(self._order.batch, places(self._order.batch), strict=False):
            data = np.concatenate([store[at:at + size] for at, size in piece.stretches])
            self._into[start:start + len(data)] = data
        link.session.post(lambda: link.owner.on_fetched(number, np.zeros(0, np.uint64)))
        return True


class LateLink(FetchLink):
    """Decode's side of one session."""

    name: LinkName = "nixl"

    def __init__(self, session: Session, owner: FetchOwner, served: LateServeLink, landing: WatchedLanding,
                 reads: list[LateRead]) -> None:
        self.session, self.owner, self.served = session, owner, served
        self.closed = False
        self._landing = landing
        self._reads = reads

    def fetch(self, order: FetchOrder) -> None:
        self._reads.append(LateRead(self, order, self._landing.held_last))

    def fails(self, number: int) -> None:
        self.owner.on_fetch_failed(number)
        if not self.closed:
            raise PeerGone(self.session.peer, "does not vouch for it any more")

    def close(self) -> None:
        self.closed = True


class WatchedLanding(HostLanding):
    """Of a host. ``held_last``: the memory that was last asked for beside the cache."""

    def host_places(self, batch: Sequence[Piece], at: int | BufferPlace) -> list[Scatter]:
        self.held_last = self._memory(at)[:places(batch)[-1]]
        return super().host_places(batch, at)

    def due(self) -> Callable[[], object] | None:
        """What may happen in the device."""
        return None


class LateLanding(WatchedLanding):
    """Of a device: blocks are packed in runs, and kernels run when they are told to."""

    caches: Sequence[np.ndarray]
    """By array: (block, head, byte)."""
    ring: memoryview

    def start(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._launched: deque[tuple[LoadTarget, Sequence[Piece], int | BufferPlace, Placed]] = deque()

    def place(self, target: LoadTarget, batch: Sequence[Piece], at: int | BufferPlace, placed: Placed) -> None:
        if target.gate.enter():
            self._launched.append((target, batch, at, placed))
        else:
            placed(None)

    def due(self) -> Callable[[], object] | None:
        return self.give if self._launched else None

    def give(self) -> None:
        target, batch, at, placed = self._launched.popleft()
        view, made = np.frombuffer(self._memory(at), np.uint8), [np.zeros(0, np.uint64)]
        for piece, start in zip(batch, places(batch), strict=False):
            part, packed, data = target.parts[piece.region], piece.packed, view[start:start + piece.size]
            begin, table = target.tables[part.table]
            for block, head in itertools.product(range(packed.first, packed.first + packed.blocks), range(part.heads)):
                if begin <= block < begin + len(table):  # a run may have more than was lacking
                    from_ = packed.place(block, head)
                    self.caches[part.into][table[block - begin], part.at + head] = data[from_:from_ + packed.head_bytes]
            made.append(sums_of(data, packed))
        target.gate.leave()
        sums = np.concatenate(made) if self._cover else made[0]
        self._post(lambda: placed(sums))

    def _memory(self, at: int | BufferPlace) -> memoryview:
        return self.ring[at:] if isinstance(at, int) else super()._memory(at)
