"""Places in the queue, and those of one key in their order. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort

import msgspec


class Ticket(msgspec.Struct, order=True, eq=True, frozen=True):
    """A place in the queue. Sorts by when it is due within its key."""

    rank: float
    number: int
    key: str
    cost: int
    """Tokens."""
    arrived: float
    alone: bool = False


class KeyTickets(msgspec.Struct):
    """Those of one key."""

    start: int
    waiting: tuple[list[Ticket], list[Ticket]] = msgspec.field(default_factory=lambda: ([], []))
    """Those that need prefill, and those that are alone; each in order."""
    arrivals: dict[int, Ticket] = {}
    """In the order of arrival."""
    kept: set[int] = set()
    """Numbers of those that never give way."""

    def first(self) -> Ticket:
        """The one that is served next."""
        return min(some[0] for some in self.waiting if some)

    def youngest(self) -> Ticket | None:
        """Of those that may give way."""
        if len(self.kept) == len(self.arrivals):
            return None
        return next(ticket for number, ticket in reversed(self.arrivals.items()) if number not in self.kept)

    def add(self, ticket: Ticket) -> None:
        """One more."""
        insort(self.waiting[ticket.alone], ticket)
        self.arrivals[ticket.number] = ticket

    def drop(self, ticket: Ticket) -> None:
        """One less."""
        some = self.waiting[ticket.alone]
        del some[bisect_left(some, ticket)]
        del self.arrivals[ticket.number]
        self.kept.discard(ticket.number)
