"""The queue before the instances: bounded, fair between keys, ordered by priority within a key. Pure: time is an argument.

    key A   ▸ a1 a2 a3 …      start tags  S(a1) = max(V, F(A))       F(A) = S + cost
    key B   ▸ b1              the key with the smallest S is served, V = its S

Between keys: start-time fair queueing (Goyal, Vin and Cheng, "Start-time Fair Queuing", SIGCOMM 1996). Over any span in
which two keys both wait, what they get differs by at most one request of each; who floods waits behind himself.

Within a key: by ``arrived + priority · step``, so a lower priority is served first (as in vLLM) and time makes up for it: a
request overtakes those of a better priority that come ``step`` seconds later for each level. Priority counts within a key
alone, or clients could take others' share by claiming one.

Laws
  1. At most ``size`` wait; once two keys have come, none gets more than ``size`` / (keys that wait + 1) places.
  2. Each ticket ends once: taken, removed or expired.
  3. A ticket whose key waits is taken after at most one round of the other keys for each one before it in its key.
  4. An empty queue keeps nothing but the rate at which it drained.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort

import msgspec

from xpyd_sidecar.router.api.faults import too_many, unavailable

PRIORITIES = 8
"""Priorities beyond ± this count as this."""
RATE_S = 10.0
"""Over what time the drain rate is averaged."""
RETRY_AFTER_S = (1, 60)
"""Least and most that a client is told to wait."""
KEYS_KEPT = 4096
"""Finish tags kept of keys that do not wait."""


class Ticket(msgspec.Struct, order=True, eq=True, frozen=True):
    """A place in the queue. Sorts by when it is due within its key."""

    rank: float
    number: int
    key: str
    cost: float
    arrived: float


class _Key(msgspec.Struct):
    start: float
    waiting: list[Ticket]


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
        self._keys: dict[str, _Key] = {}
        self._heap: list[tuple[float, int, str]] = []
        """Start tags of the keys that wait; entries of keys that left are skipped."""
        self._finish: dict[str, float] = {}
        self._tickets: dict[int, Ticket] = {}
        """In the order of arrival, which is that of expiry."""
        self._virtual = 0.0
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

    def put(self, now: float, key: str, priority: int = 0, cost: float = 1.0) -> Ticket:
        """Wait. ``key``: whose request it is. ``priority``: lower is served first. ``cost``: what it counts for in its
        key's share, above 0. Raises HttpFault: 503, the queue is full; 429, its key has its share.
        """
        self.note(key)
        known = self._keys.get(key)
        own = 0 if known is None else len(known.waiting)
        if len(self._tickets) >= self._size:
            words = f"{self._size} requests wait, which is the limit" if self._size else "the instances are busy"
            raise unavailable(words, self.retry_after(now, len(self._tickets)))
        keys = len(self._keys) + (known is None)
        share = max(1, self._size // (keys + 1)) if self._shared else self._size
        if own >= share:
            raise too_many(f"{own} requests of this key wait, which is its share", self.retry_after(now, own * keys))
        level = max(-PRIORITIES, min(PRIORITIES, priority))
        self._numbers += 1
        ticket = Ticket(now + level * self._step, self._numbers, key, cost, now)
        self._tickets[ticket.number] = ticket
        if known is None:
            known = self._keys[key] = _Key(max(self._virtual, self._finish.pop(key, 0.0)), [])
            heapq.heappush(self._heap, (known.start, ticket.number, key))
        insort(known.waiting, ticket)
        return ticket

    def peek(self) -> Ticket | None:
        """The one that is served next."""
        while self._heap:
            start, _, key = self._heap[0]
            known = self._keys.get(key)
            if known is not None and known.start == start:
                return known.waiting[0]
            heapq.heappop(self._heap)
        return None

    def take(self, now: float) -> Ticket | None:
        """Serve the next one."""
        ticket = self.peek()
        if ticket is None:
            return None
        heapq.heappop(self._heap)
        known = self._keys[ticket.key]
        self._virtual = known.start
        known.start += ticket.cost
        self._drop(ticket)
        if known.waiting:
            heapq.heappush(self._heap, (known.start, known.waiting[0].number, ticket.key))
        self._rate.add(now)
        return ticket

    def remove(self, ticket: Ticket) -> bool:
        """Its client has gone. False: it did not wait any more."""
        if ticket.number not in self._tickets:
            return False
        self._drop(ticket)
        return True

    def expired(self, now: float) -> list[Ticket]:
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

    def retry_after(self, now: float, before: int) -> int:
        """Seconds until so many are served, at the rate at which the queue drains."""
        rate = self._rate.per_s(now)
        least, most = RETRY_AFTER_S
        return max(least, min(most, math.ceil(before / rate))) if rate > 0 else most if before else least

    def _drop(self, ticket: Ticket) -> None:
        del self._tickets[ticket.number]
        known = self._keys[ticket.key]
        del known.waiting[bisect_left(known.waiting, ticket)]
        if known.waiting:
            return
        del self._keys[ticket.key]
        if len(self._heap) > 2 * len(self._keys) + 64:
            self._heap = [(each.start, each.waiting[0].number, key) for key, each in self._keys.items()]
            heapq.heapify(self._heap)
        if not self._tickets:  # nobody is owed anything
            self._finish.clear()
            self._heap.clear()
            self._virtual = 0.0
        elif known.start > self._virtual:
            if len(self._finish) >= KEYS_KEPT:
                self._finish = {key: tag for key, tag in self._finish.items() if tag > self._virtual}
            if len(self._finish) < KEYS_KEPT:
                self._finish[ticket.key] = known.start


class Rate:
    """Events per second, averaged with exponential weights over ``RATE_S``."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._at = 0.0
        self._since: float | None = None

    def add(self, now: float, count: float = 1.0) -> None:
        """Events happened."""
        if self._since is None:
            self._since = self._at = now
        self._sum = self._sum * math.exp(-(now - self._at) / RATE_S) + count
        self._at = now

    def per_s(self, now: float) -> float:
        """The rate; 0 where nothing happened yet. The weights are those of the time there was, at least a second."""
        if self._since is None:
            return 0.0
        weight = RATE_S * (1 - math.exp(-max(1.0, now - self._since) / RATE_S))
        return self._sum * math.exp(-(now - self._at) / RATE_S) / weight
