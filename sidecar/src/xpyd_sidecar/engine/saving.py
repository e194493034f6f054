"""Prefill's half beside a worker: final blocks are copied out of the cache and handed to the sender.

    push ─▶ waits ─▶ part: has room in the store ─▶ copied out ─▶ sender
              │                                        └─▶ ``copied``: its blocks are not needed any more
              └─ no room: its blocks stay in the cache, and later steps try again

Nothing waits here, and nothing is lost for lack of room while its blocks can stay: the scheduler keeps them until they are
copied, and begins no more prompts for a decode instance of which too many wait (``kv.offers``). So a prefill whose copies
leave slowly computes more slowly. Blocks of an instance for which no room has come in ``wait_s`` are given up.

All methods but ``_copied`` are called by the engine's own thread, in the order of a step: ``begin``, ``layer``, ``finish``.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xpyd_sidecar.engine.kv_cache import KvCache, Move
from xpyd_sidecar.engine.memory_sizes import ROUNDS
from xpyd_sidecar.engine.put_mode import PutMode
from xpyd_sidecar.kv.copies import Copy
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.offers import Push
from xpyd_sidecar.memory.completions import Completions
from xpyd_sidecar.memory.store import CopyStore, StoreLease, offsets
from xpyd_sidecar.session.sender import Kept, Sender

RUNS: Final = 2
"""Pieces of the store that a step's copies may lie in. Each may be in two rounds, which have two launches more: so a step
has eight at most, if all arrays have one shape.
"""


@dataclass
class WaitingBlocks:
    """Blocks of a push that are in the cache alone."""

    key: Key
    group: int
    first: int
    ids: NDArray[np.int64]
    holder: str
    since: float


class SavedPart(NamedTuple):
    """Blocks of one push that have room: those of its group's r-th array begin at ``starts[r]`` of the lease."""

    key: Key
    arrays: range
    first: int
    ids: NDArray[np.int64]
    lease: StoreLease
    starts: Sequence[int]
    gone: Callable[[], None] | None


class LeasedRuns:
    """Runs among the leases of a step, each of which begins where another ends; a device copies each by itself."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._ends: set[int] = set()
        """One for each run."""

    def take(self, lease: StoreLease, size: int) -> bool:
        """Whether one more lease, rounded up to ``size`` bytes, makes no more runs than may be."""
        if lease.offset not in self._ends and len(self._ends) >= self._most:
            return False
        self._ends.discard(lease.offset)
        self._ends.add(lease.offset + size)
        return True


class Saving:
    """Of one rank."""

    def __init__(self, memory: KvCache, store: CopyStore, sender: Sender, completions: Completions, *, wait_s: float,
                 put: PutMode | None) -> None:
        self.copied: deque[tuple[Key, int]] = deque()
        """Transfers, and how many blocks of them are copied out; for the engine's thread to take."""
        self._memory = memory
        self._store = store
        self._sender = sender
        self._completions = completions
        self._put = put
        self._wait_s = wait_s
        self._each = {group: sum(store.rounded(memory.block_bytes[one]) for one in memory.of_group(group))
                      for group in set(memory.groups)}
        """Of the store, that one block over all arrays of a group takes at most, by group."""
        self._waiting: list[WaitingBlocks] = []
        self._found: dict[str, float] = {}
        """By holder of what waits: when room was found last."""
        self._parts: list[SavedPart] = []
        self._pushed: set[Key] = set()
        """In this step."""
        self._hold = 0
        """As ``Orders.hold``."""
        self._saved: set[int] = set()

    @property
    def waiting(self) -> int:
        """Blocks that wait for room."""
        return sum(len(one.ids) for one in self._waiting)

    def begin(self, pushes: Sequence[Push], hold: int = 0) -> None:
        """A step begins, which computes these blocks; those that have waited since earlier ones go first.

        ``hold``: as in ``Orders``.
        """
        now = time.monotonic()
        self._hold = hold
        self._saved.clear()
        self._pushed = {push.key for push in pushes}
        for push in pushes:
            if push.group in self._each:
                ids = np.array(push.ids, np.int64)
                self._waiting.append(WaitingBlocks(push.key, push.group, push.first, ids, push.holder, now))
            else:  # this pipeline stage has no layer of the group
                self.copied.append((push.key, len(push.ids)))
        self._parts = self._with_room(now)
        for one in self._waiting:
            if now - max(one.since, self._found.get(one.holder, 0.0)) >= self._wait_s:
                self._give_up(one.key, f"no room was found for {len(one.ids)} blocks in {self._wait_s:.0f} s")
        self._found = {holder: self._found[holder] for holder in {one.holder for one in self._waiting} & self._found.keys()}

    def layer(self, regions: Sequence[int]) -> None:
        """A layer of this step is computed: on a host its arrays are copied out now, on a device with all others."""
        if self._memory.at_once:
            for region in regions:
                self._copy_array(region)

    def finish(self) -> None:
        """All layers are enqueued: copy out what has not been."""
        if not self._parts:
            return
        if self._memory.at_once:
            for region in range(len(self._memory.regions)):
                self._copy_array(region)
            self.copied += [(part.key, len(part.ids)) for part in self._parts]
        else:
            mark = self._memory.gather([Move(part.arrays.start, part.ids, part.lease.chunk.tensor, part.starts)
                                        for part in self._parts])
            if self._put is not None:
                self._put.enqueued(mark)
            self._completions.add(mark, partial(self._copied, self._parts, self._hold))
        self._parts = []

    def forget(self, key: Key) -> None:
        """A transfer is over: what waits of it need not be copied."""
        self._waiting = [one for one in self._waiting if one.key != key]

    def reclaim(self, key: Key) -> None:
        """Blocks of a transfer go back before this step's forward, since its request was preempted."""
        self._memory.fence()
        if any(one.key == key for one in self._waiting):
            self._give_up(key, "its request was preempted while its blocks waited to be copied out")

    def _copied(self, parts: Sequence[SavedPart], hold: int) -> None:
        """Copies of a device are complete; on the thread that waits for them."""
        for part in parts:
            self._sender.push(part.key, self._copies(part), hold)
            self.copied.append((part.key, len(part.ids)))

    def _copy_array(self, region: int) -> None:
        if region in self._saved:
            return
        self._saved.add(region)
        for part in self._parts:
            if region in part.arrays:
                start = part.starts[region - part.arrays.start]
                self._memory.gather([Move(region, part.ids, part.lease.chunk.tensor, (start,))])
                self._sender.push(part.key, iter([self._copy(part, region)]), self._hold)

    def _copies(self, part: SavedPart) -> Iterator[Copy[Kept]]:
        return (self._copy(part, region) for region in part.arrays)

    def _copy(self, part: SavedPart, region: int) -> Copy[Kept]:
        size = len(part.ids) * self._memory.block_bytes[region]
        at = region - part.arrays.start
        start, end = part.starts[at], part.starts[at + 1] if at + 1 < len(part.starts) else None
        lease = part.lease.part(start, (end if end is not None else len(part.lease.chunk.view)) - start)
        return Copy(region, part.first, len(part.ids), Kept(lease.chunk.view[:size], lease, part.gone))

    # --- room ---

    def _with_room(self, now: float) -> list[SavedPart]:
        """Take what has room out of what waits, in order; a holder that has no more room holds up nobody else."""
        parts: list[SavedPart] = []
        full: set[str] = set()
        runs = LeasedRuns(RUNS if self._memory.most_bytes is not None else math.inf)
        most, rounds = self._memory.most_bytes, ROUNDS
        left = most
        """Of this round; it begins where the one before is full, as in ``memory.device.rounds``."""
        for one in self._waiting:
            each = self._each[one.group]
            while len(one.ids) and one.holder not in full:
                count = min(len(one.ids), self._store.most_units(each, one.holder))
                if most is not None and left is not None:
                    if left < each and rounds > 1:
                        left, rounds = most, rounds - 1
                    count = min(count, left // each)
                part = self._part(one, count, runs) if count else None
                if part is None:
                    full.add(one.holder)
                    break
                parts.append(part)
                self._found[one.holder] = now
                if left is not None:
                    left -= count * each
        self._waiting = [one for one in self._waiting if len(one.ids)]
        return parts

    def _part(self, one: WaitingBlocks, count: int, runs: LeasedRuns) -> SavedPart | None:
        """So many blocks of it, from its first on, if they find room."""
        arrays = self._memory.of_group(one.group)
        *starts, size = offsets(self._store, [count * self._memory.block_bytes[region] for region in arrays])
        lease = self._store.lease(size, one.holder)
        if lease is None:
            return None
        if not runs.take(lease, self._store.rounded(size)):
            self._store.give(lease)
            return None
        gone = self._put.tally(one.key, len(starts)) if self._put is not None and one.key in self._pushed else None
        part = SavedPart(one.key, arrays, one.first, one.ids[:count], lease, starts, gone)
        one.first, one.ids = one.first + count, one.ids[count:]
        return part

    def _give_up(self, key: Key, reason: str) -> None:
        self.forget(key)
        self._sender.release(key, Outcome.OVERFLOW, reason)

