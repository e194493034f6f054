"""The bodies of requests that a server holds: the budget of their bytes, and what a client is told where it is used up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from xpyd_sidecar.router.api.faults import HttpFault, unavailable
from xpyd_sidecar.router.http.body_budget import SMALL, BodyBudget, HeldBody
from xpyd_sidecar.router.http.upload import HELD

DEFAULT = 512 << 20
MOST_AT_ONCE = 2
"""So many bodies of the largest size always fit, whatever the budget is."""


class BodyOwner(Protocol):
    """A connection that receives a body."""

    def end_body(self, fault: HttpFault) -> None:
        """There is no more room for what it has of the body: let go of it, and tell the client."""


Held = HeldBody[BodyOwner] | int
"""A body that is held, or how many bytes one has that came at once."""


class HeldBodies:
    """The bodies of all requests of a server."""

    def __init__(self, clock: Callable[[], float], budget: int = DEFAULT, largest: int = 0) -> None:
        """``budget``: bytes of all bodies, ``largest``: of one."""
        self._clock = clock
        self._budget: BodyBudget[BodyOwner] = BodyBudget(max(budget, MOST_AT_ONCE * largest))
        self.reserve = self._budget.reserve
        """Where small bodies have their room."""
        self.at_once = self._budget.at_once
        self.whole = self._budget.whole
        self.give_back = self._budget.give_back

    @property
    def held(self) -> int:
        """Bytes of bodies that are here."""
        return self._budget.held

    @property
    def limit(self) -> int:
        """Bytes that may be here."""
        return self._budget.reserve.limit + self._budget.rest.limit

    def begin(self, owner: BodyOwner, length: int | None) -> HeldBody[BodyOwner]:
        """A head came; ``length``: of its body, None where it comes in chunks.

        Raises:
            HttpFault: there is no room for it.
        """
        body, ended = self._budget.begin(owner, length, self._clock())
        for slow in ended:
            slow.owner.end_body(too_slow_for_the_room())
        if body is None:
            raise no_room()
        return body

    def grow(self, body: HeldBody[BodyOwner], more: int, *, streamed: bool) -> None:
        """So many bytes more came. ``streamed``: they are handed on, and few are here at a time. Raises HttpFault."""
        for one in self._budget.grow(body, more, self._clock(), kept=not streamed or body.size < HELD):
            if one is body:
                raise no_room()
            one.owner.end_body(too_slow_for_the_room())



def no_room() -> HttpFault:
    """503."""
    return unavailable("this router holds as many bytes of requests as it may: there is no room for this body now")


def too_slow_for_the_room() -> HttpFault:
    """408."""
    words = "this router holds as many bytes of requests as it may, and this body came more slowly than others"
    return HttpFault(408, words, code="request_timeout", retry_after_s=1)


__all__ = ["DEFAULT", "SMALL", "BodyOwner", "Held", "HeldBodies", "HeldBody"]
