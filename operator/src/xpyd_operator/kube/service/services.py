"""One task per DisaggService, begun when it is first heard of and ended when it and what it leaves behind are gone.

Events only wake a task; each round looks at everything. Rounds of one service never overlap; those of several run side by
side, up to a bound. A round that failed is tried again later and later, and an event then waits for the pause as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import aiohttp

from xpyd_operator.errors import ServiceGone, XpydError
from xpyd_operator.kube.client.api import Api
from xpyd_operator.kube.client.cache import OWNER_KIND, WatchCache
from xpyd_operator.kube.client.events import Events
from xpyd_operator.kube.client.metrics import Metrics
from xpyd_operator.kube.gangs.gangs import Gangs
from xpyd_operator.kube.gangs.topology import Topology
from xpyd_operator.kube.keys.master import KeyTrouble, Master
from xpyd_operator.kube.keys.turns import Turns
from xpyd_operator.kube.logs import log_subject
from xpyd_operator.kube.objects.blueprint import DocumentRefused
from xpyd_operator.kube.objects.sweep import left_behind, sweep
from xpyd_operator.kube.podstate.facts import facts
from xpyd_operator.kube.routes.gateways import Gateways
from xpyd_operator.kube.service.backend import KubeBackend
from xpyd_operator.kube.service.shared import SharedParts
from xpyd_operator.kube.settings import OperatorSettings
from xpyd_operator.loop import SLOWEST_S, converge
from xpyd_operator.plan.round import Round
from xpyd_operator.render.keys import is_derived

logger = logging.getLogger(__name__)
SOON_S = 1.0
"""Pause while something is on its way that no watch tells of."""
CALM = 200
"""Services up to which each has its resync as often as the settings say."""
LONGEST = 6.0
FINISH_S = 3.0
"""How long the rounds that are under way may take at the end."""
FLUSH_S = 2.0
"""How long the last Events may."""
ROUND_S = 60.0
"""Deadline of one round, far beyond what its requests may take."""

Name = tuple[str, str]


class _Service:
    """The task of one service."""

    def __init__(self, name: Name) -> None:
        self.name = name
        self.wake = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.backend: KubeBackend | None = None
        self.failed = 0
        self.refused = ""


class Services:
    """``wake`` is cheap and may be called for any event of a service or of what belongs to it."""

    def __init__(self, api: Api, cache: WatchCache, settings: OperatorSettings, metrics: Metrics) -> None:
        self._cache = cache
        self._settings = settings
        self._metrics = metrics
        self._api = api
        self._events = Events(api, metrics)
        self._services: dict[Name, _Service] = {}
        self._turns = asyncio.Semaphore(settings.rounds)
        self._ending = asyncio.Event()
        self._shared: SharedParts | None = None

    def wake(self, namespace: str, name: str) -> None:
        """Something of this service may have changed."""
        at = (namespace, name)
        found = self._services.get(at)
        if found is None:
            there = self._cache.get(OWNER_KIND, namespace, name) is not None
            if self._ending.is_set() or not (there or left_behind(self._cache, namespace, name)):
                return
            found = self._services[at] = _Service(at)
            self._begin(found)
        found.wake.set()

    async def run(self) -> None:
        """Look after every service in the cache until cancelled or closed."""
        connector = aiohttp.TCPConnector(limit=256, limit_per_host=2)
        async with aiohttp.ClientSession(connector=connector) as session:
            settings = self._settings
            master = Master(self._api, settings.operator_namespace, settings.master_secret, self._derived_keys,
                            dry_run=settings.dry_run)
            self._shared = SharedParts(self._api, self._cache, settings, self._events, session, self._api.server_clock.time,
                                       master, Turns(self._cache), Gangs(self._api, settings), Topology(self._api),
                                       Gateways(self._api, self._cache, settings.namespaces, self.wake), self._metrics)
            looking = asyncio.create_task(self._shared.gateways.run(), name="gateways")
            sender = asyncio.create_task(self._events.run(), name="events")
            in_order = False
            try:
                for at in self._cache.names():
                    self.wake(*at)
                for service in list(self._services.values()):
                    self._begin(service)
                await self._ending.wait()
                in_order = True
            finally:
                self._ending.set()
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)
                await self._end(sender, in_order=in_order)

    async def close(self) -> None:
        """No round begins any more; waits for those under way, within seconds. ``run`` ends after that."""
        self._ending.set()
        for service in self._services.values():
            service.wake.set()
        tasks = [service.task for service in self._services.values() if service.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=FINISH_S)

    @property
    def _resync_s(self) -> float:
        """A service that nothing wakes is looked at so often: less often where there are many, so that they cost together
        what ``CALM`` cost, up to ``LONGEST`` times as long.
        """
        return self._settings.resync_s * min(LONGEST, max(1.0, len(self._services) / CALM))

    def _derived_keys(self) -> bool:
        """Whether some engine has a key that was derived from a master."""
        return any(
            is_derived(name, pod.derive(facts).key)
            for namespace, name in self._cache.services() for pod in self._cache.of_service("Pod", namespace, name)
        )

    def _begin(self, service: _Service) -> None:
        """Once ``run`` has begun."""
        if self._shared is not None and service.task is None:
            where = "/".join(service.name)
            with log_subject(*service.name):
                service.task = asyncio.create_task(self._tend(service, self._shared), name=f"service {where}")
            self._metrics.tasks.inc()

    async def _end(self, sender: asyncio.Task[None], *, in_order: bool) -> None:
        """Finish what was begun, unless cancelled: then another may be about to begin."""
        tasks = [service.task for service in self._services.values() if service.task is not None]
        if tasks and in_order:
            await asyncio.wait(tasks, timeout=FINISH_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
        if in_order:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._events.flush()
        self._shared = None

    async def _tend(self, service: _Service, shared: SharedParts) -> None:
        try:
            while not self._ending.is_set():
                service.wake.clear()
                entry = self._cache.get(OWNER_KIND, *service.name)
                pause_s = self._resync_s
                if entry is None:
                    await self._drop(service)
                    if self._settings.dry_run or not left_behind(self._cache, *service.name):
                        break
                    pause_s = await self._sweep(service)
                elif entry.deleting:
                    await self._drop(service)  # nobody asks its routers any more who is to be started
                else:
                    if service.backend is None or service.backend.uid != entry.uid:
                        await self._drop(service)
                        service.backend = KubeBackend(shared, entry, service.wake.set)
                    with self._metrics.waiting.track_inprogress():
                        await self._turns.acquire()
                    try:
                        pause_s = await self._round(service, service.backend)
                    finally:
                        self._turns.release()
                await self._pause(service, pause_s)
        finally:
            await self._drop(service)
            if self._services.get(service.name) is service:
                del self._services[service.name]
            self._metrics.tasks.dec()
            self.wake(*service.name)  # one of the same name may have come meanwhile

    async def _sweep(self, service: _Service) -> float:
        """Of a service that is gone; the pause until the next time."""
        try:
            await sweep(self._api, self._cache, *service.name)
        except XpydError as error:
            logger.warning("%s/%s: cannot delete what is left of it: %s", *service.name, error)
            self._fail(service, error)
        else:
            service.failed = 0
        return self._resync_s if left_behind(self._cache, *service.name) else 0.0

    async def _drop(self, service: _Service) -> None:
        backend, service.backend = service.backend, None
        if backend is not None:
            service.failed = 0
            backend.forget()
            await backend.close()

    async def _pause(self, service: _Service, pause_s: float) -> None:
        """Until the service is woken or the pause is over; not less than the gap, nor than the back-off after failures."""
        gap_s = self._settings.gap_s
        least_s = min(SLOWEST_S, gap_s * 2.0 ** min(service.failed, 16)) if service.failed else gap_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(least_s):
                await self._ending.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, pause_s - least_s)):
                await service.wake.wait()

    async def _round(self, service: _Service, backend: KubeBackend) -> float:
        """One round; the pause until the next."""
        started = time.perf_counter()
        result = "failed"
        last = backend.last.desired if backend.last is not None else None
        try:
            async with asyncio.timeout(ROUND_S):
                done = await converge(backend, self._api.server_clock.time(), dry_run=self._settings.dry_run, last=last)
        except ServiceGone:
            result = "gone"
        except (DocumentRefused, KeyTrouble) as error:
            service.failed, result = 0, "refused"
            if str(error) != service.refused:
                logger.warning("%s/%s: %s", *service.name, error)
                service.refused = str(error)
        except XpydError as error:
            logger.warning("%s/%s: %s", *service.name, error)
            self._fail(service, error)
        except TimeoutError as error:
            logger.exception("%s/%s: no end of a round within %g s", *service.name, ROUND_S)
            self._fail(service, error)
        except Exception as error:
            logger.exception("%s/%s: round failed", *service.name)
            self._fail(service, error)
        else:
            return self._after(service, backend, done, time.perf_counter() - started)
        self._metrics.reconcile(time.perf_counter() - started, result)
        return self._resync_s

    def _after(self, service: _Service, backend: KubeBackend, done: Round, took_s: float) -> float:
        service.refused = ""
        result = "failed" if done.failures else "changed" if done.plan.actions else "same"
        self._metrics.reconcile(took_s, result)
        if self._settings.dry_run and done.plan.actions:
            logger.info("%s/%s would: %s", *service.name, "; ".join(str(action) for action in done.plan.actions))
        if done.failures or done.postponed:
            service.failed += 1
            if done.failures:
                self._metrics.errors("action")
            return self._resync_s
        service.failed = 0
        if self._settings.dry_run:
            return self._resync_s
        holding = backend.holds.is_holding(self._api.server_clock.time())
        return 0.0 if done.plan.actions and not holding else self._soon(backend)

    def _soon(self, backend: KubeBackend) -> float:
        return min(SOON_S, self._resync_s) if backend.hurried else self._resync_s

    def _fail(self, service: _Service, error: Exception) -> None:
        service.failed += 1
        self._metrics.errors(type(error).__name__)
