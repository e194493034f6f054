"""Pods are made, labelled and deleted, each only as the very object that was seen. An instance may have several of them
(``groups``): they are made together, but for the leader, which is made last, and deleted together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from xpyd_operator.api.service import DisaggService
from xpyd_operator.errors import NotYet
from xpyd_operator.kube.client.api import Api, ApiError
from xpyd_operator.kube.client.backoff import Holds
from xpyd_operator.kube.client.cache import Entry, WatchCache
from xpyd_operator.kube.client.work import all_of, in_turn
from xpyd_operator.kube.gangs.gangs import Gangs
from xpyd_operator.kube.gangs.podgroups import PodGroups
from xpyd_operator.kube.objects.blueprint import KubeBlueprint
from xpyd_operator.kube.podstate.facts import Facts, controller, facts
from xpyd_operator.plan.actions import Create, Drain, Label, Remove
from xpyd_operator.plan.observed import Phase
from xpyd_operator.plan.round import Round
from xpyd_operator.render import labels
from xpyd_operator.render.gang import Gang, InstanceGroups, joined_by, queued_as
from xpyd_operator.render.labels import LAYOUT
from xpyd_sidecar.contract.ids import InstanceName, Role

logger = logging.getLogger(__name__)
Body = dict[str, Any]
TAKEN_S = 30.0
"""A name that somebody else's pod has is tried again so late."""


class Pods:
    """The pods of one service. A write that finds its pod gone or changed is no error: the watch tells.

    All methods raise ApiError where the API server refuses otherwise or does not answer.
    """

    def __init__(self, api: Api, cache: WatchCache, owner: Entry, holds: Holds, groups: PodGroups) -> None:
        self.ungrouped = False
        """The API server took the last pod of a group, and left out in which one it is."""
        self._groups = groups
        self._api = api
        self._cache = cache
        self._namespace, self._service, self._uid = owner.namespace, owner.name, owner.uid
        self._holds = holds
        self._turn = asyncio.Lock()
        self._taken: dict[str, float] = {}
        """Names of pods of others, which carry no label of ours → when to try again."""

    def taken_names(self, now: float) -> tuple[str, ...]:
        """Names of pods that the service needs and somebody else has, though no watch of ours shows them."""
        self._taken = {name: when for name, when in self._taken.items() if now < when}
        return tuple(self._taken)

    def all_of(self, instance: InstanceName) -> list[Entry]:
        """The pods of an instance that are ours, in no order."""
        return [each for each in self._mine() if each.derive(facts).instance == instance]

    def by_instance(self) -> dict[InstanceName, list[Entry]]:
        """The pods of all instances that are ours."""
        found: dict[InstanceName, list[Entry]] = {}
        for each in self._mine():
            found.setdefault(each.derive(facts).instance, []).append(each)
        return found

    def members(self) -> list[Facts]:
        """Of instances of several pods."""
        return [fact for each in self._mine() if (fact := each.derive(facts)).member is not None]

    async def create(
        self, pods: Sequence[Body], now: float, group: tuple[Gang, Body] | None, lacking: Callable[[Body], str]
    ) -> None:
        """Make those pods of an instance that are not there, each once all is there that it needs, of which the group that
        they are in is made here; unless something only means to wait. After a refusal one instance is made after the other,
        so that what a quota leaves goes to whole ones.

        Args:
            pods: of the instance, the leader first.
            now: unix seconds.
            group: what a scheduler is told of them; None: nothing.
            lacking: what an object waits for, in words; empty where it may be made (``render.needs``).

        Raises:
            NotYet: some wait.
        """
        leader, *others = pods

        async def make_others() -> None:
            await all_of(self._make(pod, now, lacking) for pod in others)

        async def make_group() -> None:
            if group is not None:
                await self._groups.provide(*group, now)

        async with self._turn if len(pods) > 1 and self._holds.refused_lately(now) else contextlib.nullcontext():
            await in_turn((make_group, make_others, partial(self._make, leader, now, lacking)))

    async def _make(self, pod: Body, now: float, lacking: Callable[[Body], str]) -> None:
        name = pod["metadata"]["name"]
        if self._pod(name) is not None or self._holds.is_holding(now):
            return
        if words := lacking(pod):
            raise NotYet(words)
        try:
            made = await self._api.create("Pod", self._namespace, pod)
            if joined_by(pod) is not None:
                self.ungrouped = joined_by(made) is None
            self._cache.on_written("Pod", made)
        except ApiError as error:
            if error.conflict:
                await self._recognize(name, now)
            elif not self._holds.excuses(error, f"creating {name}", now):
                raise
            return
        self._holds.clear(now)

    async def delete(self, instance: InstanceName) -> None:
        """Begin the end of all pods of an instance: their preStop drains."""
        await all_of(self._delete(entry) for entry in self.all_of(instance))

    async def end_together(self) -> None:
        """Of an instance of several pods of which one ends, all end."""
        members = [each for each in self._mine() if each.derive(facts).member is not None]
        ending = {each.derive(facts).instance for each in members if each.deleting}
        left = [each for each in members if each.derive(facts).instance in ending and not each.deleting]
        for each in left:
            logger.info("pod %s/%s ends with the others of its instance", self._namespace, each.name)
        await all_of(self._delete(each) for each in left)

    async def _delete(self, entry: Entry) -> None:
        if entry.deleting:
            return
        try:
            answer = await self._api.delete("Pod", self._namespace, entry.name, entry.uid)
        except ApiError as error:
            self._excuse(entry, error)
        else:
            if answer.get("kind") == "Pod":
                self._cache.on_written("Pod", answer)

    async def label(self, action: Label) -> None:
        """Say whether it routes."""
        entry = leader_of(self.all_of(action.instance))
        if entry is None:
            return
        held = {labels.ROSTER: action.roster, labels.ROUTER: action.router}
        wanted = {label: labels.YES if holds else None for label, holds in held.items()}
        patch = {"metadata": {"uid": entry.uid, "labels": wanted}}
        try:
            self._cache.on_written("Pod", await self._api.patch("Pod", self._namespace, entry.name, patch))
        except ApiError as error:
            self._excuse(entry, error)

    async def _recognize(self, name: str, now: float) -> None:
        """A pod of this name exists that the watch does not show: it lost its label, or is somebody else's."""
        try:
            pod = await self._api.get("Pod", self._namespace, name)
            if controller(pod["metadata"]) == self._uid:
                mark = {"metadata": {"uid": pod["metadata"]["uid"], "labels": {labels.SERVICE: self._service}}}
                self._cache.on_written("Pod", await self._api.patch("Pod", self._namespace, name, mark))
                return
        except ApiError as error:
            if not (error.missing or error.conflict):
                raise
            return
        logger.warning("pod %s/%s is somebody else's", self._namespace, name)
        self._taken[name] = now + TAKEN_S

    def _mine(self) -> list[Entry]:
        """Without the pods of routers."""
        found = self._cache.of_service("Pod", self._namespace, self._service)
        return [each for each in found if each.derive(facts).owner == self._uid]

    def why_not(self, name: str) -> str:
        """Why a pod is not there; empty where it is ours and does not end."""
        entry = self._pod(name)
        return "is not there yet" if entry is None else "ends" if entry.deleting else ""

    def _pod(self, name: str) -> Entry | None:
        entry = self._cache.get("Pod", self._namespace, name)
        return entry if entry is not None and controller(entry.body["metadata"]) == self._uid else None

    def _excuse(self, entry: Entry, error: ApiError) -> None:
        """It has gone, or is another one by now, which the watch tells: nothing is wrong."""
        if error.missing:
            self._cache.missing(entry)
        elif not error.conflict:
            raise error


def leader_of(pods: Sequence[Entry]) -> Entry | None:
    """Of the pods of an instance, the one that speaks for it; None where it is not there."""
    return next((each for each in pods if each.derive(facts).leads), None)


async def make_whole(
    pods: Pods, blueprint: KubeBlueprint, gangs: Gangs, round_: Round, now: float, *, lacking: Callable[[Body], str]
) -> None:
    """Go on where the making of an instance ended in the middle (``groups``); ``lacking``: as in ``Pods.create``.

    Raises:
        ApiError: something could not be written.
        NotYet: some pods wait for what they need.
        XpydError: several things could not.
    """
    going = {action.instance for action in round_.plan.actions if isinstance(action, Drain | Remove)}
    entries = pods.by_instance()
    for each in round_.observed.instances:
        if each.parts == 1 or each.phase is not Phase.STARTING or each.name in going:
            continue
        found = entries.get(each.name, [])
        if not found or leader_of(found) is not None:
            continue
        if blueprint.revisions.get(each.role) != each.revision:
            continue  # it is of the other role's revision, and its time to be made will pass
        there = [pod.derive(facts) for pod in found]
        # They stay in the groups that they are in, whatever is made now.
        together = InstanceGroups(gangs.gang_of(there[0].gang) if there[0].gang is not None else None, there[0].queued_as)
        rendered = blueprint.pods_of(each.name, each.role, each.revision, together)
        leader = rendered[0]
        wanted = (leader["metadata"]["annotations"][LAYOUT], joined_by(leader), queued_as(leader))
        if {(fact.layout, fact.gang, fact.queued_as) for fact in there} == {wanted}:
            await pods.create(rendered, now, blueprint.group_of(rendered, together), lacking)
        else:  # this operator renders them otherwise than the one that began, or their groups are served no more
            await pods.delete(each.name)


def in_groups(pods: Pods, gangs: Gangs, round_: Round) -> dict[InstanceName, tuple[Gang, int] | None]:
    """Instances that exist or are being made; of those whose pods are in a scheduler's group which one, and of how many."""
    found: dict[InstanceName, tuple[Gang, int] | None] = {
        action.instance: None for action in round_.plan.actions if isinstance(action, Create)}
    for fact in pods.members():
        gang = gangs.gang_of(fact.gang) if fact.gang is not None else None
        found[fact.instance] = None if gang is None else (gang, fact.size)
    return found


def pods_of_wanted(service: DisaggService, round_: Round) -> dict[Role, int]:
    """How many pods the wanted instances of each role have: of those that serve the largest; one that is missing or does
    not serve counts as the largest that may take its place.

    So while the size changes the budgets are about what serves. By the new size alone one pod of each old group could go at
    once where it becomes smaller, and none could as long as a rollout waits where it becomes larger.
    """
    found: dict[Role, int] = {}
    for role in Role:
        wanted, size = round_.desired.target(role).replicas, service.spec.role(role).parallelism.pods
        there = [each for each in round_.observed.instances if each.role is role and not each.leaving]
        serving = sorted((each.parts for each in there if each.ready), reverse=True)[:wanted]
        late = max([size, *(each.parts for each in there if not each.ready)])
        found[role] = sum(serving) + (wanted - len(serving)) * late
    return found
