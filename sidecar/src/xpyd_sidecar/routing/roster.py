"""Who serves: what the router knows of each instance, from heartbeats, probes and the data path.

    heard ──beat: ready──▶ picked ──beat: draining──▶ not picked, its legs run on ──goodbye──▶ gone
                             │  ▲
      connection refused or  │  │ next beat that says ready, or a good probe
      probe failed           ▼  │
                          suspended                beats missed AND a probe failed ──▶ gone, its legs are lost

Laws
  * An instance is one (name, incarnation). A beat with another incarnation replaces it: legs on the old one are lost.
  * A beat with a lower epoch than known is refused; roles change only with a higher epoch.
  * Silence alone evicts nobody: a probe must fail too. A refused connection suspends at once, without waiting for beats.
  * At most one probe of an instance is open, and none is made within ``PROBE_GAP_S`` of the last.
"""

from __future__ import annotations

import math
from enum import Enum

import msgspec

from xpyd_sidecar.contract.fleet import FleetInstance
from xpyd_sidecar.contract.ids import Fingerprint, HostPort, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.membership import Goodbye, Heartbeat, Load, Up

VERSIONS = frozenset({1})
"""Wire versions understood."""
MAX_INSTANCES = 4096
"""Bound of the roster; instances beyond it are refused."""
PROBE_GAP_S = 1.0
PROBE_LOST_S = 30.0
"""A probe that nobody reported on for so long is made again."""
INTERVAL_RANGE_S = (0.05, 60.0)
"""Beat intervals accepted; an agent's word outside of it is taken as the nearer end."""


class Probed(Enum):
    """How a health probe ended."""

    HEALTHY = "healthy"
    DEAD = "dead"
    """Connection refused or broken, or an error status: nobody serves there."""
    SILENT = "silent"
    """No answer in time: perhaps only busy, so not evidence enough without missed beats."""


class Member:
    """One instance. Policies read ``name``, ``load``, ``in_flight`` and ``in_flight_at_beat``; only the roster writes."""

    __slots__ = ("beat_at", "control", "drained", "epoch", "fingerprint", "http", "in_flight", "in_flight_at_beat",
                 "incarnation", "interval_s", "load", "max_model_len", "model", "name", "probe_at", "probing",
                 "role", "state", "suspended", "turn")

    def __init__(self, name: InstanceName) -> None:
        self.name = name
        self.role = Role.DECODE
        self.epoch = 0
        self.state = State.STARTING
        self.incarnation = Incarnation("")
        self.http: tuple[HostPort, ...] = ()
        self.control: tuple[HostPort, ...] = ()
        self.model = ""
        self.max_model_len = 0
        self.fingerprint = Fingerprint("")
        self.load = Load()
        self.drained = False
        self.interval_s = 3.0
        self.beat_at = 0.0
        self.suspended = ""
        self.probing = False
        self.probe_at = -math.inf
        self.in_flight = 0
        self.in_flight_at_beat = 0
        self.turn = 0

    @property
    def pickable(self) -> bool:
        """Whether new legs may go there."""
        return self.state is State.READY and not self.suspended and bool(self.http) and bool(self.incarnation)

    def __repr__(self) -> str:
        return f"Member({self.name}, {self.role}, {self.state}, {self.suspended or 'ok'})"


class Probe(msgspec.Struct, frozen=True):
    """Instruction: ask ``GET /health`` of this address and report with ``on_probe``."""

    instance: InstanceName
    incarnation: Incarnation
    address: HostPort


class Lost(msgspec.Struct, frozen=True):
    """Instruction: legs on this incarnation will never answer."""

    instance: InstanceName
    incarnation: Incarnation
    reason: str


class Changed(msgspec.Struct, frozen=True):
    """Instruction: say so in the log."""

    instance: InstanceName
    what: str


Instruction = Probe | Lost | Changed


class Refused(Exception):
    """A message was not taken; the reason goes into the acknowledgement."""


class Roster:
    """The instances of one service. Times are seconds of one monotonic clock."""

    def __init__(self, service: ServiceName, *, started: float, settle_s: float, missed_beats: int,
                 beside_engine: bool = False) -> None:
        """``beside_engine``: agents are told of this router at some time, not before its start."""
        self.service = service
        self._beside_engine = beside_engine
        self._heard_since: float | None = None
        self._heard = started
        self._members: dict[InstanceName, Member] = {}
        self._started = started
        self._settle_s = settle_s
        self._missed = missed_beats
        self._picks: dict[Role, tuple[Member, ...]] | None = None
        self._models: list[str] | None = None

    # ---- what others read

    def settled(self, now: float) -> bool:
        """Every agent had the time to find this router and to beat once.

        Agents look up the routers' name again and again, so all of them find a router within one such interval of the first
        that did; until then the router knows only some of them.
        """
        if not self._beside_engine:
            return self.listened(now)
        return self._heard_since is not None and not self._unheard(now) and now - self._heard_since >= self._settle_s

    def listened(self, now: float) -> bool:
        """Agents that knew this router before its start had the time to come back."""
        return now - self._started >= self._settle_s

    def _unheard(self, now: float) -> bool:
        return now - self._heard >= self._settle_s

    def members(self) -> list[Member]:
        """All, by name."""
        return [self._members[name] for name in sorted(self._members)]

    def find(self, name: InstanceName, incarnation: Incarnation) -> Member | None:
        """The member, if it still is this incarnation."""
        member = self._members.get(name)
        return member if member is not None and member.incarnation == incarnation else None

    def pickable(self, role: Role) -> tuple[Member, ...]:
        """Instances of a role that take new legs, by name (the same object until something changes)."""
        if self._picks is None:
            ready = [member for member in self.members() if member.pickable]
            self._picks = {kind: tuple(m for m in ready if m.role is kind) for kind in Role}
        return self._picks[role]

    def models(self) -> list[str]:
        """Model names that instances say they serve, sorted."""
        if self._models is None:
            self._models = sorted({member.model for member in self._members.values() if member.model})
        return list(self._models)

    def fleet(self, now: float) -> tuple[FleetInstance, ...]:
        """What ``GET /fleet`` says of the instances."""
        return tuple(FleetInstance(
            instance=m.name, role=m.role, epoch=m.epoch, state=m.state, incarnation=m.incarnation,
            fingerprint=m.fingerprint, http=m.http, control=m.control, model=m.model, load=m.load, drained=m.drained,
            in_flight=m.in_flight, beat_age_s=round(max(0.0, now - m.beat_at), 3), suspended=m.suspended)
            for m in self.members())

    def why_not(self, role: Role) -> str:
        """Why nobody of a role can be picked, in words for a person."""
        here = [m for m in self.members() if m.role is role]
        if not here:
            return f"no {role} instance is known"
        shown = ", ".join(f"{m.name} {'suspended: ' + m.suspended if m.suspended else m.state}" for m in here[:4])
        return f"no {role} instance is ready ({shown}{', …' if len(here) > 4 else ''})"

    # ---- legs of this router

    def leg_opened(self, member: Member) -> None:
        """A leg was sent to it."""
        member.in_flight += 1

    def next_rank(self, member: Member) -> int:
        """Its DP rank whose turn it is; 0 where it has one."""
        turn = member.turn
        member.turn += 1
        return turn % max(len(member.http), len(member.control), 1)

    def leg_closed(self, member: Member) -> None:
        """A leg on it ended in whatever way."""
        member.in_flight -= 1

    # ---- events

    def on_message(self, now: float, message: Up) -> list[Instruction]:
        """A heartbeat or a goodbye.

        Raises:
            Refused: it was not taken, and why.
        """
        if message.v not in VERSIONS:
            raise Refused(f"version {message.v} is not understood here (known: {', '.join(map(str, sorted(VERSIONS)))})")
        if message.service != self.service:
            raise Refused(f"this router serves {self.service!r}, not {message.service!r}")
        return self._on_beat(now, message) if isinstance(message, Heartbeat) else self._on_goodbye(message)

    def _on_beat(self, now: float, beat: Heartbeat) -> list[Instruction]:
        if self._heard_since is None or self._unheard(now):
            self._heard_since = now
        self._heard = now
        member = self._members.get(beat.instance)
        out: list[Instruction] = []
        if member is None:
            if len(self._members) >= MAX_INSTANCES:
                raise Refused(f"the roster is full ({MAX_INSTANCES} instances)")
            member = self._members[beat.instance] = Member(beat.instance)
            out.append(Changed(beat.instance, f"joined as {beat.role}, {beat.state}"))
        elif beat.epoch < member.epoch:
            raise Refused(f"epoch {beat.epoch} is older than {member.epoch}")
        else:
            if beat.epoch == member.epoch and beat.role is not member.role:
                raise Refused(f"role {beat.role} without a new epoch: epoch {beat.epoch} is {member.role}")
            if member.incarnation and beat.incarnation != member.incarnation:
                out.append(Lost(member.name, member.incarnation, f"{member.name} was restarted"))
                member.suspended, member.probing, member.probe_at = "", False, -math.inf  # said of the old one
            if (beat.role, beat.state) != (member.role, member.state):
                out.append(Changed(member.name, f"{member.role} {member.state} → {beat.role} {beat.state}"))
        if beat.state is State.READY and member.suspended and not member.probing:
            out.append(Changed(member.name, f"no longer suspended ({member.suspended})"))
            member.suspended = ""
        member.role, member.epoch, member.state = beat.role, beat.epoch, beat.state
        member.incarnation, member.http, member.control = beat.incarnation, beat.http, beat.control
        member.model, member.max_model_len, member.fingerprint = beat.model, beat.max_model_len, beat.fingerprint
        member.load, member.drained = beat.load, beat.drained
        member.interval_s = min(max(beat.interval_s, INTERVAL_RANGE_S[0]), INTERVAL_RANGE_S[1])
        member.beat_at = now
        member.in_flight_at_beat = member.in_flight
        self._changed()
        return out

    def _on_goodbye(self, goodbye: Goodbye) -> list[Instruction]:
        member = self._members.get(goodbye.instance)
        if member is None:
            return []
        if goodbye.incarnation and goodbye.incarnation != member.incarnation:
            raise Refused(f"goodbye of incarnation {goodbye.incarnation}, which has been replaced")
        # Its legs are not lost: an engine that ends in order finishes what it has begun; broken connections tell the rest.
        del self._members[goodbye.instance]
        self._changed()
        return [Changed(goodbye.instance, "said goodbye")]

    def on_refused(self, now: float, name: InstanceName, incarnation: Incarnation, reason: str) -> list[Instruction]:
        """The data path could not connect: suspend at once, and probe."""
        member = self.find(name, incarnation)
        if member is None:
            return []
        out: list[Instruction] = []
        if not member.suspended:
            out.append(Changed(name, f"suspended: {reason}"))
            member.suspended = reason
            self._changed()
        return out + self._probe(now, member)

    def on_doubt(self, now: float, name: InstanceName, incarnation: Incarnation) -> list[Instruction]:
        """An engine broke a connection, failed a request or was silent for long: ask whether it lives, but still pick it.

        One broken connection is not evidence enough: with few instances, suspending them would refuse everybody.
        """
        member = self.find(name, incarnation)
        return [] if member is None else self._probe(now, member)

    def on_probe(self, now: float, name: InstanceName, incarnation: Incarnation, result: Probed,
                 detail: str) -> list[Instruction]:
        """A probe ended."""
        member = self.find(name, incarnation)
        if member is None:
            return []
        member.probing = False
        if result is Probed.HEALTHY:
            if not member.suspended:
                return []
            reason, member.suspended = member.suspended, ""
            self._changed()
            return [Changed(name, f"healthy again ({reason})")]
        if self._silent(now, member):
            del self._members[name]
            self._changed()
            reason = f"{name} was silent for {now - member.beat_at:.1f} s and its health check failed: {detail}"
            return [Changed(name, f"evicted: {reason}"), Lost(name, incarnation, reason)]
        if result is Probed.SILENT:
            return []
        out: list[Instruction] = [Lost(name, incarnation, f"{name} failed its health check: {detail}")]
        if not member.suspended:
            out.insert(0, Changed(name, f"suspended: {detail}"))
        member.suspended = detail or "health check failed"
        self._changed()
        return out

    def on_tick(self, now: float) -> list[Instruction]:
        """Once per beat interval or oftener: probe who is silent or suspended."""
        out: list[Instruction] = []
        for member in list(self._members.values()):
            if self._silent(now, member):
                if not member.http:  # nothing to probe
                    del self._members[member.name]
                    self._changed()
                    out.append(Changed(member.name, "evicted: silent before it had an address"))
                    continue
                out += self._probe(now, member)
            elif member.suspended:
                out += self._probe(now, member)
        return out

    def _changed(self) -> None:
        self._picks = self._models = None

    def _silent(self, now: float, member: Member) -> bool:
        return now - member.beat_at > self._missed * member.interval_s

    @staticmethod
    def _probe(now: float, member: Member) -> list[Instruction]:
        gap = PROBE_LOST_S if member.probing else PROBE_GAP_S
        if not member.http or now - member.probe_at < gap:
            return []
        member.probing, member.probe_at = True, now
        return [Probe(member.name, member.incarnation, member.http[0])]
