"""Bytes of request bodies that a router holds, of all requests together: who may hold more, and who must go for it.

    begin ──▶ grow … grow ──▶ complete ──▶ give_back       a body, from its head to the end of its request
                        └───▶ ended (408, or 503)
    at_once ─────────────────────────────▶ give_back       a small one that came in one piece

Laws
  * What is held is at most the budget, whatever comes in whatever order: an eighth of it is the reserve, for bodies of up
    to ``SMALL`` bytes, and the rest is for all others, and for those when the reserve is full. What else the router holds
    for clients (``ledger``) is part of the rest, and an eighth of the rest is for that alone: who has sent a whole request
    finds room for what it takes, however many bodies come, or wait.
  * A body counts for what has come of it, until its request has ended: another engine may have to be asked with it.
  * A body that is whole is never taken away. Of those that are not, the slowest goes first: the fewest bytes for each
    second since its head; those that began less than ``GRACE_S`` ago only after all others.
  * A large body that is announced when there is no room for it takes the room of those alone that come with less than
    ``PRESSED`` bytes a second; if that is not enough, it is not begun and nobody is ended. So nobody who sends at a normal
    speed loses to somebody who only announces. Neither to a request that is whole and needs room (``ledger``).
  * Of several keys each has its share (``shares``), from its bodies' first bytes on.
  * What is given back is what was taken, once, however often it is given back (a body that came at once: once).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Protocol

import msgspec

from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.api.hidden import refuse_in_form
from xpyd_sidecar.router.http.ledger import Holder
from xpyd_sidecar.router.http.shares import KeyShares
from xpyd_sidecar.router.http.wire import chunk_of

SMALL = 64 << 10
"""Bytes of a body that the reserve takes."""
RESERVE = 8
"""The reserve is the budget divided by this; and what bodies leave of the rest is the rest divided by it."""
PRESSED = 1_000_000
"""Bytes a second with which a body must come once there is no room for another one."""
GRACE_S = 1.0
"""How old a body must be for its speed to say anything."""
LOOK_S = 0.05
"""How long no bodies are looked for that come too slowly, when too few were found: all of them are looked at each time."""
DEFAULT = 512 << 20


class BodyOwner(Holder, Protocol):
    """A connection that receives a body."""

    def end_body(self, fault: HttpFault) -> None:
        """There is no more room for what has come of it: let go of it, and tell the client."""


class BodyRoom(msgspec.Struct, eq=False):
    """A part of the budget."""

    limit: int
    held: int = 0


class HeldBody(msgspec.Struct, eq=False):
    """A body that is held."""

    owner: BodyOwner
    began: float
    """When its head was there."""
    key: str = ""
    """Under which its bytes count in a share; empty: in none."""
    came: int = 0
    """Bytes that have come, whether they are still here or not."""
    size: int = 0
    """Bytes that are held."""
    counted: int = 0
    """Bytes that count in its key's share."""
    room: BodyRoom | None = None
    """Where it has its bytes; None: it has none, or has given them back."""
    ended: bool = False
    """Its bytes were given back, or taken away: it is not to have any again."""

    def speed(self, now: float) -> float:
        """Bytes a second since its head."""
        return self.came / max(now - self.began, 1e-3)


class BodyBudget:
    """The bytes that all bodies may have."""

    def __init__(self, budget: int, small: int = SMALL, others: Callable[[], int] = lambda: 0) -> None:
        """``small``: how large a body of the reserve may be. ``others``: bytes of the rest that are no bodies'."""
        self.small = small
        self._others = others
        self.reserve = BodyRoom(budget // RESERVE)
        self.whole_rest = budget - self.reserve.limit
        """Bytes of the rest, with those that are not for bodies."""
        self.rest = BodyRoom(self.whole_rest - self.whole_rest // RESERVE)
        self.shares = KeyShares(self.whole_rest)
        self._coming: dict[HeldBody, None] = {}
        """Those with room in the rest that are not whole, oldest first."""
        self._look_at = 0.0

    @property
    def held_bytes(self) -> int:
        """Bytes of all bodies that are here."""
        return self.reserve.held + self.rest.held

    def begin(self, owner: BodyOwner, length: int | None, now: float,
              key: str = "") -> tuple[HeldBody | None, list[HeldBody]]:
        """A head came. ``length``: bytes that it announces, None where nobody knows. ``key``: whose it is.

        Returns the body (None: there is no room for it), and those that have to be ended for it. Raises HttpFault: 429, its
        key has its share.
        """
        key = self.shares.name(key)
        if length is None or length <= self.small:
            return HeldBody(owner, now, key), []
        self.shares.require(key, length)
        ended: list[HeldBody] = []
        missing = self.rest.held + self._others() + length - self.rest.limit
        if missing > 0:
            ended = self._slow(missing, now)
            if not ended:
                return None, []
            for body in ended:
                self.give_back(body)
        return HeldBody(owner, now, key), ended

    def grow(self, body: HeldBody, more: int, now: float, *, kept: bool = True) -> list[HeldBody]:
        """More bytes came; ``kept``: and stay here. Returns those that have to be ended for them, maybe it as the last.

        Raises HttpFault: 429, its key has its share; nothing is held of it any more.
        """
        body.came += more
        if body.ended or not kept:
            return []
        try:
            self.shares.require(body.key, more, own=body.counted)
        except HttpFault:
            self.give_back(body)
            raise
        if body.key:
            self.shares.add(body.key, more)
            body.counted += more
        reserve, room = self.reserve, self.rest
        if body.room is not room and body.size + more <= self.small and reserve.held + more <= reserve.limit:
            room = reserve
        if body.room is not room:
            if body.room is not None:
                body.room.held -= body.size
                more, body.size = more + body.size, 0
            body.room = room
            if room is self.rest:
                self._coming[body] = None
        ended: list[HeldBody] = []
        others = self._others() if room is self.rest else 0
        while room.held + others + more > room.limit:
            slowest = min(self._coming, key=lambda one: (now - one.began < GRACE_S, one.speed(now)))
            self.give_back(slowest)
            ended.append(slowest)
            if slowest is body:
                return ended
        room.held += more
        body.size += more
        return ended

    def at_once(self, size: int) -> bool:
        """Count a whole small body that came in one piece, as nearly all do: it is known by its size alone.

        False: nothing was counted, since it is not small or the reserve is full; ``begin`` it.
        """
        reserve = self.reserve
        if size > self.small or reserve.held + size > reserve.limit:
            return False
        reserve.held += size
        return True

    def complete(self, body: HeldBody) -> None:
        """The last byte of a body has come: it is held until ``give_back``."""
        self._coming.pop(body, None)

    def give_back(self, body: HeldBody | int) -> None:
        """The bytes of a body are here no longer. ``body``: its size, where it was counted ``at_once``; that only once."""
        if isinstance(body, int):
            self.reserve.held -= body
            return
        self._coming.pop(body, None)
        if body.room is not None:
            body.room.held -= body.size
        self.shares.add(body.key, -body.counted)
        body.room, body.size, body.counted, body.ended = None, 0, 0, True

    def let_go(self, missing: int, now: float) -> list[BodyOwner]:
        """Give back so many bytes of bodies that come too slowly; whose they were. None where all of them have less."""
        slow = self._slow(missing, now)
        for body in slow:
            self.give_back(body)
        return [body.owner for body in slow]

    def _slow(self, missing: int, now: float) -> list[HeldBody]:
        """The slowest of those that come too slowly, as many as have so many bytes together; none where all have less."""
        if now < self._look_at:
            return []
        slow = [body for body in self._coming if now - body.began >= GRACE_S and body.speed(now) < PRESSED]
        if sum(body.size for body in slow) < missing:
            self._look_at = now + LOOK_S
            return []
        slow.sort(key=lambda body: body.speed(now))
        return [body for body, before in zip(slow, accumulate([body.size for body in slow], initial=0), strict=False)
                if before < missing]


HELD = 256 << 10
"""Bytes held while nobody takes them; reading stops beyond it."""
_NAME = 32
"""Bytes of a form's piece that are looked at again with the next one: a name may lie across both."""


class BodyTaker(Protocol):
    """Who gets the body."""

    def write(self, data: bytes) -> None:
        """More of it."""


class Upload:
    """A form that is handed on while it comes, piece by piece (``call.BodySender``).

    connection ──feed──▶ held (bounded) ──on_open──▶ taker.write …
         ▲                                              │
         └── reads no more while ``blocked`` ◀── on_full(True)
    """

    __slots__ = ("_held", "_on_blocked", "_seen", "_size", "_taker", "_waits", "done", "fault", "length", "refuse", "sent")

    def __init__(self, length: int | None, on_blocked: Callable[[], None]) -> None:
        """``length``: bytes announced, None where the client sends chunks. ``on_blocked``: ``blocked`` may have changed."""
        self.length = length
        self.done = self.sent = False
        """It is whole; and was handed on so."""
        self.fault: HttpFault | None = None
        self.refuse: Callable[[HttpFault], None] = lambda _: None
        """Who hears of what is wrong with it, once somebody takes it."""
        self._on_blocked = on_blocked
        self._held: list[bytes] = []
        self._size = 0
        self._seen = b""
        self._taker: BodyTaker | None = None
        self._waits = False

    @property
    def blocked(self) -> bool:
        """Whether the client must wait."""
        return not self.done and (self._waits or self._size > HELD)

    # ---- the connection

    def feed(self, data: bytes) -> None:
        """The next bytes came. A field that a client must not send is refused."""
        if self._taker is None and self.fault is None:
            self._held.append(data)
            self._size += len(data)
        if self._taker is None:
            return
        seen = self._seen + data
        self._seen = seen[-_NAME:]
        try:
            refuse_in_form(seen)
        except HttpFault as fault:
            self.fail(fault)
        else:
            self._taker.write(chunk_of(data) if self.length is None else data)

    def finish(self) -> None:
        """The body is whole."""
        self.done = True
        if self._taker is not None:
            if self.length is None:
                self._taker.write(b"0\r\n\r\n")
            self.sent = True

    def fail(self, fault: HttpFault) -> None:
        """It will not be whole."""
        self.fault = fault
        self._held.clear()
        self._size = 0
        if self._taker is not None:
            self._taker = None
            self.refuse(fault)

    # ---- the taker

    def on_open(self, taker: BodyTaker) -> None:
        """Give everything to ``taker`` from now on: what is held at once."""
        self._taker = taker
        held, self._held, self._size = self._held, [], 0
        for data in held:
            self.feed(data)
        if self._taker is not None and self.fault is not None:
            self.fail(self.fault)
        elif self.done:
            self.finish()
        self._on_blocked()

    def on_full(self, full: bool) -> None:
        """Whether the taker can take no more at present."""
        self._waits = full
        self._on_blocked()
