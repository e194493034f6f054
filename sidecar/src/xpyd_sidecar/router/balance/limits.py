"""What a router bounds itself: retries (``RetryBudget``), and requests that an instance serves at once.

How many of this router these are: no limit, until its engine shows that requests wait there.

A request that waits in an engine can neither go elsewhere nor be overtaken by a better one, so what an engine cannot begin
soon is better kept in the router's queue. An engine must never run dry for it. Both follow from Little's law:

    wait in the engine  =  queued / rate                          rate: legs of this router that ended there, per second
    limit               =  running + max(SLACK, rate · WAIT_S)    running: of this router's legs, those that are not queued

What waits is what the last beat says, without decode's requests that are parked for their KV (``transfers``): these wait
for prefill. The limit keeps at least ``WAIT_S`` seconds of work queued in the engine, and a leg that ends is replaced at
once, so the engine always has more to begin than it can: the limit costs no throughput, however large its batches are.

    no limit ──wait > WAIT_S at two beats in a row──▶ limit, sinking to the formula by at most SINK a beat
       ▲                                                │
       └──reached twice what is used────────────────────┘ wait ≤ WAIT_S / 2: grows by GROW a beat

Multiplicative decrease and increase around a formula, since load comes in numbers from 1 to hundreds. A burst is no reason:
queues that stand are (Nichols and Jacobson, "Controlling Queue Delay", 2012).

Laws
  1. No limit is below ``LEAST``, nor below running + ``SLACK``.
  2. An engine that shows no waiting requests gets no limit, whatever runs there.
  3. Without beats nothing changes; an instance that is gone or restarted has no limit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import msgspec

from xpyd_sidecar.contract.ids import Incarnation, InstanceName, Role
from xpyd_sidecar.router.balance.rate import Rate
from xpyd_sidecar.router.fleet.member import FleetMember

WAIT_S = 2.0
"""Work that is left queued in an engine, in seconds."""
SLACK = 4
"""Requests that may wait in an engine however slow it is."""
LEAST = 8
SINK = 0.7
"""A limit is at least so much of what was in use before."""
GROW = 1.5
STANDS = 2
"""Beats in a row that must show the queue."""
WINDOW = 4
"""The most of so many beats counts: requests of one batch end together, and a beat at that moment shows an empty engine."""


class _Seen(msgspec.Struct):
    incarnation: Incarnation
    rate: Rate
    beat_at: float
    limit: float = math.inf
    waited: int = 0
    """Beats in a row at which too much waited."""
    beats: deque[tuple[float, int]] = msgspec.field(default_factory=lambda: deque(maxlen=WINDOW))
    """The formula and the legs that were open, at the last beats."""


class ConcurrencyLimits:
    """Limits of all instances of one router."""

    def __init__(self, fixed: int = 0) -> None:
        """``fixed``: the limit of each instance; 0: found from what engines report."""
        self._fixed = fixed
        self._seen: dict[InstanceName, _Seen] = {}
        self._looked = 0.0
        """When they were looked at last."""
        self.unlimited = not fixed
        """No instance has a limit."""

    def limit_of(self, member: FleetMember) -> float:
        """Most legs of this router at once; infinite where there is no limit."""
        seen = self._seen.get(member.name)
        return self._fixed or (math.inf if seen is None else seen.limit)

    def free(self, candidates: Sequence[FleetMember]) -> Sequence[FleetMember]:
        """Those with room; the same object where all have, and where none has."""
        if self.unlimited:
            return candidates
        left = [member for member in candidates if member.in_flight < self.limit_of(member)]
        return candidates if not left or len(left) == len(candidates) else left

    def has_room(self, candidates: Sequence[FleetMember]) -> bool:
        """Whether one of them has room; also where there are none, since nobody frees a place then."""
        return self.unlimited or not candidates or any(member.in_flight < self.limit_of(member) for member in candidates)

    def adjust(self, now: float, members: Sequence[FleetMember]) -> None:
        """Take note of the legs that ended and the beats that came since the last look."""
        if self._fixed:
            return
        between, self._looked = (self._looked + now) / 2, now
        for member in members:
            ended, member.ended = member.ended, 0
            seen = self._seen.get(member.name)
            if seen is None or seen.incarnation != member.incarnation:
                self._seen[member.name] = _Seen(member.incarnation, Rate(), member.beat_at)
                continue
            if ended:
                seen.rate.add(between, ended)  # on average they did then
            if seen.beat_at != member.beat_at:
                seen.beat_at = member.beat_at
                self._heard(now, member, seen)
        if len(self._seen) > len(members):
            for name in self._seen.keys() - {member.name for member in members}:
                del self._seen[name]
        self.unlimited = all(seen.limit == math.inf for seen in self._seen.values())

    def _heard(self, now: float, member: FleetMember, seen: _Seen) -> None:
        load = member.load
        queued = load.waiting - load.transfers if member.role is Role.DECODE else load.waiting
        there = load.running + load.waiting
        mine = member.in_flight_at_beat
        share = min(1.0, mine / there) if there else 0.0
        own, rate = max(0, queued) * share, seen.rate.per_s(now)
        before = seen.limit
        may_wait = max(SLACK, rate * WAIT_S)
        seen.waited = seen.waited + 1 if own > may_wait else 0
        seen.beats.append((mine - own + may_wait, mine))
        if seen.waited < STANDS and before == math.inf:
            return  # law 2; nearly every beat
        formula, used = max(each for each, _ in seen.beats), max(each for _, each in seen.beats)
        if seen.waited >= STANDS:
            seen.limit = math.ceil(max(LEAST, formula, SINK * min(before, used)))
        elif before < math.inf and own <= may_wait / 2:
            seen.limit = math.ceil(before * GROW) + 1
            if seen.limit >= 2 * max(LEAST, used):
                seen.limit = math.inf


WINDOW_S = 10
FLOOR_PER_S = 3.0
"""Retries per second that are always allowed."""


class RetryBudget:
    """How many retries are allowed: a share of recent requests, beyond a small floor.

    Without a budget, retries multiply the load just when engines have too much of it. A retry is allowed while

        retries(window) + 1  ≤  FLOOR_PER_S · window  +  share · requests(window)

    over the last ``WINDOW_S`` seconds. The shape is that of Finagle's ``RetryBudget`` (window of 10 s, share of 20 %, a
    floor for routers with little traffic); counts per second keep it exact to a second and free of drift.

    Ask it where an engine that lives said no (5xx, 429, an aborted request, silence). A leg that ended because its instance
    is gone (connection refused or broken, incarnation lost) needs no budget: each death gives at most one retry to each
    request that was there, and ``RequestLimits`` bounds the legs of a request. Taking those from the budget would lose
    streams that could have been saved when one of two decode instances dies.

    ``share``: from 0 (the floor alone) to 1 (every recent request may be retried once).
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._seconds = deque([[0, 0, 0]])
        """Those of the window in which something happened: the second, its requests and its retries."""

    def on_request(self, now: float) -> None:
        """A request came. ``now``: seconds of a monotonic clock, as in every other call."""
        newest = self._seconds[-1]
        (newest if now < newest[0] + 1 else self._turn(now))[1] += 1

    def may_retry(self, now: float) -> bool:
        """Whether a retry may be made now; if so it is taken from the budget."""
        if self.remaining_retries(now) < 1:
            return False
        self._seconds[-1][2] += 1
        return True

    def remaining_retries(self, now: float) -> int:
        """Retries that may be made now."""
        self._turn(now)
        _, requests, retries = map(sum, zip(*self._seconds, strict=True))
        return max(0, math.floor(FLOOR_PER_S * WINDOW_S + self._share * requests) - retries)

    def _turn(self, now: float) -> list[int]:
        second = math.floor(now)
        if second > self._seconds[-1][0]:  # a clock that went back a little counts for the newest second
            self._seconds.append([second, 0, 0])
            while self._seconds[0][0] <= second - WINDOW_S:
                self._seconds.popleft()
        return self._seconds[-1]
