"""Pods change their role: annotation first, then the agent hears of it, then the routers, and the label last.

    assign    annotation with role and epoch, which the pod's volume shows to the agent sooner or later; routing ends
    push      the same to the agent at once; tried again every round until the routers know, or the volume was faster
    follow    the label, once a router has heard the agent say so; of an instance of several pods the leader is told, which
              tells the others, and the labels of all follow its

Every step is found by looking (the annotation and the label of the pod, a router's fleet), so that an operator that begins
in the middle goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import aiohttp
import msgspec

from xpyd_operator.kube.client.api import Api, ApiError
from xpyd_operator.kube.client.cache import Entry, WatchCache
from xpyd_operator.kube.objects.pods import leader_of
from xpyd_operator.kube.podstate.facts import Facts, facts
from xpyd_operator.kube.routers import calls
from xpyd_operator.kube.routers.fleet import KeyOf
from xpyd_operator.plan.actions import Switch
from xpyd_operator.render import labels
from xpyd_sidecar.contract import assignment
from xpyd_sidecar.contract.assignment import Assignment
from xpyd_sidecar.contract.fleet import Fleet

logger = logging.getLogger(__name__)
PUSHES = 16
"""Agents that are told side by side."""


class Switches:
    """The pods of one service that change their role."""

    def __init__(
        self, api: Api, cache: WatchCache, owner: Entry, session: aiohttp.ClientSession, *, timeout_s: float = 2.0
    ) -> None:
        self._api = api
        self._cache = cache
        self._namespace, self._service, self._uid = owner.namespace, owner.name, owner.uid
        self._session = session
        self._timeout_s = timeout_s
        self._complained: dict[str, str] = {}
        """uid of a pod → why its agent could not be told."""

    async def assign(self, action: Switch, key_of: KeyOf, now: float) -> None:
        """Write the annotation, and tell the agent.

        Raises:
            ApiError: the API server refuses, or does not answer.
        """
        entry = leader_of([each for each in self._mine() if each.derive(facts).instance == action.instance])
        if entry is None or entry.deleting:
            return
        told = Assignment(action.role, action.epoch, round(now, 3))
        metadata = {
            "uid": entry.uid,
            "resourceVersion": entry.body["metadata"]["resourceVersion"],  # nobody told it another one meanwhile
            "annotations": {labels.ASSIGNMENT: assignment.encode(told)},
            "labels": {labels.ROSTER: None, labels.ROUTER: None},
        }
        if await self._patch(entry, metadata):
            await self._push([msgspec.structs.replace(entry.derive(facts), told=told)], key_of)

    async def reconcile(self, fleet: Fleet | None, key_of: KeyOf) -> None:
        """Label those that the routers know in their new role, and tell the others once more.

        Raises:
            ApiError: a label could not be written.
        """
        mine = [pod for pod in self._mine() if not pod.deleting]
        pods = [pod for pod in mine if pod.derive(facts).switching]
        there = {pod.uid for pod in pods}
        self._complained = {uid: why for uid, why in self._complained.items() if uid in there}
        heard = {each.instance: each for each in fleet.instances} if fleet is not None else {}
        deaf = []
        for pod in pods:
            told, known = pod.derive(facts).told, heard.get(pod.derive(facts).instance)
            if told is not None and known is not None and (known.role, known.epoch) == (told.role, told.epoch):
                logger.info("pod %s/%s is %s now", self._namespace, pod.name, told.role)
                await self._patch(pod, {"uid": pod.uid, "labels": {labels.ROLE: told.role.value}})
            else:
                deaf.append(pod.derive(facts))
        await self._push(deaf, key_of)
        leaders = {pod.derive(facts).instance: pod for pod in mine if pod.derive(facts).leads}
        for pod in mine:
            leader = leaders.get(pod.derive(facts).instance)
            if leader is None or leader is pod or (fact := leader.derive(facts)).switching or fact.role is None:
                continue
            if pod.derive(facts).role is not fact.role:
                await self._patch(pod, {"uid": pod.uid, "labels": {labels.ROLE: fact.role.value}})

    async def _push(self, pods: Iterable[Facts], key_of: KeyOf) -> None:
        turns = asyncio.Semaphore(PUSHES)

        async def tell(pod: Facts) -> None:
            if pod.told is None:
                return
            async with turns:
                body = assignment.encode(pod.told).encode()
                why = await calls.tell_agent(self._session, pod, key_of(pod), (assignment.PATH, body), self._timeout_s)
            if why and self._complained.get(pod.uid) != why:
                logger.warning("pod %s/%s was not told its role: %s; its volume will", self._namespace, pod.name, why)
            self._complained[pod.uid] = why

        await asyncio.gather(*(tell(pod) for pod in pods if pod.usable))

    def _mine(self) -> list[Entry]:
        found = self._cache.of_service("Pod", self._namespace, self._service)
        return [each for each in found if each.derive(facts).owner == self._uid]

    async def _patch(self, entry: Entry, metadata: dict[str, object]) -> bool:
        """Whether it was written: a pod that has gone or changed is no error, since the watch tells."""
        try:
            self._cache.on_written("Pod", await self._api.patch("Pod", self._namespace, entry.name, {"metadata": metadata}))
        except ApiError as error:
            if error.missing:
                self._cache.missing(entry)
            elif not error.conflict:
                raise
            return False
        return True
