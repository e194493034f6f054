"""The DaemonSets and the Job that fetch images and weights of one service ahead of its instances, and the condition
``Prefetched`` that reports on them, with its reasons:

    True     ``Fetched``: the images are on all nodes that instances may run on; weights are on the volume, or running
             instances bring them there
    False    ``Fetching``: not yet
             ``WeightsFailed``: the Job has failed, such as when the hub does not have the model or does not give it
             ``Refused``, ``NameTaken``: the API server refuses a DaemonSet or a Job, or its name is somebody else's
    Unknown  ``NoNode``: there is no node that an instance may run on, such as before an autoscaler adds one

The conditions ``Ready`` and ``Degraded`` do not depend on it: an instance that starts fetches what is missing by itself.
What goes wrong here does not fail a round of reconciliation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Final, Literal

from xpyd_operator.api.service import DisaggService
from xpyd_operator.api.status import Condition
from xpyd_operator.errors import XpydError
from xpyd_operator.kube.client.cache import Entry
from xpyd_operator.kube.objects.children import Children
from xpyd_operator.kube.podstate.podstatus import condition, last_line
from xpyd_operator.kube.service.shared import SharedParts
from xpyd_operator.plan.conditions import shorten
from xpyd_operator.render.prefetch import IMAGES, KINDS, WEIGHTS, fetches_weights, prefetch_objects

logger = logging.getLogger(__name__)
Body = dict[str, Any]
Status = Literal["True", "False", "Unknown"]
TYPE: Final = "Prefetched"
AGAIN_S: Final = 30.0
"""What the API server refused is tried again so late, or when the document changes."""


class ServicePrefetch:
    """Keeps the DaemonSets and the Job of one service as its document asks, and reports how far they are."""

    def __init__(self, shared: SharedParts, entry: Entry) -> None:
        self._cache, self._settings = shared.cache, shared.settings
        self._at = (entry.namespace, entry.name)
        self._children = Children(shared.api, shared.cache, shared.events, shared.settings)
        self._rendered: tuple[DisaggService | None, tuple[Body, ...]] = (None, ())
        self._refused = ""
        """What the API server refused last, and why."""
        self._not_made = ""
        """The part of it that is about objects which are to be there."""
        self._again = 0.0
        """When these are tried again."""

    async def reconcile(self, service: DisaggService, wanted: int, now: float) -> None:
        """Create, change and delete DaemonSets and Job as the document asks. An XpydError is not raised but logged, and
        shown by ``condition``; what could not be made is tried again after ``AGAIN_S``, or at once with another document.

        Args:
            service: the document.
            wanted: number of wanted instances of both roles together; with any, a Job that has not completed is deleted.
            now: unix seconds.
        """
        if self._rendered[0] is not service:
            self._rendered = (service, prefetch_objects(service, self._settings))
            self._refused, self._not_made, self._again = "", "", 0.0
        made = [each for each in self._rendered[1] if each["kind"] != WEIGHTS or not wanted or self._done(each)]
        names = {(each["kind"], each["metadata"]["name"]) for each in made}
        gone = [(each.kind, each.name) for each in self._there() if (each.kind, each.name) not in names]
        not_gone = await self._refusal(service, [], gone, now)  # whatever cannot be made, an instance gets its volume
        if now >= self._again:
            self._not_made = await self._refusal(service, made, [], now)
            self._again = now + AGAIN_S if self._not_made else 0.0
        words = "; ".join(filter(None, (not_gone, self._not_made)))
        if words and words != self._refused:
            logger.warning("what fetches ahead for %s/%s: %s", *self._at, words)
        self._refused = words

    async def _refusal(
        self, service: DisaggService, objects: list[Body], unwanted: list[tuple[str, str]], now: float
    ) -> str:
        """Make the ones and delete the others; what came in the way, or nothing."""
        try:
            await self._children.reconcile_objects(service, objects, unwanted, now, lacking=lambda _: "")
        except XpydError as error:
            return str(error)
        return ""

    def condition(self) -> Condition | None:
        """The condition ``Prefetched``. None where the document asks for no prefetch or the service is suspended, but for
        objects that the API server refuses to delete.
        """
        service, rendered = self._rendered
        if self._refused:
            return _said("False", "Refused", f"the API server does not take it: {self._refused}")
        if service is None or not rendered:
            return None
        names = {f"{each['kind']} {each['metadata']['name']}" for each in rendered}
        if taken := [each for each in self._children.taken_names if each in names]:
            return _said("False", "NameTaken", f"somebody else's, so rename or delete it: {', '.join(taken)}")
        found = [self._cache.get(each["kind"], self._at[0], each["metadata"]["name"]) for each in rendered]
        return verdict([each.body for each in found if each is not None], weights=fetches_weights(service))

    def _there(self) -> Iterator[Entry]:
        for kind in KINDS:
            yield from self._cache.of_service(kind, *self._at)

    def _done(self, wanted: Body) -> bool:
        entry = self._cache.get(WEIGHTS, self._at[0], wanted["metadata"]["name"])
        return entry is not None and _holds(entry.body, "Complete")


def verdict(there: list[Body], *, weights: bool) -> Condition:
    """The condition ``Prefetched``, from the DaemonSets and Jobs of a service that exist. ``weights``: whether the document
    has weights to fetch.
    """
    daemons, jobs = ([each for each in there if each["kind"] == kind] for kind in (IMAGES, WEIGHTS))
    nodes = [_nodes(each) for each in daemons]
    ready, wanted = sum(each[0] for each in nodes), sum(each[1] for each in nodes)
    words = [f"images on {ready} of {wanted} nodes"]
    failed = next((each for each in jobs if _holds(each, "Failed")), None)
    fetched = any(_holds(each, "Complete") for each in jobs)
    if weights:
        words.append("weights are fetched" if fetched else "weights are being fetched" if jobs else
                     "weights are not fetched while instances run, which bring them")
    if failed is not None:
        why = condition(failed.get("status") or {}, "Failed") or {}
        told = last_line(why.get("message")) or why.get("reason") or "no reason is given"
        say = f"kubectl logs -l job-name={failed['metadata']['name']}"
        return _said("False", "WeightsFailed", f"weights cannot be fetched: {told} ({say}); {words[0]}")
    if any(not each[2] for each in nodes) or not daemons or ready < wanted or (jobs and not fetched):
        return _said("False", "Fetching", "; ".join(words))
    if not wanted:
        return _said("Unknown", "NoNode", "; ".join(["no node is there that an instance may run on", *words[1:]]))
    return _said("True", "Fetched", "; ".join(words))


def _nodes(daemon: Body) -> tuple[int, int, bool]:
    """Of a DaemonSet: nodes with a ready pod, or with a pod of its present template if these are fewer; nodes that should
    have one; whether its status is of its present generation.
    """
    status = daemon.get("status") or {}
    known = status.get("observedGeneration", 0) >= daemon["metadata"].get("generation", 0)
    ready = min(status.get("numberReady", 0), status.get("updatedNumberScheduled", 0))
    return ready, status.get("desiredNumberScheduled", 0), known


def _holds(job: Body, kind: str) -> bool:
    return (condition(job.get("status") or {}, kind) or {}).get("status") == "True"


def _said(holds: Status, reason: str, message: str) -> Condition:
    return Condition(type=TYPE, status=holds, reason=reason, message=shorten(message))
