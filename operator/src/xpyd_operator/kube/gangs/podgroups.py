"""The groups that tell a scheduler which pods are one instance (``render.gang``): made before the pods, gone after them.

    provide   ─▶ not there, or of another size: it is made, or made anew in a later round
    why_not   ─▶ empty: it is there, and as it should be
    reconcile ─▶ what is of no instance any more goes; what an instance has lost comes back

No watch shows them, since which kinds there are changes with the cluster; they are listed now and then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from xpyd_operator.kube.client.api import Api, ApiError
from xpyd_operator.kube.client.backoff import Holds
from xpyd_operator.kube.client.cache import Entry
from xpyd_operator.kube.podstate.facts import controller
from xpyd_operator.render.compare import differs
from xpyd_operator.render.gang import VERSIONS, Gang, Kind, resource_of
from xpyd_operator.render.labels import SERVICE
from xpyd_sidecar.contract.ids import InstanceName

logger = logging.getLogger(__name__)
Body = dict[str, Any]
LIST_S = 60.0


class PodGroups:
    """Of one service. All methods raise ApiError where the API server refuses or does not answer."""

    def __init__(self, api: Api, owner: Entry, holds: Holds) -> None:
        self._api = api
        self._namespace, self._service, self._uid = owner.namespace, owner.name, owner.uid
        self._holds = holds
        self._there: dict[tuple[str, str], Body] = {}
        """Resource and name of those that are ours, as they were seen last."""
        self._listed = float("-inf")
        self._taken: set[str] = set()

    @property
    def taken_names(self) -> list[str]:
        """Kinds and names of PodGroups that the service needs and that are somebody else's."""
        return [f"PodGroup {name}" for name in sorted(self._taken)]

    @property
    def has_groups(self) -> bool:
        """Whether there are groups, ours or in our way, as far as is known."""
        return bool(self._there or self._taken)

    def why_not(self, name: str, kind: Kind) -> str:
        """Why the group of an instance is not there, of a scheduler of this kind; empty where it is as it should be."""
        if any((resource_of(version), name) in self._there for version in VERSIONS[kind]):
            return ""
        return "is somebody else's" if name in self._taken else "is not there yet"

    async def provide(self, gang: Gang, wanted: Body, now: float) -> None:
        """Have the group of an instance there as it should be; where it cannot be yet, ``why_not`` says why."""
        name = wanted["metadata"]["name"]
        there = self._there.get((gang.resource, name)) or await self._make(gang, wanted, now)
        if there is None:
            return
        if controller(there["metadata"]) != self._uid:
            if name not in self._taken:
                logger.warning("PodGroup %s/%s is somebody else's", self._namespace, name)
            self._taken.add(name)
            return
        self._taken.discard(name)
        if there["metadata"].get("deletionTimestamp"):
            self._there.pop((gang.resource, name), None)
            return
        if differs(wanted["spec"], there["spec"]):  # of an instance of the same name before; its size cannot be changed
            await self._delete(gang.resource, there)
            return
        self._there[gang.resource, name] = there

    async def reconcile(
        self,
        served: Iterable[Gang],
        instances: Mapping[InstanceName, tuple[Gang, int] | None],
        render: Callable[[Gang, InstanceName, int], Body],
        now: float,
    ) -> None:
        """Delete groups of instances that are gone, and make those that are missing.

        Args:
            served: kinds that may have some.
            instances: those that exist or are being made; of those whose pods are in a group which one, and of how many.
            render: the group of an instance of so many pods.
            now: unix seconds.
        """
        self._taken.intersection_update(instances)  # nobody needs the other names any more
        if not 0 <= now - self._listed < LIST_S:
            await self._list(served)
            self._listed = now
        for (resource, name), body in list(self._there.items()):
            if InstanceName(name) not in instances:
                await self._delete(resource, body)
        for instance, group in instances.items():
            if group is not None and (group[0].resource, instance) not in self._there:
                await self.provide(group[0], render(group[0], instance, group[1]), now)

    async def _make(self, gang: Gang, wanted: Body, now: float) -> Body | None:
        """The group of that name, made or found; None: it cannot be made now."""
        name = wanted["metadata"]["name"]
        if self._holds.is_holding(now):
            return None
        try:
            return await self._api.create(gang.resource, self._namespace, wanted)
        except ApiError as error:
            if self._holds.excuses(error, f"creating PodGroup {name}", now):
                return None
            if not error.exists:
                raise
        try:
            return await self._api.get(gang.resource, self._namespace, name)
        except ApiError as error:
            if error.missing:  # it has just gone
                return None
            raise

    async def _list(self, served: Iterable[Gang]) -> None:
        there: dict[tuple[str, str], Body] = {}
        for gang in served:
            found = await self._api.items(gang.resource, self._namespace, labels=f"{SERVICE}={self._service}")
            there |= {(gang.resource, each["metadata"]["name"]): each for each in found.get("items") or ()
                      if controller(each["metadata"]) == self._uid}
        self._there = there

    async def _delete(self, resource: str, body: Body) -> None:
        name = body["metadata"]["name"]
        logger.info("delete PodGroup %s/%s", self._namespace, name)
        self._there.pop((resource, name), None)
        try:
            await self._api.delete(resource, self._namespace, name, body["metadata"]["uid"])
        except ApiError as error:
            if not (error.missing or error.conflict):
                raise
