"""One rank. Its laws:

    local <= granted             a rank begins no forward that is not granted; what it asks for is granted to itself at once
    local, granted, vote, frozen only grow
    behind = local < granted     then it runs a dummy forward whenever it has nothing with tokens: also while its requests
                                 wait for KV, while it is paused, and while it ends
    Forward(k), k > granted      is announced before it begins: the others must follow
    vote                         only when idle and not behind, with everything asked for in the same frame
    frozen(p) at step F          the pause p holds here once local >= F; no rank begins a forward beyond F

A forward is counted exactly when it is handed to the executor, never when it is planned: a plan without tokens is no
forward, and the count of a rank is the number of collectives it has entered.
"""

from __future__ import annotations

from typing import NamedTuple

from xpyd_sidecar.dp.frames import VERSION, Grant, Want
from xpyd_sidecar.dp.look_ahead import LookAhead
from xpyd_sidecar.errors import OurFault


class Forward(NamedTuple):
    """A forward with tokens begins."""

    budget: int
    """The most tokens that a running request may still make, this forward's included."""


class Dummy(NamedTuple):
    """A dummy forward begins."""


class GrantReceived(NamedTuple):
    """A frame of the coordinator, or the join of all lines in shared memory."""

    grant: Grant


class Idle(NamedTuple):
    """There is nothing to run and nothing granted."""


class PauseAsked(NamedTuple):
    """The engine is to stop at a step on which all agree."""


class LeaveAsked(NamedTuple):
    """The engine ends and has nothing left to run."""


Event = Forward | Dummy | GrantReceived | Idle | PauseAsked | LeaveAsked


class Rank(NamedTuple):
    """State of a rank; ``handle`` gives the next one."""

    epoch: int
    rank: int
    policy: LookAhead = LookAhead()
    local: int = 0
    """Forwards begun."""
    granted: int = 0
    """The last forward that must run."""
    asked: int = 0
    """The last forward that this rank itself has asked for."""
    woke: int = 0
    """``local`` when it was last idle."""
    pauses: int = 0
    """Pauses asked for so far; also the name of the last one."""
    vote: int = 0
    frozen: int = 0
    at: int = 0
    leaving: bool = False
    leave: bool = False
    """All ranks leave: this one may end."""

    @property
    def is_behind(self) -> bool:
        """Whether another rank's forward may be waiting for this one."""
        return self.local < self.granted

    @property
    def pausing(self) -> bool:
        """Whether a pause was asked for that does not hold yet."""
        return not (self.frozen >= self.pauses and self.local >= self.at)

    @property
    def want(self) -> Want:
        """What the coordinator should know; the heartbeat."""
        return Want(VERSION, self.epoch, self.rank, self.local, self.granted, self.vote, self.leaving)

    def handle(self, event: Event) -> tuple[Rank, Want | None]:
        """The state after ``event``, and what must be sent before anything else is done.

        Raises:
            OurFault: the event cannot happen in this state.
        """
        match event:
            case Forward(budget=budget):
                return self._forward(budget)
            case Dummy():
                if not self.is_behind:
                    raise OurFault(f"rank {self.rank}: a dummy forward after step {self.local}, granted {self.granted}")
                return self._replace(local=self.local + 1), None
            case GrantReceived(grant=grant):
                return self._heard(grant), None
            case Idle():
                return self._idle()
            case PauseAsked():
                return self._replace(pauses=self.pauses + 1), None
            case LeaveAsked():
                after = self._replace(leaving=True)
                return after, None if self.leaving else after.want

    def _forward(self, budget: int) -> tuple[Rank, Want | None]:
        local = self.local + 1
        if local <= self.granted:
            return self._replace(local=local), None
        asked = local + self.policy.steps(budget, self.local - self.woke)
        after = self._replace(local=local, granted=asked, asked=asked)
        return after, after.want

    def _heard(self, grant: Grant) -> Rank:
        if grant.epoch != self.epoch:
            return self
        frozen = grant.frozen > self.frozen
        return self._replace(granted=max(self.granted, grant.step), frozen=grant.frozen if frozen else self.frozen,
                             at=grant.at if frozen else self.at, leave=self.leave or grant.leave)

    def _idle(self) -> tuple[Rank, Want | None]:
        if self.is_behind:
            raise OurFault(f"rank {self.rank}: idle at step {self.local}, granted {self.granted}")
        if self.vote == self.pauses:
            return self._replace(woke=self.local), None
        after = self._replace(woke=self.local, vote=self.pauses)
        return after, after.want
