"""Fetches that are under way, and the room that they have: in the ring, or beside it by session (``kv.fetching``)."""

from __future__ import annotations

from xpyd_sidecar.kv.buffer import Buffer, BufferPlace
from xpyd_sidecar.kv.fetch_state import BufferedPiece, Flight
from xpyd_sidecar.kv.ring import Ring


class Flights(dict[int, Flight]):
    """The fetches of one rank that are under way, by number. No number is used twice."""

    def __init__(self, ring: Ring, buffer: Buffer[BufferedPiece], window: int) -> None:
        """None. ``window``: bytes in flight beside the ring, by session."""
        super().__init__()
        self._ring = ring
        self._buffer = buffer
        self.window = window
        self._next = 0
        self._direct: dict[int, int] = {}
        """By session: bytes in flight beside the ring."""

    def fits(self, link: int, size: int) -> bool:
        """Whether a session may have so many more bytes in flight beside the ring; if it has none, always."""
        flying = self._direct.get(link, 0)
        return not flying or flying + size <= self.window

    def add(self, flight: Flight) -> int:
        """Something is under way: its number. It counts as bytes in flight, unless they are here already."""
        if not flight.here and not isinstance(flight.at, int):
            self._direct[flight.link] = self._direct.get(flight.link, 0) + flight.size
        number, self._next = self._next, self._next + 1
        self[number] = flight
        return number

    def land(self, flight: Flight) -> None:
        """Nothing of a fetch is in flight any more."""
        if not isinstance(flight.at, int):
            self._direct[flight.link] -= flight.size
            if not self._direct[flight.link]:
                del self._direct[flight.link]

    def drop(self, number: int) -> None:
        """A fetch is over; what it has filled is free."""
        flight = self.pop(number)
        if isinstance(flight.at, BufferPlace):
            self._buffer.free(flight.at)
        elif flight.at is not None:
            self._ring.give(flight.link, flight.at, flight.size)
