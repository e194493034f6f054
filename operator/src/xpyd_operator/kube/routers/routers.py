"""Routers in pods of their own: why those that should be there do not serve. Pure.

    Deployment ─▶ pods          ReplicaFailure: a quota or an admission lets it make none
                   └▶ absent    as that of an engine's pod, in words for routers
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from xpyd_operator.kube.client.cache import Entry
from xpyd_operator.kube.podstate.absent import absent
from xpyd_operator.kube.podstate.facts import Facts
from xpyd_operator.kube.podstate.podstatus import condition, has_ended, last_line
from xpyd_operator.plan.absent import Absence, Breakage, Waiting
from xpyd_operator.plan.desired import STARTUP_S
from xpyd_operator.render import labels

Body = dict[str, Any]
REFUSED = "RouterPodsRefused"


def absent_routers(
    name: str, deployment: Body | None, pods: Iterable[Entry], now: float, limit_s: float = STARTUP_S
) -> tuple[Absence, ...]:
    """Why the routers of the Deployment ``name`` are not all there at ``now`` (unix seconds): what keeps pods from being
    made, then those of pods that are to stay, by name. Empty: all that there are are ready.
    """
    found: list[Absence] = []
    failure = condition((deployment or {}).get("status") or {}, "ReplicaFailure")
    if failure is not None and failure.get("status") == "True":
        words = last_line(failure.get("message")) or failure.get("reason") or "no reason is given"
        found.append(Breakage(REFUSED, f"Deployment {name} cannot make pods of routers: {words}"))
    # One that has ended for good lies about until somebody clears it away; its ReplicaSet has made another one.
    staying = sorted((pod for pod in pods if not pod.deleting and not has_ended(pod.body.get("status") or {})),
                     key=lambda pod: pod.name)
    if not staying and not found:
        found.append(Waiting("NoRouter", f"Deployment {name} has made no pod that runs yet"))
    found += [seen for pod in staying if (seen := absent(pod.body, now, limit_s)) is not None]
    return tuple(found)


def running_routers(pods: Iterable[Facts]) -> tuple[str, ...]:
    """Names of the routers in pods of their own that have not ended, by name."""
    return tuple(sorted(each.name for each in pods if each.component == labels.ROUTERS and not each.over))


def first_words(found: Sequence[Absence]) -> str:
    """What keeps routers away, in words; empty where nothing does."""
    return "; ".join(dict.fromkeys(each.message for each in found[:2]))
