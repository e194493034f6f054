"""The operator from its start to its end: log in, serve health, take part in the election; while leading, watch and work.

    stop (SIGTERM) ─▶ rounds end after the action that is under way, Events are flushed ─▶ watches end ─▶ Lease handed back
    Lease lost     ─▶ all of it is cancelled before another may begin; this process follows again
    anything ends that should not ─▶ the process ends, and the kubelet starts it anew
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time

from xpyd_operator import __version__
from xpyd_operator.errors import XpydError
from xpyd_operator.kube.client.api import Api
from xpyd_operator.kube.client.cache import WatchCache
from xpyd_operator.kube.client.login import Login
from xpyd_operator.kube.client.metrics import Metrics
from xpyd_operator.kube.client.reflector import Kopf
from xpyd_operator.kube.client.watch import Watch
from xpyd_operator.kube.election.leader import Election, Times
from xpyd_operator.kube.election.lease import Candidate, StillWorking
from xpyd_operator.kube.health import Health
from xpyd_operator.kube.service.services import Services
from xpyd_operator.kube.settings import OperatorSettings

logger = logging.getLogger(__name__)
EVENTS_S = 3.0
"""How long the last Events may take, once the rounds have ended."""
WORK_S = 7.0
"""How long the leader's whole work may."""
PROCESS_S = 9.5
"""From SIGTERM to the end of the process, at the latest."""
LEASE_REQUEST_S = 3.0
SILENT_S = 30.0
"""A follower that has not seen the Lease for so long is not ready."""
DEAD_S = 60.0
"""kopf did not come back for so long: start the process anew."""


class Operator:
    """One process. ``run`` returns its exit code."""

    def __init__(self, settings: OperatorSettings, login: Login, *, elect: bool) -> None:
        self.metrics = Metrics()
        self._settings = settings
        self._login = login
        self._elect = elect and not settings.dry_run  # a dry run writes no Lease either
        self._stop = asyncio.Event()
        self._candidate: Candidate | None = None
        self._kopf: Kopf | None = None
        self._watch: Watch | None = None

    async def run(self) -> int:
        """Until SIGTERM or SIGINT.

        Raises:
            XpydError: there is no way to the API server, the port is taken, or the work ended on its own.
        """
        self._claim_signals()
        health = Health(self.metrics, self._unhealthy, self._unready)
        await health.start(self._settings.http_port)
        logger.info("xpyd operator %s for %s", __version__, _scope(self._settings))
        try:
            async with await self._login.api(self.metrics, width=self._settings.width,
                                             timeout_s=self._settings.request_timeout_s) as api:
                if self._elect:
                    await self._campaign(api)
                else:
                    await self._alone(api)
        except StillWorking:
            logger.critical("the Lease is another's and work goes on: ending the process at once")
            logging.shutdown()
            os._exit(1)
        finally:
            await health.close()
        logger.info("ended")
        return 0

    async def _campaign(self, api: Api) -> None:
        settings = self._settings
        times = Times(lease_s=int(settings.lease_s), renew_s=settings.lease_s * 0.7, retry_s=settings.lease_s * 0.2)
        election = Election(settings.lease_namespace, settings.lease_name, settings.identity, times)
        async with await self._login.api(self.metrics, width=2, timeout_s=LEASE_REQUEST_S) as store:
            self._candidate = Candidate(election, store, settings.lease_namespace, settings.lease_name,
                                        lambda leading: self.metrics.leader.set(float(leading)))
            await self._candidate.run(lambda ending: self._work(api, ending), self._stop, WORK_S)

    async def _alone(self, api: Api) -> None:
        """Work without a Lease; ``stop`` is the only end that is in order."""
        self.metrics.leader.set(1)
        await self._work(api, self._stop)

    async def _work(self, api: Api, ending: asyncio.Event) -> None:
        """Watch, and look after services, until ``ending``; everything is made anew each time."""
        cache = WatchCache()
        services = Services(api, cache, self._settings, self.metrics)
        self._watch = watch = Watch(cache, self.metrics, self._settings.namespaces, services.wake)
        self._kopf = kopf = Kopf(self._login, watch, self._settings.namespaces, self._claim_signals)
        watching = asyncio.ensure_future(kopf.run())
        working = asyncio.ensure_future(_serve(services, watch))
        asked = asyncio.ensure_future(ending.wait())
        tasks = (watching, working, asked)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if ending.is_set() and watch.filled.is_set():
                await services.close()
                await asyncio.wait((working,), timeout=EVENTS_S)
        finally:
            self._watch = self._kopf = None
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in (watching, working):
            if not task.cancelled():
                task.result()
        if not ending.is_set():
            raise XpydError("the watches or the services ended without being asked to")

    # What is told about it

    def _unhealthy(self) -> list[str]:
        if self._kopf is not None and time.monotonic() - self._kopf.alive_at > DEAD_S:
            return [f"the watches have not been running for {DEAD_S:g} s"]
        return []

    def _unready(self) -> list[str]:
        candidate, watch = self._candidate, self._watch
        if watch is not None:
            return [trouble for trouble in (*self._unhealthy(), watch.missing()) if trouble]
        if candidate is None or candidate.heard_at is None:
            return ["the Lease was not seen yet" if self._elect else "starting"]
        silent_s = asyncio.get_running_loop().time() - candidate.heard_at
        return [f"the Lease was not seen for {silent_s:.0f} s"] if silent_s > SILENT_S else []

    # Signals

    def _claim_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop, number)

    def _asked_to_stop(self, number: signal.Signals) -> None:
        if not self._stop.is_set():
            logger.info("%s: ending", number.name)
            asyncio.get_running_loop().call_later(PROCESS_S, _give_up)
        self._stop.set()


async def _serve(services: Services, watch: Watch) -> None:
    """Rounds, once everything there is was seen."""
    await watch.filled.wait()
    await services.run()


def _give_up() -> None:
    logger.critical("did not end within %g s: ending at once", PROCESS_S)
    logging.shutdown()
    os._exit(1)


def _scope(settings: OperatorSettings) -> str:
    where = f"namespaces {', '.join(settings.namespaces)}" if settings.namespaces else "all namespaces"
    return f"{where}{', dry run' if settings.dry_run else ''}"
