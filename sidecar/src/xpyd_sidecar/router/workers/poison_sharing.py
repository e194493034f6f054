"""Requests that end engines, in a router of several processes: one ledger for all of them.

    worker ──Broke, EndedWell──▶ owner ──the same, Judged─────────────▶ every worker: each has a replica of the ledger
    worker ──WantsTurn─────────▶ owner ──Turn──▶ one worker at a time
                                 owner ──Evidence──▶ a worker that is new, or that did not read

Laws
  * The owner alone convicts. It judges a death ``GATHER_S`` after it knows of it: each worker has heard by then that its
    legs there are lost, and has said whose they were.
  * A worker notes what broke off in its own replica at once, so a request that broke off twice is held before any answer.
  * Suspects run in the worker whose turn it is, and there at most one on an instance. A turn ends with the last of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.router.api.bodies import RequestHash
from xpyd_sidecar.router.fleet.member import DeathVerdict
from xpyd_sidecar.router.fleet.roster import Roster
from xpyd_sidecar.router.serving.poison_ledger import Conviction, Ledger, Word
from xpyd_sidecar.router.serving.quarantine import Poison, Suspect
from xpyd_sidecar.router.workers import link as li

GATHER_S = 0.3


class OwnerPoison(Poison):
    """The owner's side. It has no requests itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop, roster: Roster, tell: Callable[[li.Down], None],
                 give_turn: Callable[[int, li.SuspectTurn], None]) -> None:
        """``tell``: every worker. ``give_turn``: tell one that it has the turn."""
        super().__init__(loop, roster)
        self._tell = tell
        self._give_turn = give_turn
        self._wishes: dict[int, int] = {}
        """Workers that want a turn, in their order, and the numbers of their wishes."""
        self._whose: int | None = None
        """Whose turn it is."""
        self._conviction: Conviction | None = None

    def on_message(self, worker: int, message: li.Broke | li.EndedWell | li.WantsTurn) -> None:
        """A worker says something."""
        match message:
            case li.Broke(instance=instance, incarnation=incarnation, request=request):
                self._tell(message)
                self.noted(instance, incarnation, request)
            case li.EndedWell(request=request):
                self._tell(message)
                self.whole(request)
            case li.WantsTurn(number=number, wanted=True):
                self._wishes[worker] = number
                self._next_turn()
            case li.WantsTurn():
                self.left(worker)

    def left(self, worker: int) -> None:
        """A worker needs no turn any more, or has ended."""
        self._wishes.pop(worker, None)
        if self._whose == worker:
            self._whose = None
        self._next_turn()

    def _next_turn(self) -> None:
        if self._whose is None and self._wishes:
            self._whose = next(iter(self._wishes))
            self._give_turn(self._whose, li.SuspectTurn(self._wishes[self._whose]))

    def judged(self, instance: InstanceName, incarnation: Incarnation, verdict: DeathVerdict) -> None:
        """Whether an incarnation has died by itself."""
        case = self.ledger.cases().get((instance, incarnation))
        if verdict is DeathVerdict.DIED:
            if case is None or not case.dead:
                self._loop.call_later(GATHER_S, self._judge, instance, incarnation)
        elif case is not None:
            self._tell(li.DeathJudged(instance, incarnation, verdict, None))
            super().judged(instance, incarnation, verdict)

    def _judge(self, instance: InstanceName, incarnation: Incarnation) -> None:
        case = self.ledger.cases().get((instance, incarnation))
        if case is None or case.dead:
            return
        self._conviction = None
        super().judged(instance, incarnation, DeathVerdict.DIED)
        # In one message: between two a suspect might be sent on that is convicted with the second.
        self._tell(li.DeathJudged(instance, incarnation, DeathVerdict.DIED, self._conviction))

    def noted(self, instance: InstanceName, incarnation: Incarnation, request: RequestHash) -> None:
        """A leg of a request broke off there."""
        self._conviction = None
        super().noted(instance, incarnation, request)
        if self._conviction is not None:  # it was the last to be named of a death
            self._tell(li.DeathJudged(instance, incarnation, DeathVerdict.DIED, self._conviction))

    def _convicted(self, conviction: Conviction | None) -> None:
        super()._convicted(conviction)
        self._conviction = conviction

    def evidence(self) -> li.Evidence:
        """All that a worker must know which has not been told of it."""
        return li.Evidence(list(self.ledger.cases().items()), self.ledger.convictions())


class WorkerPoison(Poison):
    """A worker's side."""

    def __init__(self, loop: asyncio.AbstractEventLoop, roster: Roster, send: Callable[[li.Up], None]) -> None:
        """``send``: to the owner."""
        super().__init__(loop, roster, Ledger(judges=False))
        self._send = send
        self._turn = self._wanted = False
        self._number = 0

    def noted(self, instance: InstanceName, incarnation: Incarnation, request: RequestHash) -> None:
        """A leg of a request broke off there."""
        super().noted(instance, incarnation, request)
        self._send(li.Broke(instance, incarnation, request))

    def whole(self, request: RequestHash) -> None:
        """An engine answered a request to its end."""
        if self.ledger.knows(request):
            self._send(li.EndedWell(request))
        super().whole(request)

    def on_message(self, message: li.Broke | li.EndedWell | li.DeathJudged | li.SuspectTurn | li.Evidence) -> None:
        """The owner says something."""
        match message:
            case li.Broke(instance=instance, incarnation=incarnation, request=request):
                super().noted(instance, incarnation, request)
            case li.EndedWell(request=request):
                super().whole(request)
            case li.DeathJudged(instance=instance, incarnation=incarnation, verdict=verdict, conviction=conviction):
                self.judged(instance, incarnation, verdict)
                if conviction is not None:
                    self.ledger.convict(conviction)
                    self._changed()
            case li.SuspectTurn(number=number):
                self._turn = self._wanted and number == self._number
                self.moved()
            case li.Evidence(cases=cases, convicted=convicted):
                self.ledger.load(dict(cases), convicted)
                self._changed()

    def _move(self) -> None:
        super()._move()
        wants = bool(self._running) or any(self._asked(request) is Word.ALONE for request in self._held.values())
        if wants != self._wanted:
            self._wanted = wants
            self._turn = False
            self._number += 1
            self._send(li.WantsTurn(self._number, wants))

    def _room(self, one: Suspect) -> bool:
        return self._turn and super()._room(one)
