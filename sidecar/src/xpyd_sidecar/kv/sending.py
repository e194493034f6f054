"""Prefill's worker side: copies of KV that wait for READY, and what is sent where.

Laws
1. A copy is handed to exactly one of Send and Free, once.
2. Nothing is sent before READY, nothing but what READY asked for, and nothing after the transfer has ended.
3. Every transfer that was begun ends once, with one Ended; what a peer asks of an ended one is answered with GONE.
4. Copies wait for READY no longer than ``keep_s``; after READY a transfer lasts no longer than ``send_s``.

    (unknown) ──begin, copy──▶ KEPT ──ready──▶ SENDING ──done──▶ ended ok
        │ ready: remembered      └── release, keep_s over ─┴── cancel, release, lost, send_s over ──▶ ended otherwise
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

from xpyd_sidecar.kv.blocks import overlap
from xpyd_sidecar.kv.keys import Key, Outcome, Recent
from xpyd_sidecar.kv.leases import Lease
from xpyd_sidecar.kv.messages import Ready

EARLY_MAX: Final = 4096
C = TypeVar("C")


class Copy(NamedTuple, Generic[C]):
    """Blocks ``first``.. of one region, copied out of the cache. ``data`` belongs to the caller."""

    region: int
    first: int
    blocks: int
    data: C


class Send(NamedTuple, Generic[C]):
    """Send blocks ``first``.. of a copy over a link; the copy may be freed when they are out."""

    link: int
    key: Key
    copy: Copy[C]
    first: int
    blocks: int
    cover: bool


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
    link: int | None = None
    ready: Ready | None = None


class Sending(Generic[C]):
    """The machine. ``link`` numbers name connections; the owner never uses one twice."""

    def __init__(self, *, keep_s: float, send_s: float, regions: int, block_bytes: int, cover: bool) -> None:
        self._keep_s = keep_s
        self._send_s = send_s
        self._regions = regions
        self._block_bytes = block_bytes
        self._cover = cover
        self._open: dict[Key, Transfer[C]] = {}
        self._early: OrderedDict[Key, tuple[int, Ready]] = OrderedDict()
        self._ended: Recent[Key, tuple[Outcome, str, bool]] = Recent()

    @property
    def open(self) -> int:
        """Transfers begun and not ended."""
        return len(self._open)

    def busy(self, link: int) -> bool:
        """Whether a link has transfers."""
        return any(t.link == link for t in self._open.values()) or any(n == link for n, _ in self._early.values())

    def copy(self, key: Key, copy: Copy[C], now: float) -> list[Step[C]]:
        """A copy has been made; the first one begins the transfer."""
        if key in self._ended:
            return [Free(copy)]
        out: list[Step[C]] = []
        transfer = self._open.get(key)
        if transfer is None:
            transfer = self._open[key] = Transfer(Lease.of(now, self._keep_s))
            early = self._early.pop(key, None)
            if early is not None:
                out += self.ready(early[0], key, early[1], now)
        if key not in self._open:
            return [*out, Free(copy)]
        if transfer.ready is None:
            transfer.copies.append(copy)
            return out
        return [*out, self._send(key, transfer, copy)]

    def ready(self, link: int, key: Key, ready: Ready, now: float) -> list[Step[C]]:
        """Decode asks for a transfer. Asked again over another link, it is sent no more over the first: ended as lost."""
        if key in self._ended:
            outcome, reason, retry = self._ended.get(key) or (Outcome.STALE, "ended", False)
            return [Refuse(link, key, outcome, reason, retry)]
        transfer = self._open.get(key)
        if transfer is None:
            self._early[key] = (link, ready)
            if len(self._early) > EARLY_MAX:
                old, (old_link, _) = self._early.popitem(last=False)
                return [Refuse(old_link, old, Outcome.OVERFLOW, "too many transfers asked for ahead", False)]
            return []
        if ready.regions != self._regions or ready.block_bytes != self._block_bytes:
            reason = (f"geometry: {self._regions} arrays of {self._block_bytes} bytes a block here, "
                      f"{ready.regions} of {ready.block_bytes} there")
            return [Refuse(link, key, Outcome.INCOMPATIBLE, reason, False),
                    *self._end(key, Outcome.INCOMPATIBLE, reason)]
        if transfer.ready is not None:
            reason = "asked for twice"
            return [Refuse(link, key, Outcome.PROTOCOL, reason, False), *self._end(key, Outcome.PROTOCOL, reason)]
        transfer.link, transfer.ready, transfer.lease = link, ready, Lease.of(now, self._send_s)
        copies, transfer.copies = transfer.copies, []
        return [self._send(key, transfer, copy) for copy in copies]

    def done(self, link: int, key: Key) -> list[Step[C]]:
        """Decode has everything."""
        transfer = self._open.get(key)
        return self._end(key, Outcome.OK, "", confirmed=True) if transfer and transfer.link == link else []

    def cancel(self, link: int, key: Key, outcome: Outcome, reason: str) -> list[Step[C]]:
        """Decode no longer wants a transfer that it asked for."""
        early = self._early.get(key)
        if early and early[0] == link:
            del self._early[key]
            return self._end(key, outcome, reason)  # announced, so this engine's scheduler side waits for its end
        transfer = self._open.get(key)
        return self._end(key, outcome, reason) if transfer and transfer.link == link else []

    def release(self, key: Key, outcome: Outcome, reason: str, *, retry: bool = False) -> list[Step[C]]:
        """Let go of a transfer, begun or not; decode is told where it has asked."""
        if key in self._ended:
            return []
        out: list[Step[C]] = []
        transfer = self._open.get(key)
        early = self._early.pop(key, None)
        link = transfer.link if transfer else early[0] if early else None
        if link is not None:
            out.append(Refuse(link, key, outcome, reason, retry))
        return out + self._end(key, outcome, reason, retry=retry)

    def lost(self, link: int, outcome: Outcome, reason: str) -> list[Step[C]]:
        """A link is gone."""
        for key in [k for k, (n, _) in self._early.items() if n == link]:
            del self._early[key]
        return [one for key in [k for k, t in self._open.items() if t.link == link]
                for one in self._end(key, outcome, reason)]

    def tick(self, now: float) -> list[Step[C]]:
        """Time passes: what has waited too long ends."""
        out: list[Step[C]] = []
        for key in [k for k, t in self._open.items() if t.lease.over(now)]:
            asked = self._open[key].ready is not None
            out += self.release(key, Outcome.DEADLINE,
                                "decode did not confirm in time" if asked else "decode did not ask for it in time")
        return out

    def _send(self, key: Key, transfer: Transfer[C], copy: Copy[C]) -> Send[C] | Free[C]:
        assert transfer.ready is not None
        assert transfer.link is not None
        first, count = overlap(copy.first, copy.blocks, transfer.ready.first, transfer.ready.count)
        if not count:
            return Free(copy)
        return Send(transfer.link, key, copy, first, count, self._cover or transfer.ready.checksum)

    def _end(self, key: Key, outcome: Outcome, reason: str, *, confirmed: bool = False,
             retry: bool = False) -> list[Step[C]]:
        transfer = self._open.pop(key, None)
        self._ended.put(key, (outcome, reason, retry))
        freed: list[Step[C]] = [Free(copy) for copy in transfer.copies] if transfer else []
        return [*freed, Ended(key, outcome, reason, confirmed)]
