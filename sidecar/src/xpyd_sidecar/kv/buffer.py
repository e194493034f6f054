"""Decode's lookup buffer: KV that came before its request has blocks, and the places it lies in.

The verbs are those of vLLM's KV lookup buffers: ``insert``, and ``drop_select`` of a try, by content, or of any entry;
the region of interest is the blocks that decode lacks. Places are taken from the buffer and, where that is full, from the
host pool; where both are full the offer is refused (BUSY), and prefill offers again.

Laws
1. A place is handed out once and taken back once; places in use never overlap, and lie in the tier that they name.
2. Nothing is inserted that was not offered and granted, nor after its entry has left.
3. An entry leaves once: selected by a load, forgotten, evicted, or after ``ttl_s`` because no request claims it.
4. By content only whole entries of other tries of the same transfer are selected: what another try left unfinished stands
   for nothing, and what came for another request is that request's, whose prefill has nothing of it any more.
5. There are never more than ``most`` entries; the oldest gives way.

    expect ──▶ entry ── offer ──▶ reserved ── frame begins ──▶ taken ── insert ──▶ item ── drop_select ──▶ the caller's
                          └ no room: BUSY       (a place leaves its entry with the frame, and comes back with insert)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from xpyd_sidecar.contract.ids import TransferId
from xpyd_sidecar.kv.blocks import overlap
from xpyd_sidecar.kv.buddy import Buddy
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.leases import Lease
from xpyd_sidecar.kv.reach import ArraySpan, span_of

ENTRIES_MAX: Final = 4096


class BufferPlace(NamedTuple):
    """``size`` bytes at ``offset`` of a tier: 0 is the buffer, 1 the host pool."""

    tier: int
    offset: int
    size: int


class BufferedCut(NamedTuple):
    """One frame's worth of blocks of a region."""

    region: int
    first: int
    blocks: int
    size: int


class Item(NamedTuple):
    """Blocks that lie in a place; ``skip`` bytes before them there are not wanted."""

    region: int
    first: int
    blocks: int
    place: BufferPlace
    skip: int
    size: int


@dataclass
class BufferEntry:
    """What is there of one try."""

    identity: bytes
    slots: int
    """Blocks of all arrays: what a whole entry has."""
    lease: Lease
    reserved: dict[BufferedCut, BufferPlace] = field(default_factory=dict)
    items: dict[BufferedCut, BufferPlace] = field(default_factory=dict)
    filled: int = 0
    seen: set[tuple[int, int]] = field(default_factory=set)
    """(region, block) that were granted."""


class Buffer:
    """The buffer. Not safe across threads."""

    def __init__(self, buffer: Buddy, pool: Buddy, *, ttl_s: float, most: int = ENTRIES_MAX,
                 usable: Callable[[int], bool] = lambda _: True) -> None:
        """``usable``: whether there is memory under a tier, asked before a place of it is promised."""
        self._usable = usable
        self._tiers = (buffer, pool)
        self._ttl_s = ttl_s
        self._most = most
        self._entries: OrderedDict[Key, BufferEntry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    @property
    def used(self) -> tuple[int, int]:
        """Bytes in use, of the buffer and of the pool."""
        return self._tiers[0].usage.used, self._tiers[1].usage.used

    def expect(self, key: Key, identity: bytes, slots: int, now: float) -> list[Key]:
        """A transfer may be pushed ahead. Entries that had to give way."""
        if key in self._entries:
            return []
        self._entries[key] = BufferEntry(identity, slots, Lease.of(now, self._ttl_s))
        return [self.drop_any() for _ in range(len(self._entries) - self._most)]

    def offer(self, key: Key, cuts: Iterable[BufferedCut]) -> bool:
        """Reserve places for all of ``cuts``, or for none; False means busy, or no such entry.

        Raises:
            ValueError: blocks that were granted before, or more of them than the prompt has.
        """
        entry = self._entries.get(key)
        if entry is None:
            return False
        wanted: list[BufferedCut] = []
        slots: set[tuple[int, int]] = set()
        for cut in cuts:  # a peer says how many: no more of them is looked at than the prompt can have
            wanted.append(cut)
            slots.update((cut.region, block) for block in range(cut.first, cut.first + cut.blocks))
            if slots & entry.seen or len(slots) + len(entry.seen) > entry.slots:
                raise ValueError("blocks were offered twice, or more than the prompt has")
        places: list[BufferPlace] = []
        for cut in wanted:
            place = self._allocate(cut.size)
            if place is None:
                for one in places:
                    self.free(one)
                return False
            places.append(place)
        entry.seen |= slots
        entry.reserved.update(zip(wanted, places, strict=True))
        return True

    def take(self, key: Key, cut: BufferedCut) -> BufferPlace | None:
        """A frame begins: its place, the caller's until ``insert`` or ``free``. None: nothing was granted for it."""
        entry = self._entries.get(key)
        return entry.reserved.pop(cut, None) if entry else None

    def insert(self, key: Key, cut: BufferedCut, place: BufferPlace) -> bool:
        """A frame that ``take`` gave a place is complete. False: its entry has left, and so has the place."""
        entry = self._entries.get(key)
        if entry is None:
            self.free(place)
            return False
        entry.items[cut] = place
        entry.filled += cut.blocks
        return True

    def drop_select(self, key: Key, first: int, count: int, spans: Sequence[ArraySpan] = ()) -> list[Item]:
        """Take a try's entry out: its blocks inside the region of interest. Their places are the caller's to free.

        ``spans``: arrays of which other blocks are of interest.
        """
        entry = self._entries.pop(key, None)
        return list(self._leave(entry, (first, count), spans)) if entry else []

    def drop_select_content(self, transfer: TransferId, identity: bytes, first: int, count: int,
                            spans: Sequence[ArraySpan] = ()) -> list[Item]:
        """The same for any whole entry of a transfer with this prompt, whichever try has brought it."""
        whole = (key for key, one in self._entries.items()
                 if (key.transfer, one.identity) == (transfer, identity) and one.filled == one.slots)
        found = next(whole, None)
        return self.drop_select(found, first, count, spans) if found else []

    def drop_any(self) -> Key:
        """Take the oldest entry out, and everything in it.

        Raises:
            KeyError: there is none.
        """
        key, entry = self._entries.popitem(last=False)
        self._leave_all(entry)
        return key

    def forget(self, key: Key) -> bool:
        """A try will not be loaded. Whether there was an entry."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._leave_all(entry)
        return entry is not None

    def clear(self) -> None:
        """No try of these will be loaded."""
        for key in list(self._entries):
            self.forget(key)

    def broken(self, key: Key) -> bool:
        """Nothing more of a try will come: what is whole stays. Whether there was an entry that has left."""
        entry = self._entries.get(key)
        return entry is not None and entry.filled < entry.slots and self.forget(key)

    def tick(self, now: float) -> list[Key]:
        """Time passes: entries that no request has claimed leave."""
        over = [key for key, entry in self._entries.items() if entry.lease.over(now)]
        for key in over:
            self.forget(key)
        return over

    def free(self, place: BufferPlace) -> None:
        """A place is no longer in use."""
        self._tiers[place.tier].free(place.offset)

    def _allocate(self, size: int) -> BufferPlace | None:
        for tier, buddy in enumerate(self._tiers):
            offset = buddy.allocate(size)
            if offset is None:
                continue
            if self._usable(tier):
                return BufferPlace(tier, offset, size)
            buddy.free(offset)
        return None

    def _leave(self, entry: BufferEntry, others: tuple[int, int], spans: Sequence[ArraySpan]) -> Iterator[Item]:
        for place in entry.reserved.values():
            self.free(place)
        for cut, place in entry.items.items():
            begin, blocks = overlap(cut.first, cut.blocks, *span_of(spans, cut.region, others))
            if not blocks:
                self.free(place)
                continue
            each = cut.size // cut.blocks
            yield Item(cut.region, begin, blocks, place, (begin - cut.first) * each, blocks * each)

    def _leave_all(self, entry: BufferEntry) -> None:
        for place in (*entry.reserved.values(), *entry.items.values()):
            self.free(place)
