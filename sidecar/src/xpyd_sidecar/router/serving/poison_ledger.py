"""Which requests end engines: who was in flight where one died, who is suspected, who is refused. Pure: time is given.

    a leg breaks ──▶ case open ──probe: the engine is dead───▶ death ──10 min──▶ forgotten
                        └─────────it lives, or nobody knows──▶ dropped

    requests that one death has in common go on at once, wherever the picker sends them; of those that two have in common
        a verdict is open ──▶ WAIT ──▶ ALONE: suspects, at most one on an instance ──it ends whole──▶ cleared
                                │             └── the sole suspect at a death ──▶ convicted: refused for a minute
    of those that are like      └────▶ QUARANTINE: one instance, one at a time ──▶ likewise; its label is refused
    others (``likeness``)

Laws
  1. Only a death counts, once for an incarnation; a core that stands still with requests is dead, too. An engine that
     lives, leaves in order, is lost with its machine, or of which nobody can say within ``VERDICT_S`` whether it lives
     accuses nobody.
  2. A request is convicted where it was the sole suspect at a death, or at a second one if nobody else was at either. So
     one that ends whatever serves it ends two engines alone, and three among others, however many they are; and of one
     that is unlucky twice, one of two engines that ended served others as well, unless hardly anything is asked.
  3. A conviction explains every death at which the request was: they accuse nobody else any more.
  4. A request that an engine answers to its end is cleared, unless it is being refused.
  5. Who is suspected or in question is never told GO; who is neither is never told anything else.
  6. A convicted request is refused for ``REFUSED_S``. For ``KNOWN_S`` after its conviction it is a suspect: one death more
     convicts it again.
  7. Who is told ALONE goes where no other suspect is, and who is told QUARANTINE to one instance, one at a time. That is
     the caller's to keep; law 2 rests on it.
  8. Who has a label that is quarantined (``likeness``) is a suspect; so is for that time who was at one of several deaths
     with others that have it. Where all suspects at a death have one in common, that label is refused, and law 3 holds for
     it as for a request.
  9. Bounds: ``CASES`` cases, ``PRESENT`` requests in each, ``CONVICTED`` convictions; the oldest goes.

Known weakness: of two that end engines at the same time, one may be beside an honest suspect before it is a suspect itself,
and that one is then refused in its place. A request that ends only some of the engines that serve it is cleared whenever it
ends well, and so are its labels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum

import msgspec

from xpyd_sidecar.contract.ids import InstanceName
from xpyd_sidecar.router.api.bodies import HASH_SIZE, RequestHash
from xpyd_sidecar.router.api.labels import LABEL_SIZE, Label, Labels
from xpyd_sidecar.router.serving.likeness import Engine, LabelVerdict, Likeness

VERDICT_S = 8.0
"""How long a broken leg may wait for the word on its engine: a probe that follows another, and its time-out."""
WINDOW_S = 600.0
"""How long a death is evidence."""
REFUSED_S = 60.0
KNOWN_S = 600.0
CASES, PRESENT, CONVICTED = 32, 2048, 1024
_NONE: Labels = {}


class Word(Enum):
    """What a request may do."""

    GO = "go"
    """As any other."""
    WAIT = "wait"
    """It broke off with an engine of which nobody has said yet whether it died."""
    ALONE = "alone"
    """Go where no other suspect is."""
    QUARANTINE = "quarantine"
    """Go to the one instance for those that are like others which were at deaths, when none of them is there."""


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
        died = "an engine has died" if engines == 1 else f"{engines or 'other'} engines have died"
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
        self._told: frozenset[RequestHash] = frozenset()
        self.alike = Likeness()
        self.deaths = 0
        """So far."""

    # ---- what others read

    @property
    def quiet(self) -> bool:
        """Whether there is no evidence at all."""
        return not self._cases and not self._convicted and self.alike.quiet

    @property
    def alert(self) -> bool:
        """Whether there is somebody who may not simply go."""
        return bool(self._several or self._convicted or not self.alike.quiet)

    @property
    def suspects(self) -> int:
        """Requests that two deaths have in common, or that were convicted before."""
        common = sum(len(self._deaths_of(one)) > 1 for one in self._several)
        return common + len(self._convicted.keys() - self._several)

    def convictions(self, now: float) -> list[Conviction]:
        """Convictions that hold now."""
        return [one for one in self._convicted.values() if one.holds(now)]

    def refusals(self, now: float) -> list[bytes]:
        """Hashes of requests, and labels, that are refused for what was found here, the latest last: for other routers."""
        found: list[tuple[float, bytes]] = [(one.at, request) for request, one in self._convicted.items()
                                            if one.engines and one.holds(now)]
        found += [(one.at, one.label) for one in self.alike.verdicts(now)[1] if one.times and one.holds(now)]
        return [key for _, key in sorted(found)]

    def judge_request(self, now: float, request: RequestHash,
                      labels: Collection[Label] = ()) -> Word | Conviction | LabelVerdict:
        """What a request may do now, or why it is refused."""
        conviction, alike = self._convicted.get(request), self.alike
        if conviction is not None and (conviction.holds(now) or request in self._told):
            return conviction
        refusal = alike.refusal(now, labels)
        if refusal is not None:
            return refusal
        alone = conviction is not None or request in self._several
        like = not alone and (alike.is_quarantined(labels)
                              or (self._cases_of(request) > 0 and alike.in_question(request, labels)))
        if not alone and not like:
            return Word.GO
        if any(not case.dead and request in case.present for case in self._cases.values()):
            return Word.WAIT
        return Word.ALONE if alone else Word.QUARANTINE

    # ---- events

    def on_break(self, now: float, engine: Engine, request: RequestHash,
                 labels: Labels = _NONE) -> Conviction | LabelVerdict | None:
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
        self.alike.on_break(engine, request, labels)
        if self._cases_of(request) > 1:
            self._several.add(request)
        return self._judge(now, engine, case) if case.dead else None

    def on_death(self, now: float, engine: Engine) -> Conviction | LabelVerdict | None:
        """The engine is dead, by itself. Legs that were still open there broke before."""
        case = self._cases.get(engine)
        if case is None or case.dead:
            return None
        case.dead, case.at = True, now
        self.alike.on_death(engine)
        self.deaths += 1
        return self._judge(now, engine, case)

    def lives(self, engine: Engine) -> None:
        """An engine lives, or left in order: what broke there was no death. One that died before stays dead."""
        case = self._cases.get(engine)
        if case is not None and not case.dead:
            self._drop(engine)

    def on_lost(self, engine: Engine) -> None:
        """An engine went with its machine, or with its agent: no death by itself, whatever it looked like before."""
        if engine in self._cases:
            self._drop(engine)

    def on_ended(self, now: float, request: RequestHash) -> None:
        """An engine answered a request to its end."""
        for case in self._cases.values():
            case.present.discard(request)
        self._several.discard(request)
        conviction = self._convicted.get(request)
        if conviction is not None and not conviction.holds(now):
            del self._convicted[request]

    def on_ended_well(self, labels: Collection[Label]) -> None:
        """An engine did what a request with these labels asked for."""
        self.alike.on_ended(labels)

    def take_refusals(self, now: float, told: Iterable[bytes]) -> None:
        """What all other routers refuse now, as their ``refusals`` say it."""
        keys = set(told)
        requests = frozenset(RequestHash(key) for key in keys if len(key) == HASH_SIZE)
        for request in sorted(requests - self._told):
            if request not in self._convicted:
                self._convict(Conviction(request, now, ()))
        self._told = requests
        self.alike.take_refusals(now, {Label(key) for key in keys if len(key) == LABEL_SIZE})

    def tick(self, now: float) -> None:
        """Called every second: forget what is old."""
        self.alike.tick(now)
        for engine, case in list(self._cases.items()):
            if now - case.at > (WINDOW_S if case.dead else VERDICT_S):
                self._drop(engine)
        for request, conviction in list(self._convicted.items()):
            if now - conviction.at > KNOWN_S:
                del self._convicted[request]

    # ---- judging

    def _judge(self, now: float, last: Engine, case: Case) -> Conviction | LabelVerdict | None:
        alike = self.alike
        convicted = [self._convicted[one] for one in case.present if one in self._convicted]
        if any(one.holds(now) for one in convicted) or alike.explains(now, last):
            self._drop(last)  # it was in flight there while it was convicted elsewhere
            return None
        several = case.present & self._several
        guilty = [one for one in case.present if one in self._convicted]
        guilty += [one for one in several - self._convicted.keys() if len(self._deaths_of(one)) > 2]
        if not guilty and not case.shared:
            guilty = [one for one in several if len(self._deaths_of(one, alone=True)) > 1]
        like = alike.suspects(last)
        if len(guilty) == 1 and like.issubset(guilty):
            [request] = guilty
            engines = [*(engine for engine in self._deaths_of(request) if engine != last), last]
            conviction = Conviction(request, now, tuple(name for name, _ in engines))
            found = alike.convict(now, request, engines)
            self._convict(conviction)
            return conviction if found is None else self._explained(*found)
        found = alike.judge(now, last, like) if like.issuperset(guilty) else None
        if found is not None:
            return self._explained(*found)
        if not guilty and not like:
            alike.over_represented(now, last)
        return None

    def _explained(self, verdict: LabelVerdict, engines: Iterable[Engine]) -> LabelVerdict:
        for engine in engines:
            if engine in self._cases:
                self._drop(engine)
        return verdict

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
        self.alike.drop(engine)
        self._several = {one for one in self._several if self._cases_of(one) > 1}
