"""Session affinity: requests that belong together go to the same instances."""

from __future__ import annotations

from xpyd_sidecar.router.balance.load import Mean, score
from xpyd_sidecar.router.balance.policies import Policy, Query
from xpyd_sidecar.router.balance.rendezvous import Rendezvous

OVERLOADED = 2.0
"""A session leaves its instance while that has more than this times the mean."""
ALWAYS = 4
"""So many requests are never an overload, whatever the mean."""


class SessionAffinity:
    """A policy that keeps sessions together, and otherwise does as another one does.

    The instance of a session is the winner of a rendezvous hash of its key, so every router knows it and none remembers
    it. When it is gone, the next in the hash's order is the winner; while it is overloaded, the policy chooses.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._rendezvous = Rendezvous()
        self._mean = Mean()
        self.holds = policy.holds

    def choose(self, query: Query) -> int:
        """Index of the chosen one."""
        if query.session:
            index = self._rendezvous.best(query.role, query.candidates, query.session)
            usual = self._mean.of(query.role, query.candidates)
            if score(query.candidates[index]) < max(ALWAYS, OVERLOADED * usual):
                return index
        return self._policy.choose(query)
