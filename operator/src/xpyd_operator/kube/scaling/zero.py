"""A service that may have no instances, in a cluster: polls its routers while nobody decodes, and sets both pools.

    decode wanted 0   polls are open ── somebody is held ──▶ pools 1 and 1 (``plan.zero.first_counts``)
    decode wanted     a router tells that it is idle ─▶ all are asked ── all are ──▶ pools 0 and 0

Prefill's pool is written first, both ways: where the second write fails, decode still says where things stand, and all of
it is done again. What only this process knows is the history of gaps.
"""

from __future__ import annotations

import logging

import msgspec

from xpyd_operator.api.service import DisaggService
from xpyd_operator.kube.client.cache import Entry
from xpyd_operator.kube.client.events import Events
from xpyd_operator.kube.objects.children import Children
from xpyd_operator.kube.podstate.facts import Facts
from xpyd_operator.kube.routers.fleet import Fleets, KeyOf
from xpyd_operator.kube.routers.waking import WakeCaller
from xpyd_operator.plan import zero
from xpyd_operator.plan.counts import Counts
from xpyd_operator.plan.observed import Instance
from xpyd_sidecar.contract.fleet import Fleet
from xpyd_sidecar.contract.ids import Role

logger = logging.getLogger(__name__)
WOKEN, TO_ZERO = "Woken", "ToZero"
"""Reasons of Events."""


class ZeroView(msgspec.Struct, frozen=True):
    """What a round saw of a service that may have no instances."""

    fleet: Fleet | None = None
    """What a router told."""
    instances: tuple[Instance, ...] = ()
    routers: tuple[Facts, ...] = ()
    """Those that clients reach, and can be asked."""


class ZeroScaler:
    """Of one service."""

    def __init__(self, events: Events, fleets: Fleets, children: Children, caller: WakeCaller) -> None:
        self._events, self._fleets, self._children = events, fleets, children
        self._caller = caller
        self._history = zero.IdleHistory()
        self._told: Fleet | None = None
        """The answer that was heard last; one may stand for several rounds."""

    async def scale(
        self, entry: Entry, service: DisaggService, wanted: Counts, seen: ZeroView, key_of: KeyOf, *, now: float,
        cold_s: float, held_up: str = "", failed: str = ""
    ) -> bool:
        """Wake the service, or put it to sleep, where that is due; whether it did, so that ``wanted`` is of before.

        Args:
            entry: the service's object.
            service: the document.
            wanted: instances that are wanted.
            seen: what the round saw.
            key_of: tells the key of a pod.
            now: unix seconds.
            cold_s: what a start takes, seconds.
            held_up: as in ``plan.zero.wake_call``, and
            failed: as well.

        Raises:
            ApiError: a pool could not be written.
        """
        if not service.spec.to_zero:
            await self._caller.close()
            return False
        tls = service.spec.router.tls.secret is not None
        served = zero.can_serve(service, wanted, seen.instances)
        call = None if served else zero.wake_call(wanted.decode, seen.instances, held_up, failed)
        await self._caller.keep(seen.routers, key_of, call, tls=tls)
        if wanted.decode > 0:
            return await self._sleep(entry, service, seen, key_of, now=now, cold_s=cold_s)
        held = self._caller.take()
        if not held:
            return False
        self._history = self._history.with_request(0.0, now, service.spec.planner.idle_timeout_s)
        first = zero.first_counts(service)
        words = f"{held} requests wait and no instance runs: {first.prefill}P{first.decode}D"
        return await self._set(entry, service, (first.prefill, first.decode), WOKEN, words)

    async def close(self) -> None:
        """Wait for nobody any more."""
        await self._caller.close()

    async def _sleep(
        self, entry: Entry, service: DisaggService, seen: ZeroView, key_of: KeyOf, *, now: float, cold_s: float
    ) -> bool:
        after_s, told = service.spec.planner.idle_timeout_s, seen.fleet
        if told is None or told.idle_s is None:
            return False
        if told is not self._told:
            self._told = told
            self._history = self._history.with_request(told.idle_s, now, after_s)
        idle_s = now - self._history.last
        if zero.comes_soon(seen.instances) or zero.reason_to_stay(self._history, idle_s, after_s, cold_s):
            return False
        tls = service.spec.router.tls.secret is not None
        answers = await self._fleets.fetch_fleets(seen.routers, key_of, tls=tls)
        agreed = zero.agreed_idle_s(answers.get(each.uid) for each in seen.routers)
        if agreed is None:
            return False
        self._history = self._history.with_request(agreed, now, after_s)
        if why := zero.reason_to_stay(self._history, agreed, after_s, cold_s):
            logger.info("%s/%s is idle and stays: %s", entry.namespace, entry.name, why)
            return False
        words = f"no request for {agreed:.0f} s: no instance runs until one comes"
        return await self._set(entry, service, (0, 0), TO_ZERO, words)

    async def _set(self, entry: Entry, service: DisaggService, counts: tuple[int, int], reason: str, words: str) -> bool:
        changed = False
        for role, count in zip((Role.PREFILL, Role.DECODE), counts, strict=True):
            changed |= await self._children.scale(service, role, count)
        if changed:
            self._events.emit(entry, "Normal", reason, words)
        return changed
