"""Advice to users about a pod that fails or waits: an engine with its sidecar, or a router in a pod of its own."""

from __future__ import annotations

from typing import Any

import msgspec

from xpyd_operator.render.labels import COMPONENT, ROUTERS, SIDECAR

Body = dict[str, Any]


class PodWords(msgspec.Struct, frozen=True):
    """Phrases for messages about one kind of pod."""

    what: str
    pull: str
    """Where its pull secrets are written."""
    room: str
    """How it asks for less of a node."""
    memory: str
    """How it gets more memory."""
    start: str
    """What gives it more time to start."""


_ROUTER_MEMORY = "give it more memory (spec.router.resources.limits.memory), or a smaller spec.router.maxBodySize"
_AGENT_MEMORY = "give it more memory (template.spec.initContainers, sidecar: resources.limits.memory)"
ENGINE = PodWords(
    what="engine",
    pull="template.spec.imagePullSecrets of its role",
    room="add nodes or devices, or ask for fewer (resources, replicas)",
    memory="give it more memory (resources.limits.memory), or let it take less",
    start="raise spec.engine.startupTimeout or see why it is slow",
)
ROUTER = PodWords(
    what="router",
    pull="spec.router.template.spec.imagePullSecrets",
    room="add nodes, let it run on more of them (spec.router.template) or ask for less (spec.router.resources)",
    memory=_ROUTER_MEMORY,
    start="see why it is slow",
)


def words_of(pod: Body) -> PodWords:
    """Return the phrases for a pod, by its component label: ``ROUTER`` or ``ENGINE``."""
    return ROUTER if (pod["metadata"].get("labels") or {}).get(COMPONENT) == ROUTERS else ENGINE


def more_memory(pod: Body, container: str) -> str:
    """Return the advice how to give a container of a pod more memory.

    An engine's sidecar that has ports is a router too, and gets the router's advice.
    """
    if container != SIDECAR:
        return words_of(pod).memory
    sidecars = [each for each in (pod.get("spec") or {}).get("initContainers") or () if each["name"] == SIDECAR]
    return _ROUTER_MEMORY if any(each.get("ports") for each in sidecars) else _AGENT_MEMORY
