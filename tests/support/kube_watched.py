"""What watches show of a namespace, and waiting until they show something."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kube_client import Kube, KubeError, Mirror, Object
from node_agent import NodeAgent

DEADLINE_S = 240.0
ACCOUNT_S = 120.0
POLL_S = 0.03


class Watched:
    """A namespace with a scripted kubelet; ``mirrors`` by kind."""

    agent: NodeAgent
    mirrors: dict[str, Mirror]

    def of(self, kind: str) -> dict[str, Object]:
        """Objects of a kind by name."""
        return self.mirrors[kind].objects

    def events(self, reason: str) -> list[Object]:
        return [each for each in self.of("Event").values() if each["reason"] == reason]

    def describe(self) -> str:
        """For a failed test."""
        raise NotImplementedError

    async def catch_up(self) -> None:
        """Until everything is seen that had been written when this began, by a test or by others."""
        try:
            await asyncio.gather(*(mirror.catch_up() for mirror in self.mirrors.values()))
        except TimeoutError:
            raise AssertionError(f"a watch does not show what the API server has\n{self.describe()}") from None

    async def wait(self, condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Until ``condition()``; fails with everything that is known.

        It is not looked at before everything is seen that the test has done; afterwards everything is seen that was written
        before what made it true.
        """
        await self.catch_up()
        end = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > end or self.agent.faults:
                raise AssertionError(f"not within {deadline_s:g} s: {what}\n{self.describe()}")
            await asyncio.sleep(POLL_S)
        await self.catch_up()


def label(item: Object, key: str) -> str:
    """A label; empty where it is not there."""
    return str((item["metadata"].get("labels") or {}).get(key, ""))


def is_true(item: Object, kind: str) -> bool:
    """A condition says so."""
    conditions = (item.get("status") or {}).get("conditions") or ()
    return any(each["type"] == kind and each["status"] == "True" for each in conditions)


def is_ready(pod: Object) -> bool:
    """The kubelet says so, and nobody asked it to end."""
    return is_true(pod, "Ready") and not pod["metadata"].get("deletionTimestamp")


async def wait_account(kube: Kube, namespace: str) -> None:
    """Pods are refused until the namespace has its service account."""
    end = time.monotonic() + ACCOUNT_S
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
    while True:
        try:
            await kube.request("GET", path)
        except KubeError:  # also of an API server that has just come back
            if time.monotonic() > end:
                raise
            await asyncio.sleep(POLL_S)
        else:
            return
