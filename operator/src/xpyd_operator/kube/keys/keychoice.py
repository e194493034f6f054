"""Which key a service is to have, by what its pods have and whose turn it is (decision 0032).

    no pods                                                       the newest
    some pods have the newest already                             the newest: what was begun ends
    the document asks for other pods than those there             the newest: they are replaced in any case
    a generation came, all is ready, and nobody else is rolled    the newest
    else                                                          the one that its pods have
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from xpyd_operator.api.durations import seconds
from xpyd_operator.api.service import DisaggService
from xpyd_operator.kube.client.cache import WatchCache
from xpyd_operator.kube.keys.key import KnownKey, ServiceKeys
from xpyd_operator.kube.keys.turns import Turns
from xpyd_operator.kube.podstate.facts import Facts, facts
from xpyd_operator.plan.desired import Revision
from xpyd_operator.plan.round import Round
from xpyd_operator.render import labels
from xpyd_operator.render.keys import PodKey, secret_of
from xpyd_sidecar.contract.ids import Role

RevisionOf = Callable[[str, Role], Revision]
"""(id of a key, role) → revision of the document with it."""


class KeyChoice:
    """Of one service."""

    def __init__(self, cache: WatchCache, keys: ServiceKeys, turns: Turns) -> None:
        self._cache = cache
        self._keys = keys
        self._turns = turns
        self._calm = False
        self.wanted: KnownKey | None = None
        """What new pods get."""
        self.used: frozenset[str] = frozenset()
        """The Secrets that living engines have."""

    async def choose(self, service: DisaggService, revision_of: RevisionOf, now: float) -> KnownKey:
        """The key that is wanted now.

        Raises:
            KeyTrouble: the pods have one that cannot be told.
            ApiError: at present.
        """
        living = self._living(service)
        self.used = used = frozenset(each.key for each in living if each.key)
        await self._keys.refresh(service, used, now)
        there = {(each.role, each.revision) for each in living}
        roles = {role for role, _ in there if role is not None}
        uid, spec = service.metadata.uid or "", service.spec

        def stays(known: KnownKey) -> bool:
            return all((role, revision_of(known.pod.id, role)) in there for role in roles)

        def may_roll() -> bool:
            limit_s = 2 * (seconds(spec.engine.startup_timeout) + spec.drain.timeout_s)
            return self._turns.holds(uid) or (self._calm and self._turns.take(uid, now, limit_s))

        self.wanted = self._keys.choose(used, stays, may_roll)
        if self._calm and used <= {self._keys.newest.pod.secret}:
            self._turns.give_back(uid)
        return self.wanted

    def on_round(self, round_: Round) -> None:
        """Note whether a round found all that is asked for ready, with nothing beside it."""
        staying = [each for each in round_.observed.instances if not each.leaving]
        there = Counter(each.role for each in staying if each.ready)
        as_wanted = all(each.revision == round_.desired.target(each.role).revision for each in staying)
        self._calm = as_wanted and len(staying) == there.total() and all(
            there[role] == round_.desired.target(role).replicas for role in Role
        )

    def of_routers(self, service: DisaggService) -> PodKey | None:
        """For routers in pods of their own: as it is while engines have another one, since those reach no newer router."""
        wanted = self.wanted
        if wanted is None or self.used <= {wanted.pod.secret}:
            return None if wanted is None else wanted.pod
        entry = self._cache.get("Deployment", service.metadata.namespace or "", labels.router_name(service.name))
        there = secret_of(entry.body["spec"]["template"]) if entry is not None else ""
        known = self._keys.find(there) or self._keys.previous_key(self.used, wanted) or wanted
        return known.pod

    def _living(self, service: DisaggService) -> list[Facts]:
        """What the pods of its engines say that stay."""
        pods = self._cache.of_service("Pod", service.metadata.namespace or "", service.name)
        found = (pod.derive(facts) for pod in pods)
        return [each for each in found if each.owner == service.metadata.uid and each.component == labels.ENGINE
                and not each.ends_by]
