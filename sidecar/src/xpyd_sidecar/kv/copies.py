"""What ``kv.sending`` works on: copies of KV, what is to be done with them, and an open transfer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from xpyd_sidecar.kv.bodies import Ready
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.leases import Lease
from xpyd_sidecar.kv.mapping import Cut
from xpyd_sidecar.kv.stores import Expect

C = TypeVar("C")


class Copy(NamedTuple, Generic[C]):
    """Blocks ``first``.. of one region, copied out of the cache. ``data`` belongs to the caller."""

    region: int
    first: int
    blocks: int
    data: C


@dataclass
class Uses:
    """How many sends of one copy have not left yet, those to come included."""

    count: int

    def more(self) -> None:
        """One that was to come is cut in two."""
        self.count += 1

    def over(self) -> bool:
        """One has left, or never will. Whether it was the last."""
        self.count -= 1
        return self.count == 0


class Send(NamedTuple, Generic[C]):
    """Send blocks ``first``.. of a copy over a link."""

    link: int
    key: Key
    copy: Copy[C]
    first: int
    blocks: int
    cover: bool
    uses: Uses
    """Of the copy: it may be freed when all of them are out."""
    cut: Cut | None = None
    """Send so many heads of each block; None: whole blocks."""
    frame: int = 0
    """As ``Ready.frame``."""


class OfferCopy(NamedTuple, Generic[C]):
    """Ask decode whether it has room for a copy."""

    link: int
    key: Key
    copy: Copy[C]


class StoreCopy(NamedTuple, Generic[C]):
    """Send a whole copy into decode's buffer; it may be freed when it is out."""

    link: int
    key: Key
    copy: Copy[C]
    cover: bool


class Free(NamedTuple, Generic[C]):
    """A copy is not needed, or (``uses``) one send of it will not be."""

    copy: Copy[C]
    uses: Uses | None = None


class RefuseTransfer(NamedTuple):
    """Answer GONE on a link."""

    link: int
    key: Key
    outcome: Outcome
    reason: str
    retry: bool
    ended: bool = False
    """It had ended before it was asked for."""


class TransferEnded(NamedTuple):
    """A transfer is over on this rank."""

    key: Key
    outcome: Outcome
    reason: str
    confirmed: bool


Step = Send[C] | OfferCopy[C] | StoreCopy[C] | Free[C] | RefuseTransfer | TransferEnded


@dataclass
class Held(Generic[C]):
    """A copy that is sent as its takers fetch it."""

    copy: Copy[C]
    uses: Uses
    left: dict[int, tuple[int, int, Cut | None]]
    """By link: the blocks from .. up to .. that have not been sent, and the cut."""


@dataclass
class Transfer(Generic[C]):
    """One open transfer."""

    lease: Lease
    """Until when it may wait for progress: by the clock before READY, after it by the time in which this side has listened.
    """
    ends: Lease | None = None
    """By the clock, after READY: the bound of the whole."""
    news: bool = False
    """There was progress since the last look."""
    copies: list[Copy[C]] = field(default_factory=list)
    takers: dict[int, Ready] = field(default_factory=dict)
    """By link."""
    done: set[int] = field(default_factory=set)
    sending: bool = False
    held: list[Held[C]] = field(default_factory=list)
    fetched: dict[int, int] = field(default_factory=dict)
    """By link of a taker that pulls: block up to which it has asked."""
    ahead: tuple[int, Expect] | None = None
    """The link over which copies may be offered before READY."""
    offered: dict[tuple[int, int], tuple[Copy[C], int]] = field(default_factory=dict)
    """By region and first block: what is on offer, and what it weighs."""
    quiet_until: float = 0.0
    stored: bool = False
