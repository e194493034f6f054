"""The link ``nixl``, decode's side (``serve`` draws it): what is fetched is read into memory that is registered.

An order for a range of memory that was given to NIXL (``NixlThread.give``) is read right into it. Any other is read into a
slot, and copied from there: the cache itself is never NIXL's to write, since a read that cannot be stopped ends where it
was to end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from xpyd_sidecar.errors import PeerGone, ProtocolError
from xpyd_sidecar.kv.packing import NO_SUMS
from xpyd_sidecar.kv.reads import READ_BYTES, unusable
from xpyd_sidecar.kv.selection import PackedSpan, packed_spans, places
from xpyd_sidecar.kv.session_bodies import LinkName, LinkWelcome, NixlMemory
from xpyd_sidecar.transport.landing import sums_of
from xpyd_sidecar.transport.links import FetchLink, FetchOrder, FetchOwner, Session
from xpyd_sidecar.transport.nixl.driver import LandingMemory
from xpyd_sidecar.transport.nixl.reading import ReadOrder
from xpyd_sidecar.transport.nixl.thread import NixlThread

Settled = Callable[[FetchLink | None, str], None]
"""Takes a link that was made, or why there is none."""


class NixlFetcher:
    """Makes decode's side of sessions (``link_trial.OtherLink``)."""

    def __init__(self, hub: NixlThread, *, insists: bool, ring: LandingMemory | None = None) -> None:
        """``insists``: there is no other link; ``ring``: memory that orders name ranges of, if it can be read into."""
        self.hub = hub
        self.insists = insists
        if ring is not None:
            hub.give(ring)

    def __call__(self, session: Session, owner: FetchOwner, welcome: LinkWelcome, settled: Settled) -> bool:
        """Begin to reach prefill's memory."""
        memory = welcome.nixl
        assert memory is not None
        if reason := unusable(memory):
            settled(None, f"nixl: {reason}")
            return False
        NixlFetchLink(self, session, owner, memory, settled)
        return True


class NixlFetchLink(FetchLink):
    """Decode's side of the NIXL link, of one session (``reading.ReadMember``)."""

    name: LinkName = "nixl"

    def __init__(self, fetcher: NixlFetcher, session: Session, owner: FetchOwner, memory: NixlMemory,
                 settled: Settled) -> None:
        """Begin to reach prefill's memory; ``settled`` is called once with how that has ended."""
        self._hub = fetcher.hub
        self._insists = fetcher.insists
        self._session = session
        self._owner = owner
        self._memory = memory
        self._settled: Settled | None = settled
        self._orders: dict[int, FetchOrder] = {}
        self._here: deque[tuple[int, int]] = deque()
        """Orders that have come, each at an address, and wait for their turn."""
        self._closed = False
        self._number = self._hub.join(self, memory)

    def fetch(self, order: FetchOrder) -> None:
        """Fetch pieces, as ``FetchLink`` has it."""
        spans = packed_spans(order.batch)
        if self._closed or not self._holds(spans):
            self.post(partial(self._refuse, order.number))
            return
        self._orders[order.number] = order
        ring = order.at if self._hub.has_ring else None
        self._hub.order(self._number, ReadOrder(order.number, places(order.batch)[-1],
                                                reads_of(spans, self._memory.base, READ_BYTES), ring))

    def close(self) -> None:
        """The session has ended. What is being read is answered when it has ended, or its agent has."""
        if self._closed:
            return
        self._closed = True
        self._settled = None
        while self._here:
            self._drop(self._here.popleft()[0])
        self._hub.leave(self._number)

    def _holds(self, spans: Sequence[PackedSpan]) -> bool:
        return all(span.offset + span.size <= self._memory.size for span in spans)

    def _refuse(self, number: int) -> None:
        """An order that cannot be read.

        Raises:
            ProtocolError: it is prefill's fault.
        """
        self._owner.on_fetch_failed(number)
        if not self._closed:
            raise ProtocolError(self._session.peer, f"told of bytes outside of a store of {self._memory.size}")

    def _drop(self, number: int) -> None:
        """What has come of an order is of no use."""
        del self._orders[number]
        self._hub.release_order(self._number, number)
        self._owner.on_fetch_failed(number)

    def _next(self) -> None:
        """Put what has come first to its place; between two, other sessions have their turn."""
        if not self._here:
            return
        number, address = self._here.popleft()
        if self._here:
            self.post(self._next)
        sums: NDArray[np.uint64] | None = None
        try:
            sums = self._placed(self._orders[number], address)
        finally:
            if sums is None:
                self._drop(number)
        if sums is not None:
            del self._orders[number]
            self._hub.release_order(self._number, number)
            self._owner.on_fetched(number, sums)

    def _placed(self, order: FetchOrder, address: int) -> NDArray[np.uint64] | None:
        """Put what has come to its place. Its sums, where it is in blocks; None: its load is over."""
        if order.at is not None and self._hub.has_ring:
            return NO_SUMS
        gate = order.gate
        if gate is not None and not gate.enter():
            return None
        try:
            for rows, start in zip(order.rows, places(order.batch), strict=False):
                rows.copy(address + start)
        finally:
            if gate is not None:
                gate.leave()
        return sums_of(order.rows)

    # --- told by the thread for NIXL, on the session's thread (``ReadMember``) ---

    def post(self, call: Callable[[], None]) -> None:
        """Have a call made on the session's thread."""
        self._session.post(call)

    def on_open(self) -> None:
        """Prefill's memory can be read."""
        settled, self._settled = self._settled, None
        if settled is not None:
            settled(self, "")

    def come(self, numbers: Sequence[tuple[int, int]]) -> None:
        """Orders are here, each at an address."""
        if self._closed:
            for number, _ in numbers:
                self._drop(number)
            return
        before = bool(self._here)
        self._here.extend(numbers)
        if not before:
            self._next()

    def on_order_dropped(self, number: int) -> None:
        """An order does not come."""
        del self._orders[number]
        self._owner.on_fetch_failed(number)

    def on_lost(self, reason: str, *, late: bool) -> None:
        """Nothing more is read.

        Raises:
            PeerGone: this was the link, or prefill has not answered where there is no other one.
        """
        if self._closed:
            return
        settled, self._settled = self._settled, None
        if settled is not None:
            self.close()
        if settled is None or (late and self._insists):
            raise PeerGone(self._session.peer, f"nixl: {reason}")
        settled(None, f"nixl: {reason}")


def reads_of(spans: Sequence[PackedSpan], base: int, most: int) -> list[list[tuple[int, int, int]]]:
    """Reads of ``most`` bytes each, as ``ReadOrder`` has them. ``base``: of the store, at prefill."""
    found: list[list[tuple[int, int, int]]] = []
    room = 0
    for offset, size, at in spans:
        done = 0
        while done < size:
            if not room:
                found.append([])
                room = most
            some = min(room, size - done)
            found[-1].append((base + offset + done, at + done, some))
            done, room = done + some, room - some
    return found
