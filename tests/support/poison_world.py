"""A fleet in which requests end engines, seen by the ledger alone: time, engines that start again, a router that does as
the ledger says. Everything that happens is drawn from a seed.

    world = World(random.Random(1), engines=8)
    world.ask(0.5, Asked(hash, labels, takes=0.3, kills=True, family="a grammar"))
    world.run()
    world.deaths["a grammar"], world.answered, world.refused, world.quarantined
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.router.api.bodies import RequestHash
from xpyd_sidecar.router.api.labels import Labels
from xpyd_sidecar.router.serving.likeness import Engine
from xpyd_sidecar.router.serving.poison_ledger import Ledger, Word


@dataclass(eq=False)
class Asked:
    """A request. ``takes``: seconds until it is answered, or the engine that serves it is dead."""

    hash: RequestHash
    labels: Labels
    takes: float
    kills: bool = False
    family: str = ""
    legs: int = 6
    """Engines that are asked before it is given up."""
    came: float = 0.0
    held_s: float = 0.0
    engines: list[Engine] = field(default_factory=list)


class World:
    """Of one router."""

    def __init__(self, draw: random.Random, *, engines: int, restart_s: float = 1.5, verdict_s: float = 0.05) -> None:
        self.draw, self.restart_s, self.verdict_s = draw, restart_s, verdict_s
        self.ledger = Ledger()
        self.now = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.up: dict[str, int] = {f"d{number}": 0 for number in range(engines)}
        """Which life of each engine serves; those that start again are not there."""
        self.where: dict[Asked, str] = {}
        self.held: dict[Asked, float] = {}
        """And since when."""
        self._running: list[Asked] = []
        self.deaths: Counter[str] = Counter()
        """By family; each counts for whoever ended the engine."""
        self.ended_by: Counter[RequestHash] = Counter()
        self.answered: list[Asked] = []
        self.refused: list[Asked] = []
        self.unserved: list[Asked] = []
        self.quarantined: set[Asked] = set()
        """Those that were told so at some time."""
        self.sampled = True

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def ask(self, when: float, one: Asked) -> None:
        one.came = when
        self.at(when, lambda: self._send(one))

    def run(self, until: float = 1e9) -> None:
        """Until nothing happens any more, or that time."""
        ticks = 0
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            for _ in range(ticks, int(self.now)):
                self.ledger.tick(self.now)
            ticks = max(ticks, int(self.now))
            act()
            self._look()

    # ---- requests

    def _asked(self, one: Asked) -> object:
        return self.ledger.judge_request(self.now, one.hash, one.labels)

    def _send(self, one: Asked) -> None:
        said = self._asked(one)
        if not isinstance(said, Word):
            self._refuse(one)
        elif said is Word.GO:
            self._go(one, self._away(one))
        else:
            self.held.setdefault(one, self.now)
            if said is Word.QUARANTINE:
                self.quarantined.add(one)

    def _look(self) -> None:
        self._running = [one for one in self._running if one in self.where and self._asked(one) is not Word.GO]
        for one in list(self.held):
            said = self._asked(one)
            if not isinstance(said, Word):
                self._let(one)
                self._refuse(one)
                continue
            taken = frozenset(self.where[other] for other in self._running if other in self.where)
            if said is Word.QUARANTINE:
                self.quarantined.add(one)
                if any(self._asked(other) is Word.QUARANTINE or self.ledger.alike.share_evidence(one.labels, other.labels)
                       for other in self._running):
                    continue
            if said is Word.GO or (said is not Word.WAIT and self.up.keys() - taken):
                self._let(one)
                if said is not Word.GO:
                    self._running.append(one)
                self._go(one, self._away(one) if said is Word.GO else taken)

    def _away(self, one: Asked) -> frozenset[str]:
        """Others keep away from suspects where they can."""
        taken = frozenset(self.where[other] for other in self._running if other in self.where)
        return taken if self.up.keys() - taken - {name for name, _ in one.engines} else frozenset()

    def _let(self, one: Asked) -> None:
        one.held_s += self.now - self.held.pop(one)

    def _refuse(self, one: Asked) -> None:
        self.refused.append(one)

    def _go(self, one: Asked, taken: frozenset[str]) -> None:
        if len(one.engines) >= one.legs:
            self.unserved.append(one)
            return
        there = sorted(self.up.keys() - taken)
        if not there:  # it waits for an engine that starts
            self.at(self.now + 0.1, lambda: self._send(one))
            return
        name = self.draw.choice(there)
        engine = InstanceName(name), Incarnation(str(self.up[name]))
        one.engines.append(engine)
        self.where[one] = name
        self.at(self.now + one.takes, lambda: self._done(one, engine))

    def _done(self, one: Asked, engine: Engine) -> None:
        if self.where.get(one) != engine[0] or one.engines[-1] != engine:
            return
        if one.kills:
            self.deaths[one.family] += 1
            self.ended_by[one.hash] += 1
            self.kill(engine[0])
            return
        del self.where[one]
        self.answered.append(one)
        self.ledger.on_ended(self.now, one.hash)
        self.ledger.on_ended_well(one.labels)
        if self.sampled:
            self.ledger.alike.traffic.add(one.labels)

    def kill(self, name: str) -> None:
        """It breaks what it serves; the word on it comes a little later, and it is back in a while."""
        life = self.up.pop(name)
        engine = InstanceName(name), Incarnation(str(life))
        broken = [one for one, there in self.where.items() if there == name]
        self.draw.shuffle(broken)
        for one in broken:
            del self.where[one]
            self.ledger.on_break(self.now, engine, one.hash, one.labels)
            self._send(one)
        self.at(self.now + self.draw.uniform(0.2, 1.0) * self.verdict_s, lambda: self._judged(engine))
        self.at(self.now + self.restart_s, lambda: self.up.update({name: life + 1}))

    def _judged(self, engine: Engine) -> None:
        self.ledger.on_death(self.now, engine)
