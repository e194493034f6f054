"""Where requests for LoRA adapters go, so that engines seldom change the adapters of their batches.

An engine has places for some adapters (``--max-loras``) and fetches another one in place of the one that was used longest
ago. What it has there is a belief of this router: what the engine was asked for last, by its beat, and what this router has
sent there since. Among candidates that are not loaded far above the others:

    1. those that have it;
    2. else one that has a free place: by a rendezvous hash, so that several routers agree;
    3. else, where it is asked for often, the one whose oldest adapter is asked for least;
    4. else one of a few instances (a quarter, the same for all routers) that what is seldom asked for shares: it costs the
       places there, and nobody's who is asked for often.

Often: as often as what would fill the places of the others, by counts that are halved now and then. 4 keeps the number of
changes near that of a policy that knows how often each is asked for: last-used order alone lets every rare request push out
a common adapter (Einziger, Friedman and Manes, "TinyLFU", 2017, have the same thought at a cache's door).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Final

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.router.balance.candidates import Rendezvous, name_key, score
from xpyd_sidecar.router.fleet.member import FleetMember

FEW: Final = 2
BOUND: Final = 1.5
"""Candidates may have this times the mean of requests, and ``FEW`` more; so of this router's own, since those of others are
known by beats, and several routers would send what is common to the same instance until the next one.
"""
SHARED: Final = 4
"""One of so many instances is shared by what is seldom asked for; with fewer none is."""
COUNT_AGAIN: Final = 512
"""Requests between two looks at what is often."""
HALVE: Final = 40
"""Requests for each name that is known, until counts are halved."""
MOST_INSTANCES: Final = 4096
SENT: Final = 1024
"""Requests to an instance between two of its beats that are remembered."""
_TAIL: Final = 0x5DEECE66D
"""A key of the order by which the shared instances are found."""


class _Held:
    """What one instance is believed to have, the adapter used longest ago first."""

    def __init__(self) -> None:
        self.names: OrderedDict[str, None] = OrderedDict()
        self._sent: list[str] = []
        """Since its last beat."""
        self._beat_at = -math.inf

    def hear(self, member: FleetMember) -> None:
        """Take what its last beat tells, where that is new; an engine that tells nothing is believed what it was sent."""
        told = member.load.adapters
        if member.beat_at == self._beat_at or not told:
            return
        self._beat_at = member.beat_at
        self.names = OrderedDict.fromkeys(told)
        for name in self._sent:
            self._place(name, _slots(member))
        self._sent.clear()

    def use(self, name: str, slots: int) -> bool:
        """It is sent a request; whether it had the adapter."""
        had = name in self.names
        self._place(name, slots)
        self._sent.append(name)
        del self._sent[:-SENT]
        return had

    def _place(self, name: str, slots: int) -> None:
        self.names[name] = None
        self.names.move_to_end(name)
        while len(self.names) > max(1, slots):
            self.names.popitem(last=False)


class AdapterSlots:
    """The belief of one router, and what follows from it."""

    def __init__(self) -> None:
        self._held: dict[tuple[InstanceName, Incarnation], _Held] = {}
        self._asked: Counter[str] = Counter()
        self._since_counted = self._since_halved = 0
        self._often = 0.0
        """More requests than this are often."""
        self._rendezvous = Rendezvous()

    def narrow(self, name: str, candidates: Sequence[FleetMember]) -> Sequence[FleetMember]:
        """Those among whom a policy may choose for a request for this adapter; all, where their places are not known."""
        if len(candidates) < 2 or not all(one.adapters is not None and one.adapters.slots for one in candidates):
            return candidates
        loads, own = [score(one) for one in candidates], [one.in_flight for one in candidates]
        most, most_own = (BOUND * (sum(each) + 1) / len(each) + FEW for each in (loads, own))
        free = [one for one, load in zip(candidates, loads, strict=True) if load < most and one.in_flight < most_own]
        having = [one for one in free if name in self._of(one)]
        if having or not free:
            return having or candidates
        spare = [one for one in free if len(self._of(one)) < _slots(one)]
        if spare:
            return [spare[next(self._rendezvous.order(spare[0].role, spare, name_key(name)))]]
        shared = self._shared(candidates)
        alike = [one for one in free if (one.name in shared) is not (self._asked[name] > self._often)]
        if self._asked[name] > self._often and shared:
            return [min(alike or free, key=lambda one: self._asked[next(iter(self._of(one)))])]
        return alike or free

    def use(self, name: str, member: FleetMember) -> bool:
        """A request for an adapter was sent to an instance; whether it had the adapter, as far as is known here."""
        return self._believed(member).use(name, _slots(member))

    def count(self, name: str, candidates: Sequence[FleetMember]) -> None:
        """Count one request for an adapter, for which there were these candidates."""
        self._asked[name] += 1
        self._since_counted += 1
        self._since_halved += 1
        if self._since_halved >= HALVE * len(self._asked):
            self._since_halved = 0
            self._asked = Counter({each: count // 2 for each, count in self._asked.items() if count > 1})
            self._often /= 2
        if self._since_counted >= COUNT_AGAIN:
            self._since_counted = 0
            places = sum(_slots(one) for one in candidates) - sum(_slots(one) for one in candidates[:_parts(candidates)])
            counts = sorted(self._asked.values(), reverse=True)
            self._often = counts[places - 1] if 0 < places <= len(counts) else 0

    def _shared(self, candidates: Sequence[FleetMember]) -> set[InstanceName]:
        order = self._rendezvous.order(candidates[0].role, candidates, _TAIL)
        return {candidates[next(order)].name for _ in range(_parts(candidates))}

    def _of(self, member: FleetMember) -> OrderedDict[str, None]:
        return self._believed(member).names

    def _believed(self, member: FleetMember) -> _Held:
        who = (member.name, member.incarnation)
        held = self._held.get(who)
        if held is None:
            if len(self._held) >= MOST_INSTANCES:
                self._held.clear()
            held = self._held[who] = _Held()
        held.hear(member)
        return held


def _slots(member: FleetMember) -> int:
    return member.adapters.slots if member.adapters is not None else 0


def _parts(candidates: Sequence[FleetMember]) -> int:
    """How many instances are shared by what is seldom asked for."""
    return math.floor(len(candidates) / SHARED)
