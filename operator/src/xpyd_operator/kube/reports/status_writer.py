"""Writing the status of a service and of its pools, only where it says something new.

What is compared is what the API server's defaults leave no trace in, with times of transition taken over from conditions
that still hold the same: a status that says the same as before is equal, and nothing is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, TypeVar

import msgspec

from xpyd_operator.api.status import Condition, PoolStatus, ServiceStatus
from xpyd_operator.kube.client.api import Api, ApiError
from xpyd_operator.kube.client.cache import Entry, WatchCache

logger = logging.getLogger(__name__)
Body = dict[str, Any]
Status = TypeVar("Status", ServiceStatus, PoolStatus)
GAP_S = 0.5
"""Shortest time between two writes of one object, unless a condition turns."""
MESSAGE_MAX = 4096
CONDITIONS_MAX = 32


def read(body: Body, kind: type[Status]) -> Status:
    """The status that an object has; what cannot be read is taken to be none, and is written anew."""
    try:
        return msgspec.convert(body.get("status") or {}, kind)
    except msgspec.ValidationError:
        return kind()


def stamp_status(status: Status, before: Status, generation: int | None, now: str) -> Status:
    """The status with the generation, and each condition with the time ``now`` where it turned, or that of ``before``."""
    old = {each.type: each for each in before.conditions}
    conditions = tuple(_stamp(each, old.get(each.type), generation, now) for each in status.conditions[:CONDITIONS_MAX])
    return msgspec.structs.replace(status, observed_generation=generation, conditions=conditions)


def has_turned(status: ServiceStatus | PoolStatus, before: ServiceStatus | PoolStatus) -> bool:
    """Whether a condition holds that did not, or the other way round."""
    return {each.type: each.status for each in status.conditions} != {each.type: each.status for each in before.conditions}


def difference(live: Body, wanted: Body) -> Body:
    """The merge patch (RFC 7396) that makes ``wanted`` of ``live``; empty where they are equal."""
    patch: Body = {key: None for key in live if key not in wanted}
    for key, value in wanted.items():
        there = live.get(key)
        if isinstance(value, dict) and isinstance(there, dict):
            if inner := difference(there, value):
                patch[key] = inner
        elif key not in live or there != value:
            patch[key] = value
    return patch


class StatusWriter:
    """The status of one service and its pools: what is said last wins, written by one task that is there while needed."""

    def __init__(self, api: Api, cache: WatchCache) -> None:
        self._api = api
        self._cache = cache
        self._pending: dict[tuple[str, str, str], tuple[str, ServiceStatus | PoolStatus]] = {}
        self._sending: dict[tuple[str, str, str], tuple[str, ServiceStatus | PoolStatus]] = {}
        """What is on its way: the cache shows it only when it is answered."""
        self._written = float("-inf")
        self._hurry = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def put(self, entry: Entry, status: Status, generation: int | None, now: str) -> None:
        """Say it of this very object, soon.

        Args:
            entry: the object as it is now.
            status: without generation and times.
            generation: which one the status is about: that of the spec that was acted on, not of a newer one.
            now: the time as Kubernetes writes it.
        """
        at = (entry.kind, entry.namespace, entry.name)
        uid, sent = self._sending.get(at, ("", None))
        before = sent if isinstance(sent, type(status)) and uid == entry.uid else read(entry.body, type(status))
        status = stamp_status(status, before, generation, now)
        if status == before:
            self._pending.pop(at, None)
            return
        self._pending[at] = (entry.uid, status)
        if has_turned(status, before):
            self._hurry.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write(), name=f"status {entry.namespace}/{entry.service}")

    async def close(self, timeout_s: float = 2.0) -> None:
        """Write what is pending, as far as that goes in time."""
        task, self._task = self._task, None
        if task is not None:
            self._hurry.set()
            await asyncio.wait([task], timeout=timeout_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _write(self) -> None:
        while self._pending:
            wait_s = self._written + GAP_S - asyncio.get_running_loop().time()
            if wait_s > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._hurry.wait()
            self._hurry.clear()
            self._written = asyncio.get_running_loop().time()
            pending, self._pending = self._pending, {}
            self._sending = pending
            try:
                await asyncio.gather(*(self._one(*at, *said) for at, said in pending.items()))
            finally:
                self._sending = {}

    async def _one(self, kind: str, namespace: str, name: str, uid: str, status: ServiceStatus | PoolStatus) -> None:
        entry = self._cache.get(kind, namespace, name)
        if entry is None or entry.uid != uid or entry.deleting:
            return
        patch = difference(entry.body.get("status") or {}, msgspec.to_builtins(status))
        if not patch:
            return
        try:
            self._cache.on_written(kind, await self._api.patch_status(kind, namespace, name, patch, uid))
        except ApiError as error:
            if not (error.missing or error.conflict):  # it has gone meanwhile, or is another one
                logger.warning("cannot write the status of %s %s/%s: %s", kind, namespace, name, error)


def _stamp(condition: Condition, old: Condition | None, generation: int | None, now: str) -> Condition:
    same = old is not None and old.status == condition.status and old.last_transition_time
    return msgspec.structs.replace(
        condition,
        message=condition.message[:MESSAGE_MAX],
        observed_generation=generation,
        last_transition_time=old.last_transition_time if same and old is not None else now,
    )
