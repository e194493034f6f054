"""One instance as a router sees it and as a request is sent to it, and what a roster tells its caller to do."""

from __future__ import annotations

import math
from enum import Enum
from operator import attrgetter

import msgspec

from xpyd_sidecar.contract.adapters import AdapterReport
from xpyd_sidecar.contract.core_steps import CoreSteps
from xpyd_sidecar.contract.ids import AgentId, Fingerprint, HostPort, Incarnation, InstanceName, Role, State
from xpyd_sidecar.contract.liveness import RestartWish
from xpyd_sidecar.contract.membership import Heartbeat, Load, Sampling, Up
from xpyd_sidecar.contract.pair_notes import RefusedPeer
from xpyd_sidecar.router.api.faults import FailureReason

PROBE_S = 5.0
"""In which a probe is to be answered."""
INTERVAL_RANGE_S = (0.05, 60.0)
"""Beat intervals accepted; an agent's word outside of it is taken as the nearer end."""

TOLD = ("incarnation", "state", "agent", "epoch", "role", "http", "control", "fingerprint", "model", "max_model_len",
        "also", "adapters", "sampling", "refused", "links", "ejected_by", "poisons", "restart")
"""What a beat says of what an instance is: the fields of a member that only change when it becomes another."""
_told = attrgetter(*TOLD)


class HealthResult(Enum):
    """How a health probe ended."""

    HEALTHY = "healthy"
    DEAD = "dead"
    """Connection refused or broken, or an error status: nobody serves there."""
    SILENT = "silent"
    """No answer in time: perhaps only busy, so not evidence enough without missed beats."""


class FleetMember(msgspec.Struct, eq=False):
    """One instance. Policies read ``name``, ``load`` and the counts of legs; the roster writes, and who counts legs."""

    name: InstanceName
    role: Role = Role.DECODE
    epoch: int = 0
    state: State = State.STARTING
    incarnation: Incarnation = Incarnation("")
    agent: AgentId = AgentId("")
    seq: int = -1
    http: tuple[HostPort, ...] = ()
    control: tuple[HostPort, ...] = ()
    model: str = ""
    max_model_len: int = 0
    also: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    """What it answers to: ``model`` and ``also``."""
    adapters: AdapterReport | None = None
    sampling: Sampling | None = None
    fingerprint: Fingerprint = Fingerprint("")
    refused: tuple[RefusedPeer, ...] = ()
    """Prefill engines whose KV it cannot take."""
    links: tuple[str, ...] = ()
    """Words on links of it that are worse than they could be."""
    load: Load = Load()
    drained: bool = False
    interval_s: float = 3.0
    beat_at: float = 0.0
    suspended: str = ""
    """Why it is not picked."""
    ejected: str = ""
    """Why it is not picked though it lives (``outliers``)."""
    core: CoreSteps | None = None
    """How far its core had got, by its latest beat."""
    still_s: float = 0.0
    """For how long beats have said the same of that."""
    work_since: float = math.inf
    """Since when a leg of this router is there that its core should work on; infinity: there is none."""
    stalled_s: float = 0.0
    """Its core has such legs and has not stepped for so long, which is too long; 0: it has not."""
    hung: bool = False
    """For that it answers nothing."""
    ejected_by: tuple[str, ...] = ()
    """Routers that say so, by its latest beat."""
    poisons: tuple[str, ...] = ()
    """What routers refuse since engines died of it, by its latest beat."""
    restart: RestartWish = RestartWish.NONE
    """Whether it stands still and is to be restarted, by its latest beat."""
    still_since: float = math.inf
    """Since when its beats say so; infinity: they do not."""
    well: int = 0
    """Legs that ended well there since ``Outliers`` looked last."""
    failed: int = 0
    """Legs of this router that failed there a short while ago."""
    queued_tokens: int = 0
    """Of prompts of this router's legs there that have no byte of an answer yet, about."""
    uncached_tokens: int = 0
    """Of those, that it is not believed to have in its cache."""
    sent_tokens: int = 0
    """Such ones that this router has sent there since the last beat."""
    computed_per_s: float = 0.0
    """Tokens of prompts that its core computes while some wait, by its beats; 0: not known."""
    heard_at: float = -math.inf
    """When it last gave a byte to a leg of this router, as far as was looked at."""
    doubted: bool = False
    """A probe is owed."""
    probing: bool = False
    probe_at: float = -math.inf
    unanswered: int = 0
    """Probes without an answer since the last beat or good probe."""
    stuck: int = 0
    """Those since its agent last had an answer, or a probe."""
    in_flight: int = 0
    in_flight_at_beat: int = 0
    prefixes_seq: int = 0
    """``seq`` of the message about its cache that was taken last; 0: none was."""
    ended: int = 0
    """Legs of this router that ended since it was last looked at (``ConcurrencyLimits.look``)."""

    @property
    def able(self) -> bool:
        """Whether new legs could go there, whatever became of earlier ones."""
        return self.state is State.READY and not self.suspended and bool(self.http) and bool(self.incarnation)

    @property
    def pickable(self) -> bool:
        """Whether new legs may go there."""
        return not self.ejected and self.able

    @property
    def standing(self) -> str:
        """Its state, in a word."""
        return "suspended" if self.suspended else "ejected" if self.ejected and self.able else self.state.value

    def matches(self, beat: Heartbeat) -> bool:
        """Whether a beat says nothing new but load and time: most do, and must cost next to nothing."""
        return _told(beat) == _told(self)

    def take_beat(self, now: float, beat: Heartbeat) -> None:
        """Take the part of a beat that changes from beat to beat."""
        self.seq = beat.seq
        before, prompts = self.load.prompts, beat.load.prompts
        if before is not None and prompts is not None and now > self.beat_at and prompts.computed > before.computed:
            rate = (prompts.computed - before.computed) / (now - self.beat_at)
            busy = before.queued > 0 and prompts.queued > 0
            self.computed_per_s = (rate + self.computed_per_s) / 2 if busy else max(rate, self.computed_per_s)
        self.load, self.drained = beat.load, beat.drained
        moves = beat.core is None or self.core is None or beat.core.turns != self.core.turns
        # What is between two beats counts once, so that a time in which nobody beat proves nothing.
        self.still_s = 0.0 if moves else self.still_s + min(max(0.0, now - self.beat_at), 2 * self.interval_s)
        self.core = beat.core
        self.still_since = min(self.still_since, now) if beat.restart else math.inf
        if beat.interval_s != self.interval_s:
            self.interval_s = min(max(beat.interval_s, INTERVAL_RANGE_S[0]), INTERVAL_RANGE_S[1])
        self.beat_at = now
        self.unanswered = 0
        if beat.state is not State.STARTING:
            self.stuck = 0
        self.in_flight_at_beat, self.sent_tokens = self.in_flight, 0

    def become(self, beat: Heartbeat) -> None:
        """Take the part of a beat that says what the instance is."""
        for name in TOLD:
            setattr(self, name, getattr(beat, name))
        self.names = frozenset((beat.model, *beat.also) if beat.model else beat.also)

    def begin(self) -> None:
        """A new incarnation: what was said of the one before says nothing of it."""
        self.suspended = self.ejected = ""
        self.well, self.failed, self.hung = 0, 0, False
        self.core, self.still_s, self.stalled_s = None, 0.0, 0.0
        self.computed_per_s = 0.0
        self.heard_at = -math.inf
        self.prefixes_seq = 0
        self.probing, self.doubted, self.probe_at = False, False, -math.inf


class DeathVerdict(Enum):
    """How an incarnation ended, or that it did not: which ends are a death by itself.

    its agent beats, and GET /health is refused, broken off or answered with an error   DIED
    it did not drain, and another incarnation beats in its place                         DIED: it was restarted at once
    GET /health is answered with success                                                 LIVES
    it drains, or has said goodbye                                                       LIVES: it ends in order
    its agent is silent as well                                                          LOST with its machine
    no answer to GET /health in time                                                     nothing is known

    Known weakness: where a machine goes in such a way that its ports are refused at once, the engine counts as dead until
    the silence of its agent is noticed, and as lost from then on.
    """

    DIED = "died"
    LIVES = "lives"
    LOST = "lost"


def by_probe(member: FleetMember | None, result: HealthResult, *, silent: bool) -> DeathVerdict | None:
    """By a probe of the incarnation that ``member`` was before; None: nothing is known. ``silent``: its agent is."""
    if result is HealthResult.HEALTHY:
        return DeathVerdict.LIVES
    if member is None:
        return None
    if silent:
        return DeathVerdict.LOST
    if result is HealthResult.SILENT:
        return None
    return DeathVerdict.LIVES if member.state is State.DRAINING else DeathVerdict.DIED


def by_message(member: FleetMember | None, message: Up) -> tuple[Incarnation, DeathVerdict] | None:
    """By a message that was taken, of the incarnation that was there before it; None: it says nothing of one."""
    if member is None or not member.incarnation:
        return None
    if not isinstance(message, Heartbeat):
        return member.incarnation, DeathVerdict.LIVES
    if message.incarnation == member.incarnation:
        return None
    return member.incarnation, DeathVerdict.LIVES if member.state is State.DRAINING else DeathVerdict.DIED


class EngineTarget(msgspec.Struct, frozen=True):
    """Where a leg goes."""

    instance: InstanceName
    incarnation: Incarnation
    fingerprint: Fingerprint
    http: HostPort
    control: HostPort
    """KV control address of the chosen DP rank; empty where the instance has none."""
    member: FleetMember
    """Whose load its legs are."""
    dp_rank: int | None = None
    """Set where one HTTP server stands before several ranks: which of its own it is, told by a header."""

    def rank_headers(self) -> list[tuple[bytes, bytes]]:
        """What tells a server that stands before several ranks which of them is meant."""
        return [] if self.dp_rank is None else [(b"x-data-parallel-rank", b"%d" % self.dp_rank)]


class Pair(msgspec.Struct, frozen=True):
    """What a request gets."""

    decode: EngineTarget
    prefill: EngineTarget | None


class ProbeInstance(msgspec.Struct, frozen=True):
    """Instruction: ask ``GET /health`` of these addresses and report the worst with ``on_probe``."""

    instance: InstanceName
    incarnation: Incarnation
    address: HostPort
    others: tuple[HostPort, ...] = ()
    """Further servers, of ranks that do not share the first one's."""
    patience_s: float = PROBE_S
    """Without an answer for so long it is over."""


class InstanceLost(msgspec.Struct, frozen=True):
    """Instruction: legs on this incarnation will never answer."""

    instance: InstanceName
    incarnation: Incarnation
    reason: FailureReason


class InstanceLeaves(msgspec.Struct, frozen=True):
    """Instruction: this incarnation ends soon; streams on it that can go on elsewhere should, while it still runs."""

    instance: InstanceName
    incarnation: Incarnation


class RosterChange(msgspec.Struct, frozen=True):
    """Instruction: say so in the log, and count it by its kind."""

    instance: InstanceName
    what: str
    kind: str = "state"
    """For counting: joined, state, role, agent, pairs, suspended, resumed, ejected, readmitted, evicted, left."""


Instruction = ProbeInstance | InstanceLost | InstanceLeaves | RosterChange


class BeatRefused(Exception):
    """A message was not taken; the reason goes into the acknowledgement."""

    result = "refused"
    """As what it is counted."""


class Undecodable(BeatRefused):
    """It could not be read."""

    result = "undecodable"
