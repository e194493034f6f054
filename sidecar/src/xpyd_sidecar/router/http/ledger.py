"""One ledger of the bytes that a router holds for its clients beyond a turn of the loop. Pure: time is an argument.

    kind       what                                            who can be cut for others
    BODIES     of requests (``body_budget``: they may have      those that are not whole, the slowest first
               what the others leave of seven eighths)
    HEADS      that are not whole                              those that began first
    UNREAD     answers that clients do not take                those that have waited for longest
    REQUESTS   what accepted requests hold beside their        nobody: it was reserved when the request was
               bodies: what is sent to engines, until they     accepted, and who comes later is refused
               answer; whole answers; the ids of prompts and
               what clients have of streams that may go on

Laws
  * A request is accepted only where its reservation fits: 503 where the budget is full, 429 where its key has its share of
    it and other keys are there (``shares``). It is never ended for who comes later.
  * For a request that does not fit, heads and unread answers of ``PRESSED_S`` and older are cut, the oldest first, then
    bodies that come too slowly (``body_budget``), if that makes enough room; if not, nobody is cut.
  * An unread answer that is younger is cut only where all of them have more than an eighth of the budget: who reads, though
    a moment later, loses nothing to who comes.
  * Once its answer has begun, what a request really holds counts, be it more than its reservation: what drains the budget
    always goes on. Who comes pays for it, and who can be cut.
  * What is given back is what was taken, however often it is given back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

import msgspec

from xpyd_sidecar.router.api.faults import HttpFault, unavailable
from xpyd_sidecar.router.http.shares import KeyShares

PRESSED_S = 2.0
"""How long a head may take, or an answer may be left unread, once others need the room."""
UNREAD_PART = 8
"""Unread answers may have the budget divided by this, however young they are."""
COST = 2
"""Bytes of memory for each byte of a head: it lies in the parser, or as names and values."""


class HeldKind(Enum):
    """What the bytes are."""

    BODIES = "bodies"
    HEADS = "heads"
    UNREAD = "unread"
    REQUESTS = "requests"


_CUT = (HeldKind.HEADS, HeldKind.UNREAD)


class Holder(Protocol):
    """A connection."""

    def cut(self, kind: HeldKind) -> None:
        """There is no more room for its head, for the body that comes, or for what it leaves unread: let go of it."""


class Holding(msgspec.Struct, eq=False):
    """Bytes of one kind that a connection has."""

    since: float
    size: int = 0


class Reservation(msgspec.Struct, eq=False):
    """What an accepted request may hold."""

    key: str
    counts: int
    """Bytes that count in its key's share: its body's, too, but for those that counted before."""
    size: int
    """Bytes beside its body."""
    ended: bool = False


class ByteLedger:
    """The bytes of one process."""

    def __init__(self, budget: int, bodies: Callable[[], int] = lambda: 0, shares: KeyShares | None = None,
                 slow_bodies: Callable[[int, float], Sequence[Holder]] = lambda _missing, _now: ()) -> None:
        """``bodies``: bytes of all bodies that are here. ``shares``: of keys, of bodies too. ``slow_bodies`` lets go of
        bodies that come too slowly, so that there are so many bytes more now, and says whose they were; of none, where all
        have less.
        """
        self.budget = budget
        self.bodies = bodies
        self.shares = KeyShares(budget) if shares is None else shares
        self._slow_bodies = slow_bodies
        self._sums = dict.fromkeys((HeldKind.HEADS, HeldKind.UNREAD, HeldKind.REQUESTS), 0)
        self._holdings: dict[HeldKind, dict[Holder, Holding]] = {kind: {} for kind in _CUT}
        """Those that began first stand first."""
        self.cuts = 0
        """How often somebody was cut."""

    @property
    def other_bytes(self) -> int:
        """Bytes of everything but bodies."""
        return sum(self._sums.values())

    def held_bytes(self, kind: HeldKind) -> int:
        """Bytes of one kind."""
        return self.bodies() if kind is HeldKind.BODIES else self._sums[kind]

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be taken; below 0 where accepted requests have grown beyond the budget."""
        return self.budget - self.bodies() - self.other_bytes

    # ---- what can be cut

    def hold(self, kind: HeldKind, one: Holder, size: int, now: float) -> list[Holder]:
        """A connection has so many bytes of a kind now. Returns those that have to be cut for it, maybe it among them."""
        held = self._holdings[kind]
        mine = held.get(one)
        if mine is None:
            mine = held[one] = Holding(now)
        self._sums[kind] += size - mine.size
        grew, mine.size = size > mine.size, size
        ended: list[Holder] = []
        while grew and self.free_bytes < 0 and held:
            oldest = next(iter(held))
            if kind is HeldKind.UNREAD and now - held[oldest].since < PRESSED_S and (
                    self._sums[kind] <= self.budget // UNREAD_PART):
                break
            self.drop(kind, oldest)
            ended.append(oldest)
            if oldest is one:
                break
        self.cuts += len(ended)
        return ended

    def drop(self, kind: HeldKind, one: Holder) -> None:
        """It has none of that kind any more."""
        mine = self._holdings[kind].pop(one, None)
        if mine is not None:
            self._sums[kind] -= mine.size

    # ---- what is reserved

    def reserve(self, key: str, body: int, size: int, now: float,
                counted: int = 0) -> tuple[Reservation, list[tuple[HeldKind, Holder]]]:
        """Accept a request. ``key``: whose it is. ``body``: bytes of its body, which are here already, and ``counted``
        those of them that count in the share of its key already. ``size``: bytes that it will hold beside. Raises
        HttpFault: 429, 503.

        Returns what is to be released, and who has to be cut for it.
        """
        counts = body - counted + size
        key = self.shares.name(key)
        self.shares.require(key, counts, own=counted)
        ended: list[tuple[HeldKind, Holder]] = []
        if size > 0 and size > self.free_bytes:
            ended = self._slow(size - self.free_bytes, now)
        self.shares.add(key, counts)
        self._sums[HeldKind.REQUESTS] += size
        return Reservation(key, counts, size), ended

    def _slow(self, missing: int, now: float) -> list[tuple[HeldKind, Holder]]:
        """Drop so many bytes of what comes, or is read, slowly. Raises HttpFault: there are not as many."""
        found: list[tuple[HeldKind, Holder]] = []
        for kind in _CUT:
            for one, holding in self._holdings[kind].items():
                if missing <= 0 or now - holding.since < PRESSED_S:
                    break
                found.append((kind, one))
                missing -= holding.size
        bodies = self._slow_bodies(missing, now) if missing > 0 else ()
        if missing > 0 and not bodies:
            raise no_room()
        for kind, one in found:
            self.drop(kind, one)
        found += [(HeldKind.BODIES, one) for one in bodies]
        self.cuts += len(found)
        return found

    def settle(self, of: Reservation, size: int) -> None:
        """The request really holds so much beside its body now."""
        more = size - of.size
        if not more or of.ended:
            return
        of.size += more
        of.counts += more
        self._sums[HeldKind.REQUESTS] += more
        self.shares.add(of.key, more)

    def release(self, of: Reservation) -> None:
        """The request is over."""
        if of.ended:
            return
        of.ended = True
        self._sums[HeldKind.REQUESTS] -= of.size
        self.shares.add(of.key, -of.counts)


def no_room() -> HttpFault:
    """503."""
    return unavailable("this router holds as many bytes for its clients as it may: there is no room for this request now")
