"""Kubernetes Events: what happened to a service, for ``kubectl describe``. Bounded: too many are dropped."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from datetime import UTC, datetime
from typing import Any, Literal

from xpyd_operator.kube.client.api import Api, ApiError
from xpyd_operator.kube.client.cache import Entry
from xpyd_operator.kube.client.metrics import Metrics

logger = logging.getLogger(__name__)
Body = dict[str, Any]
Severity = Literal["Normal", "Warning"]
QUEUE = 1000
MESSAGE_MAX = 1024
REPEAT_S = 600.0
"""The same words about the same object are said again so late at the earliest."""
COMPONENT = "xpyd-operator"


def now_text() -> str:
    """The time as Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def event(about: Entry, severity: Severity, reason: str, message: str, *, now: str, suffix: str) -> Body:
    """The Event. ``suffix`` makes its name its own."""
    words = message if len(message) <= MESSAGE_MAX else f"{message[: MESSAGE_MAX - 1]}…"
    reference = {
        "apiVersion": about.body.get("apiVersion", ""),
        "kind": about.kind,
        "namespace": about.namespace,
        "name": about.name,
        "uid": about.uid,
        "resourceVersion": str(about.version),
    }
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{about.name}.{suffix}", "namespace": about.namespace},
        "involvedObject": reference,
        "type": severity,
        "reason": reason,
        "message": words,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": COMPONENT,
    }


class Events:
    """A queue and one sender (``run``)."""

    def __init__(self, api: Api, metrics: Metrics) -> None:
        self._api = api
        self._metrics = metrics
        self._queue: deque[tuple[str, Body]] = deque()
        self._more = asyncio.Event()
        self._said: dict[tuple[str, str, str], float] = {}

    def emit(self, about: Entry, severity: Severity, reason: str, message: str) -> None:
        """Queue an Event about an object; dropped and counted where the queue is full, not repeated within ``REPEAT_S``."""
        now = asyncio.get_running_loop().time()
        what = (about.uid, reason, message)
        if now - self._said.get(what, float("-inf")) < REPEAT_S:
            return
        self._said.pop(what, None)
        self._said[what] = now
        while len(self._said) > QUEUE:
            del self._said[next(iter(self._said))]
        if len(self._queue) >= QUEUE:
            self._metrics.event_dropped()
            return
        body = event(about, severity, reason, message, now=now_text(), suffix=secrets.token_hex(8))
        self._queue.append((about.namespace, body))
        self._more.set()

    async def run(self) -> None:
        """Send, until cancelled."""
        while True:
            await self._more.wait()
            self._more.clear()
            await self.flush()

    async def flush(self) -> None:
        """Send what there is."""
        while self._queue:
            namespace, body = self._queue.popleft()
            try:
                await self._api.create("Event", namespace, body)
            except ApiError as error:
                self._metrics.event_dropped()
                logger.debug("cannot write an event: %s", error)
