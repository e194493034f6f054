"""Prefill's half beside a worker: final blocks are copied out of the cache and handed to the thread that tells of them.

    push ─▶ waits ─▶ part: has room in the store ─▶ copied out, some layers at a time ─▶ publisher
              │                                        └─▶ ``copied``: its blocks are free to go
              └─ no room: its blocks stay in the cache, and later steps try again

Where a layer's hook says that it is computed, a group of layers leaves as soon as it has (``layer_groups``), while the
others are computed; what is left leaves when all are enqueued.

Nothing waits here, and nothing is lost for lack of room while its blocks can stay: the scheduler keeps them until they are
copied, and begins no more prompts for a decode instance of which too many wait (``kv.offers``). So a prefill whose copies
leave slowly computes more slowly. Blocks of an instance for which no room has come in ``wait_s`` are given up.

All methods but ``_complete`` are called by the engine's own thread: in each step ``begin``, ``layer``, ``finish``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xpyd_sidecar.engine.worker.kv_cache import CacheRows, KvCache
from xpyd_sidecar.engine.worker.layer_groups import last_layers
from xpyd_sidecar.engine.worker.put_mode import PutMode
from xpyd_sidecar.kv.array_layout import ArrayLayout
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.manifests import most_blocks
from xpyd_sidecar.kv.offers import Push
from xpyd_sidecar.kv.packing import PackedArray
from xpyd_sidecar.memory.completions import Completions
from xpyd_sidecar.memory.device import PackedRows
from xpyd_sidecar.memory.launch_memory import MadeSums
from xpyd_sidecar.memory.store import CopyStore, StoreLease, offsets
from xpyd_sidecar.session.publisher import Publisher
from xpyd_sidecar.session.stored_copy import StoredCopy

GROUP_BYTES = 64 << 20
"""Of a group of layers on a device, at least: less is not worth its launches."""
HOST_GROUP_BYTES = 1 << 20
"""The same on a host, where a copy costs no launch."""
SPANS_MOST = 48
"""Copies of a device to the host, beyond which a step has one group: each part has one in each group."""


@dataclass
class WaitingBlocks:
    """Blocks of a push that are in the cache alone."""

    key: Key
    group: int
    first: int
    ids: NDArray[np.int64]
    holder: str
    since: float


@dataclass
class SavedPart:
    """Blocks of one push that have room: those of its group's r-th array begin at ``starts[r]`` of the lease."""

    key: Key
    arrays: range
    first: int
    ids: NDArray[np.int64]
    lease: StoreLease
    starts: Sequence[int]
    """The last one is where the lease ends."""
    ready: bool
    """They were computed in earlier steps."""
    left: int
    """Of its arrays, that have not been copied out."""


class Leaving(NamedTuple):
    """Some arrays of a part, which are copied out together."""

    part: SavedPart
    regions: range
    ends: bool
    """No array of the part is left."""
    gone: Callable[[], None] | None
    """To be called when that copy is freed."""

    @property
    def begin(self) -> int:
        """Where the first of them begins in the lease."""
        return self.part.starts[self.regions.start - self.part.arrays.start]

    @property
    def size(self) -> int:
        """Bytes of the lease that they have."""
        return self.part.starts[self.regions.stop - self.part.arrays.start] - self.begin


class BlockSaver:
    """Copies final KV blocks of one rank out of the cache, and hands them to the publisher."""

    def __init__(self, memory: KvCache, layouts: Sequence[ArrayLayout], store: CopyStore, publisher: Publisher, *,
                 completions: Completions, wait_s: float, put: PutMode | None, layers: Mapping[str, Sequence[int]]) -> None:
        """``layouts``: how the arrays are packed; ``layers``: the arrays of each layer whose hook is called, in order."""
        self.copied: deque[tuple[Key, int]] = deque()
        """Transfers, and how many blocks of them are copied out; for the engine's thread to take."""
        self._memory = memory
        self._layouts = tuple(layouts)
        self._store = store
        self._publisher = publisher
        self._completions = completions
        self._put = put
        self._wait_s = wait_s
        self._layers = [tuple(regions) for regions in layers.values()]
        self._nth = {name: at for at, name in enumerate(layers)}
        self._least = HOST_GROUP_BYTES if memory.at_once else GROUP_BYTES
        self._each = {group: sum(store.round_up(memory.block_bytes[one]) for one in memory.of_group(group))
                      for group in set(memory.groups)}
        """Of the store, that one block over all arrays of a group takes at most, by group."""
        self._most = {group: self._most_blocks(group) for group in self._each}
        """Blocks of a part, by group: one array of them passes through the device's memory for copies at once, and the sums
        of all arrays go into one frame.
        """
        self._waiting: list[WaitingBlocks] = []
        self._found: dict[str, float] = {}
        """By holder of what waits: when room was found last."""
        self._parts: list[SavedPart] = []
        self._pushed: set[Key] = set()
        """In this step."""
        self._began = 0.0
        """When this step did."""
        self._hold = 0
        """As ``Orders.hold``."""
        self._left: set[int] = set()
        """Arrays of this step that have left."""
        self._ends: set[int] = set()
        """Layers with which a group of this step ends."""
        self._computed: list[int] = []
        """Arrays of layers that are computed and have not left."""

    def _most_blocks(self, group: int) -> int:
        arrays = self._memory.of_group(group)
        summed = most_blocks([self._layouts[one] for one in arrays])
        most = self._memory.most_bytes
        if most is None:
            return summed
        return min(summed, most // max(self._store.round_up(self._memory.block_bytes[one]) for one in arrays))

    @property
    def waiting(self) -> int:
        """Blocks that wait for room."""
        return sum(len(one.ids) for one in self._waiting)

    def begin(self, pushes: Sequence[Push], hold: int = 0) -> None:
        """A step begins, which computes these blocks; those that have waited since earlier ones go first.

        ``hold``: as in ``Orders``.
        """
        now = self._began = time.monotonic()
        self._hold = hold
        self._left.clear()
        self._computed.clear()
        self._pushed = {push.key for push in pushes}
        for push in pushes:
            if push.group in self._each:
                ids = np.array(push.ids, np.int64)
                self._waiting.append(WaitingBlocks(push.key, push.group, push.first, ids, push.holder, now))
            else:  # this pipeline stage has no layer of the group
                self.copied.append((push.key, len(push.ids)))
        parts = self._with_room(now)
        self._leave([one for one in parts if one.ready], range(len(self._memory.regions)))
        self._parts = [one for one in parts if not one.ready]
        self._ends.clear()
        if self._parts and self._layers:
            self._ends.update(last_layers([self._bytes_of(one) for one in self._layers], self._least,
                                          SPANS_MOST // len(self._parts)))
        for one in self._waiting:
            if now - max(one.since, self._found.get(one.holder, 0.0)) >= self._wait_s:
                self._give_up(one.key, f"no room was found for {len(one.ids)} blocks in {self._wait_s:.0f} s")
        self._found = {holder: self._found[holder] for holder in {one.holder for one in self._waiting} & self._found.keys()}

    def _bytes_of(self, regions: Sequence[int]) -> int:
        return sum(len(part.ids) * self._memory.block_bytes[region] for part in self._parts for region in regions
                   if region in part.arrays)

    def layer(self, name: str) -> None:
        """A layer of this step is computed, or enqueued: with the last one of a group the group leaves."""
        nth = self._nth.get(name)
        if nth is None or not self._parts:
            return
        self._computed += [region for region in self._layers[nth] if region not in self._left]
        if nth in self._ends and not self._memory.capturing:
            self._left.update(self._computed)
            self._leave(self._parts, self._computed)
            self._computed = []

    def finish(self) -> None:
        """All layers are enqueued: copy out what has not been."""
        self._leave(self._parts, [region for region in range(len(self._memory.regions)) if region not in self._left])
        self._parts = []

    def forget(self, key: Key) -> None:
        """A transfer is over: what waits of it need not be copied."""
        self._waiting = [one for one in self._waiting if one.key != key]

    def reclaim(self, key: Key) -> None:
        """Blocks of a transfer go back before this step's forward, since its request was preempted."""
        self._memory.fence()
        if any(one.key == key for one in self._waiting):
            self._give_up(key, "its request was preempted while its blocks waited to be copied out")

    # --- copies ---

    def _leave(self, parts: Sequence[SavedPart], regions: Sequence[int]) -> None:
        """Copy these arrays of parts out."""
        leaving = []
        for part in parts:
            for some in self._passing(part, regions):
                part.left -= len(some)
                leaving.append(Leaving(part, some, not part.left, self._tally(part.key)))
        if self._memory.at_once:
            for one in leaving:
                part = one.part
                starts = part.starts[one.regions.start - part.arrays.start:one.regions.stop - part.arrays.start]
                self._memory.copy_out(one.regions, part.ids, part.lease.chunk.tensor, starts)
                self._hand_over(one, b"", self._hold)
        else:
            for rest in self._rounds(leaving):
                self._gather(rest)

    def _passing(self, part: SavedPart, regions: Sequence[int]) -> Iterator[range]:
        """Those of its arrays, in runs that pass through the device's memory for copies at once."""
        most = self._memory.most_bytes
        for some in neighbours(regions, part.arrays):
            begin = some.start
            for region in some:
                start = part.starts[begin - part.arrays.start]
                if most is not None and part.starts[region + 1 - part.arrays.start] - start > most:
                    yield range(begin, region)
                    begin = region
            yield range(begin, some.stop)

    def _hand_over(self, one: Leaving, sums: bytes, hold: int) -> None:
        """A copy is complete."""
        part = one.part
        copy = StoredCopy(part.lease.part(one.begin, one.size), self._layouts, one.regions, (part.first, len(part.ids)),
                          sums=sums, gone=one.gone)
        self._publisher.push(part.key, [copy], hold)
        if one.ends:
            self.copied.append((part.key, len(part.ids)))

    def _tally(self, key: Key) -> Callable[[], None] | None:
        """One copy more that the end of the step waits for, in mode put; before anybody can have taken it."""
        return self._put.tally(key) if self._put is not None and key in self._pushed else None

    def _rounds(self, leaving: Sequence[Leaving]) -> Iterator[list[Leaving]]:
        """As many as the device's memory for copies holds."""
        most = self._memory.most_bytes
        assert most is not None
        some: list[Leaving] = []
        size = 0
        for one in leaving:
            if some and size + one.size > most:
                yield some
                some, size = [], 0
            some.append(one)
            size += one.size
        if some:
            yield some

    def _gather(self, leaving: Sequence[Leaving]) -> None:
        """Have a device copy out what leaves, and hand it over when that is complete."""
        assert self._memory.copies is not None
        at, arrays, spans, parts = 0, [], [], []
        for one in leaving:
            packed = self._packed(one, at)
            arrays += packed
            parts.append(CacheRows([*one.regions], packed, one.part.ids))
            spans.append((one.part.lease.chunk.tensor[one.begin:one.begin + one.size], at))
            at += one.size
        mark, sums = self._memory.copies.gather(PackedRows(self._memory.rows(parts), arrays, at), spans)
        if self._put is not None:
            self._put.on_copies_enqueued(mark)
        self._completions.add(mark, partial(self._complete, leaving, sums, self._hold))

    def _complete(self, leaving: Sequence[Leaving], sums: MadeSums, hold: int) -> None:
        """Copies of a device are complete; on the thread that waits for them."""
        every, at = sums.read(), 0
        for one in leaving:
            count = sum(packed.sums for packed, _ in self._packed(one, 0))
            self._hand_over(one, every[at:at + count].tobytes(), hold)
            at += count

    def _packed(self, one: Leaving, at: int) -> list[tuple[PackedArray, int]]:
        """How its arrays are packed, from ``at`` on."""
        part = one.part
        return [(PackedArray(part.first, len(part.ids), *self._layouts[region]),
                 at + part.starts[region - part.arrays.start] - one.begin) for region in one.regions]

    # --- room ---

    def _with_room(self, now: float) -> list[SavedPart]:
        """Take what has room out of what waits, in order; a holder that has no more room holds up nobody else."""
        parts: list[SavedPart] = []
        full: set[str] = set()
        for one in self._waiting:
            each, most = self._each[one.group], self._most[one.group]
            while len(one.ids) and one.holder not in full:
                count = min(len(one.ids), self._store.most_units(each, one.holder), most)
                part = self._part(one, count) if count else None
                if part is None:
                    full.add(one.holder)
                    break
                parts.append(part)
                self._found[one.holder] = now
        self._waiting = [one for one in self._waiting if len(one.ids)]
        return parts

    def _part(self, one: WaitingBlocks, count: int) -> SavedPart | None:
        """So many blocks of it, from its first on, if they find room."""
        arrays = self._memory.of_group(one.group)
        starts = offsets(self._store, [count * self._memory.block_bytes[region] for region in arrays])
        lease = self._store.lease(starts[-1], one.holder)
        if lease is None:
            return None
        part = SavedPart(one.key, arrays, one.first, one.ids[:count], lease, starts, one.since < self._began, len(arrays))
        one.first, one.ids = one.first + count, one.ids[count:]
        return part

    def _give_up(self, key: Key, reason: str) -> None:
        self.forget(key)
        self._publisher.release(key, Outcome.OVERFLOW, reason)


def neighbours(regions: Sequence[int], arrays: range) -> Iterator[range]:
    """Cut those ``regions`` that are among ``arrays`` into runs of consecutive numbers."""
    start = end = -1
    for region in sorted({one for one in regions if one in arrays}):
        if region != end:
            if end > start:
                yield range(start, end)
            start = region
        end = region + 1
    if end > start:
        yield range(start, end)
