"""Who may get a new key now: services are rolled one after the other.

    take ─▶ granted where nobody else rolls: none has the turn, and no service has pods with two keys
    give_back, or the limit is over: the next one. A service that is stuck goes on, and holds up nobody any more.

What rolls is seen from the pods, so that an operator that begins in the middle lets it end first.
"""

from __future__ import annotations

import logging

from xpyd_operator.kube.client.cache import WatchCache
from xpyd_operator.kube.podstate.facts import facts
from xpyd_operator.render.labels import ENGINE

logger = logging.getLogger(__name__)
LOOK_S = 1.0
"""The pods of all services are gone through at most so often."""


class Turns:
    """Of all services, by their uid."""

    def __init__(self, cache: WatchCache) -> None:
        self._cache = cache
        self._holder = ""
        self._until = 0.0
        self._late: set[str] = set()
        """Whose time is over."""
        self._looked = float("-inf")
        self._rolling: set[str] = set()

    def take(self, uid: str, now: float, limit_s: float) -> bool:
        """Whether this one may, and goes on to."""
        if self._holder == uid:
            return True
        if self._holder and now < self._until:
            return False
        if self._holder:
            logger.warning("a service did not get its new key in time, the next one begins", extra={"uid": self._holder})
            self._late.add(self._holder)
            self._holder = ""
        if not 0 <= now - self._looked < LOOK_S:
            self._rolling, self._looked = self._mixed(), now
        self._late &= self._rolling
        if self._rolling - self._late - {uid}:
            return False
        self._holder, self._until = uid, now + limit_s
        return True

    def holds(self, uid: str) -> bool:
        """It has its turn."""
        return self._holder == uid

    def give_back(self, uid: str) -> None:
        """It is through, or gone."""
        if self._holder == uid:
            self._holder = ""
        self._late.discard(uid)

    def _mixed(self) -> set[str]:
        """The services whose pods have more than one key."""
        seen: dict[str, set[str]] = {}
        for service in self._cache.services():
            for pod in self._cache.of_service("Pod", *service):
                fact = pod.derive(facts)
                if fact.key and fact.component == ENGINE and not fact.ends_by:
                    seen.setdefault(fact.owner, set()).add(fact.key)
        return {owner for owner, found in seen.items() if len(found) > 1}
