"""The queue before the instances: bounded, fair between keys, ordered by priority within a key. Pure: time is an argument.

    key A   ▸ a1 a2 a3 …      a key begins with the start tag  S = max(V + in flight, F)      F: where it left off
    key B   ▸ b1              the key with the smallest S is served:  V = max(V, S - in flight);  then S += tokens

Between keys: start-time fair queueing (Goyal, Vin and Cheng, "Start-time Fair Queuing", SIGCOMM 1996), by the tokens of
requests: those of the prompt and those that may be generated. Over any span in which two keys both wait, what they get
differs by at most one request of each; who floods waits behind himself. Added to it is what keys have in flight already: a
key begins that much later, so that one with nothing in flight catches up with the one that is served before they take
turns. And what a request did not use of its tokens is given back when it ends.

Within a key: by ``arrived + priority · step``, so a lower priority is served first (as in vLLM) and time makes up for it: a
request overtakes those of a better priority that come ``step`` seconds later for each level. Priority counts within a key
alone, or clients could take others' share by claiming one.

Who needs no prefill (``alone``) can be served before those that wait for it: the order is the same without these.

Laws
  1. At most ``size`` wait; once two keys have come, none gets more than ``size`` / (keys that wait + 1) places.
  2. Each ticket ends once: taken, removed, expired, or it gave way.
  3. A ticket whose key waits is taken after at most one round of the other keys for each one before it in its key, and
     after as many tokens of others as its key had in flight.
  4. An empty queue keeps nothing but the rate at which it drained, and what is in flight.
  5. In a full queue a newcomer's key takes the place of the youngest ticket of the key that has the most, if that has at
     least two more than the newcomer's. Who is to stay (``keep``) never gives way.
"""

from __future__ import annotations

import heapq
import math

from xpyd_sidecar.router.api.faults import too_many, unavailable
from xpyd_sidecar.router.api.priority import OWN, PRIORITIES
from xpyd_sidecar.router.balance.rate import Rate
from xpyd_sidecar.router.balance.tickets import KeyTickets, Ticket

RETRY_AFTER_S = (1, 60)
"""Least and most that a client is told to wait."""
KEYS_KEPT = 4096
"""Finish tags kept of keys that do not wait."""


class FairQueue:
    """Tickets of requests that wait. Seconds of a monotonic clock."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self._size = size
        self._timeout_s = timeout_s
        self._only: str | None = None
        self._shared = False
        """Several keys have come, so none may take every place."""
        self._step = timeout_s / 4 / PRIORITIES
        """The worst priority waits half of the timeout longer than the best at most."""
        self._keys: dict[str, KeyTickets] = {}
        self._heap: list[tuple[int, int, str]] = []
        """Start tags of the keys that wait; entries of keys that left, or have another one, are skipped."""
        self._finish: dict[str, int] = {}
        self._in_flight: dict[str, int] = {}
        """Tokens of requests that are being served, by key."""
        self._tickets: dict[int, Ticket] = {}
        """In the order of arrival, which is that of expiry."""
        self.alone = 0
        """How many of them need no prefill."""
        self._virtual = 0
        self._numbers = 0
        self._rate = Rate()

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._tickets)

    def note(self, key: str) -> None:
        """A request of this key came, whether it has to wait or not."""
        if key != self._only:
            self._shared = self._only is not None
            self._only = key if self._only is None else self._only

    # ---- waiting

    def put(self, now: float, key: str, priority: int = 0, cost: int = 1, *, alone: bool = False) -> Ticket:
        """Wait. ``key``: whose request it is. ``priority``: lower is served first. ``cost``: its tokens, above 0.
        ``alone``: it needs no prefill. Raises HttpFault: 503, the queue is full; 429, its key has its share.
        """
        self.note(key)
        own, share = self._own(key), self._share(key)
        if len(self._tickets) >= self._size:
            words = f"{self._size} requests wait, which is the limit" if self._size else "the instances are busy"
            raise unavailable(words, self.retry_after(now, len(self._tickets)))
        if own >= share:
            words = f"{own} requests of this key wait, which is its share"
            raise too_many(words, self.retry_after(now, own * len(self._keys)))
        self._numbers += 1
        ticket = Ticket(now + OWN.clamp(priority) * self._step, self._numbers, key, cost, now, alone)
        self._tickets[ticket.number] = ticket
        known = self._keys.get(key)
        if known is None:
            start = max(self._virtual + self._in_flight.get(key, 0), self._finish.pop(key, 0))
            known = self._keys[key] = KeyTickets(start)
            known.add(ticket)
            self._push(key, known)
        else:
            known.add(ticket)
        self.alone += alone
        return ticket

    def make_room(self, key: str) -> Ticket | None:
        """In a full queue, who gives way to a newcomer of this key: it has left. None: nobody has to, or nobody does."""
        own = self._own(key)
        if not self._size or len(self._tickets) < self._size or own >= self._share(key):
            return None
        for known in sorted(self._keys.values(), key=lambda one: -len(one.arrivals)):
            if len(known.arrivals) < own + 2:
                return None
            ticket = known.youngest()
            if ticket is not None:
                self._drop(ticket)
                return ticket
        return None

    def keep(self, ticket: Ticket) -> None:
        """Its client has heard a byte: it never gives way."""
        if ticket.number in self._tickets:
            self._keys[ticket.key].kept.add(ticket.number)

    def peek(self, *, alone: bool = False) -> Ticket | None:
        """The one that is served next; ``alone``: of those that need no prefill."""
        if alone:
            able = [(known.start, name) for name, known in self._keys.items() if known.waiting[True]] if self.alone else []
            return self._keys[min(able)[1]].waiting[True][0] if able else None
        while self._heap:
            start, _, key = self._heap[0]
            known = self._keys.get(key)
            if known is not None and known.start == start:
                return known.first()
            heapq.heappop(self._heap)
        return None

    def take(self, now: float, ticket: Ticket | None = None) -> Ticket | None:
        """Serve the next one, or this one, which waits and goes before others that cannot be served."""
        following = self.peek()
        ticket = following if ticket is None else ticket
        if ticket is None:
            return None
        known = self._keys[ticket.key]
        if ticket is following:
            self._virtual = max(self._virtual, known.start - self._in_flight.get(ticket.key, 0))
        known.start += ticket.cost
        self._drop(ticket)
        if known.arrivals:
            self._push(ticket.key, known)
        self._rate.add(now)
        return ticket

    def remove(self, ticket: Ticket) -> bool:
        """Its client has gone. False: it did not wait any more."""
        if ticket.number not in self._tickets:
            return False
        self._drop(ticket)
        return True

    def take_expired(self, now: float) -> list[Ticket]:
        """Those that waited for too long; they have left the queue."""
        out = []
        while self._tickets:
            ticket = next(iter(self._tickets.values()))
            if now - ticket.arrived < self._timeout_s:
                break
            self._drop(ticket)
            out.append(ticket)
        return out

    @property
    def deadline(self) -> float:
        """When the next one expires."""
        return next(iter(self._tickets.values())).arrived + self._timeout_s if self._tickets else math.inf

    # ---- in flight

    def on_begun(self, key: str, tokens: int, *, waited: bool = False) -> None:
        """A request of this key is being served. ``waited``: it was taken from here, so its key has paid for it."""
        self._in_flight[key] = self._in_flight.get(key, 0) + tokens
        known = self._keys.get(key)
        if known is not None and not waited:
            self._move(key, known, tokens)

    def on_ended(self, key: str, tokens: int, used: int) -> None:
        """It has ended, and took ``used`` tokens, not ``tokens`` with which it began."""
        left = self._in_flight.get(key, 0) - tokens
        if left > 0:
            self._in_flight[key] = left
        else:
            self._in_flight.pop(key, None)
        known = self._keys.get(key)
        if known is not None:
            self._move(key, known, used - tokens)
        elif key in self._finish:
            self._finish[key] += used - tokens

    def in_flight(self, key: str) -> int:
        """Tokens of its requests that are being served."""
        return self._in_flight.get(key, 0)

    # ---- both

    def retry_after(self, now: float, before: int) -> int:
        """Seconds until so many are served, at the rate at which the queue drains."""
        rate = self._rate.per_s(now)
        least, most = RETRY_AFTER_S
        return max(least, min(most, math.ceil(before / rate))) if rate > 0 else most if before else least

    def _own(self, key: str) -> int:
        known = self._keys.get(key)
        return 0 if known is None else len(known.arrivals)

    def _share(self, key: str) -> int:
        """Places that it may have."""
        keys = len(self._keys) + (key not in self._keys)
        return max(1, self._size // (keys + 1)) if self._shared else self._size

    def _move(self, key: str, known: KeyTickets, by: int) -> None:
        if by:
            known.start += by
            self._push(key, known)

    def _push(self, key: str, known: KeyTickets) -> None:
        heapq.heappush(self._heap, (known.start, known.first().number, key))
        if len(self._heap) > 2 * len(self._keys) + 64:
            self._heap = [(each.start, each.first().number, name) for name, each in self._keys.items()]
            heapq.heapify(self._heap)

    def _drop(self, ticket: Ticket) -> None:
        del self._tickets[ticket.number]
        known = self._keys[ticket.key]
        known.drop(ticket)
        self.alone -= ticket.alone
        if known.arrivals:
            return
        del self._keys[ticket.key]
        if not self._tickets:  # nobody is owed anything
            self._finish.clear()
            self._heap.clear()
            self._virtual = 0
        elif known.start > self._virtual:
            if len(self._finish) >= KEYS_KEPT:
                self._finish = {key: tag for key, tag in self._finish.items() if tag > self._virtual}
            if len(self._finish) < KEYS_KEPT:
                self._finish[ticket.key] = known.start
