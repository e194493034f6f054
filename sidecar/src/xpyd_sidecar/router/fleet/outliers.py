"""Which instances fail while others do not, and are not picked for that. Pure: events in, instructions out; time is given.

    a leg fails, and the request ends well elsewhere ──▶ fault ──``FAULTS`` of them, ``SHARE`` of what ended──┐
    silence, or a failure that nobody else was asked about ─▶ suspected ──canary: bad here, answered there──┤
    another router has ejected it ───────────────────────────▶ suspected                                      │
    its core has requests and does not step (``stalled``) ────────────────────────────────────────────────────▼
                                                                   on trial ◀──canary answered, not before── ejected
                                                                      └── a fault, or a canary ──────────────▶
Laws
  1. A fault counts once for whoever it is of (a body, a key and a source), within ``WINDOW_S``.
  2. A canary convicts only where the same one was answered by another instance of the role, and only who gave no byte to
     anybody since it was sent.
  3. At most half of the instances of a role that could be picked are ejected, counting what other routers say; an only
     one never is. Where verdicts exceed that, all routers keep the same ones: those of the most routers, then by name.
  4. An ejection lasts ``EJECTED_S``, by how many there were, and then until a canary is answered. There is a canary at
     least every ``CANARY_S``.
  5. A verdict is of one incarnation in one role. Another router's is none: it makes an instance suspected.
  6. Bounds: ``MOST_FAULTS`` faults and ``MOST_FAILED`` failed legs of an instance, ``CANARIES_OPEN`` canaries of suspects.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from enum import Enum

import msgspec

from xpyd_sidecar.contract.ids import Incarnation, InstanceName, Role
from xpyd_sidecar.router.fleet.member import FleetMember

FAULTS = 3
SHARE = 0.2
WINDOW_S = 30.0
EJECTED_S = (5.0, 10.0, 20.0, 25.0)
CANARY_S = 15.0
TRIAL_S = 60.0
"""So long after an ejection one fault is enough."""
FORGOTTEN_S = 300.0
"""Without an ejection for so long the next one is the first."""
LOAD_S = 10.0
"""A leg that failed counts as load for so long."""
AGAIN_S = (5.0, 60.0)
"""How long after one that did not convict the next canary of a suspect may follow: the first time, and at most."""
CANARY_LOST_S = 120.0
"""A canary that nobody reported on for so long is made again."""
CANARIES_OPEN = 8
MOST_FAULTS = 64
MOST_FAILED = 256


class CanaryResult(Enum):
    """How a canary ended."""

    ANSWERED = "answered"
    """With any status below 500: whatever the engine thinks of it, it answers."""
    FAILED = "failed"
    SILENT = "silent"
    UNMADE = "unmade"
    """This process had no file, port or memory for it."""


class SendCanary(msgspec.Struct, frozen=True):
    """Instruction: ask an instance for a few tokens, and another of its role for the same; report with ``on_canary``."""

    instance: InstanceName
    incarnation: Incarnation
    reference: InstanceName | None
    """None: nobody is compared with, since it is ejected already."""


class EjectInstance(msgspec.Struct, frozen=True):
    """Instruction: pick it no more. ``hung``: it answers nothing, so what has not begun there is better elsewhere; of who
    is ejected already that may be found later.
    """

    instance: InstanceName
    incarnation: Incarnation
    reason: str
    hung: bool = False


class ReadmitInstance(msgspec.Struct, frozen=True):
    """Instruction: pick it again."""

    instance: InstanceName
    incarnation: Incarnation
    reason: str


OutlierInstruction = SendCanary | EjectInstance | ReadmitInstance


class _Conduct(msgspec.Struct):
    """Of one incarnation in one role."""

    incarnation: Incarnation
    role: Role
    faults: dict[Hashable, float] = {}
    """When each came, the oldest first."""
    wells: float = 0.0
    """Legs that ended well, with weights that fall over ``WINDOW_S``."""
    failed: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=MOST_FAILED))
    why: str = ""
    """Why it is ejected; empty: it is not."""
    ejections: int = 0
    changed_at: float = -math.inf
    """When it was ejected or readmitted last."""
    until: float = -math.inf
    trial_until: float = -math.inf
    due: float = math.inf
    """When a canary is to be sent."""
    asked_at: float = -math.inf
    open: bool = False
    again_s: float = AGAIN_S[0]
    told: bool = False
    """Other routers had ejected it when it was looked at last."""


def stalled_for(now: float, member: FleetMember) -> float:
    """For how long its core has had requests of this router without a step, a byte or another word of its agent; 0: for no
    longer than its own longest steps explain.
    """
    if member.core is None:
        return 0.0
    since = min(member.still_s, now - max(member.work_since, member.heard_at))
    return since if since > member.core.patience_s else 0.0


class Outliers:
    """Those of one router."""

    def __init__(self, router: str, members: Callable[[], Sequence[FleetMember]]) -> None:
        """``router``: this one's name, which other routers' verdicts are told from. ``members``: all instances."""
        self._router = router
        self._members = members
        self._conducts: dict[InstanceName, _Conduct] = {}
        self._ticked = math.inf

    # ---- events

    def on_failed(self, now: float, member: FleetMember) -> None:
        """A leg failed there, whoever is to blame: that is load for a while."""
        conduct = self._conduct(member)
        conduct.failed.append(now)
        member.failed = len(conduct.failed)

    def on_fault(self, now: float, member: FleetMember, who: Hashable, why: str) -> list[OutlierInstruction]:
        """A leg failed there, and the same request ended well on another instance. ``who``: whose request it was."""
        conduct = self._conduct(member)
        faults = conduct.faults
        faults.pop(who, None)
        faults[who] = now
        if len(faults) > MOST_FAULTS:
            del faults[next(iter(faults))]
        self._age(now, conduct)
        enough = 1 if now < conduct.trial_until else FAULTS
        if len(faults) < enough or len(faults) < SHARE * (len(faults) + conduct.wells + member.well):
            return []
        ended = round(len(faults) + conduct.wells + member.well)
        words = f"{len(faults)} of about {ended} legs failed that ended well elsewhere: {why}"
        return self._eject(now, member, conduct, words)

    def on_suspected(self, now: float, member: FleetMember) -> None:
        """It is silent, or a leg failed there and nobody else was asked: a canary will tell."""
        conduct = self._conduct(member)
        if not conduct.why and conduct.due == math.inf:
            conduct.due = max(now, conduct.asked_at + conduct.again_s)

    def on_canary(self, now: float, member: FleetMember, result: CanaryResult, detail: str, *,
                  answered: bool) -> list[OutlierInstruction]:
        """A canary ended. ``detail``: what was wrong. ``answered``: the other instance answered its own."""
        conduct = self._conduct(member)
        if not conduct.open:
            return []  # of the life before
        conduct.open = False
        if result is CanaryResult.UNMADE:
            conduct.due = now + 1.0
        elif conduct.why:
            if result is CanaryResult.ANSWERED and now >= conduct.until:
                return [self._readmit(now, member, conduct, "its canary was answered")]
            answers = result is CanaryResult.ANSWERED
            conduct.due = conduct.until if answers else max(now, conduct.asked_at + CANARY_S)
            if result is CanaryResult.SILENT and not member.hung and member.heard_at <= conduct.asked_at:
                return [EjectInstance(member.name, member.incarnation, conduct.why, hung=True)]
        elif result is not CanaryResult.ANSWERED and answered and member.heard_at <= conduct.asked_at:
            return self._eject(now, member, conduct, f"{detail}, and another instance answered the same", hung=True)
        else:
            conduct.again_s = min(2 * conduct.again_s, AGAIN_S[1])
        return []

    def on_tick(self, now: float) -> list[OutlierInstruction]:
        """Called every second."""
        passed, self._ticked = max(0.0, now - self._ticked), now
        members = self._members()
        here = {member.name: member for member in members}
        for name in self._conducts.keys() - here.keys():
            del self._conducts[name]
        out = [one for role in Role for one in self._within_bounds(now, [m for m in members if m.role is role])]
        room = CANARIES_OPEN - sum(one.open and not one.why for one in self._conducts.values())
        for member in members:
            told = any(name != self._router for name in member.ejected_by)
            member.stalled_s = stalled_for(now, member)
            if member.name not in self._conducts and not (member.well or told or member.stalled_s):
                continue
            conduct = self._conduct(member)
            conduct.wells = conduct.wells * math.exp(-passed / WINDOW_S) + member.well
            member.well = 0
            self._age(now, conduct)
            member.failed = len(conduct.failed)
            if told and not conduct.told:
                self.on_suspected(now, member)
            conduct.told = told
            out += self._stalls(now, member, conduct)
            canary = self._canary(now, member, conduct, room=room > 0)
            room -= canary is not None and not conduct.why
            out += [canary] if canary is not None else []
        return out

    # ---- parts

    def _conduct(self, member: FleetMember) -> _Conduct:
        known = self._conducts.get(member.name)
        if known is None or (known.incarnation, known.role) != (member.incarnation, member.role):
            known = self._conducts[member.name] = _Conduct(member.incarnation, member.role)
        return known

    def _age(self, now: float, conduct: _Conduct) -> None:
        """Forget what is old."""
        faults, failed = conduct.faults, conduct.failed
        while faults and now - next(iter(faults.values())) > WINDOW_S:
            del faults[next(iter(faults))]
        while failed and now - failed[0] > LOAD_S:
            failed.popleft()
        if not conduct.why and now - conduct.changed_at > FORGOTTEN_S:
            conduct.ejections = 0
        if conduct.open and now - conduct.asked_at > CANARY_LOST_S:
            conduct.open, conduct.due = False, now

    def _stalls(self, now: float, member: FleetMember, conduct: _Conduct) -> list[OutlierInstruction]:
        """A core that does not step needs no canary."""
        if not member.stalled_s or member.hung:
            return []
        if conduct.why:
            return [EjectInstance(member.name, member.incarnation, conduct.why, hung=True)]
        why = f"stalled: its core has requests and has not stepped for {member.stalled_s:.0f} s"
        return self._eject(now, member, conduct, why, hung=True)

    def _canary(self, now: float, member: FleetMember, conduct: _Conduct, *, room: bool) -> SendCanary | None:
        if now < conduct.due or conduct.open or not member.able:
            return None
        reference = None
        if not conduct.why:
            others = [m for m in self._members() if m.role is member.role and m is not member and m.pickable]
            if not others or not self._may_eject(member):
                conduct.due = math.inf  # nothing would follow
                return None
            if not room:
                return None
            reference = max(others, key=lambda m: (m.heard_at, m.name)).name
        conduct.open, conduct.asked_at, conduct.due = True, now, math.inf
        return SendCanary(member.name, member.incarnation, reference)

    def _away(self, able: Sequence[FleetMember]) -> list[FleetMember]:
        """Those that some router has ejected, of the most routers first."""
        votes = {m.name: bool(m.ejected) + sum(name != self._router for name in m.ejected_by) for m in able}
        return sorted((m for m in able if votes[m.name]), key=lambda m: (-votes[m.name], m.name))

    def _may_eject(self, member: FleetMember) -> bool:
        able = [m for m in self._members() if m.role is member.role and m.able]
        return len({m.name for m in self._away(able)} | {member.name}) <= len(able) // 2

    def _within_bounds(self, now: float, members: Sequence[FleetMember]) -> list[OutlierInstruction]:
        able = [m for m in members if m.able]
        beyond = self._away(able)[len(able) // 2:]
        return [self._readmit(now, m, self._conduct(m), "more than half of its role would be ejected")
                for m in beyond if m.ejected]

    def _eject(self, now: float, member: FleetMember, conduct: _Conduct, why: str, *,
               hung: bool = False) -> list[OutlierInstruction]:
        if conduct.why or not member.able or not self._may_eject(member):
            return []
        conduct.until = now + EJECTED_S[min(conduct.ejections, len(EJECTED_S) - 1)]
        conduct.why, conduct.changed_at = why, now
        conduct.ejections += 1
        conduct.due = min(conduct.until, now + CANARY_S)
        conduct.faults.clear()
        return [EjectInstance(member.name, member.incarnation, why, hung)]

    def _readmit(self, now: float, member: FleetMember, conduct: _Conduct, reason: str) -> OutlierInstruction:
        conduct.why, conduct.due, conduct.changed_at = "", math.inf, now
        conduct.trial_until, conduct.again_s = now + TRIAL_S, AGAIN_S[0]
        conduct.wells, member.well = 0.0, 0
        conduct.faults.clear()
        return ReadmitInstance(member.name, member.incarnation, reason)
