"""Leading: requests for the Lease, and the work that goes on only while it is held. The rules are in ``kube/leader``."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from xpyd_operator.errors import XpydError
from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.election.leader import Election, LeaseLost, LeaseWait, Write

logger = logging.getLogger(__name__)
FAILED_S = 0.5
"""Pause after a request of a leader that failed; a follower has its usual pause."""

Work = Callable[[asyncio.Event], Awaitable[None]]
"""What a leader does: until the event is set, and then to an orderly end."""


class LeaseStore(Protocol):
    """Where the Lease is (``kube.client.api.Api``, with connections of its own so that nothing else holds a renewal up)."""

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        """Raises ApiError."""

    async def create(self, kind: str, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        """Raises ApiError."""

    async def patch(self, kind: str, namespace: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Raises ApiError."""


class StillWorking(XpydError):
    """The Lease was lost and the work does not end: the process must."""


class Candidate:
    """Takes part in the election until ``stop``. One per process."""

    def __init__(self, election: Election, store: LeaseStore, namespace: str, name: str,
                 changed: Callable[[bool], None] = lambda _: None) -> None:
        self.election = election
        self.heard_at: float | None = None
        """When the Lease was last read or written (the loop's time)."""
        self._store = store
        self._namespace = namespace
        self._name = name
        self._changed = changed
        self._lease: dict[str, Any] | None = None
        self._said = ""

    async def run(self, work: Work, stop: asyncio.Event, end_s: float) -> None:
        """Lead whenever it is this candidate's turn, until ``stop``; then give the work ``end_s`` and hand the Lease back.

        Raises:
            StillWorking: the Lease was lost, and the cancelled work did not end before another may begin.
            Exception: what the work raised.
        """
        while not stop.is_set():
            if await self._take(stop):
                await self._lead(work, stop, end_s)

    async def _take(self, stop: asyncio.Event) -> bool:
        """Follow until the Lease is ours; False: ``stop`` came first."""
        while not stop.is_set():
            pause_s = self.election.times.retry_s
            try:
                step = await self._turn(fresh=True)
            except ApiError as error:
                self._say(f"cannot see the Lease {self._namespace}/{self._name}: {error.message}", logging.WARNING)
            else:
                if self.election.leading:
                    return True
                if isinstance(step, LeaseWait):
                    pause_s = step.seconds
                    self._say(f"following {step.holder}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause_s)
        return False

    async def _lead(self, work: Work, stop: asyncio.Event, end_s: float) -> None:
        self._say(f"leading as {self.election.identity}")
        self._changed(True)
        ending = asyncio.Event()
        task = asyncio.ensure_future(work(ending))
        renewing = asyncio.ensure_future(self._renew())
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((task, renewing, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and not renewing.done():
                ending.set()
                await asyncio.wait((task, renewing), timeout=end_s, return_when=asyncio.FIRST_COMPLETED)
            lost = renewing.result().reason if renewing.done() else ""
            await self._end(task, lost)
        finally:
            for each in (task, renewing, stopping):
                each.cancel()
            self._changed(False)
            with contextlib.suppress(asyncio.CancelledError):
                await renewing
            await self._release()
        if not stop.is_set() and not lost:
            raise XpydError("the work of the leader ended without being asked to")

    async def _end(self, task: asyncio.Future[None], lost: str) -> None:
        if lost:
            self._say(f"leading no more: {lost}", logging.WARNING)
        task.cancel()
        times = self.election.times
        done, _ = await asyncio.wait((task,), timeout=(times.lease_s - times.renew_s) * 0.8)
        if not done:
            raise StillWorking("the work of the leader did not end in time")
        if not task.cancelled():
            task.result()

    async def _renew(self) -> LeaseLost:
        """Keep the Lease; returns when it is lost."""
        loop = asyncio.get_running_loop()
        fresh = False
        pause_s = self.election.times.retry_s
        while True:
            await asyncio.sleep(max(0.0, min(pause_s, self.election.stop_at() - loop.time())))
            lost = self.election.overdue(loop.time())
            if lost is not None:
                return lost
            pause_s, step = self.election.times.retry_s, None
            try:
                async with asyncio.timeout_at(self.election.stop_at()):
                    step = await self._turn(fresh=fresh)
                fresh = False
            except (ApiError, TimeoutError) as error:
                logger.warning("the Lease was not renewed: %s", error or "no answer in time")
                fresh, pause_s = True, min(FAILED_S, pause_s)
            if isinstance(step, LeaseLost):
                return step

    async def _turn(self, *, fresh: bool) -> Write | LeaseWait | LeaseLost:
        """Look at the Lease (where it is not known, or ``fresh``) and do what the rules say."""
        loop = asyncio.get_running_loop()
        if fresh or self._lease is None:
            self._lease = await self._read()
        step = self.election.on_lease(self._lease, loop.time(), _wall())
        self.heard_at = loop.time()
        if isinstance(step, Write):
            sent_at = loop.time()
            self._lease = await self._write(step.body)
            self.election.on_written(self._lease, sent_at)
            self.heard_at = loop.time()
        return step

    async def _read(self) -> dict[str, Any] | None:
        try:
            return await self._store.get("Lease", self._namespace, self._name)
        except ApiError as error:
            if error.missing:
                return None
            raise

    async def _write(self, body: dict[str, Any]) -> dict[str, Any]:
        """A merge patch with the version it was decided on; 409 where that is not the newest."""
        version = body["metadata"].get("resourceVersion")
        if version is None:
            return await self._store.create("Lease", self._namespace, body)
        patch = {"metadata": {"resourceVersion": version}, "spec": body["spec"]}
        return await self._store.patch("Lease", self._namespace, self._name, patch)

    async def _release(self) -> None:
        """Hand the Lease back, once; another waits no longer than its own pause then."""
        given = self.election.release(self._lease, _wall())
        self._lease = None
        if given is None:
            return
        try:
            await self._write(given)
        except ApiError as error:
            logger.warning("the Lease was not handed back, another takes it when it has run out: %s", error.message)
        else:
            logger.info("handed the Lease back")

    def _say(self, what: str, level: int = logging.INFO) -> None:
        """Log what is new."""
        if what != self._said:
            logger.log(level, "%s", what)
            self._said = what


def _wall() -> dt.datetime:
    return dt.datetime.now(dt.UTC)
