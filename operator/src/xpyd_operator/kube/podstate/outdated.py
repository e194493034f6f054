"""Pods of another release of xpyd that an upgrade cannot leave as they are, though it replaces nothing by itself.

A pod's revision says nothing of the image of xpyd's own containers, so that an upgrade restarts no engine. Two kinds of
pods need more than that:

    begun in vain   its image cannot be pulled, or ends. It is of the wanted revision, and would stay as it is after the
                    operator was put right. Its engine never ran, so it is made anew.
    left behind     some pod is of the operator's image, made since for whatever reason, and its KV is another one. The old
                    ones could not pair with it, and each that ends leaves fewer pairs: they count as of another revision,
                    and the planner replaces them in balance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from xpyd_operator.kube.client.cache import Entry
from xpyd_operator.kube.podstate.facts import facts
from xpyd_operator.kube.podstate.podstatus import unix
from xpyd_operator.plan.absent import Breakage
from xpyd_operator.plan.desired import Revision
from xpyd_operator.plan.observed import OUTDATED, Instance, Phase
from xpyd_operator.render import labels

Body = dict[str, Any]
OLD_S: Final = 30.0
"""A pod is tried for so long first. It also bounds how often one is made anew where something rewrites images."""
LEFT: Final = "-before"
"""Behind the revision of who was left behind."""
_OWN: Final = frozenset({labels.INSTALL, labels.SIDECAR})
_ON_ITS_WAY: Final = frozenset({"", "PodInitializing", "ContainerCreating"})
"""Reasons to wait of a container with which nothing is wrong."""


def mark_outdated(found: tuple[Instance, ...], pods: Iterable[Entry], image: str, now: float) -> tuple[Instance, ...]:
    """The instances, those marked that cannot stay as they are; ``image``: the operator's for xpyd's own containers."""
    bodies: dict[str, list[Body]] = {}
    for entry in pods:
        bodies.setdefault(entry.derive(facts).instance, []).append(entry.body)
    other = {name for name, mine in bodies.items() if any(_images(body).get(labels.INSTALL) != image for body in mine)}
    new = {each.fingerprint for each in found if each.name in bodies.keys() - other and each.ready and each.fingerprint}
    return tuple(
        _left_behind(each) if new and each.name in other and each.ready and each.fingerprint and each.fingerprint not in new
        else _begun_in_vain(each, bodies.get(each.name, ()), image, now)
        for each in found
    )


def _left_behind(instance: Instance) -> Instance:
    return msgspec.structs.replace(instance, revision=Revision(f"{instance.revision}{LEFT}"))


def _begun_in_vain(instance: Instance, pods: Sequence[Body], image: str, now: float) -> Instance:
    if not pods or instance.phase is not Phase.STARTING or instance.absent is None:
        return instance
    created = max(unix(pod["metadata"].get("creationTimestamp")) for pod in pods)
    other = next((found for pod in pods if not _ran(pod) and (found := _stuck(pod, image))), "")
    if now - created < OLD_S or not other:
        return instance
    words = f"{instance.absent.message}; it is made anew with {image}, as {other} is not the operator's image any more"
    why = Breakage(OUTDATED, words, replaced=True)
    return msgspec.structs.replace(instance, phase=Phase.CRASHED, since=created, absent=why)


def _images(pod: Body) -> dict[str, str]:
    """By init container; a native sidecar is one."""
    return {each["name"]: str(each.get("image")) for each in (pod.get("spec") or {}).get("initContainers") or ()}


def _ran(pod: Body) -> bool:
    """Whether its engine was ever started."""
    mains = [each for each in (pod.get("status") or {}).get("containerStatuses") or () if each["name"] == labels.MAIN]
    return any(each.get("lastState") or "waiting" not in (each.get("state") or {"waiting": {}}) for each in mains)


def _stuck(pod: Body, image: str) -> str:
    """Another image than ``image``, of a container of ours that cannot be started with it; empty: there is none."""
    images = _images(pod)
    for each in (pod.get("status") or {}).get("initContainerStatuses") or ():
        state: Body = each.get("state") or {}
        waits = (state.get("waiting") or {}).get("reason") or ""
        failed = bool((state.get("terminated") or {}).get("exitCode"))
        if each["name"] in _OWN and (failed or waits not in _ON_ITS_WAY) and images.get(each["name"], image) != image:
            return images[each["name"]]
    return ""
