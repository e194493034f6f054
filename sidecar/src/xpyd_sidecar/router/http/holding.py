"""Router memory held for the request that a connection answers: the bytes of its body, and those reserved beside it."""

from __future__ import annotations

from collections.abc import Callable

from xpyd_sidecar.router.http.body_budget import BodyBudget, HeldBody
from xpyd_sidecar.router.http.ledger import ByteLedger, Reservation

Held = HeldBody | int
"""A body that is held, or how many bytes one has that came at once."""


class RequestHolding:
    """Memory held for the current request of one connection, one request after the other. At a request's end all of it is
    given back, once.
    """

    __slots__ = ("_bodies", "_body", "_ledger", "_reserved", "_time")

    def __init__(self, bodies: BodyBudget, ledger: ByteLedger, time: Callable[[], float]) -> None:
        self._bodies = bodies
        self._ledger = ledger
        self._time = time
        self._body: Held = 0
        self._reserved: Reservation | None = None

    def begin(self, body: Held) -> None:
        """Begin with the next request. ``body``: the body that ``BodyBudget`` counts for it, or the size in bytes of one
        that came in one piece; 0: none is counted.
        """
        self._body = body

    def reserve(self, key: str, body: int, size: int) -> None:
        """Reserve ``size`` bytes for the accepted request, beside its body of ``body`` bytes. Connections whose bytes
        have to go for it are cut. ``key``: the client or tenant whose share it counts in.

        Raises:
            HttpFault: 429 where the key has its share, 503 where the router has no room.
        """
        counted = 0 if isinstance(self._body, int) else self._body.counted
        self._reserved, ended = self._ledger.reserve(key, body, size, self._time(), counted)
        for kind, holder in ended:
            holder.cut(kind)

    def settle(self, size: int) -> None:
        """Correct the reservation to the ``size`` bytes that the request holds beside its body; nothing if it is over."""
        if self._reserved is not None:
            self._ledger.settle(self._reserved, size)

    def end(self) -> None:
        """Give back the body and the reservation of the request, which is over; nothing where that was done before."""
        if self._body:
            self._bodies.give_back(self._body)
            self._body = 0
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            self._ledger.release(reserved)
