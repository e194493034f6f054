"""From looks at the engine to the next heartbeat: the agent's state machine. Pure; time is an argument.

Laws
    1. READY ⇒ the last look that brought news (see 3) found the engine up, with the record of every DP rank, ranks
       agreeing, the model known.
    2. A change of incarnation always passes through STARTING: health and record are two reads, so a new record counts
       from the second look that shows it.
    3. An engine that refuses or answers with an error is down at once. One that is merely slow is down after
       SLOW_LOOKS looks in a row: a busy server is not a dead one. A look that the agent could not make, for lack of files
       or ports of its own, is none: the state stays what it was, however long.
    4. DRAINING ⇔ a drain was asked for and not taken back. The engine's health does not end it.
    5. drained ⇒ DRAINING, and every router knew so and had no leg open (as of its last ack; a router that was silent for
       its bound is not asked) before IDLE_LOOKS looks in a row found nothing running, waiting or moving. The engine's own
       numbers do not suffice: they miss a request that its front end is still reading. An engine that is down has nothing
       to finish. drained never turns false again while the drain lasts.

    STARTING ──engine up──▶ READY
        ▲  ◀──engine down─────┘
        │ undrain        drain │ (from either)
        └────── DRAINING ◀─────┘      ──idle, routers informed──▶ drained
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from xpyd_sidecar.contract import adapters, fingerprint, speculation
from xpyd_sidecar.contract.adapters import AdapterOrder, AdapterReport, AdapterState
from xpyd_sidecar.contract.assignment import Assignment
from xpyd_sidecar.contract.core_steps import CoreSteps
from xpyd_sidecar.contract.demand import RouterDemand, newest_demands
from xpyd_sidecar.contract.ids import AgentId, Fingerprint, HostPort, Incarnation, Role, State
from xpyd_sidecar.contract.launch import SidecarConfig
from xpyd_sidecar.contract.liveness import RestartWish
from xpyd_sidecar.contract.membership import (
    MAX_POISONS,
    MAX_ROUTERS,
    WIRE_VERSION,
    GoodbyeMessage,
    Heartbeat,
    Load,
    Parallel,
)
from xpyd_sidecar.contract.pair_notes import MOST_LINKS, MOST_REFUSED, PairNotes
from xpyd_sidecar.contract.record import EngineRecord

SLOW_LOOKS = 3
IDLE_LOOKS = 2
SILENT_BEATS = 2.0
"""A router that has not answered for so many heartbeats since the drain began does not hold it up."""
MOVE_S = 5.0
"""So long before the end of a drain's time streams are asked to go on elsewhere; half of that time where it is short."""


class ProbeResult(msgspec.Struct, frozen=True):
    """What one look at the engine found."""

    health: Literal["up", "slow", "unready", "down", "unmade"]
    """Unready: it is slow, and the group that it is part of does not serve. What runs there may run on."""
    problem: str = ""
    """Why it is not up, or why what it says cannot be used."""
    records: tuple[EngineRecord, ...] = ()
    """One per DP rank, in order; empty until all are there."""
    load: Load | None = None
    """None: not asked, or not answered."""
    model: str = ""
    max_model_len: int = 0
    also: tuple[str, ...] = ()
    adapters: AdapterState | None = None
    """What its API server tells of adapters; None: nothing."""
    doors: tuple[HostPort, ...] = ()
    """Servers of the ranks, by rank; empty: all are behind the agent's own engine's."""
    pairs: PairNotes = PairNotes(Incarnation(""))
    """What its ranks have found of their peers."""
    core: CoreSteps | None = None
    """How far its cores have got; None: not known."""
    answered: bool = False
    """Slow or not, its servers have answered their health checks well."""


class KnownRouter(msgspec.Struct, frozen=True):
    """What the agent knows of one router."""

    address: str
    name: str = ""
    """As the router calls itself; empty before its first ack."""
    acked: int = -1
    """Highest ``seq`` that it acked."""
    heard: float = float("-inf")
    """When its last ack came."""
    since: float = 0.0
    """When the agent began to send to this address."""
    refused: str = ""
    """Not empty: it refused the last beat, and why."""
    in_flight: int = 0
    """Legs that it had open on the instance at its last ack."""
    ejected: bool = False
    """It said in its last ack that it does not pick the instance, for how that fails."""
    poisons: tuple[str, ...] = ()
    """What it said in its last ack that it refuses, since engines died of it."""
    demand: RouterDemand | None = None
    """What it said in its last ack that its tenants want; None: it has none."""
    stalled: bool = False
    """It said in its last ack that the core does not step though it has requests of that router."""
    hold: bool = False
    """It said in its last ack that the engine is not to be restarted now."""


class ProbeDone(msgspec.Struct, frozen=True):
    """Event: a look at the engine is done."""

    look: ProbeResult
    routers: tuple[KnownRouter, ...]


class DrainAsked(msgspec.Struct, frozen=True):
    """Event: somebody wants the instance empty."""


class UndrainAsked(msgspec.Struct, frozen=True):
    """Event: the drain is taken back."""


class AdaptersTold(msgspec.Struct, frozen=True):
    """Event: the instance is to have these adapters."""

    order: AdapterOrder


class RoleTold(msgspec.Struct, frozen=True):
    """Event: the instance is to have this role. One of an epoch that is not higher changes nothing."""

    assignment: Assignment


Event = ProbeDone | DrainAsked | UndrainAsked | RoleTold | AdaptersTold


class BeatNow(msgspec.Struct, frozen=True):
    """Instruction: routers must hear of this at once."""

    reason: str


class DrainEnded(msgspec.Struct, frozen=True):
    """Instruction: answer those who wait for the drain."""

    drained: bool
    reason: str


Instruction = BeatNow | DrainEnded


class Machine:
    """State of one agent. ``handle`` is the one method that changes it, but for the count of beats in ``heartbeat``."""

    def __init__(self, config: SidecarConfig, agent: AgentId) -> None:
        """``agent``: what tells this process from others that speak under the same name."""
        assert config.agent is not None
        self._id = agent
        self._service = config.service
        self._instance = config.instance
        self._agent = config.agent
        self._seq = 0
        self._slow = 0
        self._idle = 0
        self._up = False
        self._drain_since: float | None = None
        self._drain_seq = -1
        self._drained = False
        self._leaving = False
        self._role = config.agent.role
        self._epoch = config.agent.epoch
        self._records: tuple[EngineRecord, ...] = ()
        self._doors: tuple[HostPort, ...] = ()
        self._load = Load()
        self._model = config.agent.model
        self._max_model_len = 0
        self._also: tuple[str, ...] = ()
        self._order: AdapterOrder | None = None
        self._has: AdapterState | None = None
        self._adapters: AdapterReport | None = None
        self._pairs = PairNotes(Incarnation(""))
        self._core: CoreSteps | None = None
        self._ejected_by: tuple[str, ...] = ()
        self._poisons: tuple[str, ...] = ()
        self._demands: tuple[RouterDemand, ...] = ()
        self.problem = "the engine has not been looked at yet"
        """Why the instance is not ready; empty when it is."""

    @property
    def state(self) -> State:
        """What the next heartbeat will say."""
        if self._drain_since is not None:
            return State.DRAINING
        return State.READY if self._up else State.STARTING

    @property
    def role(self) -> Role:
        """What the next heartbeat will say."""
        return self._role

    @property
    def epoch(self) -> int:
        """The epoch of the role."""
        return self._epoch

    @property
    def drained(self) -> bool:
        """Nothing runs, waits or moves, and no router will pick the instance."""
        return self._drained

    @property
    def incarnation(self) -> Incarnation:
        """The incarnation of the first rank; empty until the connector has started."""
        return self._records[0].incarnation if self._records else Incarnation("")

    @property
    def load(self) -> Load:
        """The latest load that the engine has told."""
        return self._load

    @property
    def pairs(self) -> PairNotes:
        """What the engine has found of its peers; nothing of an engine that has gone."""
        return self._pairs

    def handle(self, event: Event, now: float) -> tuple[Instruction, ...]:
        """Take in one event at ``now`` (monotonic seconds)."""
        before = self._news()
        out: list[Instruction] = []
        match event:
            case ProbeDone(look=look, routers=routers):
                self._take(look)
                heard = [one for one in routers if now - one.heard < SILENT_BEATS * self._agent.heartbeat_s]
                self._ejected_by = tuple(sorted({one.name for one in heard if one.ejected and one.name}))[:MAX_ROUTERS]
                self._poisons = tuple(sorted({each for one in heard for each in one.poisons}))[:MAX_POISONS]
                self._demands = newest_demands(tuple(one.demand for one in heard if one.demand is not None))
                if self._drain_since is not None and not self._drained:
                    reason = self._drain_progress(look, routers, now)
                    if self._drained:
                        out.append(DrainEnded(True, reason))
                    self._leaving = not self._drained and now - self._drain_since >= self._moves_after_s
            case DrainAsked():
                if self._drain_since is None:
                    self._drain_since, self._drain_seq, self._idle = now, self._seq, 0
            case UndrainAsked():
                if self._drain_since is not None:
                    self._drain_since, self._drained, self._leaving = None, False, False
                    out.append(DrainEnded(False, "the drain was taken back"))
            case RoleTold(assignment=told):
                if told.epoch > self._epoch:
                    self._role, self._epoch = told.role, told.epoch
            case AdaptersTold(order=order):
                self._order = order
                self._adapters = adapters.report(order, self._has)
        after = self._news()
        if after != before:
            why = "drained" if self._drained else self.problem if self.state is State.STARTING else self.state.value
            if after[-1] != before[-1]:
                why = f"{self._role} from epoch {self._epoch} on"
            out.append(BeatNow(why))
        return tuple(out)

    def heartbeat(self, restart: RestartWish = RestartWish.NONE) -> Heartbeat:
        """The next beat; counts it. ``restart``: what ``Liveness`` says of the engine."""
        self._seq += 1
        first = self._records[0] if self._records else None
        return Heartbeat(
            v=WIRE_VERSION,
            service=self._service,
            instance=self._instance,
            seq=self._seq,
            role=self._role,
            epoch=self._epoch,
            state=self.state,
            agent=self._id,
            incarnation=self.incarnation,
            http=self._doors or (self._agent.advertised_address,),
            control=tuple(record.control for record in self._records),
            model=self._model,
            max_model_len=self._max_model_len,
            fingerprint=self._fingerprint,
            parallel=first.parallel if first else Parallel(),
            load=self._load,
            interval_s=self._agent.beat_s,
            drained=self._drained,
            leaving=self._leaving,
            also=self._also,
            adapters=self._adapters,
            sampling=first.sampling if first else None,
            refused=self._pairs.refused,
            links=self._pairs.links,
            ejected_by=self._ejected_by,
            poisons=self._poisons,
            demands=self._demands,
            core=self._core,
            restart=restart,
        )

    def last_message(self) -> GoodbyeMessage:
        """The message by which the agent leaves its routers."""
        return GoodbyeMessage(WIRE_VERSION, self._service, self._instance, self._id, self.incarnation)

    def waits_for(self, routers: Sequence[KnownRouter], now: float) -> str:
        """Why a drain has not ended, in words; empty when there is none."""
        if self._drain_since is None:
            return ""
        if holding := self._holding(routers, now):
            return "; ".join(f"router {router.name or router.address} {self._why_holding(router)}" for router in holding)
        load = self._load
        return f"{load.running} running, {load.waiting} waiting, {load.transfers} KV transfers"

    @property
    def _fingerprint(self) -> Fingerprint:
        """Engines under different keys, or of different versions of the KV plane, cannot exchange KV, whatever it is like.
        Neither can those of a model with states that speculate otherwise.
        """
        if not self._records:
            return Fingerprint("")
        first, mark = self._records[0], self._agent.key_mark
        drafts = speculation.mark(first.speculation)
        drafts = f"-s{drafts}" if drafts else ""
        return Fingerprint(f"{fingerprint.digest(first.fingerprint)}-kv{first.kv}{drafts}{f'-{mark}' if mark else ''}")

    @property
    def _moves_after_s(self) -> float:
        whole_s = self._agent.drain_timeout_s
        return whole_s - min(MOVE_S, whole_s / 2)

    def _news(self) -> tuple[object, ...]:
        """What routers hear of at once when it changes."""
        return (self.state, self._drained, self._leaving, self.incarnation, self._pairs.refused, self._ejected_by,
                self._poisons, self._also, self._adapters, self._epoch)

    def _take(self, look: ProbeResult) -> None:
        self._core = look.core if look.health != "unmade" else None  # what nobody has looked at does not stand still
        if look.health == "unmade":
            return
        self._slow = self._slow + 1 if look.health == "slow" else 0
        if look.load is not None:
            self._load = look.load
        if look.health == "slow" and self._slow < SLOW_LOOKS:
            return  # no news
        problem = look.problem or disagreement(look.records)
        changed = tuple(r.incarnation for r in look.records) != tuple(r.incarnation for r in self._records)
        if look.records:
            self._records, self._doors = look.records, look.doors
            self._pairs = look.pairs
        if look.health == "up" and not look.records and not problem:
            problem = "the engine is up, but its connector has written no record"
        if look.health == "up" and look.records and changed and not problem:
            problem = "a new incarnation of the engine: to be confirmed by a second look"
        self._up = look.health == "up" and not problem
        self.problem = "" if self._up else problem or "the engine does not answer"
        if look.health == "down":
            self._load = Load()
        if self._up:
            self._model, self._max_model_len, self._also = look.model, look.max_model_len, look.also
            self._has = look.adapters
            self._adapters = adapters.report(self._order, look.adapters)

    def _drain_progress(self, look: ProbeResult, routers: Sequence[KnownRouter], now: float) -> str:
        if self._holding(routers, now) and look.health != "down":
            self._idle = 0
        elif look.health == "down":
            self._idle += 1
        elif look.load is not None:
            busy = look.load.running or look.load.waiting or look.load.transfers
            self._idle = 0 if busy else self._idle + 1
        self._drained = self._idle >= IDLE_LOOKS
        return "the engine is down" if look.health == "down" else "nothing runs, waits or moves"

    def _holding(self, routers: Sequence[KnownRouter], now: float) -> list[KnownRouter]:
        """Routers that hold the drain up: they do not know of it, or have legs open, and are not silent for too long."""
        assert self._drain_since is not None
        bound = SILENT_BEATS * self._agent.heartbeat_s
        return [router for router in routers if (router.acked <= self._drain_seq or router.in_flight)
                and now - max(self._drain_since, router.since, router.heard) < bound]

    def _why_holding(self, router: KnownRouter) -> str:
        return "has not acknowledged" if router.acked <= self._drain_seq else f"has {router.in_flight} requests in flight"


def merge_notes(notes: Sequence[PairNotes], incarnation: Incarnation) -> PairNotes:
    """Merge what ranks of one engine have noted, each by itself; notes of ranks of another start are left out."""
    ours = [one for one in notes if one.incarnation == incarnation]
    refused = {(peer.instance, peer.incarnation): peer for one in ours for peer in one.refused}
    links = dict.fromkeys(words for one in ours for words in one.links)
    return PairNotes(incarnation, tuple(refused.values())[:MOST_REFUSED], tuple(links)[:MOST_LINKS])


def disagreement(records: Sequence[EngineRecord]) -> str:
    """What the DP ranks of one engine do not agree about; empty when they do."""
    for record in records[1:]:
        if record.fingerprint != records[0].fingerprint:
            fields = fingerprint.difference(records[0].fingerprint, record.fingerprint)
            return f"DP ranks {records[0].dp_rank} and {record.dp_rank} differ: {fields}"
        if record.incarnation != records[0].incarnation:
            return f"DP ranks {records[0].dp_rank} and {record.dp_rank} are of two starts of the engine"
    return ""
