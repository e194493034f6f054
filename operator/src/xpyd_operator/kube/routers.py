"""Routers in pods of their own: why those that should be there do not serve. Pure.

    Deployment ─▶ pods           ReplicaFailure: a quota or an admission lets it make none
                   └▶ problem    as that of an engine's pod, in words for routers
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from xpyd_operator.kube.cache import Entry
from xpyd_operator.kube.problems import condition, last_line, problem
from xpyd_operator.plan.observed import Problem

Body = dict[str, Any]
REFUSED = "RouterPodsRefused"


class RouterTroubles(msgspec.Struct, frozen=True):
    """Of one service whose routers have pods of their own."""

    deployment: str
    """Name of the Deployment."""
    problems: tuple[Problem, ...] = ()
    """Of pods that are to stay, by name, after what keeps pods from being made."""

    @property
    def why(self) -> str:
        """What keeps routers away, in words; empty where nothing is known to."""
        return "; ".join(dict.fromkeys(each.message for each in self.problems[:2]))


def router_troubles(name: str, deployment: Body | None, pods: Iterable[Entry], now: float) -> RouterTroubles:
    """What is wrong with the routers of the Deployment ``name`` at ``now`` (unix seconds)."""
    found = []
    failure = condition((deployment or {}).get("status") or {}, "ReplicaFailure")
    if failure is not None and failure.get("status") == "True":
        words = last_line(failure.get("message")) or failure.get("reason") or "no reason is given"
        found.append(Problem(REFUSED, f"Deployment {name} cannot make pods of routers: {words}"))
    staying = sorted((pod for pod in pods if not pod.deleting and not _replaced(pod.body)), key=lambda pod: pod.name)
    found += [seen for pod in staying if (seen := problem(pod.body, now)) is not None]
    return RouterTroubles(name, tuple(found))


def _replaced(pod: Body) -> bool:
    """A pod that has ended for good lies about until somebody clears it away; its ReplicaSet has made another one."""
    return (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")
