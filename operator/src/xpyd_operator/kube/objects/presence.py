"""What is there of all that the objects of one service need, so that nothing is made before it (``render.needs``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from xpyd_operator.api.service import DisaggService
from xpyd_operator.kube.client.cache import WatchCache
from xpyd_operator.kube.gangs.podgroups import PodGroups
from xpyd_operator.kube.keys.key import ServiceKeys
from xpyd_operator.kube.keys.keychoice import KeyChoice
from xpyd_operator.kube.objects.ownership import ownership
from xpyd_operator.kube.objects.pods import Pods
from xpyd_operator.render import needs
from xpyd_operator.render.compare import differs
from xpyd_operator.render.needs import Need
from xpyd_operator.render.objects import policies
from xpyd_operator.render.settings import KubeSettings

Body = dict[str, Any]
MISSING = "is not there yet"


def why_not_there(cache: WatchCache, service: DisaggService, wanted: Body) -> str:
    """Why an object that a service wants is not there as it should be, in words behind its name; empty where it is.

    Args:
        cache: what is known of the cluster.
        service: the document.
        wanted: the object as it is rendered.
    """
    entry = cache.get(wanted["kind"], service.metadata.namespace or "", wanted["metadata"]["name"])
    if entry is None:
        return MISSING
    owned = ownership(entry.body["metadata"], service.name, service.metadata.uid or "")
    if owned != "ours":
        return "is somebody else's" if owned == "others" else "is still that of a service of this name before"
    if entry.deleting:
        return "is being deleted"
    what = differs(wanted, entry.body)
    return f"is not as it was written: {what}" if what else ""


class Presence:
    """Of one service."""

    def __init__(
        self, cache: WatchCache, settings: KubeSettings, *, keys: ServiceKeys, choice: KeyChoice, groups: PodGroups,
        pods: Pods,
    ) -> None:
        self._cache, self._settings = cache, settings
        self._keys, self._choice, self._groups, self._pods = keys, choice, groups, pods
        self._rendered: tuple[DisaggService | None, Mapping[str, Body]] = (None, {})

    def lacking(self, service: DisaggService, made: Body) -> str:
        """What a rendered object of this document waits for, in words; empty where it may be made."""
        wanted = self._policies(service)
        ask: Mapping[str, Callable[[Need], str]] = {
            "Secret": lambda need: self._keys.why_not(need.name, self._choice.wanted),
            "NetworkPolicy": lambda need: why_not_there(self._cache, service, wanted[need.name]),
            "PodGroup": lambda need: self._groups.why_not(need.name, need.of) if need.of is not None else MISSING,
            "Pod": lambda need: self._pods.why_not(need.name),
        }
        return needs.lacking(made, wanted, lambda need: ask[need.kind](need))

    def _policies(self, service: DisaggService) -> Mapping[str, Body]:
        if self._rendered[0] is not service:
            self._rendered = (service, {each["metadata"]["name"]: each for each in policies(service, self._settings)})
        return self._rendered[1]
