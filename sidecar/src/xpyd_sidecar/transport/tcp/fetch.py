"""The link ``tcp``, decode's side: opens a session's stripes, and has the threads of its rank bring what is ordered."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial

from xpyd_sidecar.errors import PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv.leases import ListeningClock
from xpyd_sidecar.kv.session_bodies import LinkName
from xpyd_sidecar.kv.session_keys import SessionKeys, stripe_answer, stripe_keys, stripe_name
from xpyd_sidecar.threads.loop import Loop
from xpyd_sidecar.transport.landing import sums_of
from xpyd_sidecar.transport.links import FetchLink, FetchOrder, FetchOwner, Session
from xpyd_sidecar.transport.tcp.greeting import StripeGreeting
from xpyd_sidecar.transport.tcp.pool import STRIPES, StripePool
from xpyd_sidecar.transport.tcp.sockets import complain


class TcpFetchLink(FetchLink):
    """Decode's side of the TCP link, of one session. Orders wait until a stripe is there; then they are the threads'."""

    name: LinkName = "tcp"

    def __init__(self, session: Session, owner: FetchOwner, loop: Loop, pool: StripePool, *, keys: SessionKeys,
                 connect: Callable[[], socket.socket], stripes: int, encrypts: bool) -> None:
        """Begin to connect.

        Args:
            session: whose stripes these are.
            owner: of the fetches.
            loop: of this link.
            pool: whose threads move its bytes.
            keys: of the session, which name its stripes.
            connect: a socket that has begun to connect to prefill.
            stripes: how many prefill has room for; none: it will refuse this link, with its reason.
            encrypts: what is said on them is sealed.

        Raises:
            PeerGone: there is no room for another session here, or no connection can be begun.
            ProtocolError: prefill has room for more than there may be.
        """
        self.peer = session.peer
        self._session = session
        self._owner = owner
        self._pool = pool
        self._keys = keys
        self._encrypts = encrypts
        self._orders: dict[int, FetchOrder] = {}
        """Those that the threads have."""
        self._early: list[FetchOrder] = []
        """Those that wait for the first stripe."""
        self._closed = False
        self._greeted = 0
        """Stripes that the threads have."""
        self._strange: ListeningClock | None = None
        self._fault: PeerError | None = None
        if not 0 <= stripes <= STRIPES:
            raise ProtocolError(session.peer, f"has room for {stripes} stripes")
        self._promised = pool.promise(stripes)
        if stripes and not self._promised:
            raise PeerGone(session.peer, "there is no room for another data connection here")
        self._number: int | None = None
        self._greetings: list[StripeGreeting] = []
        complain()
        try:
            self._number = pool.open(self)
            for nth in range(self._promised):
                words = stripe_name(keys, nth), stripe_answer(keys, nth)
                self._greetings.append(StripeGreeting(loop, connect(), session.peer, words, partial(self._begun, nth)))
        except OSError as error:
            self.close()
            raise PeerGone(session.peer, f"a stripe: {error.strerror or error}") from None
        except PeerError:
            self.close()
            raise

    def fetch(self, order: FetchOrder) -> None:
        """Fetch pieces, as ``FetchLink`` has it."""
        if self._closed:
            self._session.post(partial(self._owner.on_fetch_failed, order.number))
        elif self._greeted:
            self._give(order)
        else:
            self._early.append(order)

    def _give(self, order: FetchOrder) -> None:
        assert self._number is not None
        self._pool.order(self._number, self, order)
        self._orders[order.number] = order

    def tick(self, now: float, timeout: float) -> None:
        """End the session where prefill does not answer stripes in time, as ``FetchLink`` has it."""
        if self._closed or 0 < self._greeted == self._promised:
            return
        self._strange = self._strange or ListeningClock(timeout)
        if self._strange.advance(now) > timeout:
            self._session.close(PeerGone(self.peer, f"has not answered a stripe within {timeout} s"))

    def _begun(self, nth: int, found: socket.socket | PeerError) -> None:
        """A stripe was greeted, or cannot be."""
        if isinstance(found, PeerError):
            self._session.close(found)
            return
        assert self._number is not None
        try:
            self._pool.attach(self._number, found, stripe_keys(self._keys, nth) if self._encrypts else b"", serves=False)
        except OSError as error:
            self._session.close(PeerGone(self.peer, f"a stripe: {error.strerror or error}"))
            return
        except ValueError as error:
            self._session.close(PeerGone(self.peer, f"a stripe: {error}"))
            return
        self._greeted += 1
        early, self._early = self._early, []
        for order in early:
            self._session.post(partial(self._give_early, order))

    def _give_early(self, order: FetchOrder) -> None:
        """What it raises ends the session."""
        if self._closed:
            self._owner.on_fetch_failed(order.number)
            return
        try:
            self._give(order)
        except Exception:
            self._owner.on_fetch_failed(order.number)
            raise

    def on_order_ended(self, number: int, *, here: bool) -> None:
        """An order has an end, as ``StripeOwner`` has it."""
        order = self._orders.pop(number)
        if here:
            self._owner.on_fetched(number, sums_of(order.rows))
        else:
            self._owner.on_fetch_failed(number)

    def stripe_ended(self, error: PeerError) -> None:
        """A stripe has ended, as ``StripeOwner`` has it."""
        if not isinstance(error, PeerGone):
            self._fault = error
        self._session.close(error)

    def fault(self) -> PeerError | None:
        """The fault of the link, as ``FetchLink`` has it; what its threads have told of is taken in first."""
        if not self._closed:
            self._pool.collect()
        return self._fault

    def close(self) -> None:
        """End the link, as ``FetchLink`` has it: orders that threads have are answered as soon as those have let go
        of them.
        """
        if self._closed:
            return
        self._closed = True
        for one in self._greetings:
            one.close()
        if self._number is not None:
            self._pool.end(self._number)
        self._pool.give(self._promised)
        early, self._early = self._early, []
        for order in early:
            self._owner.on_fetch_failed(order.number)
