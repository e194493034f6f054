"""Decode's worker side: loads in progress, which bytes may be placed, and when a load is committed or has failed.

The machine belongs to the engine's own thread: it alone decides that bytes are placed, and the same thread places them
before it reports a load as finished. So nothing is written into a block after its load was reported (docs/decisions/0005).

Laws
1. Bytes are placed only for the current try of an open load, inside the blocks that it asked for.
2. A load is committed when every (source, array, block) of its current try has been placed; other tries count for nothing.
   Where one of several sources is lost or refuses, the try is lost, and the others are told.
3. A request's load is reported once by a rank: committed, or failed with a reason. It is not opened again after that: vLLM
   counts reports until it has one of every rank, and then the blocks may be used or given away. Where names of requests
   come again (vLLM can be told not to make them unique), a load of another transfer is another load.
4. A load lasts while there is progress: a block that was missing arrives, or prefill says of work for it that has grown.
   Without either for ``load_s`` (of the time in which this side listens, ``leases.Listened``) it fails, and progress never
   takes it beyond ``limit_s``, or its order's own limit, from the first order on, however many tries it takes.
5. One whose source was lost waits ``grace_s`` for a newer try, whatever arrives of the old one.
6. Of a newer try that other ranks need, a rank whose load was reported asks for nothing, where others take from the same
   source: that waits until all have asked. Where the source is lost meanwhile, its word may be, too: it asks once more, and
   then every ``grace_s``, for ``load_s`` or until the source says itself that the try is over.

    open ──▶ LOADING ──all placed──▶ committed       open (newer try): LOADING from the start, the old source is cancelled
                │ broken ──▶ ORPHANED ──grace over──▶ failed
                └ broken (final), silence, limit, abandon ──▶ failed
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from xpyd_sidecar.contract.ids import HostPort, Incarnation, TransferId
from xpyd_sidecar.kv.bodies import Ready
from xpyd_sidecar.kv.keys import Key, Outcome, Recent
from xpyd_sidecar.kv.leases import Lease, Listened
from xpyd_sidecar.kv.mapping import PlacedCut, SourceArray, table_runs, units
from xpyd_sidecar.kv.reach import ArraySpan, TableSpan


class From(NamedTuple):
    """A prefill rank that a load comes from, and what of it."""

    address: HostPort
    incarnation: Incarnation
    parts: tuple[PlacedCut, ...]
    takers: int = 1
    """How many decode ranks take from it."""
    whole: bool = True
    """Nothing of what it has stays there (``mapping.Source``)."""


class Order(NamedTuple):
    """Load blocks of a request's prompt into those of ``tables``, by group of this engine's."""

    request: str
    key: Key
    tables: tuple[TableSpan, ...]
    sources: tuple[From, ...]
    identity: bytes = b""
    """Of the prompt, by which another try's KV may be known."""
    limit_s: float = math.inf
    """What the router has left for it."""


class Ask(NamedTuple):
    """Ask a prefill rank for a transfer. Its blocks belong into ``tables``, and into no others; older tries are over."""

    address: HostPort
    incarnation: Incarnation
    key: Key
    ready: Ready
    request: str
    tables: tuple[TableSpan, ...]
    source: int
    units: Mapping[int, SourceArray]
    """What it will send, by its own arrays."""
    identity: bytes = b""
    groups: tuple[int, ...] = ()
    """By array of this rank, which table is its; empty: there is one."""

    @property
    def plain(self) -> bool:
        """Whether it is the only source, and all that it has is taken as it is."""
        return not self.ready.cuts and self.ready.takers == 1 and self.ready.regions > 0

    def table(self, unit: SourceArray) -> TableSpan:
        """Where the blocks of an array belong."""
        return self.tables[self.groups[unit.region] if self.groups else 0]

    def span(self, region: int) -> tuple[int, int]:
        """First and count of the blocks that are asked for of a source's array; of none that is asked for, nothing."""
        unit = self.units.get(region)
        if unit is None:
            return 0, 0
        table = self.table(unit)
        return table.first, len(table.ids)

    @property
    def slots(self) -> int:
        """Places for what arrives: of each array as many as of the one with the most blocks."""
        return len(self.units) * width(self.tables)

    def slot(self, region: int, first: int, count: int) -> int | None:
        """The first of ``count`` such places; None: these blocks of the source's array were not asked for."""
        unit = self.units.get(region)
        if unit is None:
            return None
        table = self.table(unit)
        at = first - table.first
        if count < 1 or at < 0 or at + count > len(table.ids):
            return None
        return unit.nth * width(self.tables) + at


class Pull(NamedTuple):
    """Ask a source for blocks of a try up to ``until``."""

    key: Key
    source: int
    until: int


class Confirm(NamedTuple):
    """Tell a source that all is in place."""

    key: Key
    source: int


class Cancel(NamedTuple):
    """Tell a source that a try is no longer wanted."""

    key: Key
    source: int
    outcome: Outcome
    reason: str


class PlaceBlocks(NamedTuple):
    """Write what arrived into these blocks of the cache, now: whole, or ``heads`` heads of each from ``head`` on."""

    request: str
    region: int
    ids: tuple[int, ...]
    head: int = 0
    heads: int = 0


class Finished(NamedTuple):
    """A load is over. ``size``: bytes placed of the committed try, 0 where it failed."""

    request: str
    key: Key
    outcome: Outcome
    reason: str
    size: int


Instruction = Ask | Pull | Confirm | Cancel | Finished


class WordForOthers(NamedTuple):
    """An ask for nothing, by a rank whose load was reported."""

    ask: Ask
    until: Lease
    """How long others may wait for it."""
    at: Lease
    """When it is said again, if its source is lost."""


@dataclass
class OpenLoad:
    """One load in progress."""

    order: Order
    width: int
    """Of the longest table."""
    lease: Lease
    """By the time in which this side has listened: until when silence is borne."""
    ends: Lease
    """By the clock: the bound of the whole."""
    have: list[bytearray]
    """By source: of each (array, block) that it owes, whether it is in place."""
    missing: int
    of_block: list[int]
    """Arrays that are missing, by block; kept where blocks are pulled."""
    whole: int = 0
    """Leading blocks of which nothing is missing."""
    size: int = 0
    news: bool = False
    """There was progress since the last look."""
    orphaned: tuple[Outcome, str] | None = None
    told: set[int] = field(default_factory=set)
    """Sources that know, or have said, that this try is over."""


class Receiving:
    """The machine. Methods return instructions in the order in which they must be carried out."""

    def __init__(self, *, load_s: float, grace_s: float, regions: int, cover: bool, window: int = 0,
                 limit_s: float = math.inf, groups: tuple[int, ...] = ()) -> None:
        """``regions``: arrays of this rank; a source with as many, taken as they are, is asked for them without cuts.

        ``window``: pull, with so many blocks asked for and not yet there at most; 0: have everything pushed. ``groups``: by
        array, which of an order's tables is its; empty: there is one. Blocks of several tables are not pulled.
        """
        self._groups = groups
        self._window = window
        self._load_s = load_s
        self._limit_s = limit_s
        self._listened = Listened(load_s)
        self._grace_s = grace_s
        self._regions = regions
        self._cover = cover
        self._loads: dict[str, OpenLoad] = {}
        self._current: dict[Key, str] = {}
        self._reported: Recent[str, TransferId] = Recent()
        """By request: the transfer of its last load."""
        self._for_others: Recent[tuple[Key, int], WordForOthers] = Recent()
        """By try and source: what has been asked although this rank's load was reported."""
        self._unheard: dict[tuple[Key, int], WordForOthers] = {}
        """Of that, what is to be said again."""

    @property
    def open(self) -> int:
        """Loads in progress."""
        return len(self._loads)

    def load(self, order: Order, now: float) -> list[Instruction]:
        """Begin a load, or take it from a newer try; once it was reported, newer tries are for other ranks (law 6)."""
        if self._reported.get(order.request) == order.key.transfer:
            return self._nothing(order, now)
        known = self._loads.get(order.request)
        out: list[Instruction] = []
        ends = Lease.of(now, min(self._limit_s, order.limit_s))
        if known is not None:
            if order.key.order <= known.order.key.order:
                return []
            del self._current[known.order.key]
            out += _cancel(known, Outcome.STALE, "a newer try has taken its place")
            order = order._replace(tables=known.order.tables)
            ends = min(known.ends, ends)
        lease = Lease.of(self._listened.look(now), self._load_s)
        wanted = [units(one.parts) for one in order.sources]
        most = width(order.tables)
        have = [bytearray(len(one) * most) for one in wanted]
        each = sum(map(len, wanted))
        missing = each * most if len(order.tables) == 1 else sum(
            len(order.tables[self._groups[unit.region]].ids) for one in wanted for unit in one.values())
        self._loads[order.request] = OpenLoad(order, most, lease, ends, have, missing, [each] * most)
        self._current[order.key] = order.request
        return [*out, *(Ask(source.address, source.incarnation, order.key, self._ready(order, source), order.request,
                            order.tables, at, wanted[at], order.identity, self._groups)
                        for at, source in enumerate(order.sources))]

    def _nothing(self, order: Order, now: float) -> list[Instruction]:
        """Keep nobody waiting who takes from the same sources. The end of the try comes from whoever takes something."""
        asks = [Ask(one.address, one.incarnation, order.key, self._ready(order, one._replace(parts=())), order.request,
                    order.tables, at, units(())) for at, one in enumerate(order.sources) if one.takers > 1]
        for ask in asks:
            self._for_others.put((ask.key, ask.source), WordForOthers(ask, Lease.of(now, self._load_s), Lease(now)))
        return [*asks]

    def _lost_word(self, key: Key, source: int, now: float, *, final: bool) -> list[Instruction]:
        """A source is lost of which nothing was asked for others, perhaps before it has heard of it."""
        word = self._for_others.pop((key, source))
        if word is None or final or word.until.over(now):
            return []
        self._unheard[key, source] = word
        return self._say_again(now)

    def _say_again(self, now: float) -> list[Instruction]:
        """What is to be said to sources that were lost, if its time has come; the next time after a pause."""
        due = [one for one, word in self._unheard.items() if word.at.over(now)]
        words = [(one, self._unheard.pop(one)) for one in due]
        for one, word in words:
            self._for_others.put(one, word._replace(at=Lease.of(now, self._grace_s)))
        return [word.ask for _, word in words]

    def _ready(self, order: Order, source: From) -> Ready:
        """What is asked of one source: all that it has as it is, or cuts."""
        wanted = units(source.parts)
        size = sum(unit.size for unit in wanted.values())
        plain = source.whole and source.takers == 1 and len(wanted) in {0, self._regions} and all(
            unit.region == region and not unit.heads for region, unit in wanted.items())
        cuts = () if plain else tuple(part.cut for part in source.parts)
        first, count = order.tables[0].first, len(order.tables[0].ids)
        spans = () if len(order.tables) == 1 else tuple(
            ArraySpan(region, arrays, order.tables[group].first, len(order.tables[group].ids))
            for region, arrays, group in table_runs(source.parts, self._groups) if group)
        return Ready(first, count, len(wanted), size, self._cover, cuts, source.takers, min(self._window, count),
                     spans=spans)

    def arrived(self, key: Key, source: int, region: int, blocks: tuple[int, int], size: int) -> PlaceBlocks | None:
        """Intact ``blocks`` (first, count) of a source's array are here. None: not for any open load, forget them."""
        load = self._loads.get(self._current.get(key, ""))
        if load is None or not 0 <= source < len(load.order.sources):
            return None
        order, (first, count) = load.order, blocks
        unit = units(order.sources[source].parts).get(region)
        if unit is None:
            return None
        table = order.tables[self._groups[unit.region] if self._groups else 0]
        at = first - table.first
        if count < 1 or at < 0 or at + count > len(table.ids):
            return None
        have, start = load.have[source], unit.nth * load.width + at
        before = have[start:start + count]
        have[start:start + count] = b"\1" * count
        new = before.count(0)
        load.missing -= new
        load.news |= new > 0
        if self._window:
            for slot, had in enumerate(before, at):
                load.of_block[slot] -= not had
        load.size += size
        return PlaceBlocks(order.request, unit.region, table.ids[at:at + count], unit.head, unit.heads)

    def progressed(self, key: Key) -> None:
        """Prefill says that its work for a try has grown."""
        load = self._loads.get(self._current.get(key, ""))
        if load is not None:
            load.news = True

    def placed(self, key: Key) -> list[Instruction]:
        """What ``arrived`` returned has been written."""
        load = self._loads.get(self._current.get(key, ""))
        if load is None:
            return []
        if load.missing:
            return self._pull(load) if self._window else []
        confirms = [Confirm(key, source) for source in range(len(load.order.sources))]
        return [*confirms, *self._finish(load, Outcome.OK, "", load.size)]

    def broken(self, key: Key, source: int, why: tuple[Outcome, str], now: float, *, final: bool) -> list[Instruction]:
        """The source of a try is lost or refuses; with ``final`` no newer try is to be expected.

        A source that was aborted was so by the router, which sends another try or aborts this side too: its load keeps the
        deadline it has.
        """
        load = self._loads.get(self._current.get(key, ""))
        if load is None:
            return self._lost_word(key, source, now, final=final)
        load.told.add(source)
        out = _cancel(load, *why)
        if final or self._grace_s <= 0:
            return out + self._finish(load, *why, 0)
        if load.orphaned is None:
            load.orphaned = why
            if why[0] is not Outcome.ABORTED:
                load.lease = load.lease.shortened(self._listened.look(now), self._grace_s)
        return out

    def fail(self, request: str, key: Key, outcome: Outcome, reason: str) -> list[Instruction]:
        """The scheduler side wants a load reported as failed, whether it was begun or not."""
        load = self._loads.get(request)
        if load is not None:
            return self._cancelled(load, outcome, reason)
        if self._reported.get(request) == key.transfer:
            return []
        self._reported.put(request, key.transfer)
        return [Finished(request, key, outcome, reason, 0)]

    def abandon(self, request: str) -> list[Instruction]:
        """The request has ended. A load that was already reported is not reported again."""
        load = self._loads.get(request)
        return self._cancelled(load, Outcome.ABORTED, "decode's leg ended") if load else []

    def tick(self, now: float) -> list[Instruction]:
        """After a look at what has come: loads without progress fail, and those that take too long."""
        out: list[Instruction] = self._say_again(now) if self._unheard else []
        listened = self._listened.look(now)
        for load in list(self._loads.values()):
            news, load.news = load.news, False
            if load.ends.over(now):
                out += self._cancelled(load, Outcome.DEADLINE, "it took longer than a load may")
            elif load.orphaned is not None:
                if load.lease.over(listened):
                    out += self._finish(load, *load.orphaned, 0)
            elif news:
                load.lease = Lease.of(listened, self._load_s)
            elif load.lease.over(listened):
                out += self._cancelled(load, Outcome.DEADLINE, f"no progress for {self._load_s:g} s")
        return out

    def _pull(self, load: OpenLoad) -> list[Instruction]:
        """Ask for as many more blocks as have become whole at the front."""
        before = load.whole
        while not load.of_block[load.whole]:
            load.whole += 1
        if load.whole == before or before + self._window >= load.width:
            return []
        until = load.order.tables[0].first + min(load.width, load.whole + self._window)
        return [Pull(load.order.key, source, until) for source in range(len(load.order.sources))]

    def _cancelled(self, load: OpenLoad, outcome: Outcome, reason: str) -> list[Instruction]:
        return _cancel(load, outcome, reason) + self._finish(load, outcome, reason, 0)

    def _finish(self, load: OpenLoad, outcome: Outcome, reason: str, size: int) -> list[Instruction]:
        del self._loads[load.order.request]
        del self._current[load.order.key]
        self._reported.put(load.order.request, load.order.key.transfer)
        return [Finished(load.order.request, load.order.key, outcome, reason, size)]


def width(tables: tuple[TableSpan, ...]) -> int:
    """Blocks of the longest one."""
    return len(tables[0].ids) if len(tables) == 1 else max(len(one.ids) for one in tables)


def _cancel(load: OpenLoad, outcome: Outcome, reason: str) -> list[Instruction]:
    """Tell every source that does not know it yet."""
    out: list[Instruction] = [Cancel(load.order.key, at, outcome, reason)
                              for at in range(len(load.order.sources)) if at not in load.told]
    load.told.update(range(len(load.order.sources)))
    return out
