"""Which instances serve: what a router knows of each, from heartbeats, health probes and its attempts (upstream requests).

    known ──heartbeat: ready──▶ pickable ──heartbeat: draining──▶ no new attempts, open ones run on ──goodbye──▶ gone
                                  │  ▲
           connection refused or  │  │ a probe succeeded, or a new incarnation
           probe failed           ▼  │
                               suspended         heartbeats missed AND a probe failed ──▶ gone, its attempts are lost

Laws
  * An instance is one (name, incarnation). Another incarnation replaces it, and attempts on the old one are lost.
  * A heartbeat with a lower epoch than the known one is refused; a role changes only with a higher epoch. From then on the
    instance gets no new attempts in its old role, and those that are open run on.
  * One agent speaks for an instance: of two that send heartbeats, the one that began later. A heartbeat with a lower
    ``seq`` than the last one is refused.
  * Missed heartbeats alone evict no instance that has an address: a probe must fail, too. A silent instance is suspended
    by the first probe without an answer and evicted by the second, or at once by a probe that is refused or answered with
    an error. A refused connection suspends at once, whether heartbeats come or not.
  * Busy is not dead: while heartbeats come, a probe without an answer ends no attempt. But where the agent gets no answer
    either (state STARTING), and others take requests (of its role, or decode in place of prefill), the second such probe
    gives the attempts of the instance up, so that they go on elsewhere.
  * A suspended incarnation is pickable again only after a successful probe: an agent may call a dead engine ready.
  * At most one probe of an instance is open (after ``PROBE_LOST_S`` without a report it counts as lost), and none begins
    within ``PROBE_GAP_S`` of the last.
  * While this process itself stood still, no instance was silent.
  * An ejected instance (``outliers``) gets no new attempts, and those that are open run on.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from xpyd_sidecar.contract.fleet import FleetInstance
from xpyd_sidecar.contract.ids import Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.membership import GoodbyeMessage, Heartbeat, Up
from xpyd_sidecar.router.api.failover_modes import UNTOLD, EngineDefaults, told_of
from xpyd_sidecar.router.api.faults import FailureReason
from xpyd_sidecar.router.fleet import heartbeat_validation
from xpyd_sidecar.router.fleet.member import (
    PROBE_S,
    BeatRefused,
    FleetMember,
    HealthResult,
    InstanceLeaves,
    InstanceLost,
    Instruction,
    ProbeInstance,
    RosterChange,
)
from xpyd_sidecar.router.fleet.served_names import ServedNames

MAX_INSTANCES = 4096
"""Bound of the roster; instances beyond it are refused."""
PROBE_GAP_S = 1.0
PROBE_LOST_S = 30.0
"""A probe that nobody reported on for so long is made again."""
SOON_PROBE_S = 2.0
"""The least in which a probe is to be answered, however often there are beats."""
PROBES_OPEN = 64
"""Probes that a tick lets be open together; the others wait for the next one."""
UNANSWERED = 2
"""Probes without an answer that evict who is silent, and end the legs of whose agent has none either."""
STANDSTILL_S = 5.0
"""A tick that comes so long after the last one: the process was stopped, or its machine was."""


class Roster:
    """The instances of one service that a router knows. ``now`` and ``started`` are seconds of one monotonic clock."""

    def __init__(self, service: ServiceName, *, started: float, settle_s: float, missed_beats: int,
                 beside_engine: bool = False) -> None:
        """``settle_s``: seconds of agents' look-up and heartbeat intervals together. ``missed_beats``: heartbeat intervals
        after which an instance is silent. ``beside_engine``: agents learn of this router some time after its start.
        """
        self.service = service
        self._started, self._settle_s, self._beside_engine = started, settle_s, beside_engine
        self._since: float | None = None
        """Since when beats come."""
        self._heard = started
        """When the latest beat was taken."""
        self._members: dict[InstanceName, FleetMember] = {}
        self._missed = missed_beats
        self._ticked = math.inf
        self._awake = -math.inf
        """When this process last came back from standing still."""
        self.picks: dict[Role, tuple[FleetMember, ...]] | None = None
        """What ``pickable`` found; None since something changed."""
        self._served: ServedNames | None = None
        self._told: EngineDefaults | None = None
        self._told_last = UNTOLD
        self._named: list[FleetMember] | None = None
        self.on_change: Callable[[], None] = lambda: None
        """What others read here may be something else from now on."""

    # ---- what others read

    def is_settled(self, now: float) -> bool:
        """Whether every agent had the time to find this router and to send a heartbeat, so that the roster is complete.

        Agents look up the routers' name at an interval: all find a router within one such interval of the first that did,
        and send a heartbeat within one more. ``settle_s`` is both, counted from the router's start; beside an engine from
        the first heartbeat, and only while some come.
        """
        if not self._beside_engine:
            return self.has_waited_for_agents(now)
        return self._since is not None and not self._nobody_beats(now) and now - self._since >= self._settle_s

    def has_waited_for_agents(self, now: float) -> bool:
        """Whether ``settle_s`` seconds have passed since the start, in which agents that knew this router reconnect."""
        return now - self._started >= self._settle_s

    def _nobody_beats(self, now: float) -> bool:
        return now - self._heard >= self._settle_s

    def _hear(self, now: float) -> None:
        if self._since is None or self._nobody_beats(now):
            self._since = now
        self._heard = now

    def members(self) -> list[FleetMember]:
        """All known instances, sorted by name."""
        if self._named is None:
            self._named = [self._members[name] for name in sorted(self._members)]
        return self._named.copy()

    def find(self, name: InstanceName, incarnation: Incarnation) -> FleetMember | None:
        """The instance of this name if it still is of this incarnation, else None."""
        member = self._members.get(name)
        return member if member is not None and member.incarnation == incarnation else None

    def find_by_name(self, name: InstanceName) -> FleetMember | None:
        """The instance of this name, whatever its incarnation; None where it is not known."""
        return self._members.get(name)

    def pickable(self, role: Role) -> tuple[FleetMember, ...]:
        """Instances of a role that take new attempts, sorted by name (the same object until something changes)."""
        if self.picks is None:
            ready = [member for member in self.members() if member.pickable]
            self.picks = {kind: tuple(m for m in ready if m.role is kind) for kind in Role}
        return self.picks[role]

    def names(self) -> ServedNames:
        """Model names that a request may ask for, LoRA adapters included (the same object until something changes)."""
        if self._served is None:
            ready = [*self.pickable(Role.PREFILL), *self.pickable(Role.DECODE)]
            self._served = ServedNames(self._members.values(), ready)
        return self._served

    def engine_defaults(self) -> EngineDefaults:
        """What decode engines add to the sampling of requests: those that take new attempts, or all where none does. The
        same object until that changes.
        """
        if self._told is None:
            ready = self.pickable(Role.DECODE) or [m for m in self.members() if m.role is Role.DECODE]
            told = told_of(member.sampling for member in ready)
            self._told = self._told_last = self._told_last if told == self._told_last else told
        return self._told

    def fleet(self, now: float) -> tuple[FleetInstance, ...]:
        """The instances as ``GET /fleet`` reports them, sorted by name."""
        return tuple(FleetInstance(
            instance=m.name, role=m.role, epoch=m.epoch, state=m.state, incarnation=m.incarnation,
            fingerprint=m.fingerprint, http=m.http, control=m.control, model=m.model, load=m.load, drained=m.drained,
            in_flight=m.in_flight, beat_age_s=round(max(0.0, now - m.beat_at), 3), suspended=m.suspended,
            ejected=m.ejected, ejected_by=m.ejected_by, stalled_s=round(m.stalled_s, 1),
            refused=m.refused, links=m.links, adapters=m.adapters)
            for m in self.members())

    def why_not(self, role: Role) -> str:
        """Why no instance of a role takes new attempts, for clients: without the reasons, which may hold addresses."""
        here = [m for m in self.members() if m.role is role]
        if not here:
            return f"no {role} instance is known"
        shown = ", ".join(f"{m.name} {m.standing}" for m in here[:4])
        return f"no {role} instance is ready ({shown}{', …' if len(here) > 4 else ''})"

    # ---- events

    def on_message(self, now: float, message: Up) -> list[Instruction]:
        """Take a heartbeat or a goodbye. Raises BeatRefused: it was not taken; the text says why."""
        if isinstance(message, Heartbeat) and self.take_unchanged_beat(now, message) is not None:
            return []
        heartbeat_validation.refuse_foreign(self.service, message)
        return self._on_beat(now, message) if isinstance(message, Heartbeat) else self._on_goodbye(message)

    def take_unchanged_beat(self, now: float, beat: Heartbeat) -> FleetMember | None:
        """Take a heartbeat that comes in order and changes nothing but load and time, as nearly all do: no instruction
        follows from it. Returns its instance; None: nothing was taken, and ``on_message`` has to judge it.
        """
        member = self._members.get(beat.instance)
        if (member is None or beat.seq < member.seq or not member.matches(beat) or beat.leaving
                or beat.service != self.service or beat.v not in heartbeat_validation.VERSIONS):
            return None
        member.take_beat(now, beat)
        self._hear(now)
        return member

    def _on_beat(self, now: float, beat: Heartbeat) -> list[Instruction]:
        member = self._members.get(beat.instance)
        if member is None:
            return self._join(now, beat)
        heartbeat_validation.refuse_stale(member, beat, heard=not self.silent(now, member))
        out = [] if member.matches(beat) else self._change(member, beat)
        if beat.leaving:  # with each beat: what had nowhere to go may have by now
            out.append(InstanceLeaves(member.name, member.incarnation))
        member.take_beat(now, beat)
        self._hear(now)
        return out

    def _join(self, now: float, beat: Heartbeat) -> list[Instruction]:
        if len(self._members) >= MAX_INSTANCES:
            raise BeatRefused(f"the roster is full ({MAX_INSTANCES} instances)")
        heartbeat_validation.check(beat)
        member = self._members[beat.instance] = FleetMember(beat.instance)
        member.become(beat)
        member.begin()
        member.take_beat(now, beat)
        self._hear(now)
        self._changed()
        return [RosterChange(beat.instance, f"joined as {beat.role}, {beat.state}", "joined"),
                *(self._probe(now, member) if member.suspended else [])]

    def _change(self, member: FleetMember, beat: Heartbeat) -> list[Instruction]:
        heartbeat_validation.check(beat)
        out: list[Instruction] = []
        if beat.agent != member.agent:
            out.append(RosterChange(member.name, f"another agent speaks for it: {member.agent} → {beat.agent}", "agent"))
        began = member.incarnation != beat.incarnation
        if began and member.incarnation:
            out.append(InstanceLost(member.name, member.incarnation, FailureReason(f"{member.name} was restarted")))
        if (beat.role, beat.state) != (member.role, member.state):
            kind = "state" if beat.role is member.role else "role"
            out.append(RosterChange(member.name, f"{member.role} {member.state} → {beat.role} {beat.state}", kind))
        if beat.refused != member.refused:
            refused = ", ".join(f"{one.instance} ({one.reason})" for one in beat.refused)
            what = f"cannot take KV from {refused}" if refused else "may take KV from all again"
            out.append(RosterChange(member.name, what, "pairs"))
        if beat.role is not member.role:
            member.ejected, member.hung = "", False  # for what it did in the other one
        member.become(beat)
        if began:
            member.begin()
        self._changed()
        return out

    def _on_goodbye(self, goodbye: GoodbyeMessage) -> list[Instruction]:
        member = self._members.get(goodbye.instance)
        if member is None:
            return []
        heartbeat_validation.refuse_replaced(member, goodbye)
        # Its attempts are not lost: an engine that ends in order finishes them, or their connections break.
        self._forget(member)
        return [RosterChange(goodbye.instance, "said goodbye", "left")]

    def on_refused(self, now: float, name: InstanceName, incarnation: Incarnation, reason: str) -> list[Instruction]:
        """An attempt's connection was refused: suspend the instance at once, and probe it."""
        member = self.find(name, incarnation)
        if member is None:
            return []
        return self._suspend(member, reason) + self._probe(now, member)

    def on_verdict(self, name: InstanceName, incarnation: Incarnation, ejected: str, why: str = "", *,
                   hung: bool = False) -> list[Instruction]:
        """An instance fails while others do not, or no longer does (``outliers``). ``ejected``: why it gets no new
        attempts; empty: it gets them again, because of ``why``. ``hung``: it answers nothing.
        """
        member = self.find(name, incarnation)
        if member is None:
            return []
        before, member.ejected, member.hung = member.ejected, ejected, hung
        if before == ejected:
            return []
        self._changed()
        if ejected:
            return [RosterChange(name, f"ejected: {ejected}", "ejected")]
        return [RosterChange(name, f"picked again: {why}", "readmitted")]

    def on_doubt(self, now: float, name: InstanceName, incarnation: Incarnation) -> list[Instruction]:
        """An engine broke a connection, failed a request or was silent for long: probe it, but still pick it.

        One broken connection is not evidence enough: with few instances, suspending them would refuse every request.
        """
        member = self.find(name, incarnation)
        if member is None:
            return []
        member.doubted = True
        return self._probe(now, member)

    def on_probe(self, now: float, name: InstanceName, incarnation: Incarnation, result: HealthResult,
                 detail: str) -> list[Instruction]:
        """A probe has ended: resume, suspend or evict the instance, or give its attempts up. ``detail``: what was wrong."""
        member = self.find(name, incarnation)
        if member is None:
            return []
        member.probing = member.doubted = False
        if result is HealthResult.HEALTHY:
            member.unanswered = member.stuck = 0
            if not member.suspended:
                return []
            reason, member.suspended = member.suspended, ""
            self._changed()
            return [RosterChange(name, f"healthy again ({reason})", "resumed")]
        why = FailureReason(f"{name} failed its health check", detail)
        if self.silent(now, member):
            why = FailureReason(f"{name} was silent for {now - member.beat_at:.1f} s and its health check failed", detail)
            member.unanswered += result is HealthResult.SILENT
            if result is HealthResult.DEAD or member.unanswered >= UNANSWERED:
                self._forget(member)
                return [RosterChange(name, f"evicted: {why.full}", "evicted"), InstanceLost(name, incarnation, why)]
            return self._suspend(member, why.full)
        if result is HealthResult.SILENT:
            return self._unheard(member, why)
        lost = member.in_flight > 0 or not member.suspended
        suspended = self._suspend(member, detail or "health check failed")
        return suspended + ([InstanceLost(name, incarnation, why)] if lost else [])

    def _unheard(self, member: FleetMember, why: FailureReason) -> list[Instruction]:
        """A probe had no answer though heartbeats come. The second one gives the attempts up where the agent gets no answer
        either and another instance can take them; else they wait, since the engine may only stand still for a while.
        """
        if member.state is not State.STARTING or not member.in_flight:
            return []
        member.stuck += 1
        others = self.pickable(member.role) or self.pickable(Role.DECODE)  # decode can do what prefill does
        if member.stuck < UNANSWERED or not others:
            return []
        return [*self._suspend(member, why.full), InstanceLost(member.name, member.incarnation, why)]

    def on_tick(self, now: float) -> list[Instruction]:
        """Called at least once per heartbeat interval: probe instances that are silent, suspended or suspected (at most
        ``PROBES_OPEN`` at a time), and evict silent ones without an HTTP address.
        """
        if now - self._ticked > STANDSTILL_S:
            # Beats that came meanwhile wait in the socket; whoever is dead is found one silence later.
            if not self._nobody_beats(self._ticked):
                self._heard = now
            self._awake = now
        self._ticked = now
        out: list[Instruction] = []
        asked: list[FleetMember] = []
        for member in list(self._members.values()):
            silent = self.silent(now, member)
            if silent and not member.http:  # nothing to probe
                self._forget(member)
                out.append(RosterChange(member.name, "evicted: silent before it had an address", "evicted"))
            elif silent or member.suspended or member.doubted:
                asked.append(member)
        room = PROBES_OPEN - sum(member.probing for member in asked)
        for member in sorted(asked, key=lambda m: m.probe_at):  # who was asked longest ago, first
            probes = self._probe(now, member) if room > 0 else []
            room -= len(probes)
            out += probes
        return out

    def _suspend(self, member: FleetMember, reason: str) -> list[Instruction]:
        if member.suspended:
            return []
        member.suspended = reason
        self._changed()
        return [RosterChange(member.name, f"suspended: {reason}", "suspended")]

    def _forget(self, member: FleetMember) -> None:
        del self._members[member.name]
        self._changed()

    def _changed(self) -> None:
        self.picks = self._served = self._named = self._told = None
        self.on_change()

    def silent(self, now: float, member: FleetMember) -> bool:
        """Whether the agent of an instance has sent no heartbeat for ``missed_beats`` of its intervals, and this process
        has run for as long since it last stood still.
        """
        silence = self._missed * member.interval_s
        return now - member.beat_at > silence and now - self._awake > silence

    def _probe(self, now: float, member: FleetMember) -> list[Instruction]:
        gap = PROBE_LOST_S if member.probing else PROBE_GAP_S
        if not member.http or now - member.probe_at < gap:
            return []
        patience_s = self._patience_s(now, member)
        member.probing, member.probe_at = True, now
        first, *others = dict.fromkeys(member.http)
        return [ProbeInstance(member.name, member.incarnation, first, tuple(others), patience_s)]

    def _patience_s(self, now: float, member: FleetMember) -> float:
        """Seconds in which a probe is to be answered: ``PROBE_S`` while heartbeats come. For a silent instance the first
        probe since the last heartbeat, without an answer to which it is only suspended, has two heartbeat intervals (at
        least ``SOON_PROBE_S``, at most ``PROBE_S``); a later one, which may evict, has the rest of ``2 * PROBE_S``.
        """
        if not self.silent(now, member):
            return PROBE_S
        first_s = min(PROBE_S, max(SOON_PROBE_S, 2 * member.interval_s))
        return first_s if member.probe_at < member.beat_at else 2 * PROBE_S - first_s
