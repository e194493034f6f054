"""The threads of one direction of a rank, seen from its loop: whose stripes and orders they have, and how many may be.

What threads have done is collected here, once for each time that the loop is woken, and handed to whom it is of.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import selectors
import socket
import struct
from collections.abc import Callable
from typing import Final, Protocol

from xpyd_sidecar.errors import PeerError, PeerGone, ProtocolError
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.threads.loop import Loop
from xpyd_sidecar.transport import gates
from xpyd_sidecar.transport.links import FetchOrder
from xpyd_sidecar.transport.tcp.places import place_of

if gates.COMPILED:
    from xpyd_sidecar.transport._stripes import Pool

logger = logging.getLogger(__name__)

STRIPES: Final = 4
"""Of a session, where there is room."""
STRIPES_MOST: Final = 4096
"""Of one direction of a rank, if the limit of open files is more than twice that."""
THREADS_MOST: Final = 4
LOOK_S: Final = 0.1
"""Between two looks of a thread for stripes that move no byte."""
_COPY: Final = struct.Struct("<16sIII")
ASKED, LEFT, FAILED, SILENT, LIED, TAMPERED = range(6)
"""Why a stripe has ended, as ``_stripes.h`` numbers it; what says more of the peer is greater."""


class StripeOwner(Protocol):
    """Whose stripes and orders they are; called on the loop's thread."""

    peer: str
    """Name and address, for messages."""

    def on_order_ended(self, number: int, *, here: bool) -> None:
        """An order has an end: all of it has come, or nothing more will."""

    def stripe_ended(self, error: PeerError) -> None:
        """A stripe has ended, and this side had not ended its session."""


class StripePool:
    """Used on one loop's thread, but for its making before that has begun."""

    def __init__(self, loop: Loop, timeout_s: float) -> None:
        """Take no thread yet. ``timeout_s``: for so long a stripe may move no byte while one is owed.

        Raises:
            OSError: no files are left.
        """
        self._timeout_s = timeout_s
        self._owners: dict[int, StripeOwner] = {}
        """By session, until it is ended here."""
        self._orders: dict[int, StripeOwner] = {}
        self._taken: dict[bytes, Callable[[], None]] = {}
        """Copies that are being sent though nobody may ask for them any more: who is told when that has ended."""
        self._promised = 0
        self._closed = False
        self._loop = loop
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = min(STRIPES_MOST, STRIPES_MOST if files == resource.RLIM_INFINITY else files // 2)
        threads = max(1, min(THREADS_MOST, len(os.sched_getaffinity(0))))
        self._pool = Pool(threads, max(1, round(timeout_s / LOOK_S)))
        loop.watch(self._pool, selectors.EVENT_READ, self.collect)
        loop.at_end(self.close)

    # --- bounds ---

    def promise(self, most: int = STRIPES) -> int:
        """How many stripes a new session may have: all, one where they are getting few, or none; until ``give``."""
        free = self._most - self._promised
        found = most if free - most >= self._most // 4 else min(free, most, 1)
        self._promised += found
        return found

    def give(self, stripes: int) -> None:
        """A session does not need its stripes any more."""
        self._promised -= stripes

    # --- sessions ---

    def open(self, owner: StripeOwner) -> int:
        """Begin a session; its number.

        Raises:
            PeerGone: there are as many as there may be.
        """
        try:
            number = self._pool.open()
        except ValueError as error:
            raise PeerGone(owner.peer, f"stripes: {error}") from None
        self._owners[number] = owner
        return number

    def attach(self, session: int, sock: socket.socket, keys: bytes, *, serves: bool) -> None:
        """A stripe of a session, connected and greeted; the socket is the threads' from here on.

        Args:
            session: its number.
            sock: of the stripe.
            keys: as of ``session_keys.stripe_keys``; empty: all is said in clear.
            serves: this is prefill's end.

        Raises:
            OSError: there can be no thread for it.
            ValueError: keys of another size, or there is nothing to encrypt with (``cipher.lack``).
        """
        sock.setblocking(False)
        try:
            self._pool.attach(session, sock.fileno(), serves, keys)
        except (OSError, ValueError):
            sock.close()
            raise
        sock.detach()

    def order(self, session: int, owner: StripeOwner, order: FetchOrder) -> None:
        """Bring pieces; answered once, never before this returns."""
        parts = b"".join(place_of(piece.stretches) for piece in order.batch)
        self._pool.order(session, order.number, _named(order.key, order.manifest), parts, tuple(order.rows), order.gate)
        self._orders[order.number] = owner

    def end(self, session: int) -> None:
        """End a session: its stripes close, its orders are answered soon."""
        if self._owners.pop(session, None) is not None:
            self._pool.end(session)

    # --- copies ---

    def add(self, key: Key, manifest: int, view: memoryview, offset: int) -> None:
        """A copy, which begins at ``offset`` in the store, may be asked for from now on."""
        self._pool.add(_named(key, manifest), view, offset)

    def take(self, key: Key, manifest: int, freed: Callable[[], None]) -> None:
        """Serve a copy no more. ``freed``: called when nobody sends of it, perhaps now."""
        name = _named(key, manifest)
        if self._pool.take(name):
            freed()
        else:
            self._taken[name] = freed

    # --- what threads have done ---

    def collect(self, _: int = 0) -> None:
        """Hand all of it over, whatever becomes of one: nobody else knows of what follows."""
        answers, found, freed = self._pool.collect()
        ended = [(self._owners.get(session), why, code) for session, why, code in found]  # a number may be another's soon
        for name in freed:
            try:
                self._taken.pop(name)()
            except Exception:
                logger.exception("xpyd: the memory of a copy that was sent is not given back")
        for number, here in answers:
            owner = self._orders.pop(number)
            try:
                owner.on_order_ended(number, here=here)
            except Exception as error:
                logger.exception("xpyd: the session with %s is ended: what has come is not taken", owner.peer)
                self._end(owner, PeerGone(owner.peer, f"a stripe: {type(error).__name__} on this side"))
        for of, why, code in sorted(ended, key=lambda one: -one[1]):  # what says most of its session first
            if of is not None and why != ASKED:
                self._end(of, self._error(of.peer, why, code))

    def _end(self, owner: StripeOwner, error: PeerError) -> None:
        try:
            owner.stripe_ended(error)
        except Exception:
            logger.exception("xpyd: the session with %s does not end: %s", owner.peer, error)

    def _error(self, peer: str, why: int, code: int) -> PeerError:
        if why == LIED:
            return ProtocolError(peer, "said on a stripe what it may not")
        if why == TAMPERED:
            return ProtocolError(peer, "other bytes have come on a stripe than were sealed as the next ones")
        if why == SILENT:
            return PeerGone(peer, f"a stripe has moved no byte for {self._timeout_s} s")
        return PeerGone(peer, f"a stripe: {os.strerror(code if why == FAILED else errno.ECONNRESET)}")

    def close(self) -> None:
        """End all of it, once; within a turn of a thread."""
        if self._closed:
            return
        self._closed = True
        self._loop.watch(self._pool, 0, self.collect)
        self._pool.close()
        self.collect()


def _named(key: Key, manifest: int) -> bytes:
    """What a copy is called on stripes."""
    return _COPY.pack(bytes.fromhex(key.transfer), key.attempt, key.generation, manifest)

