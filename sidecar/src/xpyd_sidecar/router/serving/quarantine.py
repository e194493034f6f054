"""Requests that end engines: who waits, who goes alone, who is refused (``serving.poison_ledger`` says which).

    a leg breaks ──on_broken_leg──▶ Ledger ──GO──▶ the request goes on at once, as if this were not here
                                           └─else──▶ it is held ──▶ verdict, or its turn ──▶ ``go_on``
                                                           └─────▶ convicted ──▶ ``end_with``
    watch ──on_verdict──▶ Ledger ◀──sampled── requests that end well
    other routers ──acknowledgements, beats──▶ Ledger

A router without deaths pays next to nothing: hashes are made of requests whose leg broke, and of others only while there is
evidence (``watching``, ``alert``); labels of ``SAMPLED`` requests a second, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from xpyd_sidecar.contract.ids import Incarnation, InstanceName, Role
from xpyd_sidecar.contract.membership import MAX_POISONS
from xpyd_sidecar.router.api.bodies import RequestHash
from xpyd_sidecar.router.api.faults import HttpFault, poisonous, unavailable
from xpyd_sidecar.router.api.labels import Labels
from xpyd_sidecar.router.fleet.member import DeathVerdict, EngineTarget
from xpyd_sidecar.router.observing.record import Record
from xpyd_sidecar.router.serving.likeness import LabelVerdict
from xpyd_sidecar.router.serving.poison_ledger import Conviction, Ledger, Word

if TYPE_CHECKING:
    import asyncio

    from xpyd_sidecar.router.fleet.roster import Roster

logger = logging.getLogger(__name__)

MAX_HELD = 1024
"""Requests that are held at a time; one more is answered with 503."""
SAMPLED = 16
"""Requests that ended well of which labels are taken in a second."""
NONE: Labels = {}
Held = Conviction | LabelVerdict | Word


class Suspect(Protocol):
    """What is needed of a request. It stays the same object until it is over (``Poison.on_closed``)."""

    @property
    def decode_only(self) -> bool:
        """Whether it goes without prefill."""

    @property
    def record(self) -> Record:
        """What is known of it."""

    def request_hash(self) -> RequestHash:
        """Its hash."""

    def labels(self) -> Labels:
        """What it has in common with others."""

    def instances(self) -> Iterable[InstanceName]:
        """Those on which it has a leg open."""

    def go_on(self) -> None:
        """It is held no longer: do what was to be done when it was."""

    def end_with(self, fault: HttpFault) -> None:
        """End with this answer: no engine is asked any more."""


class Poison:
    """Of one router."""

    def __init__(self, loop: asyncio.AbstractEventLoop, roster: Roster) -> None:
        self._loop = loop
        self._roster = roster
        self.ledger = Ledger()
        self.held: dict[Suspect, None] = {}
        """In the order in which they came."""
        self._running: dict[Suspect, None] = {}
        """Suspects that had their turn and are not over."""
        self._instance: InstanceName | None = None
        """Where those in quarantine go."""
        self._due = False
        self.samples = SAMPLED
        """So many may be taken in this second."""
        self.alert = False
        """Not every request may simply go."""
        self.watching = False
        """There is evidence, so it is of interest which requests end well."""

    def __len__(self) -> int:
        """Requests that are held."""
        return len(self.held)

    def counts(self) -> tuple[int, int, int, int]:
        """Deaths so far, suspects, hashes that are refused, and requests that are held."""
        ledger = self.ledger
        return ledger.deaths, ledger.suspects, len(ledger.convictions(self._loop.time())), len(self)

    # ---- requests

    def labels(self) -> tuple[int, int]:
        """How many are quarantined, and how many are refused."""
        quarantined, refused = self.ledger.alike.verdicts(self._loop.time())
        return len(quarantined), len(refused)

    def refuse(self, request: RequestHash, labels: Callable[[], Labels]) -> None:
        """Raise HttpFault, 502, where requests like this one are refused now. Ask while ``alert``."""
        said = self.ledger.judge_request(self._loop.time(), request, NONE if self.ledger.alike.quiet else labels())
        if not isinstance(said, Word):
            raise poisonous(said.words)

    def comes(self, one: Suspect) -> bool:
        """A request begins: whether it is held. Ask while ``alert``."""
        return self._asked(one) is not Word.GO and self._hold(one)

    def on_broken_leg(self, one: Suspect, target: EngineTarget, *, lost: bool = False) -> bool:
        """A leg of a request broke off as it does where the engine dies: whether the request is held before it may be sent
        elsewhere.

        ``lost``: it did because the roster says so; the word on the engine follows.
        """
        if lost or self._roster.find(target.instance, target.incarnation) is not None:
            self.note_break(target.instance, target.incarnation, one.request_hash(), one.labels())
        return self._asked(one) is not Word.GO and self._hold(one)

    def avoid(self, one: Suspect) -> frozenset[InstanceName]:
        """Instances that a request must keep away from: where other suspects are, if it is one; all decode instances but
        one, if it is in quarantine. Others keep away from suspects, too, if they can: the next one that ends engines may be
        among them, and would be taken for the suspect.
        """
        if not self._running:
            return frozenset()
        taken = self._taken(one)
        if one not in self._running:
            been = taken.union(leg.instance for leg in one.record.legs)
            return taken if all(self._elsewhere(role, been) for role in self._roles(one)) else frozenset()
        if one is self._quarantined and (only := self._only(taken)) is not None:
            return taken | {member.name for member in self._roster.pickable(Role.DECODE) if member.name != only}
        return taken

    def on_closed(self, one: Suspect, *, whole: bool) -> None:
        """A request is over. ``whole``: an engine answered it to its end. To be called while ``watching``, or while there
        are ``samples``.
        """
        well = whole and one.record.outcome == "ok"
        if well and self.samples:
            self.samples -= 1
            self.ledger.alike.traffic.add(one.labels())
        if not self.watching:
            return
        self.held.pop(one, None)
        self._running.pop(one, None)
        if whole:
            self.ledger.on_ended(self._loop.time(), one.request_hash())
            if well:
                self.ledger.on_ended_well(one.labels())
            self._changed()
        self.schedule()

    # ---- evidence

    def note_break(self, instance: InstanceName, incarnation: Incarnation, request: RequestHash,
                   labels: Labels = NONE) -> None:
        """A leg of a request broke off on an incarnation."""
        self._convicted(self.ledger.on_break(self._loop.time(), (instance, incarnation), request, labels))
        self._changed()

    def on_verdict(self, instance: InstanceName, incarnation: Incarnation, verdict: DeathVerdict) -> None:
        """Whether an incarnation has died by itself. Its legs that were open have broken off."""
        if not self.watching:
            return
        engine = (instance, incarnation)
        match verdict:
            case DeathVerdict.DIED:
                self._died(instance, incarnation, "died by itself")
            case DeathVerdict.LIVES:
                self.ledger.lives(engine)
            case DeathVerdict.LOST:
                self.ledger.on_lost(engine)
        self._changed()

    def on_stalled(self, instance: InstanceName, incarnation: Incarnation) -> None:
        """The core of an incarnation stands still, which counts as its death: those that were noted there are suspected."""
        if self.watching:
            self._died(instance, incarnation, "stands still")
            self._changed()

    def _died(self, instance: InstanceName, incarnation: Incarnation, how: str) -> None:
        before = self.ledger.deaths
        self._convicted(self.ledger.on_death(self._loop.time(), (instance, incarnation)))
        if self.ledger.deaths > before:
            logger.warning("%s %s with requests in flight: %d are suspected", instance, how, self.ledger.suspects,
                           extra={"peer": instance})

    def refusals(self) -> tuple[str, ...]:
        """What this router refuses, for other routers: hashes and labels, the latest ``MAX_POISONS``."""
        if not self.watching:
            return ()
        return tuple(sorted(key.hex() for key in self.ledger.refusals(self._loop.time())[-MAX_POISONS:]))

    def tick(self) -> None:
        """Called every second."""
        self.samples = SAMPLED
        now = self._loop.time()
        heard = {key for member in self._roster.members() if member.poisons for key in member.poisons}
        if heard or self.watching:
            self.ledger.take_refusals(now, (bytes.fromhex(key) for key in heard))
            self.ledger.tick(now)
            self._changed()

    def _convicted(self, found: Conviction | LabelVerdict | None) -> None:
        if isinstance(found, Conviction):
            logger.error("a request is refused: %s", found.words, extra={
                "request_hash": found.request.hex(), "engines": ", ".join(found.engines)})
        elif found is not None:
            logger.error("requests are refused that are alike: %s", found.words, extra={
                "label": found.label.hex(), "engines": ", ".join(found.engines)})

    def _changed(self) -> None:
        self.alert = self.ledger.alert
        self.watching = bool(self.held or self._running) or not self.ledger.quiet
        if self.held:
            self.schedule()

    # ---- turns

    @property
    def _quarantined(self) -> Suspect | None:
        """Who is in quarantine now."""
        return next((one for one in self._running if self._asked(one) is Word.QUARANTINE), None)

    def _asked(self, one: Suspect) -> Held:
        labels = one.labels() if self.watching else NONE
        return self.ledger.judge_request(self._loop.time(), one.request_hash(), labels)

    def _hold(self, one: Suspect) -> bool:
        self._running.pop(one, None)
        self.held[one] = None
        self.schedule()
        return True

    def schedule(self) -> None:
        """Look at those that are held, as soon as the event in hand is dealt with."""
        if not self._due:
            self._due = True
            self._loop.call_soon(self._move)

    def _move(self) -> None:
        self._due = False
        self._running = {one: None for one in self._running if self._asked(one) is not Word.GO}
        for one in list(self.held):
            said = self._asked(one)
            if one not in self.held:
                continue  # it ended with another one
            if not isinstance(said, Word):
                self._let(one, partial(one.end_with, poisonous(said.words)))
            elif said is Word.GO:
                self._let(one, one.go_on)
            elif self._may_run(one, said):
                self._running[one] = None
                self._let(one, one.go_on)
        for one in list(self.held)[MAX_HELD:]:
            self._let(one, partial(one.end_with, unavailable(
                f"{MAX_HELD} requests wait until it is known which of them ends engines")))
        self.watching = bool(self.held or self._running) or not self.ledger.quiet

    def _may_run(self, one: Suspect, said: Word) -> bool:
        if said is Word.ALONE:
            return self._room(one)
        return (said is Word.QUARANTINE and self._quarantined is None and self._room(one)
                and not any(self.ledger.alike.share_evidence(one.labels(), other.labels()) for other in self._running))

    def _let(self, one: Suspect, act: Callable[[], None]) -> None:
        del self.held[one]
        try:
            act()
        except Exception:
            # The others must not be held for ever because one could not go on.
            logger.exception("a request that was held could not go on")

    def _taken(self, one: Suspect) -> frozenset[InstanceName]:
        return frozenset(name for other in self._running if other is not one for name in other.instances())

    def _only(self, taken: frozenset[InstanceName]) -> InstanceName | None:
        """The decode instance of the quarantine: the same one while it can be picked, else the one with the fewest legs."""
        able = {member.name: member.in_flight for member in self._roster.pickable(Role.DECODE) if member.name not in taken}
        if self._instance not in able:
            self._instance = min(able, key=lambda name: (able[name], name), default=None)
        return self._instance

    def _room(self, one: Suspect) -> bool:
        """Whether it can be alone among suspects where it goes. Where there is nobody at all, it will be told so."""
        taken = self._taken(one)
        if not taken:
            return True
        return all(self._elsewhere(role, taken) or not self._roster.pickable(role) for role in self._roles(one))

    def _elsewhere(self, role: Role, taken: frozenset[InstanceName]) -> bool:
        """Whether somebody else can be picked."""
        return any(member.name not in taken for member in self._roster.pickable(role))

    @staticmethod
    def _roles(one: Suspect) -> tuple[Role, ...]:
        return (Role.DECODE,) if one.decode_only else (Role.DECODE, Role.PREFILL)
