"""Decode's worker side: loads in progress, what of them is in place, and when a load is committed or has failed.

The machine belongs to the engine's own thread: it alone decides that a load is over, and closes the gate of its blocks in
the same call. So nothing is written into a block after its load was reported (docs/decisions/0005).

Laws
1. Blocks count only for the current try of an open load, inside those that it asked for.
2. A load is committed when every (source, array, block) of its current try is in place; other tries count for nothing.
   Where one of several sources is lost or refuses, the try is lost, and the others are told.
3. A request's load is reported once by a rank: committed, or failed with a reason. It is not opened again after that: vLLM
   counts reports until it has one of every rank, and then the blocks may be used or given away. Where names of requests
   come again (vLLM can be told not to make them unique), a load of another transfer is another load.
4. A load lasts while there is progress: a block that was missing arrives, or prefill says of work for it that has grown.
   Without either for ``load_s`` (of the time in which this side listens, ``leases.ListeningClock``) it fails, and
   progress never takes it beyond ``limit_s``, or its order's own limit, from the first order on, however many tries it
   takes.
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from xpyd_sidecar.contract.ids import HostPort, Incarnation, TransferId
from xpyd_sidecar.kv.blocks import overlap
from xpyd_sidecar.kv.fetch_steps import FetchPlan
from xpyd_sidecar.kv.keys import Key, Outcome, Recent
from xpyd_sidecar.kv.leases import Lease, ListeningClock
from xpyd_sidecar.kv.reach import TableSpan


class LoadSource(NamedTuple):
    """A prefill rank that a load comes from, and what of it."""

    address: HostPort
    incarnation: Incarnation
    plan: FetchPlan


class Order(NamedTuple):
    """Load blocks of a request's prompt into those of ``tables``, by group of this engine's."""

    request: str
    key: Key
    tables: tuple[TableSpan, ...]
    sources: tuple[LoadSource, ...]
    limit_s: float = math.inf
    """What the router has left for it."""


class WantTry(NamedTuple):
    """Take a try from one prefill rank; without ``tables``: it has no blocks yet. Older tries of its request are over."""

    request: str
    key: Key
    source: int
    """Its place among the sources of the load."""
    address: HostPort
    incarnation: Incarnation
    plan: FetchPlan
    tables: tuple[TableSpan, ...] | None = None

    @property
    def ident(self) -> tuple[Key, int]:
        """The try, and its source."""
        return self.key, self.source


class Confirm(NamedTuple):
    """Tell a source that all is in place. ``size``: bytes that were placed of what it has given."""

    key: Key
    source: int
    size: int


class Cancel(NamedTuple):
    """Tell a source that a try is no longer wanted."""

    key: Key
    source: int
    outcome: Outcome
    reason: str


class LoadFinished(NamedTuple):
    """A load is over. ``size``: bytes placed of the committed try, 0 where it failed."""

    request: str
    key: Key
    outcome: Outcome
    reason: str
    size: int


Instruction = WantTry | Confirm | Cancel | LoadFinished


class WordForOthers(NamedTuple):
    """A want of nothing, by a rank whose load was reported."""

    want: WantTry
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
    nth: list[dict[int, int]]
    """By source: where each of its arrays stands in that."""
    missing: int
    sizes: list[int]
    """By source: bytes that were placed."""
    news: bool = False
    """There was progress since the last look."""
    orphaned: tuple[Outcome, str] | None = None
    told: set[int] = field(default_factory=set)
    """Sources that know, or have said, that this try is over."""


class Receiving:
    """The machine. Methods return instructions in the order in which they must be carried out."""

    def __init__(self, *, load_s: float, grace_s: float, limit_s: float = math.inf) -> None:
        self._load_s = load_s
        self._limit_s = limit_s
        self._listened = ListeningClock(load_s)
        self._grace_s = grace_s
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
        """Number of loads in progress."""
        return len(self._loads)

    def load(self, order: Order, now: float) -> list[Instruction]:
        """Begin a load, or take it from a newer try; once it was reported, newer tries are for other ranks (law 6)."""
        if self._reported.get(order.request) == order.key.transfer:
            return self._nothing(order, now)
        known = self._loads.get(order.request)
        out: list[Instruction] = []
        ends = Lease.start(now, min(self._limit_s, order.limit_s))
        if known is not None:
            if order.key.order <= known.order.key.order:
                return []
            del self._current[known.order.key]
            out += _cancel(known, Outcome.STALE, "a newer try has taken its place")
            order = order._replace(tables=known.order.tables)
            ends = min(known.ends, ends)
        lease = Lease.start(self._listened.advance(now), self._load_s)
        most = width(order.tables)
        nth = [{region: at for at, region in enumerate(sorted(one.plan.parts))} for one in order.sources]
        missing = sum(len(order.tables[part.table].ids) for one in order.sources for part in one.plan.parts.values())
        have = [bytearray(len(one) * most) for one in nth]
        self._loads[order.request] = OpenLoad(order, most, lease, ends, have, nth, missing, [0] * len(have))
        self._current[order.key] = order.request
        return [*out, *(WantTry(order.request, order.key, at, one.address, one.incarnation, one.plan, order.tables)
                        for at, one in enumerate(order.sources))]

    def _nothing(self, order: Order, now: float) -> list[Instruction]:
        """Keep nobody waiting who takes from the same sources. The end of the try comes from whoever takes something."""
        wants = [
            WantTry(order.request, order.key, at, one.address, one.incarnation, one.plan._replace(parts={}), order.tables)
            for at, one in enumerate(order.sources) if one.plan.takers > 1]
        for want in wants:
            self._for_others.put((want.key, want.source), WordForOthers(want, Lease.start(now, self._load_s), Lease(now)))
        return [*wants]

    def _lost_word(self, key: Key, source: int, now: float, *, final: bool) -> list[Instruction]:
        """A source is lost of which nothing was asked for others, perhaps before it has heard of it."""
        word = self._for_others.pop((key, source))
        if word is None or final or word.until.is_over(now):
            return []
        self._unheard[key, source] = word
        return self._say_again(now)

    def _say_again(self, now: float) -> list[Instruction]:
        """What is to be said to sources that were lost, if its time has come; the next time after a pause."""
        due = [one for one, word in self._unheard.items() if word.at.is_over(now)]
        words = [(one, self._unheard.pop(one)) for one in due]
        for one, word in words:
            self._for_others.put(one, word._replace(at=Lease.start(now, self._grace_s)))
        return [word.want for _, word in words]

    def on_arrived(self, key: Key, source: int, blocks: Sequence[tuple[int, int, int]], size: int) -> list[Instruction]:
        """Blocks are in their places, and right: (array of the source, first, count) of each. Of no open load: forgotten.

        ``size``: bytes of all of them.
        """
        load = self._loads.get(self._current.get(key, ""))
        if load is None or not 0 <= source < len(load.order.sources):
            return []
        parts, nth, have, new = load.order.sources[source].plan.parts, load.nth[source], load.have[source], 0
        for region, first, fetched in blocks:
            part = parts.get(region)
            if part is None:
                continue
            table = load.order.tables[part.table]
            begin, count = overlap(first, fetched, table.first, len(table.ids))
            start = nth[region] * load.width + begin - table.first
            new += have[start:start + count].count(0)
            have[start:start + count] = b"\1" * count
        load.missing -= new
        load.news |= new > 0
        load.sizes[source] += size if parts.keys() & {region for region, _, _ in blocks} else 0
        if load.missing:
            return []
        confirms = [Confirm(key, at, size) for at, size in enumerate(load.sizes)]
        return [*confirms, *self._finish(load, Outcome.OK, "", sum(load.sizes))]

    def on_progress(self, key: Key) -> None:
        """Prefill says that its work for a try has grown."""
        load = self._loads.get(self._current.get(key, ""))
        if load is not None:
            load.news = True

    def on_source_lost(self, key: Key, source: int, why: tuple[Outcome, str], now: float, *,
                       final: bool) -> list[Instruction]:
        """The source of a try is lost or refuses; with ``final`` no newer try is to be expected.

        A source that was aborted was so by the router, which sends another try or aborts this side too: its load keeps the
        deadline it has.
        """
        load = self._loads.get(self._current.get(key, ""))
        if load is None:
            return self._lost_word(key, source, now, final=final)
        why = _failure(why[0]), why[1]
        load.told.add(source)
        out = _cancel(load, *why)
        if final or self._grace_s <= 0:
            return out + self._finish(load, *why, 0)
        if load.orphaned is None:
            load.orphaned = why
            if why[0] is not Outcome.ABORTED:
                load.lease = load.lease.shorten(self._listened.advance(now), self._grace_s)
        return out

    def fail(self, request: str, key: Key, outcome: Outcome, reason: str) -> list[Instruction]:
        """The scheduler side wants a load reported as failed, whether it was begun or not."""
        outcome = _failure(outcome)
        load = self._loads.get(request)
        if load is not None:
            return self._cancelled(load, outcome, reason)
        if self._reported.get(request) == key.transfer:
            return []
        self._reported.put(request, key.transfer)
        return [LoadFinished(request, key, outcome, reason, 0)]

    def abandon(self, request: str) -> list[Instruction]:
        """The request has ended. A load that was already reported is not reported again."""
        load = self._loads.get(request)
        return self._cancelled(load, Outcome.ABORTED, "decode's leg ended") if load else []

    def tick(self, now: float) -> list[Instruction]:
        """After a look at what has come: loads without progress fail, and those that take too long."""
        out: list[Instruction] = self._say_again(now) if self._unheard else []
        listened = self._listened.advance(now)
        for load in list(self._loads.values()):
            news, load.news = load.news, False
            if load.ends.is_over(now):
                out += self._cancelled(load, Outcome.DEADLINE, "it took longer than a load may")
            elif load.orphaned is not None:
                if load.lease.is_over(listened):
                    out += self._finish(load, *load.orphaned, 0)
            elif news:
                load.lease = Lease.start(listened, self._load_s)
            elif load.lease.is_over(listened):
                out += self._cancelled(load, Outcome.DEADLINE, f"no progress for {self._load_s:g} s")
        return out

    def _cancelled(self, load: OpenLoad, outcome: Outcome, reason: str) -> list[Instruction]:
        return _cancel(load, outcome, reason) + self._finish(load, outcome, reason, 0)

    def _finish(self, load: OpenLoad, outcome: Outcome, reason: str, size: int) -> list[Instruction]:
        del self._loads[load.order.request]
        del self._current[load.order.key]
        self._reported.put(load.order.request, load.order.key.transfer)
        return [LoadFinished(load.order.request, load.order.key, outcome, reason, size)]


def width(tables: tuple[TableSpan, ...]) -> int:
    """Blocks of the longest one."""
    return len(tables[0].ids) if len(tables) == 1 else max(len(one.ids) for one in tables)


def _failure(outcome: Outcome) -> Outcome:
    """Why a load fails, by the words of others: only blocks that have arrived make one end well."""
    return Outcome.PROTOCOL if outcome is Outcome.OK else outcome


def _cancel(load: OpenLoad, outcome: Outcome, reason: str) -> list[Instruction]:
    """Tell every source that does not know it yet."""
    out: list[Instruction] = [Cancel(load.order.key, at, outcome, reason)
                              for at in range(len(load.order.sources)) if at not in load.told]
    load.told.update(range(len(load.order.sources)))
    return out
