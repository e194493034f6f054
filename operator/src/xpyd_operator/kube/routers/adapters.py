"""The agents of a service are told which LoRA adapters their engines are to have.

Which order an agent follows is told by its beats, and by routers' ``/fleet``: whoever follows another one than is wanted is
told, so that an operator that begins in the middle goes on from there, and new pods need nothing of their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import aiohttp

from xpyd_operator.kube.client.cache import Entry
from xpyd_operator.kube.podstate.facts import Facts
from xpyd_operator.kube.routers import calls
from xpyd_operator.kube.routers.fleet import KeyOf
from xpyd_operator.render import labels
from xpyd_sidecar.contract import adapters
from xpyd_sidecar.contract.adapters import AdapterOrder
from xpyd_sidecar.contract.fleet import Fleet

logger = logging.getLogger(__name__)
AGAIN_S = 10.0
"""Until one that was told and does not follow yet is told once more."""
WIDTH = 4
"""Agents that are told side by side: an order may have a megabyte."""


class AdapterOrders:
    """The orders of one service."""

    def __init__(self, session: aiohttp.ClientSession, owner: Entry, *, timeout_s: float = 2.0) -> None:
        self._session = session
        self._owner = owner.uid
        self._where = f"{owner.namespace}/{owner.name}"
        self._timeout_s = timeout_s
        self._told: dict[str, tuple[str, float]] = {}
        """uid of a pod → which order it took, and when."""
        self._complained: dict[str, str] = {}
        self.waits = False
        """Somebody does not follow yet."""

    async def distribute(
        self, order: AdapterOrder, pods: Sequence[Facts], fleet: Fleet | None, key_of: KeyOf, now: float
    ) -> None:
        """Tell those who do not follow ``order``, of ``pods`` with the service's name: its engines of one pod each."""
        pods = [pod for pod in pods if pod.owner == self._owner and pod.usable and pod.member is None
                and pod.component == labels.ENGINE]
        there = {pod.uid for pod in pods}
        self._told = {uid: told for uid, told in self._told.items() if uid in there}
        self._complained = {uid: why for uid, why in self._complained.items() if uid in there}
        if fleet is None:
            return
        heard = {each.instance: each.adapters.order if each.adapters is not None else "" for each in fleet.instances}
        others = {told for told in set(heard.values()) if not adapters.follows(told, order)}
        deaf = [pod for pod in pods if heard.get(pod.instance) in others]
        self.waits = bool(deaf)
        due = [pod for pod in deaf if not self._lately(pod, order.digest, now)]
        if not due:
            return
        turns, body = asyncio.Semaphore(WIDTH), adapters.encode(order)

        async def tell(pod: Facts) -> None:
            async with turns:
                why = await calls.tell_agent(self._session, pod, key_of(pod), (adapters.PATH, body), self._timeout_s)
            if not why:
                self._told[pod.uid] = (order.digest, now)
            elif self._complained.get(pod.uid) != why:
                logger.warning("pod %s of %s was not told its adapters: %s", pod.name, self._where, why)
            self._complained[pod.uid] = why

        await asyncio.gather(*(tell(pod) for pod in due))

    def _lately(self, pod: Facts, digest: str, now: float) -> bool:
        told, when = self._told.get(pod.uid, ("", 0.0))
        return told == digest and 0 <= now - when < AGAIN_S
