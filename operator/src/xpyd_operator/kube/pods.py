"""Pods are made, labelled and deleted, each only as the very object that was seen."""

from __future__ import annotations

import logging
from typing import Any

from xpyd_operator.kube.api import Api, ApiError
from xpyd_operator.kube.backoff import Holds
from xpyd_operator.kube.cache import Cache, Entry
from xpyd_operator.kube.observe import controller
from xpyd_operator.plan.actions import Label
from xpyd_operator.render import labels
from xpyd_sidecar.contract.ids import InstanceName

logger = logging.getLogger(__name__)
TAKEN_S = 30.0
"""A name that somebody else's pod has is tried again so late."""


class Pods:
    """The pods of one service. A write that finds its pod gone or changed is no error: the watch tells.

    All methods raise ApiError where the API server refuses otherwise or does not answer.
    """

    def __init__(self, api: Api, cache: Cache, owner: Entry, holds: Holds) -> None:
        self._api = api
        self._cache = cache
        self._namespace, self._service, self._uid = owner.namespace, owner.name, owner.uid
        self._holds = holds
        self._taken: dict[str, float] = {}
        """Names of pods of others, which carry no label of ours → when to try again."""

    def taken(self, now: float) -> tuple[str, ...]:
        """Names that somebody else's pods have, though no watch of ours shows them."""
        self._taken = {name: when for name, when in self._taken.items() if now < when}
        return tuple(self._taken)

    async def create(self, pod: dict[str, Any], now: float) -> None:
        """Make it, unless something only means to wait."""
        if self._holds.held(now):
            return
        name = pod["metadata"]["name"]
        try:
            self._cache.wrote("Pod", await self._api.create("Pod", self._namespace, pod))
        except ApiError as error:
            if error.conflict:
                await self._recognize(name, now)
            elif not self._holds.excuses(error, f"creating {name}", now):
                raise
        else:
            self._holds.over(now)

    async def delete(self, name: InstanceName) -> None:
        """Begin its end: its preStop drains."""
        entry = self._pod(name)
        if entry is None or entry.deleting:
            return
        try:
            answer = await self._api.delete("Pod", self._namespace, name, entry.uid)
        except ApiError as error:
            self._excuse(entry, error)
        else:
            if answer.get("kind") == "Pod":
                self._cache.wrote("Pod", answer)

    async def label(self, action: Label) -> None:
        """Say whether it routes."""
        entry = self._pod(action.instance)
        if entry is None:
            return
        held = {labels.ROSTER: action.roster, labels.ROUTER: action.router}
        wanted = {label: labels.YES if holds else None for label, holds in held.items()}
        patch = {"metadata": {"uid": entry.uid, "labels": wanted}}
        try:
            self._cache.wrote("Pod", await self._api.patch("Pod", self._namespace, action.instance, patch))
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

    def _pod(self, name: InstanceName) -> Entry | None:
        entry = self._cache.get("Pod", self._namespace, name)
        return entry if entry is not None and controller(entry.body["metadata"]) == self._uid else None

    def _excuse(self, entry: Entry, error: ApiError) -> None:
        """It has gone, or is another one by now, which the watch tells: nothing is wrong."""
        if error.missing:
            self._cache.missing(entry)
        elif not error.conflict:
            raise error
