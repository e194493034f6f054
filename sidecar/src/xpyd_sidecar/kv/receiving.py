"""Decode's worker side: loads in progress, which bytes may be placed, and when a load is committed or has failed.

The machine belongs to the engine's own thread: it alone decides that bytes are placed, and the same thread places them
before it reports a load as finished. So nothing is written into a block after its load was reported (docs/decisions/0005).

Laws
1. Bytes are placed only for the current try of an open load, inside the blocks that it asked for.
2. A load is committed when every (region, block) of its current try has been placed; other tries count for nothing.
3. A request's load is reported once by a rank: committed, or failed with a reason. It is not opened again after that: vLLM
   counts reports until it has one of every rank, and then the blocks may be used or given away.
4. Nobody waits beyond ``load_s`` from READY; one whose source was lost waits ``grace_s`` for a newer try.

    open ──▶ LOADING ──all placed──▶ committed       open (newer try): LOADING from the start, the old source is cancelled
                │ broken ──▶ ORPHANED ──grace over──▶ failed
                └ broken (final), deadline, abandon ──▶ failed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from xpyd_sidecar.contract.ids import HostPort, Incarnation
from xpyd_sidecar.kv.keys import Key, Outcome, Recent
from xpyd_sidecar.kv.leases import Lease
from xpyd_sidecar.kv.messages import Ready


class Order(NamedTuple):
    """Load blocks ``first``.. of a request's prompt into ``ids`` from a prefill rank."""

    request: str
    key: Key
    first: int
    ids: tuple[int, ...]
    address: HostPort
    incarnation: Incarnation
    identity: bytes = b""
    """Of the prompt, by which another try's KV may be known."""


class Ask(NamedTuple):
    """Ask a prefill rank for a transfer. Its blocks belong into ``ids``, and into no others; older tries are over."""

    address: HostPort
    incarnation: Incarnation
    key: Key
    ready: Ready
    request: str
    ids: tuple[int, ...]
    identity: bytes = b""


class Pull(NamedTuple):
    """Ask for blocks of a try up to ``until``."""

    key: Key
    until: int


class Confirm(NamedTuple):
    """Tell the source that all is in place."""

    key: Key


class Cancel(NamedTuple):
    """Tell the source that a try is no longer wanted."""

    key: Key
    outcome: Outcome
    reason: str


class Place(NamedTuple):
    """Write what arrived into these blocks of the cache, now."""

    request: str
    region: int
    ids: tuple[int, ...]


class Finished(NamedTuple):
    """A load is over. ``size``: bytes placed of the committed try, 0 where it failed."""

    request: str
    key: Key
    outcome: Outcome
    reason: str
    size: int


Instruction = Ask | Pull | Confirm | Cancel | Finished


@dataclass
class Load:
    """One load in progress."""

    order: Order
    lease: Lease
    have: bytearray
    missing: int
    of_block: list[int]
    """Arrays that are missing, by block."""
    whole: int = 0
    """Leading blocks of which nothing is missing."""
    size: int = 0
    orphaned: tuple[Outcome, str] | None = None


class Receiving:
    """The machine. Methods return instructions in the order in which they must be carried out."""

    def __init__(self, *, load_s: float, grace_s: float, regions: int, block_bytes: int, cover: bool,
                 window: int = 0) -> None:
        """``window``: pull, with so many blocks asked for and not yet there at most; 0: have everything pushed."""
        self._window = window
        self._load_s = load_s
        self._grace_s = grace_s
        self._regions = regions
        self._block_bytes = block_bytes
        self._cover = cover
        self._loads: dict[str, Load] = {}
        self._current: dict[Key, str] = {}
        self._reported: Recent[str, None] = Recent()

    @property
    def open(self) -> int:
        """Loads in progress."""
        return len(self._loads)

    def load(self, order: Order, now: float) -> list[Instruction]:
        """Begin a load, or take it from a newer try; once it was reported, newer tries are for other ranks only."""
        if order.request in self._reported:
            return []
        known = self._loads.get(order.request)
        out: list[Instruction] = []
        if known is not None:
            if order.key.order <= known.order.key.order:
                return []
            del self._current[known.order.key]
            if known.orphaned is None:
                out.append(Cancel(known.order.key, Outcome.STALE, "a newer try has taken its place"))
            order = order._replace(first=known.order.first, ids=known.order.ids)
        size = self._regions * len(order.ids)
        lease = Lease.of(now, self._load_s)
        self._loads[order.request] = Load(order, lease, bytearray(size), size, [self._regions] * len(order.ids))
        self._current[order.key] = order.request
        ready = Ready(order.first, len(order.ids), self._regions, self._block_bytes, self._cover,
                      window=min(self._window, len(order.ids)))
        return [*out, Ask(order.address, order.incarnation, order.key, ready, order.request, order.ids, order.identity)]

    def arrived(self, key: Key, region: int, first: int, count: int, size: int) -> Place | None:
        """Intact blocks are here. None: not for any open load, forget them."""
        load = self._loads.get(self._current.get(key, ""))
        if load is None:
            return None
        order = load.order
        at = first - order.first
        if not 0 <= region < self._regions or count < 1 or at < 0 or at + count > len(order.ids):
            return None
        for slot in range(region * len(order.ids) + at, region * len(order.ids) + at + count):
            if not load.have[slot]:
                load.have[slot] = 1
                load.missing -= 1
                load.of_block[slot % len(order.ids)] -= 1
        load.size += size
        return Place(order.request, region, order.ids[at:at + count])

    def placed(self, key: Key) -> list[Instruction]:
        """What ``arrived`` returned has been written."""
        load = self._loads.get(self._current.get(key, ""))
        if load is None:
            return []
        if load.missing:
            return self._pull(load) if self._window else []
        return [Confirm(key), *self._finish(load, Outcome.OK, "", load.size)]

    def broken(self, key: Key, outcome: Outcome, reason: str, now: float, *, final: bool) -> list[Instruction]:
        """The source of a try is lost or refuses; with ``final`` no newer try is to be expected.

        A source that was aborted was so by the router, which sends another try or aborts this side too: its load keeps the
        deadline it has.
        """
        load = self._loads.get(self._current.get(key, ""))
        if load is None:
            return []
        if final or self._grace_s <= 0:
            return self._finish(load, outcome, reason, 0)
        if load.orphaned is None:
            load.orphaned = outcome, reason
            if outcome is not Outcome.ABORTED:
                load.lease = load.lease.shortened(now, self._grace_s)
        return []

    def fail(self, request: str, key: Key, outcome: Outcome, reason: str) -> list[Instruction]:
        """The scheduler side wants a load reported as failed, whether it was begun or not."""
        load = self._loads.get(request)
        if load is not None:
            return self._cancelled(load, outcome, reason)
        if request in self._reported:
            return []
        self._reported.put(request, None)
        return [Finished(request, key, outcome, reason, 0)]

    def abandon(self, request: str) -> list[Instruction]:
        """The request has ended. A load that was already reported is not reported again."""
        load = self._loads.get(request)
        return self._cancelled(load, Outcome.ABORTED, "decode's leg ended") if load else []

    def tick(self, now: float) -> list[Instruction]:
        """Time passes: loads past their deadline fail."""
        out: list[Instruction] = []
        for load in [one for one in self._loads.values() if one.lease.over(now)]:
            if load.orphaned is not None:
                out += self._finish(load, *load.orphaned, 0)
            else:
                out += self._cancelled(load, Outcome.DEADLINE, "not everything arrived in time")
        return out

    def _pull(self, load: Load) -> list[Instruction]:
        """Ask for as many more blocks as have become whole at the front."""
        before = load.whole
        while not load.of_block[load.whole]:
            load.whole += 1
        count = len(load.order.ids)
        if load.whole == before or before + self._window >= count:
            return []
        return [Pull(load.order.key, load.order.first + min(count, load.whole + self._window))]

    def _cancelled(self, load: Load, outcome: Outcome, reason: str) -> list[Instruction]:
        cancel: list[Instruction] = [] if load.orphaned is not None else [Cancel(load.order.key, outcome, reason)]
        return cancel + self._finish(load, outcome, reason, 0)

    def _finish(self, load: Load, outcome: Outcome, reason: str, size: int) -> list[Instruction]:
        del self._loads[load.order.request]
        del self._current[load.order.key]
        self._reported.put(load.order.request, None)
        return [Finished(load.order.request, load.order.key, outcome, reason, size)]
