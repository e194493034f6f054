"""What the worlds of ``session_orders`` are made of: engines of some tensor sizes, arrays that reach differently far, and
requests whose KV ranks of prefill make, try by try, and ranks of decode load.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.mapping import Array, ArrayKind, Geometry, Plan, geometry, plan
from xpyd_sidecar.kv.reach import Reach, TableSpan

BLOCK = 4
"""Tokens."""
HEAD = 64
"""Bytes of a head of a block."""


class Share(NamedTuple):
    """What one rank holds of an array: how many heads, and the first of them."""

    heads: int
    first: int


class WorldShape(NamedTuple):
    """Engines of one model. Arrays are listed group by group, the same for prefill and decode."""

    reaches: tuple[Reach, ...]
    """By group."""
    groups: tuple[int, ...]
    """By array."""
    total: int
    """Heads over all ranks; 0: all ranks hold the same one."""
    tensors: tuple[int, int]
    """Of prefill and decode."""
    run: int

    def share(self, side: int, rank: int, array: int) -> Share:
        """Of one rank of a side: 0 prefill, 1 decode."""
        tensor = self.tensors[side]
        if self.reaches[self.groups[array]].over == "state" or not self.total:
            return Share(1, 0)
        return Share(max(1, self.total // tensor), rank * self.total // tensor)

    def kinds(self, side: int) -> list[ArrayKind]:
        """Of each rank of a side."""
        found = []
        for array, group in enumerate(self.groups):
            reach = self.reaches[group]
            total = 0 if reach.over == "state" else self.total
            found.append(ArrayKind("uint8", self.share(side, 0, array).heads, (HEAD,), HEAD, total, reach, self.run))
        return found

    def geometry(self, side: int) -> Geometry:
        """Of a side's engine."""
        arrays = [Array(f"a{at}", kind) for at, kind in enumerate(self.kinds(side))]
        return geometry(self.tensors[side], [arrays] * self.tensors[side])

    def plan(self) -> Plan:
        """What each rank of decode takes."""
        return plan(self.geometry(0), self.geometry(1))


def drawn_shape(rnd: random.Random, *, runs: bool) -> WorldShape:
    """One of the shapes that there are. ``runs``: blocks may be packed in runs of several."""
    kind = rnd.choice(("full", "full", "window", "window", "state", "all three"))
    reaches = [Reach("all", BLOCK)]
    if kind in {"window", "all three"}:
        reaches.append(Reach("window", BLOCK, rnd.choice((3, 6, 9))))
    if kind in {"state", "all three"}:
        reaches.append(Reach("state", 0))
    equal = any(reach.over == "state" for reach in reaches)
    size = rnd.choice((1, 1, 2))
    tensors = (size, size) if equal else (rnd.choice((1, 1, 2)), rnd.choice((1, 1, 2)))
    groups = tuple(group for group in range(len(reaches)) for _ in range(rnd.choice((1, 2))))
    return WorldShape(tuple(reaches), groups, rnd.choice((0, 1, 2, 4)), tensors, rnd.choice((1, 2, 4)) if runs else 1)


def content(letter: str, array: int, block: int, head: int) -> np.ndarray:
    """What prefill computes: one head of one block."""
    name = f"{letter} {array} {block} {head}".encode()
    return np.frombuffer(hashlib.blake2b(name, digest_size=HEAD).digest(), np.uint8)


class Part(NamedTuple):
    """Blocks of arrays that leave together."""

    regions: range
    first: int
    count: int


@dataclass
class Try:
    """What an engine of prefill makes for a key."""

    key: Key
    p: int
    left: list[deque[Part]]
    """By rank: what is not copied."""
    expected: bool = False
    released: bool = False


@dataclass
class Prompt:
    """One request."""

    letter: str
    tokens: int
    """That are handed over."""
    shape: WorldShape
    tries: list[Try] = field(default_factory=list)
    have: int = -1
    """Tokens that decode had when its load began; below 0: it has not begun."""
    tables: tuple[TableSpan, ...] = ()
    asked: int = -1
    """The newest try that was ordered."""
    ended: dict[int, tuple[Key, Outcome]] = field(default_factory=dict)
    """By decode rank: how its load has ended, and of which try."""
    settled: set[int] = field(default_factory=set)
    """Decode ranks that write nothing more into its blocks."""
    freed: bool = False
    dropped: bool = False
    """Its request ended before its load began."""
    excuses: set[str] = field(default_factory=set)
    late: bool = False
    """Prefill begins to compute it when all others are done."""

    def begin(self, rnd: random.Random, engines: int, ranks: int) -> None:
        """One of the prefill engines begins to compute it, once more."""
        steps: list[int] = []
        while not steps or steps[-1] < self.tokens:
            steps.append(min(self.tokens, (steps[-1] if steps else 0) + rnd.randrange(1, self.tokens + 1)))
        apart = rnd.random() < 0.3
        parts = [part for before, step in pairwise([0, *steps]) for part in self._parts(before, step, apart=apart)]
        key = Key(TransferId(f"{int(self.letter, 16):032x}"), Attempt(len(self.tries) + 1), 1)
        self.tries.append(Try(key, rnd.randrange(engines), [deque(parts) for _ in range(ranks)]))

    def _parts(self, before: int, after: int, *, apart: bool) -> list[Part]:
        """What a step makes final that is handed over. ``apart``: each array leaves by itself."""
        found: list[Part] = []
        for group, reach in enumerate(self.shape.reaches):
            wanted = reach.wanted_blocks(self.tokens)
            low = max(wanted.start, reach.final_blocks(before, self.tokens))
            high = min(wanted.stop, reach.final_blocks(after, self.tokens))
            if low >= high:
                continue
            first = self.shape.groups.index(group)
            regions = range(first, first + self.shape.groups.count(group))
            taken = [range(at, at + 1) for at in regions] if apart else [regions]
            found += [Part(some, low, high - low) for some in taken]
        return found

    def wanted(self, have: int) -> list[range]:
        """By group: the blocks that decode lacks, if it has the KV of so many tokens."""
        return [reach.wanted_blocks(self.tokens, have) for reach in self.shape.reaches]

    @property
    def request(self) -> str:
        return f"r{self.letter}"

    @property
    def identity(self) -> bytes:
        return self.letter.encode() * 32

    @property
    def finished(self) -> bool:
        """Whether all ranks have reported its load."""
        return len(self.ended) == self.shape.tensors[1]

    @property
    def half(self) -> bool:
        """Whether one rank has reported its load and another one has not: a newer try is then for that one alone."""
        return bool(self.ended) and not self.finished

    @property
    def waits(self) -> bool:
        """Whether it has no blocks yet."""
        return self.have < 0 and not self.dropped

    @property
    def loading(self) -> bool:
        """Whether newer tries would be ordered."""
        return self.have >= 0 and not self.finished and "abandoned" not in self.excuses

    @property
    def whole(self) -> Key | None:
        """The try that all ranks have loaded, and confirmed."""
        keys = {key for key, _ in self.ended.values()}
        well = all(outcome is Outcome.OK for _, outcome in self.ended.values())
        return keys.pop() if self.finished and well and len(keys) == 1 else None
