"""Which requests end engines: who was in flight where one died, who is suspected, who is refused. Pure: time is given.

    a leg breaks ──▶ case open ──probe: the engine is dead───▶ death ──10 min──▶ forgotten
                        └─────────it lives, or nobody knows──▶ dropped

    requests that one death has in common go on at once, wherever the picker sends them; of those that two have in common
        a verdict is open ──▶ WAIT ──▶ ALONE: suspects, at most one on an instance ──it ends whole──▶ cleared
                                             └── the sole suspect at a death ──▶ convicted: refused for a minute

Laws
  1. Only a death counts, once for an incarnation. An engine that lives, leaves in order, is lost with its machine, or of
     which nobody can say within ``VERDICT_S`` whether it lives accuses nobody.
  2. A request is convicted where it was the sole suspect at a death, or at a second one if nobody else was at either. So
     one that ends whatever serves it ends two engines alone, and three among others, however many they are; and of one
     that is unlucky twice, one of two engines that ended served others as well, unless hardly anything is asked.
  3. A conviction explains every death at which the request was: they accuse nobody else any more.
  4. A request that an engine answers to its end is cleared, unless it is being refused.
  5. Who is suspected or in question is never told GO; who is neither is never told anything else.
  6. A convicted request is refused for ``REFUSED_S``. For ``KNOWN_S`` after its conviction it is a suspect: one death more
     convicts it again.
  7. Who is told ALONE goes where no other suspect is. That is the caller's to keep; law 2 rests on it.
  8. Bounds: ``CASES`` cases, ``PRESENT`` requests in each, ``CONVICTED`` convictions; the oldest goes.

Known weakness: of two that end engines at the same time, one may be beside an honest suspect before it is a suspect itself,
and that one is then refused in its place. A request that ends only some of the engines that serve it is cleared whenever it
ends well.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.router.api.bodies import RequestHash

Engine = tuple[InstanceName, Incarnation]

VERDICT_S = 8.0
"""How long a broken leg may wait for the word on its engine: a probe that follows another, and its time-out."""
WINDOW_S = 600.0
"""How long a death is evidence."""
REFUSED_S = 60.0
KNOWN_S = 600.0
CASES, PRESENT, CONVICTED = 32, 2048, 1024


class Word(Enum):
    """What a request may do."""

    GO = "go"
    """As any other."""
    WAIT = "wait"
    """It broke off with an engine of which nobody has said yet whether it died."""
    ALONE = "alone"
    """Go where no other suspect is."""


class Conviction(msgspec.Struct, frozen=True):
    """Why a request is refused."""

    request: RequestHash
    at: float
    engines: tuple[InstanceName, ...]
    """Those that died with it, the last one last."""

    def holds(self, now: float) -> bool:
        """Whether it is refused now."""
        return now < self.at + REFUSED_S

    @property
    def words(self) -> str:
        """For whoever asked."""
        engines = len(self.engines)
        died = "an engine has died" if engines == 1 else f"{engines} engines have died"
        return (f"{died} of this request: it is not sent to another, and equal ones are refused for {REFUSED_S:g} s "
                f"(request hash {self.request.hex()})")


class Case(msgspec.Struct):
    """An engine that broke legs off."""

    at: float
    present: set[RequestHash]
    dead: bool = False
    shared: bool = False
    """Whether more than one request was ever present, whatever became of the others."""


class Ledger:
    """The evidence of one router."""

    def __init__(self) -> None:
        self._cases: dict[Engine, Case] = {}
        self._several: set[RequestHash] = set()
        """Those that are in two cases or more."""
        self._convicted: dict[RequestHash, Conviction] = {}
        """In the order of their convictions."""
        self.deaths = 0
        """So far."""

    # ---- what others read

    @property
    def quiet(self) -> bool:
        """Whether there is no evidence at all."""
        return not self._cases and not self._convicted

    @property
    def alert(self) -> bool:
        """Whether there is somebody who may not simply go."""
        return bool(self._several or self._convicted)

    @property
    def suspects(self) -> int:
        """Requests that two deaths have in common, or that were convicted before."""
        common = sum(len(self._deaths_of(one)) > 1 for one in self._several)
        return common + len(self._convicted.keys() - self._several)

    def refused(self, now: float) -> list[Conviction]:
        """Those that hold now."""
        return [one for one in self._convicted.values() if one.holds(now)]

    def asked(self, now: float, request: RequestHash) -> Word | Conviction:
        """What a request may do now."""
        conviction = self._convicted.get(request)
        if conviction is None and request not in self._several:
            return Word.GO
        if conviction is not None and conviction.holds(now):
            return conviction
        if any(not case.dead and request in case.present for case in self._cases.values()):
            return Word.WAIT
        return Word.ALONE

    # ---- events

    def broke(self, now: float, engine: Engine, request: RequestHash) -> Conviction | None:
        """A leg broke off with an engine, as it does where the engine dies."""
        case = self._cases.get(engine)
        if case is None:
            self._room_for_a_case()
            case = self._cases[engine] = Case(now, set())
        if request in case.present:
            return None
        known = self._cases_of(request) > 0 or request in self._convicted
        if len(case.present) >= (2 * PRESENT if known else PRESENT):
            return None
        case.shared = case.shared or bool(case.present)
        case.present.add(request)
        if self._cases_of(request) > 1:
            self._several.add(request)
        return self._judge(now, engine, case) if case.dead else None

    def died(self, now: float, engine: Engine) -> Conviction | None:
        """The engine is dead, by itself. Legs that were still open there broke before."""
        case = self._cases.get(engine)
        if case is None or case.dead:
            return None
        case.dead, case.at = True, now
        self.deaths += 1
        return self._judge(now, engine, case)

    def lives(self, engine: Engine) -> None:
        """It lives, or left in order: what broke there was no death. One that died before stays dead."""
        case = self._cases.get(engine)
        if case is not None and not case.dead:
            self._drop(engine)

    def lost(self, engine: Engine) -> None:
        """It went with its machine, or with its agent: no death by itself, whatever it looked like before."""
        if engine in self._cases:
            self._drop(engine)

    def ended(self, now: float, request: RequestHash) -> None:
        """An engine answered it to its end."""
        for case in self._cases.values():
            case.present.discard(request)
        self._several.discard(request)
        conviction = self._convicted.get(request)
        if conviction is not None and not conviction.holds(now):
            del self._convicted[request]

    def tick(self, now: float) -> None:
        """Called every second: forget what is old."""
        for engine, case in list(self._cases.items()):
            if now - case.at > (WINDOW_S if case.dead else VERDICT_S):
                self._drop(engine)
        for request, conviction in list(self._convicted.items()):
            if now - conviction.at > KNOWN_S:
                del self._convicted[request]

    # ---- judging

    def _judge(self, now: float, last: Engine, case: Case) -> Conviction | None:
        if any(one in self._convicted and self._convicted[one].holds(now) for one in case.present):
            self._drop(last)  # it was in flight there while it was convicted elsewhere
            return None
        several = case.present & self._several
        guilty = [one for one in case.present if one in self._convicted]
        guilty += [one for one in several - self._convicted.keys() if len(self._deaths_of(one)) > 2]
        if not guilty and not case.shared:
            guilty = [one for one in several if len(self._deaths_of(one, alone=True)) > 1]
        if len(guilty) != 1:
            return None
        [request] = guilty
        earlier = [engine[0] for engine in self._deaths_of(request) if engine != last]
        conviction = Conviction(request, now, (*earlier, last[0]))
        self._convict(conviction)
        return conviction

    def _convict(self, conviction: Conviction) -> None:
        """The deaths at which it was are explained."""
        request = conviction.request
        self._convicted.pop(request, None)
        while len(self._convicted) >= CONVICTED:
            del self._convicted[next(iter(self._convicted))]
        self._convicted[request] = conviction
        for engine in self._deaths_of(request):
            self._drop(engine)

    def _deaths_of(self, request: RequestHash, *, alone: bool = False) -> list[Engine]:
        return [engine for engine, case in self._cases.items()
                if case.dead and request in case.present and not (alone and case.shared)]

    # ---- tables

    def _cases_of(self, request: RequestHash) -> int:
        return sum(request in case.present for case in self._cases.values())

    def _room_for_a_case(self) -> None:
        if len(self._cases) >= CASES:
            self._drop(min(self._cases, key=lambda engine: (self._cases[engine].dead, self._cases[engine].at)))

    def _drop(self, engine: Engine) -> None:
        del self._cases[engine]
        self._several = {one for one in self._several if self._cases_of(one) > 1}
