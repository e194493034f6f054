"""The requests of ``session_orders``: what prefill ranks make for them, and how their loads end at each decode rank."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kv_ranks import BLOCK, P_LIFE, REGIONS, key, whole

from xpyd_sidecar.contract.ids import HostPort
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.mapping import Cut, PlacedCut
from xpyd_sidecar.kv.reach import TableSpan
from xpyd_sidecar.kv.receiving import From, Order


@dataclass
class Try:
    """What a prefill rank makes for a key."""

    key: Key
    p: int
    left: list[tuple[int, int, int]]
    """Pieces that are not copied: region, first, count."""
    expected: bool = False
    released: bool = False


@dataclass
class Prompt:
    """One request."""

    letter: str
    blocks: int
    base: int
    """The first of its blocks' numbers at decode."""
    ranks: int
    """Of decode."""
    tries: list[Try] = field(default_factory=list)
    first: int = -1
    """Where its load begins; below 0: it has not begun."""
    asked: int = -1
    """The newest try that was ordered."""
    ended: dict[int, tuple[Key, Outcome]] = field(default_factory=dict)
    """By decode rank: how its load has ended, and of which try."""
    settled: set[int] = field(default_factory=set)
    """Decode ranks that write nothing more into its blocks."""
    dropped: bool = False
    """Its request ended before its load began."""
    excuses: set[str] = field(default_factory=set)
    late: bool = False
    """Prefill begins to compute it when all others are done."""

    def begin(self, rnd: random.Random, prefills: int) -> None:
        """One of the prefill ranks begins to compute it, once more."""
        left, at = [], 0
        while at < self.blocks:
            count = rnd.randrange(1, self.blocks - at + 1)
            left += [(region, at, count) for region in range(REGIONS)]
            at += count
        self.tries.append(Try(key(self.letter, len(self.tries) + 1), rnd.randrange(prefills), left))

    def order(self, rank: int, address: HostPort) -> Order:
        """A decode rank is to load its part of every block of the newest try, which a prefill rank at ``address`` makes."""
        part = PlacedCut(Cut(0, REGIONS, rank, 1, BLOCK // self.ranks), 0, 0)
        source = From(address, P_LIFE, whole(REGIONS, BLOCK) if self.ranks == 1 else (part,), self.ranks)
        ids = tuple(range(self.base + self.first, self.base + self.blocks))
        return Order(self.request, self.tries[-1].key, (TableSpan(self.first, ids),), (source,), self.letter.encode() * 32)

    @property
    def request(self) -> str:
        return f"r{self.letter}"

    @property
    def finished(self) -> bool:
        """Whether all ranks have reported its load."""
        return len(self.ended) == self.ranks

    @property
    def half(self) -> bool:
        """Whether one rank has reported its load and another one has not: a newer try is then for that one alone."""
        return bool(self.ended) and not self.finished

    @property
    def waits(self) -> bool:
        """Whether it has no blocks yet."""
        return self.first < 0 and not self.dropped

    @property
    def loading(self) -> bool:
        """Whether newer tries would be ordered."""
        return self.first >= 0 and not self.finished and "abandoned" not in self.excuses

    @property
    def whole(self) -> Key | None:
        """The try that all ranks have loaded, and confirmed."""
        keys = {key for key, _ in self.ended.values()}
        well = all(outcome is Outcome.OK for _, outcome in self.ended.values())
        return keys.pop() if self.finished and well and len(keys) == 1 else None
