"""Which labels (``api.labels``) requests have in common that end engines, though no two are equal. Pure: time is given.

    at deaths, with different requests, more often than by chance ─┐               ┌─ at one more death ─▶ refused
    of a request that is convicted, and of none that ended well ───┴▶ quarantined ─┤                         │
                                                                           ▲       └─ with success ─▶ cleared │
                                                                           └─────────── its time is over ─────┘
Laws
  1. The measure is requests that ended well lately. A label that more than ``SHARE`` of them have, or may have as far as is
     known, is no evidence, and another router's word on it is not taken.
  2. Only deaths with different requests count for a label: one that is carried from engine to engine brings one.
  3. Quarantined is what a convicted request has and none that ended well; and what is at deaths so often that less than
     ``CHANCE`` labels would be, if deaths chose among requests at random: of labels that are as frequent, how many are
     there, times how likely one is to be at each of these deaths.
  4. Refused is, of what all suspects at a death have, the label that fewest requests have. For ``REFUSED_S``, twice as long
     each time, at most ``REFUSED_MOST_S``.
  5. One request that has a label and ends well clears it, whatever was said before.
  6. Bounds: ``EVIDENCE`` deaths, ``LABELS`` labels of each, ``CARRIERS`` requests of each label, ``VERDICTS`` verdicts, the
     oldest goes; a sample of ``SAMPLE`` requests.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence

import msgspec

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.router.api.bodies import RequestHash
from xpyd_sidecar.router.api.labels import Label, Labels

Engine = tuple[InstanceName, Incarnation]

SHARE = 0.05
CHANCE = 0.05
QUESTION = 0.25
"""As ``CHANCE``, for those that were at one of the deaths themselves: they wait for a while, and others do not."""
REFUSED_S, REFUSED_MOST_S = 60.0, 600.0
KNOWN_S = 600.0
"""So long after its last death, or refusal, a label is quarantined."""
SAMPLE = 512
EVIDENCE, LABELS, CARRIERS, VERDICTS = 12, 4096, 4, 1024


class Traffic:
    """Labels of requests that ended well: the latest ``SAMPLE`` that were told."""

    def __init__(self) -> None:
        self._recent: deque[tuple[Label, ...]] = deque(maxlen=SAMPLE)
        self._counts: Counter[Label] | None = None

    def __len__(self) -> int:
        """Requests."""
        return len(self._recent)

    def add(self, labels: Iterable[Label]) -> None:
        """One more ended well. It counts from the next second on."""
        self._recent.append(tuple(labels))

    def tick(self) -> None:
        """Called every second."""
        self._counts = None

    def share(self, label: Label) -> float:
        """Of requests that have it, at most, as far as so few can tell: 1 where nothing is known."""
        return (self._count(label) + 1) / (len(self._recent) + 1)

    def is_unseen(self, label: Label) -> bool:
        """Whether none has it of so many that less than ``SHARE`` of all do (three in n, with a certainty of 95 %)."""
        return not self._count(label) and SHARE * len(self._recent) >= 3.0

    def common(self, label: Label) -> bool:
        """Whether more than ``SHARE`` are known to have it."""
        return self._count(label) > max(1.0, SHARE * len(self._recent))

    def _count(self, label: Label) -> int:
        if self._counts is None:
            self._counts = Counter(label for labels in self._recent for label in labels)
        return self._counts[label]


class LabelVerdict(msgspec.Struct):
    """A label that is quarantined, or refused."""

    label: Label
    what: str
    """In words."""
    at: float
    """Its last death, or when it was told."""
    engines: tuple[InstanceName, ...]
    """Those that died with it, the last one last; empty where another router tells of it."""
    until: float = -math.inf
    """Refused until then."""
    times: int = 0
    """How often it was convicted here."""

    def holds(self, now: float) -> bool:
        """Whether it is refused now."""
        return now < self.until

    @property
    def words(self) -> str:
        """For whoever asked."""
        engines = len(self.engines)
        died = f"{engines} engines have died" if engines > 1 else "engines have died"
        return (f"{died} of requests that have this in common: {self.what}. Such requests are refused for a while "
                f"(label {self.label.hex()})")


class _Carriers(msgspec.Struct):
    what: str
    requests: list[RequestHash]


class _Death(msgspec.Struct):
    """What was in flight on an engine that broke legs off."""

    labels: dict[Label, _Carriers] = {}
    present: int = 0
    dead: bool = False


class Likeness:
    """The evidence of one router, by labels."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._deaths: dict[Engine, _Death] = {}
        self._verdicts: dict[Label, LabelVerdict] = {}
        """In the order in which they came."""
        self.told: frozenset[Label] = frozenset()
        """What other routers refuse."""

    # ---- what others read

    @property
    def quiet(self) -> bool:
        """Whether nothing is quarantined or refused."""
        return not self._verdicts

    def verdicts(self, now: float) -> tuple[list[LabelVerdict], list[LabelVerdict]]:
        """What is quarantined, and what is refused."""
        refused = [one for one in self._verdicts.values() if self._refused(now, one)]
        return [one for one in self._verdicts.values() if one not in refused], refused

    def refusal(self, now: float, labels: Collection[Label]) -> LabelVerdict | None:
        """Why requests with these labels are refused; None: they are not."""
        return next((one for one in self._among(labels) if self._refused(now, one)), None)

    def is_quarantined(self, labels: Collection[Label]) -> bool:
        """Whether requests with these labels go where nobody else of that kind is."""
        return next(iter(self._among(labels)), None) is not None

    def in_question(self, request: RequestHash, labels: Collection[Label]) -> bool:
        """Whether a request that was at a death has something in common with others that were at others."""
        deaths = list(self._deaths.values())
        return any(any(label in one.labels and request in one.labels[label].requests for one in deaths)
                   and self._chance(label, deaths) <= QUESTION for label in labels)

    def share_evidence(self, some: Collection[Label], others: Collection[Label]) -> bool:
        """Whether two requests have a label in common that may be evidence."""
        return any(label in others and self.traffic.is_unseen(label) for label in some)

    # ---- events

    def on_break(self, engine: Engine, request: RequestHash, labels: Labels) -> None:
        """A leg of a request broke off with an engine."""
        death = self._deaths.get(engine)
        if death is None:
            if len(self._deaths) >= EVIDENCE:
                del self._deaths[min(self._deaths, key=lambda one: self._deaths[one].dead)]  # of equal ones the oldest
            death = self._deaths[engine] = _Death()
        death.present += 1
        for label, what in labels.items():
            known = death.labels.get(label)
            if known is None:
                if len(death.labels) < LABELS and not self.traffic.common(label):
                    death.labels[label] = _Carriers(what, [request])
            elif len(known.requests) < CARRIERS and request not in known.requests:
                known.requests.append(request)

    def on_death(self, engine: Engine) -> None:
        """An engine that broke legs off has died by itself."""
        if engine in self._deaths:
            self._deaths[engine].dead = True

    def drop(self, engine: Engine) -> None:
        """Legs that broke off with an engine are no evidence, or no longer."""
        self._deaths.pop(engine, None)

    def on_ended(self, labels: Collection[Label]) -> None:
        """A request with these labels ended well."""
        for label in labels:
            self._verdicts.pop(label, None)
            for death in self._deaths.values():
                death.labels.pop(label, None)

    def take_refusals(self, now: float, told: Collection[Label]) -> None:
        """What other routers refuse now is refused here, too, from the first word of it on until the last."""
        for label in sorted(set(told) - self.told):
            if label not in self._verdicts and not self.traffic.common(label):
                self._quarantine(now, label, "what another router has found", ())
        self.told = frozenset(told)
        for label in self.told & self._verdicts.keys():
            self._verdicts[label].at = now

    def tick(self, now: float) -> None:
        """Called every second."""
        self.traffic.tick()
        for label, one in list(self._verdicts.items()):
            if now > max(one.at, one.until) + KNOWN_S:
                del self._verdicts[label]

    # ---- judging

    def suspects(self, engine: Engine) -> set[RequestHash]:
        """Those at a death that have a quarantined label."""
        found = self._labels_of(engine)
        return {request for label in self._verdicts if label in found for request in found[label].requests}

    def explains(self, now: float, engine: Engine) -> bool:
        """Whether somebody was at a death who has a label that is refused now, and was sent there before it was."""
        found = self._labels_of(engine)
        return any(label in found and self._refused(now, one) for label, one in self._verdicts.items())

    def judge(self, now: float, engine: Engine,
              guilty: Collection[RequestHash]) -> tuple[LabelVerdict, list[Engine]] | None:
        """One of these ended an engine: what they all have, if that is quarantined, is refused. With the deaths that are
        explained by it.
        """
        found = self._labels_of(engine)
        shared = [label for label in self._verdicts
                  if label in found and all(one in found[label].requests for one in guilty)]
        return self._refuse(now, min(shared)) if shared and guilty else None

    def over_represented(self, now: float, engine: Engine) -> None:
        """Nobody is known to have ended an engine: what is at deaths too often is quarantined."""
        deaths = [one for one in self._deaths.values() if one.dead]
        for label, carriers in self._labels_of(engine).items():
            if self._chance(label, deaths) <= CHANCE:
                self._quarantine(now, label, carriers.what, tuple(name for name, _ in self._with(label)))

    def convict(self, now: float, request: RequestHash,
                engines: Sequence[Engine]) -> tuple[LabelVerdict, list[Engine]] | None:
        """A request has ended these engines. What it has is quarantined, and refused if others that have it were at deaths
        which nothing else explains.
        """
        shared = []
        for death in (self._deaths[engine] for engine in engines if engine in self._deaths):
            for label, carriers in death.labels.items():
                if request in carriers.requests and self.traffic.is_unseen(label):
                    self._quarantine(now, label, carriers.what, tuple(name for name, _ in engines))
                    if any(one not in engines for one in self._with(label)):
                        shared.append(label)
        return self._refuse(now, min(shared)) if shared else None

    # ---- parts

    def _refused(self, now: float, one: LabelVerdict) -> bool:
        return one.holds(now) or one.label in self.told

    def _among(self, labels: Collection[Label]) -> Iterable[LabelVerdict]:
        return (self._verdicts[label] for label in labels if label in self._verdicts) if self._verdicts else ()

    def _labels_of(self, engine: Engine) -> dict[Label, _Carriers]:
        death = self._deaths.get(engine)
        return {} if death is None else death.labels

    def _with(self, label: Label) -> list[Engine]:
        """Deaths at which it was."""
        return [engine for engine, one in self._deaths.items() if one.dead and label in one.labels]

    def _chance(self, label: Label, deaths: Iterable[_Death]) -> float:
        """How many labels that are as frequent would be at all of those deaths at which this one was, by chance; infinity:
        it is no evidence.
        """
        share = self.traffic.share(label)
        if share > SHARE:
            return math.inf
        chance, counted, seen = 1.0 / share, 0, set[RequestHash]()
        for death in deaths:
            carriers = death.labels.get(label)
            if carriers is not None and not seen.issuperset(carriers.requests):
                seen.update(carriers.requests)
                counted += 1
                chance *= min(1.0, share * death.present)
        return chance if counted > 1 else math.inf

    def _quarantine(self, now: float, label: Label, what: str, engines: tuple[InstanceName, ...]) -> None:
        known = self._verdicts.get(label)
        if known is not None:
            known.at = now
            return
        while len(self._verdicts) >= VERDICTS:
            del self._verdicts[next(iter(self._verdicts))]
        self._verdicts[label] = LabelVerdict(label, what, now, engines)

    def _refuse(self, now: float, label: Label) -> tuple[LabelVerdict, list[Engine]]:
        one, explained = self._verdicts[label], self._with(label)
        one.engines = tuple(dict.fromkeys((*one.engines, *(name for name, _ in explained))))[-EVIDENCE:]
        one.until = now + min(REFUSED_MOST_S, REFUSED_S * 2 ** min(one.times, 10))
        one.times, one.at = one.times + 1, now
        return one, explained
