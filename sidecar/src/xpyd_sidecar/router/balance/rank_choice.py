"""Which data-parallel rank of an instance a request goes to. Each has a KV cache, and so a prefix cache, of its own.

    a session             its own rank, by its key                            unless that has had far more than the others
    a prompt (policies    the rank that was given the longest beginning of    lately: then whichever has had the fewest
    that look at them)    it last
    else                  whichever has had the fewest: in turn

Engines tell their load as a whole, so what counts is what this router has given to each rank lately: counts are halved when
there are ``LATELY`` for each rank. What is remembered of prompts is a belief in bounded memory: what was asked for longest
ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.router.api.prompt import PromptPrefix
from xpyd_sidecar.router.fleet.member import FleetMember

LATELY: Final = 32
OVERLOADED: Final = 1.5
"""A rank is left for another one from this times the mean on,"""
ALWAYS: Final = 4
"""and so many requests more."""
MOST_KEYS: Final = 1 << 16
MOST_INSTANCES: Final = 4096


class RankChoice:
    """Of one router, for all instances."""

    def __init__(self, most: int = MOST_KEYS) -> None:
        self._most = most
        self._given: dict[tuple[InstanceName, Incarnation], list[int]] = {}
        """Requests lately, by rank."""
        self._last: OrderedDict[tuple[InstanceName, Incarnation, int], int] = OrderedDict()
        """Who was given a prefix last, by its key."""

    def __len__(self) -> int:
        """Prefixes that are remembered."""
        return len(self._last)

    def choose(self, member: FleetMember, prefix: PromptPrefix | None, session: int = 0) -> int:
        """The rank of one request. ``prefix``: None where nobody looks at prompts; ``session``: 0: it belongs to none."""
        ranks = max(len(member.http), len(member.control), 1)
        if ranks == 1:
            return 0
        given = self._counts(member, ranks)
        wanted = (session >> 1) % ranks if session else self._holder(member, prefix)  # keys of sessions are odd
        if wanted is None or wanted >= ranks or given[wanted] > OVERLOADED * sum(given) / ranks + ALWAYS:
            wanted = given.index(min(given))
        given[wanted] += 1
        if sum(given) >= LATELY * ranks:
            given[:] = [count // 2 for count in given]
        if prefix is not None:
            self._remember(member, prefix, wanted)
        return wanted

    def _counts(self, member: FleetMember, ranks: int) -> list[int]:
        name = (member.name, member.incarnation)
        given = self._given.get(name)
        if given is None or len(given) != ranks:
            if len(self._given) >= MOST_INSTANCES:
                self._given.clear()
            given = self._given[name] = [0] * ranks
        return given

    def _holder(self, member: FleetMember, prefix: PromptPrefix | None) -> int | None:
        for _, key in reversed(prefix.keys) if prefix is not None else ():
            rank = self._last.get((member.name, member.incarnation, key))
            if rank is not None:
                return rank
        return None

    def _remember(self, member: FleetMember, prefix: PromptPrefix, rank: int) -> None:
        for _, key in prefix.keys:
            name = (member.name, member.incarnation, key)
            self._last[name] = rank
            self._last.move_to_end(name)
            if len(self._last) > self._most:
                self._last.popitem(last=False)
