"""Pods are made, labelled and deleted, each only as the very object that was seen. An instance may have several of them
(``groups``): they are made together, but for the leader, which is made last, and deleted together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from xpyd_operator.kube.api import Api, ApiError
from xpyd_operator.kube.backoff import Holds
from xpyd_operator.kube.cache import Entry, WatchCache
from xpyd_operator.kube.children import all_of
from xpyd_operator.kube.facts import Facts, controller, facts
from xpyd_operator.kube.podgroups import PodGroups
from xpyd_operator.plan.actions import Label
from xpyd_operator.render import labels
from xpyd_operator.render.gang import Gang, joined_by
from xpyd_sidecar.contract.ids import InstanceName

logger = logging.getLogger(__name__)
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

    def taken(self, now: float) -> tuple[str, ...]:
        """Names that somebody else's pods have, though no watch of ours shows them."""
        self._taken = {name: when for name, when in self._taken.items() if now < when}
        return tuple(self._taken)

    def all_of(self, instance: InstanceName) -> list[Entry]:
        """The pods of an instance that are ours, in no order."""
        return [each for each in self._mine() if each.derived(facts).instance == instance]

    def by_instance(self) -> dict[InstanceName, list[Entry]]:
        """The pods of all instances that are ours."""
        found: dict[InstanceName, list[Entry]] = {}
        for each in self._mine():
            found.setdefault(each.derived(facts).instance, []).append(each)
        return found

    def members(self) -> list[Facts]:
        """Of instances of several pods."""
        return [fact for each in self._mine() if (fact := each.derived(facts)).member is not None]

    async def create(self, pods: Sequence[dict[str, Any]], now: float, group: tuple[Gang, dict[str, Any]] | None) -> None:
        """Make those pods of an instance that are not there, the leader (the first) once all others are, and before them
        the group that they are in; unless something only means to wait. After a refusal one instance is made after the
        other, so that what a quota leaves goes to whole ones.
        """
        async with self._turn if len(pods) > 1 and self._holds.lately(now) else contextlib.nullcontext():
            await self._create(pods, now, group)

    async def _create(
        self, pods: Sequence[dict[str, Any]], now: float, group: tuple[Gang, dict[str, Any]] | None
    ) -> None:
        if group is not None and not await self._groups.provide(*group, now):
            return
        leader, *others = pods
        there: list[bool] = []

        async def make(pod: dict[str, Any]) -> None:
            there.append(await self._make(pod, now))

        await all_of(make(pod) for pod in others)
        if all(there):
            await self._make(leader, now)

    async def _make(self, pod: dict[str, Any], now: float) -> bool:
        """Whether it is there."""
        name = pod["metadata"]["name"]
        if (entry := self._pod(name)) is not None:
            return not entry.deleting
        if self._holds.held(now):
            return False
        try:
            made = await self._api.create("Pod", self._namespace, pod)
            if joined_by(pod) is not None:
                self.ungrouped = joined_by(made) is None
            self._cache.wrote("Pod", made)
        except ApiError as error:
            if error.conflict:
                await self._recognize(name, now)
            elif not self._holds.excuses(error, f"creating {name}", now):
                raise
            return False
        self._holds.over(now)
        return True

    async def delete(self, instance: InstanceName) -> None:
        """Begin the end of all pods of an instance: their preStop drains."""
        await all_of(self._delete(entry) for entry in self.all_of(instance))

    async def end_together(self) -> None:
        """Of an instance of several pods of which one ends, all end."""
        members = [each for each in self._mine() if each.derived(facts).member is not None]
        ending = {each.derived(facts).instance for each in members if each.deleting}
        left = [each for each in members if each.derived(facts).instance in ending and not each.deleting]
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
                self._cache.wrote("Pod", answer)

    async def label(self, action: Label) -> None:
        """Say whether it routes."""
        entry = leader_of(self.all_of(action.instance))
        if entry is None:
            return
        held = {labels.ROSTER: action.roster, labels.ROUTER: action.router}
        wanted = {label: labels.YES if holds else None for label, holds in held.items()}
        patch = {"metadata": {"uid": entry.uid, "labels": wanted}}
        try:
            self._cache.wrote("Pod", await self._api.patch("Pod", self._namespace, entry.name, patch))
        except ApiError as error:
            self._excuse(entry, error)

    async def _recognize(self, name: str, now: float) -> None:
        """A pod of this name exists that the watch does not show: it lost its label, or is somebody else's."""
        try:
            pod = await self._api.get("Pod", self._namespace, name)
            if controller(pod["metadata"]) == self._uid:
                mark = {"metadata": {"uid": pod["metadata"]["uid"], "labels": {labels.SERVICE: self._service}}}
                self._cache.wrote("Pod", await self._api.patch("Pod", self._namespace, name, mark))
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
        return [each for each in found if each.derived(facts).owner == self._uid]

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
    return next((each for each in pods if each.derived(facts).leads), None)
