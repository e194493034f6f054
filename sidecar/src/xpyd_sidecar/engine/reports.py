"""What the two sides of the connector hand each other through vLLM: orders down, reports up, addresses at start."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from xpyd_sidecar.engine.compat import KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorWorkerMetadata
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.mapping import Array, Plan
from xpyd_sidecar.kv.messages import Announce, ListeningRank
from xpyd_sidecar.kv.offers import Push, Release
from xpyd_sidecar.kv.reach import TableSpan
from xpyd_sidecar.session.publisher import SendReport
from xpyd_sidecar.session.receiver import RefusedRank

LINK = "link:"
"""Begins the name of what has come in over a link, in bytes, among what workers count."""


class LoadOrder(NamedTuple):
    """Load blocks of a request's prompt into those of ``tables``, by group; each rank takes its own part of the plan."""

    request: str
    source: Announce
    tables: tuple[TableSpan, ...]
    tokens: int
    """That are loaded."""
    plan: Plan = ()
    """What each rank takes from which of the source's."""
    limit_s: float = math.inf
    """What the router has left for it."""


class FailOrder(NamedTuple):
    """Report the request's load as failed."""

    request: str
    key: Key
    outcome: Outcome
    reason: str


class ExpectOrder(NamedTuple):
    """A request has no blocks yet: have its sources tell what they have, which may be fetched ahead."""

    source: Announce
    blocks: tuple[int, ...]
    """Of the whole prompt, by group."""
    plan: Plan
    """What each rank will take from which of the source's."""


class UnclaimedOrder(NamedTuple):
    """A request goes on, or has ended, without this transfer: what has come ahead of it is of no use. How its load ended,
    and why, is what its sources hear.
    """

    key: Key
    outcome: Outcome
    reason: str


@dataclass
class Orders(KVConnectorMetadata):
    """Scheduler side to workers, with every step."""

    pushes: list[Push] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    reclaims: list[Key] = field(default_factory=list)
    """Transfers whose blocks go back before this step's forward, since their request was preempted."""
    loads: list[LoadOrder] = field(default_factory=list)
    fails: list[FailOrder] = field(default_factory=list)
    abandons: list[str] = field(default_factory=list)
    expects: list[ExpectOrder] = field(default_factory=list)
    forget: bool = False
    """What has come ahead so far is of no use."""
    unclaimed: list[UnclaimedOrder] = field(default_factory=list)
    progress: list[Key] = field(default_factory=list)
    """Loads for which prefill's work has grown."""
    worked: list[Key] = field(default_factory=list)
    """Sends for which this engine's own work has grown."""
    crew: bytes = b""
    """What workers join the scheduler side's calls with (``worker_rpc``); with the first orders alone."""
    tokens: int = 0
    """Of the step's forward; 0: there is none."""
    firsts: list[Key] = field(default_factory=list)
    """Transfers whose requests run for the first time since their KV came."""
    copied: list[str] = field(default_factory=list)
    """Requests that have ended and whose blocks are not needed any more: each worker says so (``multi_connector``)."""
    hold: int = 0
    """Copies that are made now leave when the step of this number is proved (``multi_connector``); 0: at once."""
    proved: int = 0
    """Copies that are held for steps up to this one may leave; 0: no news."""
    calm: bool = False
    """The engine takes naps: until the next orders a worker need not look for them without a pause."""

    @property
    def idle(self) -> bool:
        """Nothing is to be done in this step."""
        return not (self.tokens or self.pushes or self.releases or self.reclaims or self.loads or self.fails
                    or self.abandons or self.expects or self.copied or self.proved
                    or self.forget or self.unclaimed)


class CopiedReport(NamedTuple):
    """A rank has copied out so many blocks more of a prompt: it does not need them in the cache any more."""

    rank: int
    key: Key
    blocks: int


class LoadReport(NamedTuple):
    """A rank has ended a load."""

    rank: int
    request: str
    key: Key
    outcome: Outcome
    reason: str
    size: int


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Workers to scheduler side, with steps in which something ended."""

    sends: list[SendReport] = field(default_factory=list)
    loads: list[LoadReport] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    """What to add to ``stats.Stats``."""
    levels: dict[int, dict[str, int]] = field(default_factory=dict)
    """By rank: values of gauges of ``contract.metrics``, where they have changed."""
    sent_notes: list[tuple[Key, bytes]] = field(default_factory=list)
    """``contract.timeline.TransferSide`` of transfers that have ended."""
    load_notes: list[tuple[Key, bytes]] = field(default_factory=list)
    first_notes: list[tuple[Key, bytes]] = field(default_factory=list)
    """``contract.timeline.First``."""
    copied: list[CopiedReport] = field(default_factory=list)
    refused: list[RefusedRank] = field(default_factory=list)
    links: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """By rank: what is to be said of its links, where that has changed."""
    proves: int = 0
    """``Orders.hold`` of the step that this is the output of."""

    def count(self, name: str, amount: float) -> None:
        """Add to a counter."""
        self.counts[name] = self.counts.get(name, 0) + amount

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both reports in one."""
        assert isinstance(other, StepReport)
        counts = {name: self.counts.get(name, 0) + other.counts.get(name, 0) for name in self.counts | other.counts}
        return StepReport(self.sends + other.sends, self.loads + other.loads, counts, self.levels | other.levels,
                          self.sent_notes + other.sent_notes, self.load_notes + other.load_notes,
                          self.first_notes + other.first_notes, self.copied + other.copied,
                          self.refused + other.refused, self.links | other.links, max(self.proves, other.proves))


@dataclass
class RankAddress(KVConnectorHandshakeMetadata):
    """One rank's data address and the arrays of its KV."""

    rank: int
    data: ListeningRank
    arrays: tuple[Array, ...]
    place: str = ""
    """Its host and network (``place``)."""
