"""Who is expected: where nobody of a role takes requests, whether somebody will, and about when. Pure: time is an argument.

    its agent says that it starts, or it is well but ejected    it is expected, for as long as its agent beats
    the last one that took requests went a short while ago      somebody is expected in its place, for ``RETURN_S``: by
                                                                then its agent, or one that begins again, says that it
                                                                starts, or it is there
    agents that knew this router have not come back yet         somebody is expected until they had the time (``Roster``)
    the service may have no instances (``standby``)             while nobody decodes somebody is expected, unless the
                                                                operator says why not
    else                                                        nobody is: neither who drains, nor who cannot be reached
                                                                though its agent calls it ready

About when: a start takes as long as the one before it of this role. One that takes longer takes as much longer again, and
where none was seen yet, as long again as it has taken so far.
"""

from __future__ import annotations

import math

from xpyd_sidecar.contract.ids import InstanceName, Role, State
from xpyd_sidecar.router.fleet.member import FleetMember
from xpyd_sidecar.router.fleet.roster import Roster
from xpyd_sidecar.router.fleet.standby import Standby

RETURN_S = 10.0
"""For so long who has gone may come back, or another one in its place."""
RESUMES_S = 5.0
"""About what it takes until who is ejected is picked again: until its next canary has ended well."""


UNSEEN_S = 60.0
"""About what a start from nothing takes where none was seen."""


class ExpectedInstances:
    """Of one router. Times are seconds of the roster's clock."""

    def __init__(self, roster: Roster, standby: Standby | None = None) -> None:
        """``standby``: whether instances are started for who asks; None: they are not."""
        self._roster = roster
        self.standby = Standby(enabled=False) if standby is None else standby
        self._able = dict.fromkeys(Role, False)
        """Whether somebody took requests at the latest look."""
        self._went = dict.fromkeys(Role, -math.inf)
        """When the last one went, as far as looked at."""
        self._starting: dict[InstanceName, float] = {}
        """Since when those that start do; of members of the roster alone."""
        self._took: dict[Role, float] = {}
        """What the latest start of a role took."""

    def update(self, now: float) -> None:
        """Take note of what has changed. Called every second, and when the roster has changed."""
        for role in Role:
            able = bool(self._roster.pickable(role))
            if self._able[role] and not able:
                self._went[role] = now
            self._able[role] = able
        self.standby.update(serving=any(
            each.role is Role.DECODE and each.state is State.READY and not self._roster.silent(now, each)
            for each in self._roster.members()))
        before, self._starting = self._starting, {}
        for member in self._roster.members():
            if member.state is State.STARTING:
                self._starting[member.name] = before.get(member.name, now)
            elif member.state is State.READY and member.name in before:
                self._took[member.role] = now - before[member.name]

    def expects(self, role: Role, now: float, *, wakes: bool = True) -> bool:
        """Whether somebody of the role may take requests soon. ``wakes``: also whom a request would start."""
        if self.standby.expects(now) if wakes else self.standby.awake(now):
            return True
        went = now - self._went[role] < RETURN_S or (self._able[role] and not self._roster.pickable(role))
        return (went or not self._roster.has_waited_for_agents(now)
                or any(self._is_expected(member, role, now) for member in self._roster.members()))

    def soonest_s(self, role: Role, now: float) -> float:
        """About how many seconds it takes until somebody of the role takes requests; infinity where nobody is expected."""
        found = [self._left_s(member, now) for member in self._roster.members() if self._is_expected(member, role, now)]
        if found:
            return min(found)
        if self.standby.expects(now):
            return self._took.get(role, UNSEEN_S)
        if self.expects(role, now):
            return max(0.0, RETURN_S - (now - self._went[role])) + self._took.get(role, 0.0)
        return math.inf

    def _is_expected(self, member: FleetMember, role: Role, now: float) -> bool:
        comes = member.state is State.STARTING or (member.able and member.ejected)
        return member.role is role and bool(comes) and not self._roster.silent(now, member)

    def _left_s(self, member: FleetMember, now: float) -> float:
        since = self._starting.get(member.name)
        return RESUMES_S if since is None else abs(self._took.get(member.role, 0.0) - (now - since))
