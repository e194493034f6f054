"""Requests that end engines: who waits, who goes alone, who is refused (``serving.poison_ledger`` says which).

    a leg breaks ──broke──▶ Ledger ──GO──▶ the request goes on at once, as if this were not here
                                   └─WAIT, ALONE──▶ it is held ──▶ verdict, or its turn ──▶ ``go_on``
                                                         └─────▶ convicted ──▶ ``condemn``
    watch ──judged──▶ Ledger

A router without deaths pays nothing: hashes are made of requests whose leg broke, and of others only while there is
evidence (``watching``, ``alert``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from xpyd_sidecar.contract.ids import Incarnation, InstanceName, Role
from xpyd_sidecar.router.api.bodies import RequestHash
from xpyd_sidecar.router.api.faults import HttpFault, poisonous, unavailable
from xpyd_sidecar.router.fleet.member import DeathVerdict, EngineTarget
from xpyd_sidecar.router.serving.poison_ledger import Conviction, Ledger, Word

if TYPE_CHECKING:
    import asyncio

    from xpyd_sidecar.router.fleet.roster import Roster

logger = logging.getLogger(__name__)

MAX_HELD = 1024
"""Requests that are held at a time; one more is answered with 503."""


class Suspect(Protocol):
    """What is needed of a request. It stays the same object until it is ``closed``."""

    @property
    def alone(self) -> bool:
        """Whether it goes without prefill."""

    def request_hash(self) -> RequestHash:
        """Its hash."""

    def instances(self) -> Iterable[InstanceName]:
        """Those on which it has a leg open."""

    def go_on(self) -> None:
        """It is held no longer: do what was to be done when it was."""

    def condemn(self, fault: HttpFault) -> None:
        """End with this answer: no engine is asked any more."""


class Poison:
    """Of one router."""

    def __init__(self, loop: asyncio.AbstractEventLoop, roster: Roster) -> None:
        self._loop = loop
        self._roster = roster
        self.ledger = Ledger()
        self.held: dict[Suspect, RequestHash] = {}
        """In the order in which they came."""
        self._running: dict[Suspect, RequestHash] = {}
        """Suspects that had their turn and are not over."""
        self._due = False
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
        return ledger.deaths, ledger.suspects, len(ledger.refused(self._loop.time())), len(self)

    # ---- requests

    def refuse(self, request: RequestHash) -> None:
        """Raise HttpFault, 502, where requests like this one are refused now. Ask while ``alert``."""
        said = self._asked(request)
        if isinstance(said, Conviction):
            raise poisonous(said.words)

    def comes(self, one: Suspect) -> bool:
        """A request begins: whether it is held. Ask while ``alert``."""
        request = one.request_hash()
        return self._asked(request) is not Word.GO and self._hold(one, request)

    def broke(self, one: Suspect, target: EngineTarget, *, lost: bool = False) -> bool:
        """A leg of it broke off as it does where the engine dies: whether it is held before it may be sent elsewhere.

        ``lost``: it did because the roster says so; the word on the engine follows.
        """
        request = one.request_hash()
        if lost or self._roster.find(target.instance, target.incarnation) is not None:
            self.noted(target.instance, target.incarnation, request)
        return self._asked(request) is not Word.GO and self._hold(one, request)

    def avoid(self, one: Suspect) -> frozenset[InstanceName]:
        """Instances that a request must keep away from: where other suspects are, if it is one."""
        return self._taken(one) if one in self._running else frozenset()

    def closed(self, one: Suspect, *, whole: bool) -> None:
        """It is over. ``whole``: an engine answered it to its end. Tell it while ``watching``."""
        self.held.pop(one, None)
        self._running.pop(one, None)
        if whole:
            self.whole(one.request_hash())
        self.moved()

    def whole(self, request: RequestHash) -> None:
        """An engine answered a request to its end. Tell it while ``watching``."""
        self.ledger.ended(self._loop.time(), request)
        self._changed()

    # ---- evidence

    def noted(self, instance: InstanceName, incarnation: Incarnation, request: RequestHash) -> None:
        """A leg of a request broke off there."""
        self._convicted(self.ledger.broke(self._loop.time(), (instance, incarnation), request))
        self._changed()

    def judged(self, instance: InstanceName, incarnation: Incarnation, verdict: DeathVerdict) -> None:
        """Whether an incarnation has died by itself. Its legs that were open have broken off."""
        if not self.watching:
            return
        engine, now = (instance, incarnation), self._loop.time()
        match verdict:
            case DeathVerdict.DIED:
                before = self.ledger.deaths
                self._convicted(self.ledger.died(now, engine))
                if self.ledger.deaths > before:
                    logger.warning("%s died by itself with requests in flight: %d are suspected", instance,
                                   self.ledger.suspects, extra={"peer": instance})
            case DeathVerdict.LIVES:
                self.ledger.lives(engine)
            case DeathVerdict.LOST:
                self.ledger.lost(engine)
        self._changed()

    def tick(self) -> None:
        """Called every second."""
        if self.watching:
            self.ledger.tick(self._loop.time())
            self._changed()

    def _convicted(self, conviction: Conviction | None) -> None:
        if conviction is not None:
            logger.error("a request is refused: %s", conviction.words, extra={
                "request_hash": conviction.request.hex(), "engines": ", ".join(conviction.engines)})

    def _changed(self) -> None:
        self.alert = self.ledger.alert
        self.watching = bool(self.held or self._running) or not self.ledger.quiet
        if self.held:
            self.moved()

    # ---- turns

    def _asked(self, request: RequestHash) -> Word | Conviction:
        return self.ledger.asked(self._loop.time(), request)

    def _hold(self, one: Suspect, request: RequestHash) -> bool:
        self._running.pop(one, None)
        self.held[one] = request
        self.moved()
        return True

    def moved(self) -> None:
        """Look at those that are held, as soon as the event in hand is dealt with."""
        if not self._due:
            self._due = True
            self._loop.call_soon(self._move)

    def _move(self) -> None:
        self._due = False
        self._running = {one: request for one, request in self._running.items() if self._asked(request) is not Word.GO}
        for one, request in list(self.held.items()):
            said = self._asked(request)
            if one not in self.held:
                continue  # it ended with another one
            if isinstance(said, Conviction):
                self._let(one, partial(one.condemn, poisonous(said.words)))
            elif said is Word.GO:
                self._let(one, one.go_on)
            elif said is Word.ALONE and self._room(one):
                self._running[one] = request
                self._let(one, one.go_on)
        for one in list(self.held)[MAX_HELD:]:
            self._let(one, partial(one.condemn, unavailable(
                f"{MAX_HELD} requests wait until it is known which of them ends engines")))
        self.watching = bool(self.held or self._running) or not self.ledger.quiet

    def _let(self, one: Suspect, act: Callable[[], None]) -> None:
        del self.held[one]
        try:
            act()
        except Exception:
            # The others must not be held for ever because one could not go on.
            logger.exception("a request that was held could not go on")

    def _taken(self, one: Suspect) -> frozenset[InstanceName]:
        return frozenset(name for other in self._running if other is not one for name in other.instances())

    def _room(self, one: Suspect) -> bool:
        """Whether it can be alone among suspects where it goes. Where there is nobody at all, it will be told so."""
        taken = self._taken(one)
        if not taken:
            return True
        for role in (Role.DECODE,) if one.alone else (Role.DECODE, Role.PREFILL):
            ready = self._roster.pickable(role)
            if ready and all(member.name in taken for member in ready):
                return False
        return True
