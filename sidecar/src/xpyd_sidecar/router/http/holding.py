"""What the request that a connection answers holds of the router's memory: its body, and what was reserved for it."""

from __future__ import annotations

from collections.abc import Callable

from xpyd_sidecar.router.http.body_budget import BodyBudget, HeldBody
from xpyd_sidecar.router.http.ledger import ByteLedger, Reservation

Held = HeldBody | int
"""A body that is held, or how many bytes one has that came at once."""


class RequestHolding:
    """Of one connection, for one request after the other. Everything is given back at a request's end, once."""

    __slots__ = ("_bodies", "_body", "_ledger", "_reserved", "_time")

    def __init__(self, bodies: BodyBudget, ledger: ByteLedger, time: Callable[[], float]) -> None:
        self._bodies = bodies
        self._ledger = ledger
        self._time = time
        self._body: Held = 0
        self._reserved: Reservation | None = None

    def begin(self, body: Held) -> None:
        """The next request is answered. ``body``: as the budget has it; 0: there is none."""
        self._body = body

    def reserve(self, key: str, body: int, size: int) -> None:
        """It is accepted, and holds ``size`` bytes beside its body of ``body``. ``key``: whose it is. Raises HttpFault:
        there is no room (``ByteLedger.reserve``).
        """
        counted = 0 if isinstance(self._body, int) else self._body.counted
        self._reserved, ended = self._ledger.reserve(key, body, size, self._time(), counted)
        for kind, holder in ended:
            holder.cut(kind)

    def settle(self, size: int) -> None:
        """It really holds so many bytes beside its body now; nothing changes where it is over."""
        if self._reserved is not None:
            self._ledger.settle(self._reserved, size)

    def end(self) -> None:
        """It is over."""
        if self._body:
            self._bodies.give_back(self._body)
            self._body = 0
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            self._ledger.release(reserved)
