"""Decode's lookup buffer: KV that came before its request has blocks, and the places it lies in.

The verbs are those of vLLM's KV lookup buffers: ``insert``, and ``drop_select`` of a try, by content, or of any entry;
the region of interest is the blocks that decode lacks. Places are taken from the buffer and, where that is full, from the
host pool; where both are full there is no room: what prefill presses for is answered BUSY, and it presses again.

Laws
1. A place is handed out once and taken back once; places in use never overlap, and lie in the tier that they name.
2. Nothing is inserted that was not offered and granted, nor after its entry has left.
3. An entry leaves once: selected by a load, forgotten, evicted, or after ``ttl_s`` because no request claims it.
4. By content only whole entries of other tries of the same transfer are selected: what another try left unfinished stands
   for nothing, and what came for another request is that request's, whose prefill has nothing of it any more.
5. There are never more than ``most`` entries; the oldest gives way.

    expect ──▶ entry ── offer ──▶ reserved ── fetch begins ──▶ taken ── insert ──▶ item ── drop_select ──▶ the caller's
                          └ no room: BUSY       (a place leaves its entry with the fetch, and comes back with insert)

A try has an entry for each of its sources.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

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


W = TypeVar("W")
TryId = tuple[Key, int]
"""A try, and the place of a source among those of its load."""


class BufferedCut(NamedTuple):
    """One fetch's worth of blocks of an array of the source."""

    region: int
    first: int
    blocks: int
    size: int


class Item(NamedTuple, Generic[W]):
    """Blocks that lie in a place, and what was said of them when they were inserted."""

    cut: BufferedCut
    place: BufferPlace
    what: W


@dataclass
class BufferEntry(Generic[W]):
    """Blocks of one try from one source: what was granted, and what lies in a place."""

    identity: bytes
    slots: int
    """Blocks of all arrays: what a whole entry has."""
    lease: Lease
    reserved: dict[BufferedCut, BufferPlace] = field(default_factory=dict)
    items: dict[BufferedCut, Item[W]] = field(default_factory=dict)
    filled: int = 0
    seen: set[tuple[int, int]] = field(default_factory=set)
    """(region, block) that were granted."""


class Buffer(Generic[W]):
    """The buffer. Not safe across threads."""

    def __init__(self, buffer: Buddy, pool: Buddy, *, ttl_s: float, most: int = ENTRIES_MAX,
                 usable: Callable[[int], bool] = lambda _: True) -> None:
        """``usable``: whether there is memory under a tier, asked before a place of it is promised."""
        self._usable = usable
        self.closed = False
        """Nothing more is to be expected: nobody has a use for it."""
        self._tiers = (buffer, pool)
        self._ttl_s = ttl_s
        self._most = most
        self._entries: OrderedDict[TryId, BufferEntry[W]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def has_some(self, key: TryId) -> bool:
        """Whether anything of a try is in a place."""
        entry = self._entries.get(key)
        return entry is not None and bool(entry.items)

    @property
    def bytes_in_use(self) -> tuple[int, int]:
        """Bytes in use: (of the buffer, of the host pool)."""
        return self._tiers[0].usage.used, self._tiers[1].usage.used

    def expect(self, key: TryId, identity: bytes, slots: int, now: float) -> list[TryId]:
        """Make an entry for a try that may be fetched ahead of its request. Returns the entries that had to give way."""
        if self.closed or key in self._entries:
            return []
        self._entries[key] = BufferEntry(identity, slots, Lease.start(now, self._ttl_s))
        return [self.drop_any() for _ in range(len(self._entries) - self._most)]

    def offer(self, key: TryId, cuts: Iterable[BufferedCut]) -> bool:
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

    def withdraw(self, key: TryId, cut: BufferedCut) -> None:
        """Give the place of a granted fetch back: it will not come this time, and may be offered again."""
        entry = self._entries.get(key)
        if entry is None or cut in entry.items:
            return
        entry.seen -= {(cut.region, block) for block in range(cut.first, cut.first + cut.blocks)}
        if (place := entry.reserved.pop(cut, None)) is not None:
            self.free(place)

    def has(self, key: TryId, cut: BufferedCut) -> bool:
        """Whether this cut of a try has been inserted."""
        entry = self._entries.get(key)
        return entry is not None and cut in entry.items

    def take(self, key: TryId, cut: BufferedCut) -> BufferPlace | None:
        """Take the place of a fetch that begins, until ``insert`` or ``free``. None: nothing was granted for it."""
        entry = self._entries.get(key)
        return entry.reserved.pop(cut, None) if entry else None

    def insert(self, key: TryId, cut: BufferedCut, place: BufferPlace, what: W) -> bool:
        """Store a complete fetch in the place that ``take`` gave. False: its entry has left; the place is free again."""
        entry = self._entries.get(key)
        if entry is None:
            self.free(place)
            return False
        entry.items[cut] = Item(cut, place, what)
        entry.filled += cut.blocks
        return True

    def drop_select(self, key: TryId, first: int, count: int, spans: Sequence[ArraySpan] = ()) -> list[Item[W]]:
        """Take a try's entry out: what has blocks inside the region of interest. These places are the caller's to free.

        ``spans``: arrays of which other blocks are of interest.
        """
        entry = self._entries.pop(key, None)
        return list(self._leave(entry, (first, count), spans)) if entry else []

    def find_content(self, key: TryId, identity: bytes) -> TryId | None:
        """A whole entry of another try of the same transfer, of the same source, with this prompt; for ``drop_select``."""
        (transfer, _, _), source = key
        return next((other for other, one in self._entries.items()
                     if (other[0].transfer, other[1], one.identity) == (transfer, source, identity)
                     and one.filled == one.slots), None)

    def drop_any(self) -> TryId:
        """Take the oldest entry out, and everything in it.

        Raises:
            KeyError: there is none.
        """
        key, entry = self._entries.popitem(last=False)
        self._leave_all(entry)
        return key

    def forget(self, key: TryId) -> bool:
        """Drop the entry of a try that will not be loaded. Returns whether there was one."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._leave_all(entry)
        return entry is not None

    def entries(self, key: Key) -> list[TryId]:
        """Entries of a try, one for each source."""
        return [one for one in self._entries if one[0] == key]

    def clear(self) -> list[TryId]:
        """Drop all entries. Returns those that were there."""
        gone = list(self._entries)
        for key in gone:
            self.forget(key)
        return gone

    def drop_unfinished(self, key: TryId) -> bool:
        """Drop the entry of a try whose source is lost, if it is not whole. Returns whether it was dropped."""
        entry = self._entries.get(key)
        return entry is not None and entry.filled < entry.slots and self.forget(key)

    def tick(self, now: float) -> list[TryId]:
        """Drop the entries whose lease is over, since no request has claimed them. Returns them."""
        over = [key for key, entry in self._entries.items() if entry.lease.is_over(now)]
        for key in over:
            self.forget(key)
        return over

    def free(self, place: BufferPlace) -> None:
        """Give a place back to its tier."""
        self._tiers[place.tier].free(place.offset)

    def _allocate(self, size: int) -> BufferPlace | None:
        for tier, buddy in enumerate(self._tiers):
            offset = buddy.allocate(size)
            if offset is None:
                continue
            if self._usable(tier):
                return BufferPlace(tier, offset, size)
            buddy.free(offset)
            return None  # its memory is being made; the next tier's is for what has no room in this one
        return None

    def _leave(self, entry: BufferEntry[W], others: tuple[int, int], spans: Sequence[ArraySpan]) -> Iterator[Item[W]]:
        for place in entry.reserved.values():
            self.free(place)
        for item in entry.items.values():
            cut = item.cut
            if overlap(cut.first, cut.blocks, *span_of(spans, cut.region, others))[1]:
                yield item
            else:
                self.free(item.place)

    def _leave_all(self, entry: BufferEntry[W]) -> None:
        for place in (*entry.reserved.values(), *(item.place for item in entry.items.values())):
            self.free(place)
