"""Prefill's worker side: copies of KV that wait for READY, and what is sent where.

Laws
1. A copy is handed to Free once, or once to a Send for each of its takers, which share it (``uses``).
2. Nothing is sent before READY, nothing but what READY asked for, and nothing after the transfer has ended.
3. Every transfer that was begun ends once, with one Ended; what a peer asks of an ended one is answered with GONE.
4. Copies wait for READY no longer than ``keep_s``; after READY a transfer lasts no longer than ``send_s``.
5. Where decode has more ranks, several take from this one, and each READY says how many. A transfer is sent when all have
   asked and ends ok when all have confirmed; when one is lost or lets go, the others are told.

    (unknown) ──begin, copy──▶ KEPT ──every ready──▶ SENDING ──every done──▶ ended ok
        │ ready: remembered      └── release, keep_s over ─┴── cancel, release, lost, send_s over ──▶ ended otherwise
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

from xpyd_sidecar.kv.blocks import overlap
from xpyd_sidecar.kv.keys import Key, Outcome, Recent
from xpyd_sidecar.kv.leases import Lease
from xpyd_sidecar.kv.mapping import Cut, Kind
from xpyd_sidecar.kv.messages import Ready

EARLY_MAX: Final = 4096
C = TypeVar("C")


class Copy(NamedTuple, Generic[C]):
    """Blocks ``first``.. of one region, copied out of the cache. ``data`` belongs to the caller."""

    region: int
    first: int
    blocks: int
    data: C


class Uses:
    """How many sends of one copy have not left yet."""

    def __init__(self, count: int) -> None:
        self._count = count

    def over(self) -> bool:
        """One has left, or never will. Whether it was the last."""
        self._count -= 1
        return self._count == 0


class Send(NamedTuple, Generic[C]):
    """Send blocks ``first``.. of a copy over a link; the copy may be freed when they are out."""

    link: int
    key: Key
    copy: Copy[C]
    first: int
    blocks: int
    cover: bool
    cut: Cut | None = None
    """Send so many heads of each block; None: whole blocks."""
    uses: Uses | None = None
    """Of a copy that is sent more than once: it may be freed when all are out."""


class Free(NamedTuple, Generic[C]):
    """A copy is not needed."""

    copy: Copy[C]


class Refuse(NamedTuple):
    """Answer GONE on a link."""

    link: int
    key: Key
    outcome: Outcome
    reason: str
    retry: bool


class Ended(NamedTuple):
    """A transfer is over on this rank."""

    key: Key
    outcome: Outcome
    reason: str
    confirmed: bool


Step = Send[C] | Free[C] | Refuse | Ended


@dataclass
class Transfer(Generic[C]):
    """One open transfer."""

    lease: Lease
    copies: list[Copy[C]] = field(default_factory=list)
    takers: dict[int, Ready] = field(default_factory=dict)
    """By link."""
    done: set[int] = field(default_factory=set)
    sending: bool = False


class Sending(Generic[C]):
    """The machine. ``link`` numbers name connections; the owner never uses one twice."""

    def __init__(self, *, keep_s: float, send_s: float, regions: int, block_bytes: int, cover: bool,
                 kinds: Sequence[Kind] = ()) -> None:
        """``regions`` arrays with blocks of ``block_bytes`` together; ``kinds``: of each, where blocks may be cut."""
        self._kinds = kinds
        self._keep_s = keep_s
        self._send_s = send_s
        self._regions = regions
        self._block_bytes = block_bytes
        self._cover = cover
        self._open: dict[Key, Transfer[C]] = {}
        self._early: OrderedDict[Key, dict[int, Ready]] = OrderedDict()
        self._ended: Recent[Key, tuple[Outcome, str, bool]] = Recent()

    @property
    def open(self) -> int:
        """Transfers begun and not ended."""
        return len(self._open)

    def busy(self, link: int) -> bool:
        """Whether a link has transfers."""
        return any(link in t.takers for t in self._open.values()) or any(link in asked for asked in self._early.values())

    def copy(self, key: Key, copy: Copy[C], now: float) -> list[Step[C]]:
        """A copy has been made; the first one begins the transfer."""
        if key in self._ended:
            return [Free(copy)]
        out: list[Step[C]] = []
        transfer = self._open.get(key)
        if transfer is None:
            transfer = self._open[key] = Transfer(Lease.of(now, self._keep_s))
            for link, ready in self._early.pop(key, {}).items():
                out += self.ready(link, key, ready, now)
        if key not in self._open:
            return [*out, Free(copy)]
        if not transfer.sending:
            transfer.copies.append(copy)
            return out
        return [*out, *self._send(key, transfer, copy)]

    def ready(self, link: int, key: Key, ready: Ready, now: float) -> list[Step[C]]:
        """Decode asks for a transfer. Asked by more than it was said to have takers, it ends."""
        if key in self._ended:
            outcome, reason, retry = self._ended.get(key) or (Outcome.STALE, "ended", False)
            return [Refuse(link, key, outcome, reason, retry)]
        transfer = self._open.get(key)
        if transfer is None:
            self._early.setdefault(key, {})[link] = ready
            if len(self._early) > EARLY_MAX:
                old, asked = self._early.popitem(last=False)
                return [Refuse(one, old, Outcome.OVERFLOW, "too many transfers asked for ahead", False) for one in asked]
            return []
        if reason := self._unfit(ready):
            return [Refuse(link, key, Outcome.INCOMPATIBLE, reason, False),
                    *self._fail(key, Outcome.INCOMPATIBLE, reason)]
        odd = any(one.takers != ready.takers for one in transfer.takers.values())
        if odd or transfer.sending or link in transfer.takers:
            reason = f"asked for by one more than {ready.takers}" if odd or transfer.sending else "asked for twice"
            return [*([] if link in transfer.takers else [Refuse(link, key, Outcome.PROTOCOL, reason, False)]),
                    *self._fail(key, Outcome.PROTOCOL, reason)]
        transfer.takers[link] = ready
        if len(transfer.takers) < ready.takers:
            return []
        transfer.sending, transfer.lease = True, Lease.of(now, self._send_s)
        copies, transfer.copies = transfer.copies, []
        return [one for copy in copies for one in self._send(key, transfer, copy)]

    def _unfit(self, ready: Ready) -> str:
        """Why this rank does not have what is asked for; empty: it has."""
        wrong = (f"geometry: {self._regions} arrays of {self._block_bytes} bytes a block here, "
                 f"{ready.regions} of {ready.block_bytes} there")
        if ready.takers < 1:
            return f"takers: {ready.takers} is below 1"
        if not ready.cuts:  # the whole rank, or nothing of it
            fits = (ready.regions, ready.block_bytes) in {(self._regions, self._block_bytes), (0, 0)}
            return "" if fits else wrong
        after = size = count = 0
        for cut in ready.cuts:
            if cut.region < after or cut.count < 1 or cut.region + cut.count > len(self._kinds):
                return f"{wrong} (arrays {cut.region} to {cut.region + cut.count - 1})"
            after = cut.region + cut.count
            for kind in self._kinds[cut.region:after]:
                heads = cut.heads or kind.heads
                if not 0 <= cut.head <= kind.heads - heads or heads < 1 or cut.size != heads * kind.head_bytes:
                    return f"{wrong} (heads {cut.head} to {cut.head + heads - 1} of {kind.heads}, {cut.size} bytes)"
            size += cut.count * cut.size
            count += cut.count
        return "" if (count, size) == (ready.regions, ready.block_bytes) else wrong

    def done(self, link: int, key: Key) -> list[Step[C]]:
        """Decode has everything that it wanted of this link."""
        transfer = self._open.get(key)
        if transfer is None or link not in transfer.takers or not transfer.sending:
            return []
        transfer.done.add(link)
        return self._end(key, Outcome.OK, "", confirmed=True) if len(transfer.done) == len(transfer.takers) else []

    def cancel(self, link: int, key: Key, outcome: Outcome, reason: str) -> list[Step[C]]:
        """Decode no longer wants a transfer that it asked for."""
        transfer = self._open.get(key)
        if link not in (transfer.takers if transfer else self._early.get(key, ())):
            return []
        # Also where it was early: it was announced, so this engine's scheduler side waits for its end.
        return self._fail(key, outcome, reason, but=link, retry=outcome in {Outcome.ABORTED, Outcome.STALE})

    def release(self, key: Key, outcome: Outcome, reason: str, *, retry: bool = False) -> list[Step[C]]:
        """Let go of a transfer, begun or not; decode is told where it has asked."""
        return [] if key in self._ended else self._fail(key, outcome, reason, retry=retry)

    def lost(self, link: int, outcome: Outcome, reason: str) -> list[Step[C]]:
        """A link is gone."""
        for asked in [one for one in self._early.values() if link in one]:
            del asked[link]
        for key in [key for key, asked in self._early.items() if not asked]:
            del self._early[key]
        return [one for key in [k for k, t in self._open.items() if link in t.takers]
                for one in self._fail(key, outcome, reason, but=link, retry=True)]

    def tick(self, now: float) -> list[Step[C]]:
        """Time passes: what has waited too long ends."""
        out: list[Step[C]] = []
        for key in [k for k, t in self._open.items() if t.lease.over(now)]:
            asked = self._open[key].sending
            out += self.release(key, Outcome.DEADLINE,
                                "decode did not confirm in time" if asked else "decode did not ask for it in time")
        return out

    def _send(self, key: Key, transfer: Transfer[C], copy: Copy[C]) -> list[Step[C]]:
        sends: list[Send[C]] = []
        for link, ready in transfer.takers.items():
            wanted, cut = _wanted(ready, copy.region)
            first, count = overlap(copy.first, copy.blocks, ready.first, ready.count)
            if wanted and count:
                sends.append(Send(link, key, copy, first, count, self._cover or ready.checksum, cut))
        if not sends:
            return [Free(copy)]
        if len(sends) == 1:
            return [*sends]
        uses = Uses(len(sends))
        return [one._replace(uses=uses) for one in sends]

    def _fail(self, key: Key, outcome: Outcome, reason: str, *, but: int | None = None,
              retry: bool = False) -> list[Step[C]]:
        """End a transfer; who has asked for it over a link other than ``but``, and has not confirmed, is told."""
        transfer = self._open.get(key)
        asked = self._early.pop(key, {}) if transfer is None else transfer.takers
        done = transfer.done if transfer else ()
        told: list[Step[C]] = [Refuse(link, key, outcome, reason, retry)
                               for link in asked if link != but and link not in done]
        return told + self._end(key, outcome, reason, retry=retry)

    def _end(self, key: Key, outcome: Outcome, reason: str, *, confirmed: bool = False,
             retry: bool = False) -> list[Step[C]]:
        transfer = self._open.pop(key, None)
        self._ended.put(key, (outcome, reason, retry))
        freed: list[Step[C]] = [Free(copy) for copy in transfer.copies] if transfer else []
        return [*freed, Ended(key, outcome, reason, confirmed)]


def _wanted(ready: Ready, region: int) -> tuple[bool, Cut | None]:
    """Whether an array is asked for, and how it is cut."""
    if not ready.cuts:
        return ready.regions > 0, None
    for cut in ready.cuts:
        if cut.region <= region < cut.region + cut.count:
            return True, cut if cut.heads else None
    return False, None
