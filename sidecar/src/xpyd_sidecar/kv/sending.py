"""Prefill's worker side: copies of KV that wait for READY, and what is sent where.

Laws
1. A copy is handed to Free or Store once, or to Sends, which share it (``uses``); no taker is sent a block twice.
2. Nothing is sent before READY but what decode has said to have room for, nothing but what READY asked for, to a taker that
   pulls nothing beyond what it has fetched, and nothing after the transfer has ended.
3. Every transfer that was begun ends once, with one Ended; what a peer asks of an ended one is answered with GONE.
4. Copies wait for READY no longer than ``keep_s`` after the last of them, or after the last word of work that grows.
   After READY a transfer lasts while there is progress: one more copy, a word of work, a piece that has left, a FETCH.
   Without any for ``send_s`` (of the time in which this side listens) it ends, and always after ``limit_s``.
5. Where decode has more ranks, several take from this one, and each READY says how many. A transfer is sent when all have
   asked and ends ok when all have confirmed; when one is lost or lets go, the others are told. Not so where it has asked
   for nothing: it asks again (``Receiving``), also of a transfer that is sent.
6. A copy that decode is too busy for is offered again, no sooner than decode has said.
7. What was pushed ahead goes with its link: a transfer of which something was ends when that link does, or when decode
   asks for it over another one, which may be heard of first.

    (unknown) ──begin, copy──▶ KEPT ──every ready──▶ SENDING ──every done──▶ ended ok
        │ ready, expect:           │                             │
        ▼ remembered               └── release, keep_s over ─────┴── cancel, release, lost, silence ──▶ ended otherwise

    a copy while KEPT, of a transfer that decode expects:   kept ──spill──▶ offered ──room──▶ stored: on its way to decode
                                                              ▲─────full──────┘
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic

from xpyd_sidecar.kv.blocks import overlap
from xpyd_sidecar.kv.bodies import Ready
from xpyd_sidecar.kv.copies import (
    C,
    Copy,
    Free,
    Held,
    OfferCopy,
    RefuseTransfer,
    Send,
    Step,
    StoreCopy,
    Transfer,
    TransferEnded,
    Uses,
)
from xpyd_sidecar.kv.keys import Key, Outcome, Recent
from xpyd_sidecar.kv.leases import Lease, Listened
from xpyd_sidecar.kv.mapping import ArrayKind, Cut
from xpyd_sidecar.kv.ready import RankArrays, asked_of, blocks_asked
from xpyd_sidecar.kv.stores import Expect

EARLY_MAX: Final = 4096


class Sending(Generic[C]):
    """The machine. ``link`` numbers name connections; the owner never uses one twice."""

    def __init__(self, *, keep_s: float, send_s: float, regions: int, block_bytes: int, cover: bool,
                 kinds: Sequence[ArrayKind] = (), limit_s: float = math.inf) -> None:
        """``regions`` arrays with blocks of ``block_bytes`` together; ``kinds``: of each, where blocks may be cut."""
        self._geometry = RankArrays(regions, block_bytes, tuple(kinds))
        self._keep_s = keep_s
        self._send_s = send_s
        self._limit_s = limit_s
        self._listened = Listened(send_s)
        self.cover = cover
        self._open: dict[Key, Transfer[C]] = {}
        self._early: OrderedDict[Key, dict[int, Ready]] = OrderedDict()
        self._expected: OrderedDict[Key, tuple[int, Expect]] = OrderedDict()
        self._ended: Recent[Key, tuple[Outcome, str, bool]] = Recent()
        self.on_offer = 0
        """What copies weigh that decode has been asked to make room for."""

    @property
    def open(self) -> int:
        """Transfers begun and not ended."""
        return len(self._open)

    def busy(self, link: int) -> bool:
        """Whether a link has transfers, those included that decode waits for and that have not begun."""
        return (any(link in t.takers or (t.ahead is not None and t.ahead[0] == link) for t in self._open.values())
                or any(link in asked for asked in self._early.values())
                or any(link == number for number, _ in self._expected.values()))

    def copy(self, key: Key, copy: Copy[C], now: float) -> list[Step[C]]:
        """A copy has been made; the first one begins the transfer."""
        if key in self._ended:
            return [Free(copy)]
        out: list[Step[C]] = []
        transfer = self._open.get(key)
        if transfer is None:
            transfer = self._open[key] = Transfer(Lease.of(now, self._keep_s), ahead=self._expected.pop(key, None))
            for link, ready in self._early.pop(key, {}).items():
                out += self.ready(link, key, ready, now)
        if key not in self._open:
            return [*out, Free(copy)]
        if not transfer.sending:
            transfer.lease = Lease.of(now, self._keep_s)
            transfer.copies.append(copy)
            return out
        transfer.news = True
        return [*out, *self._send(key, transfer, copy)]

    def ready(self, link: int, key: Key, ready: Ready, now: float) -> list[Step[C]]:
        """Decode asks for a transfer. Asked by more than it was said to have takers, it ends."""
        if key in self._ended:
            outcome, reason, retry = self._ended.get(key) or (Outcome.STALE, "ended", False)
            return [RefuseTransfer(link, key, outcome, reason, retry, ended=True)]
        transfer = self._open.get(key)
        if transfer is None:
            self._early.setdefault(key, {})[link] = ready
            if len(self._early) > EARLY_MAX:
                old, asked = self._early.popitem(last=False)
                reason = "too many transfers asked for ahead"
                return [RefuseTransfer(one, old, Outcome.OVERFLOW, reason, False) for one in asked]
            return []
        if reason := self._geometry.unfit(ready, whole=transfer.stored):
            return [RefuseTransfer(link, key, Outcome.INCOMPATIBLE, reason, False),
                    *self._fail(key, Outcome.INCOMPATIBLE, reason)]
        if transfer.stored and transfer.ahead is not None and transfer.ahead[0] != link:
            reason = "decode asks over another connection than that over which part of it was pushed ahead"
            return [RefuseTransfer(link, key, Outcome.PEER_LOST, reason, True),
                    *self._fail(key, Outcome.PEER_LOST, reason, but=transfer.ahead[0], retry=True)]
        odd = any(one.takers != ready.takers for one in transfer.takers.values())
        again = transfer.sending and ready.for_others
        if odd or (transfer.sending and not again) or link in transfer.takers:
            reason = f"asked for by one more than {ready.takers}" if odd or transfer.sending else "asked for twice"
            return [*([] if link in transfer.takers else [RefuseTransfer(link, key, Outcome.PROTOCOL, reason, False)]),
                    *self._fail(key, Outcome.PROTOCOL, reason)]
        transfer.takers[link] = ready
        if ready.window:
            transfer.fetched[link] = ready.first + ready.window
        if again or len(transfer.takers) < ready.takers:
            return []
        transfer.sending, transfer.news = True, False
        transfer.lease, transfer.ends = Lease.of(self._listened.look(now), self._send_s), Lease.of(now, self._limit_s)
        self._take_back(transfer)
        copies, transfer.copies = transfer.copies, []
        return [one for copy in copies for one in self._send(key, transfer, copy)]

    def fetch(self, link: int, key: Key, until: int) -> list[Step[C]]:
        """A taker that pulls asks for its blocks up to ``until``."""
        transfer = self._open.get(key)
        if transfer is None or until <= transfer.fetched.get(link, until):
            return []
        transfer.fetched[link], transfer.news = until, True
        return [*self._advance(key, transfer)] if transfer.sending else []

    def progressed(self, key: Key) -> None:
        """A piece of a transfer has left, or the engine says that its work for it has grown."""
        transfer = self._open.get(key)
        if transfer is not None:
            transfer.news = True

    def expect(self, link: int, key: Key, expect: Expect) -> list[Step[C]]:
        """Decode waits for a transfer without having blocks for it: copies of it may be offered over this link."""
        if key in self._ended:
            outcome, reason, retry = self._ended.get(key) or (Outcome.STALE, "ended", False)
            return [RefuseTransfer(link, key, outcome, reason, retry, ended=True)]
        if (expect.regions, expect.block_bytes) != self._geometry[:2]:
            return []
        transfer = self._open.get(key)
        if transfer is not None:
            transfer.ahead = transfer.ahead or (link, expect)
            return []
        self._expected[key] = link, expect
        if len(self._expected) > EARLY_MAX:
            self._expected.popitem(last=False)
        return []

    def spill(self, want: int, weigh: Callable[[C], int], now: float) -> list[Step[C]]:
        """Offer copies of ``want`` bytes to decode, those of the oldest transfers first."""
        out: list[Step[C]] = []
        for key, transfer in self._open.items():
            if transfer.takers or transfer.ahead is None or now < transfer.quiet_until:
                continue
            while transfer.copies and want > 0:
                copy = transfer.copies.pop(0)
                weight = weigh(copy.data)
                transfer.offered[copy.region, copy.first] = copy, weight
                self.on_offer += weight
                out.append(OfferCopy(transfer.ahead[0], key, copy))
                want -= weight
        return out

    def room(self, link: int, key: Key, region: int, first: int) -> list[Step[C]]:
        """Decode has room for a copy that was offered. It may have been sent meanwhile, on READY."""
        transfer = self._open.get(key)
        if transfer is None or transfer.ahead is None or transfer.ahead[0] != link:
            return []
        copy = self._withdraw(transfer, region, first)
        if copy is None:
            return []
        transfer.stored = True
        return [StoreCopy(link, key, copy, self.cover or transfer.ahead[1].checksum)]

    def full(self, link: int, key: Key, region: int, first: int, until: float) -> None:
        """Decode has no room for a copy: nothing of its transfer is offered again before ``until``."""
        transfer = self._open.get(key)
        if transfer is not None and transfer.ahead is not None and transfer.ahead[0] == link:
            copy = self._withdraw(transfer, region, first)
            if copy is not None:
                transfer.copies.insert(0, copy)
                transfer.quiet_until = until

    def done(self, link: int, key: Key) -> list[Step[C]]:
        """Decode has everything that it wanted of this link."""
        transfer = self._open.get(key)
        if transfer is None and link in (early := self._early.get(key, {})) and early[link].takers == 1:
            del self._early[key]  # it had another try's in its buffer
            return self._end(key, Outcome.OK, "", confirmed=True)
        if transfer is None or link not in transfer.takers or not transfer.sending:
            return []
        transfer.done.add(link)
        return self._end(key, Outcome.OK, "", confirmed=True) if len(transfer.done) == transfer.takers[link].takers else []

    def cancel(self, link: int, key: Key, outcome: Outcome, reason: str) -> list[Step[C]]:
        """Decode no longer wants a transfer that it asked for."""
        transfer = self._open.get(key)
        known = transfer.ahead if transfer is not None else self._expected.get(key)
        ahead = known is not None and known[0] == link
        if not ahead and link not in (transfer.takers if transfer else self._early.get(key, ())):
            return []
        # Also where it was early: it was announced, so this engine's scheduler side waits for its end.
        return self._fail(key, outcome, reason, but=link, retry=outcome in {Outcome.ABORTED, Outcome.STALE})

    def release(self, key: Key, outcome: Outcome, reason: str, *, retry: bool = False) -> list[Step[C]]:
        """Let go of a transfer, begun or not; decode is told where it has asked."""
        return [] if key in self._ended else self._fail(key, outcome, reason, retry=retry)

    def lost(self, link: int, outcome: Outcome, reason: str) -> list[Step[C]]:
        """A link is gone. Where several take from a transfer that has not begun, those that have asked are told, too."""
        out: list[Step[C]] = []
        for key in [key for key, asked in self._early.items()
                    if link in asked and asked[link].takers > 1 and not asked[link].for_others]:
            out += self._fail(key, outcome, reason, but=link, retry=True)
        for asked in [one for one in self._early.values() if link in one]:
            del asked[link]
        for key in [key for key, asked in self._early.items() if not asked]:
            del self._early[key]
        for key in [key for key, (number, _) in self._expected.items() if number == link]:
            del self._expected[key]
        for key, transfer in list(self._open.items()):
            ahead = transfer.ahead is not None and transfer.ahead[0] == link
            if link in transfer.takers and transfer.takers[link].for_others:
                del transfer.takers[link]
            elif link in transfer.takers or (ahead and transfer.stored and not transfer.takers):
                out += self._fail(key, outcome, reason, but=link, retry=True)
            elif ahead:
                transfer.ahead = None
                self._take_back(transfer)
        return out

    def tick(self, now: float) -> list[Step[C]]:
        """After a look at what has come: what has waited too long ends."""
        out: list[Step[C]] = []
        listened = self._listened.look(now)
        for key, transfer in list(self._open.items()):
            clock, patience = (listened, self._send_s) if transfer.sending else (now, self._keep_s)
            news, transfer.news = transfer.news, False
            reason = ""
            if transfer.ends is not None and transfer.ends.over(now):
                reason = "it took longer than a load may"
            elif news:
                transfer.lease = Lease.of(clock, patience)
            elif transfer.lease.over(clock):
                reason = "decode did not confirm in time" if transfer.sending else "decode did not ask for it in time"
            if reason:
                out += self.release(key, Outcome.DEADLINE, reason)
        return out

    def _send(self, key: Key, transfer: Transfer[C], copy: Copy[C]) -> list[Step[C]]:
        """What of a copy somebody has asked for: at once, or, to a taker that pulls, as far as it has fetched."""
        left: dict[int, tuple[int, int, Cut | None]] = {}
        for link, ready in transfer.takers.items():
            wanted, cut = asked_of(ready, copy.region)
            first, count = overlap(copy.first, copy.blocks, *blocks_asked(ready, copy.region))
            if wanted and count:
                left[link] = first, first + count, cut
        if not left:
            return [Free(copy)]
        transfer.held.append(Held(copy, Uses(len(left)), left))
        return [*self._advance(key, transfer)]

    def _advance(self, key: Key, transfer: Transfer[C]) -> Iterator[Send[C]]:
        """What has been fetched and not been sent."""
        for held in transfer.held:
            for link, (first, end, cut) in list(held.left.items()):
                upto = min(end, transfer.fetched.get(link, end))
                if first >= upto:
                    continue
                if upto == end:
                    del held.left[link]
                else:
                    held.uses.more()
                    held.left[link] = upto, end, cut
                ready = transfer.takers[link]
                yield Send(link, key, held.copy, first, upto - first, self.cover or ready.checksum, held.uses, cut,
                           ready.frame)
        transfer.held = [held for held in transfer.held if held.left]

    def _withdraw(self, transfer: Transfer[C], region: int, first: int) -> Copy[C] | None:
        """A copy that is on offer no more, if it was."""
        copy, weight = transfer.offered.pop((region, first), (None, 0))
        self.on_offer -= weight
        return copy

    def _take_back(self, transfer: Transfer[C]) -> None:
        """What was offered is kept again."""
        self.on_offer -= sum(weight for _, weight in transfer.offered.values())
        transfer.copies = [*(copy for copy, _ in transfer.offered.values()), *transfer.copies]
        transfer.offered.clear()

    def _fail(self, key: Key, outcome: Outcome, reason: str, *, but: int | None = None,
              retry: bool = False) -> list[Step[C]]:
        """End a transfer; who has asked for it over a link other than ``but``, and has not confirmed, is told."""
        transfer = self._open.get(key)
        early, expected = self._early.pop(key, {}), self._expected.pop(key, None)
        asked: set[int] = set(early) if transfer is None else set(transfer.takers)
        if not asked and (ahead := transfer.ahead if transfer else expected) is not None:
            asked = {ahead[0]}
        done = transfer.done if transfer else ()
        told: list[Step[C]] = [RefuseTransfer(link, key, outcome, reason, retry)
                               for link in asked if link != but and link not in done]
        return told + self._end(key, outcome, reason, retry=retry)

    def _end(self, key: Key, outcome: Outcome, reason: str, *, confirmed: bool = False,
             retry: bool = False) -> list[Step[C]]:
        transfer = self._open.pop(key, None)
        self._expected.pop(key, None)
        self._ended.put(key, (outcome, reason, retry))
        freed: list[Step[C]] = []
        if transfer is not None:
            self._take_back(transfer)
            freed += [Free(copy) for copy in transfer.copies]
            freed += [Free(held.copy, held.uses) for held in transfer.held for _ in held.left]
        return [*freed, TransferEnded(key, outcome, reason, confirmed)]
