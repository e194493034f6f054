"""kopf's part: listing and watching. Wiring only; what is shown goes to ``watch`` and from there to the cache.

kopf writes nothing here: no finalizers (there are only ``on.event`` handlers), no annotations, no Events. It runs in our
own loop and is started once the Lease is held; whatever ends it, ``run`` starts it again, and nothing of ours is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import kopf

from xpyd_operator.kube.client.api import RESOURCES
from xpyd_operator.kube.client.cache import KINDS, OWNER_KIND
from xpyd_operator.kube.client.login import Login, session
from xpyd_operator.kube.client.watch import Watch
from xpyd_operator.render.labels import SERVICE

logger = logging.getLogger(__name__)
AGAIN_S = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Before kopf is started again; the last one from then on."""
LASTED_S = 60.0
"""kopf ran well for so long: the next start is again a quick one."""
REQUEST_S = 30.0
CONNECT_S = 5.0
WATCH_S = 600
"""One watch request; then the next from where it ended."""
END_S = 2.0


class Backoffs:
    """Pauses between attempts, without end: an API server that is away for hours is waited for."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.2, 0.5, 1.0, 2.0)
        while True:
            yield 5.0


class NoProgress(kopf.ProgressStorage):
    """Nothing is kept on objects: there are no handlers with a state."""

    def fetch(self, **_: Any) -> None:
        """Nothing is there."""

    def store(self, **_: Any) -> None:
        """Keep nothing."""

    def purge(self, **_: Any) -> None:
        """There is nothing."""

    def touch(self, **_: Any) -> None:
        """Change nothing."""

    def clear(self, *, essence: Any) -> Any:
        """As it is."""
        return essence


class NoDiffs(kopf.DiffBaseStorage):
    """What an object was like before is of no interest, so no copies of it are made."""

    def build(self, **_: Any) -> Any:
        """Always the same."""
        return {}

    def fetch(self, **_: Any) -> None:
        """Nothing is there."""

    def store(self, **_: Any) -> None:
        """Keep nothing."""


def registry(login: Login, watch: Watch) -> kopf.OperatorRegistry:
    """What kopf is to do: log in, and show every event of every kind."""
    found = kopf.OperatorRegistry()

    async def log_in(**_: Any) -> kopf.AiohttpSession:
        configuration = await login.configuration()
        return kopf.AiohttpSession(server=configuration.host, aiohttp_session=session(configuration, (watch.pass_on,)))

    kopf.on.login(id="login", registry=found, backoff=2.0)(log_in)
    for kind in KINDS:
        kopf.on.event(*_address(kind), id=kind, registry=found)(_shower(kind, watch))
    return found


def _shower(kind: str, watch: Watch) -> Callable[..., Any]:
    async def show(event: kopf.RawEvent, **_: Any) -> None:
        watch.event(kind, event["type"], dict(event["object"]))

    return show


def _address(kind: str) -> tuple[str, ...]:
    """How kopf names a resource: group, version, plural."""
    resource = RESOURCES[kind]
    group, _, version = resource.version.rpartition("/")
    return (group, version, resource.plural) if group else (version, resource.plural)


def settings() -> kopf.OperatorSettings:
    """Kopf's settings. ``queueing.worker_limit`` stays open: handlers never wait, and a worker lives for seconds."""
    chosen = kopf.OperatorSettings()
    chosen.posting.enabled = False
    chosen.peering.standalone = True
    chosen.process.ultimate_exiting_timeout = None  # it would kill the whole process later on
    chosen.persistence.progress_storage = NoProgress()
    chosen.persistence.diffbase_storage = NoDiffs()
    chosen.networking.request_timeout = REQUEST_S
    chosen.networking.connect_timeout = CONNECT_S
    chosen.networking.error_backoffs = Backoffs()
    chosen.watching.server_timeout = WATCH_S
    chosen.watching.client_timeout = WATCH_S + REQUEST_S
    chosen.watching.connect_timeout = CONNECT_S
    chosen.queueing.idle_timeout = 1.0
    chosen.queueing.exit_timeout = 0.5
    for kind in KINDS:
        if kind != OWNER_KIND:
            chosen.watching.label_selectors[_address(kind)] = SERVICE  # type: ignore[index]
    return chosen


WHO = "xpyd-operator"
"""For kopf's peering, which is off."""


class Kopf:
    """kopf in our loop, started again whenever it ends."""

    def __init__(self, login: Login, watch: Watch, namespaces: tuple[str, ...], claim_signals: Callable[[], None]) -> None:
        """``claim_signals`` sets the process's signal handlers again, which kopf takes for itself."""
        self.alive_at = time.monotonic()
        """When all of kopf's tasks were last seen running (monotonic)."""
        self.starts = 0
        self._claim_signals = claim_signals
        self._login = login
        self._watch = watch
        self._namespaces = namespaces

    async def run(self) -> None:
        """Until cancelled."""
        failures = 0
        while True:
            began = time.monotonic()
            try:
                await self._once()
            except Exception:
                logger.exception("the watches failed")
            failures = 0 if time.monotonic() - began > LASTED_S else failures + 1
            pause_s = AGAIN_S[min(failures, len(AGAIN_S) - 1)]
            logger.warning("the watches ended and begin again in %g s", pause_s)
            await asyncio.sleep(pause_s)

    async def _once(self) -> None:
        """Kopf from its start to its end, or until it overlooks something."""
        self._watch.begin()
        tasks = await kopf.spawn_tasks(
            registry=registry(self._login, self._watch), settings=settings(), standalone=True,
            clusterwide=not self._namespaces, namespaces=self._namespaces,
            identity=WHO,  # type: ignore[arg-type]  # else it asks for the user's name, and an assigned user has none
        )
        self._claim_signals()
        self.starts += 1
        try:
            while not (unwatched := self._watch.unwatched_kinds(time.monotonic())):
                self.alive_at = time.monotonic()
                done, _ = await asyncio.wait(tasks, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                    return
            logger.warning("%s", unwatched)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=END_S)
