"""How a scheduler is told that the pods of an instance are placed together or not at all. Pure.

    kind           what is made for an instance                what its pods say
    kubernetes     PodGroup of scheduling.k8s.io, from 1.36    spec.schedulingGroup
    volcano        PodGroup of scheduling.volcano.sh           an annotation, and schedulerName volcano
    coscheduling   PodGroup of scheduling.x-k8s.io             a label

The group has the instance's name. What a template says of groups stays: then the pods are in that one, and none is made.
Kueue admits pods of a group together, too: where a template names one of its queues, the pods say that they are one group
that nobody repairs, so that Kueue lets them go once all have ended. Its name is of one life, since Kueue remembers what has
ended.

Nothing of this is in a revision, so that another scheduler replaces no pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from xpyd_operator.api.service import DisaggService
from xpyd_operator.render import labels
from xpyd_operator.render.labels import metadata
from xpyd_sidecar.contract.ids import InstanceName

Body = dict[str, Any]
Kind = Literal["kubernetes", "volcano", "coscheduling"]

VERSIONS: Final[Mapping[Kind, tuple[str, ...]]] = {
    "kubernetes": ("scheduling.k8s.io/v1beta1", "scheduling.k8s.io/v1alpha3", "scheduling.k8s.io/v1alpha2"),
    "volcano": ("scheduling.volcano.sh/v1beta1",),
    "coscheduling": ("scheduling.x-k8s.io/v1alpha1",),
}
"""Of the API of each kind those that are known, the best first."""
PLURAL: Final = "podgroups"
NEEDS: Final[Mapping[Kind, str]] = {
    "kubernetes": "Kubernetes 1.36 or later with the feature gate GenericWorkload and that version in --runtime-config",
    "volcano": "Volcano",
    "coscheduling": "the scheduler plugin Coscheduling and its CRDs",
}
"""What serves each."""
WAIT_S: Final = 60
"""How long coscheduling holds the places of some for the others: longer, and two groups hold each other up for longer."""
_WHOLE: Final = frozenset(VERSIONS["kubernetes"][:2])
"""Versions in which a group says that it is preempted as a whole; with the one before, pods are preempted one by one."""
_VOLCANO: Final = "scheduling.k8s.io/group-name"
_COSCHEDULING: Final = "scheduling.x-k8s.io/pod-group"
_QUEUE: Final = "kueue.x-k8s.io/queue-name"
_QUEUED: Final = "kueue.x-k8s.io/pod-group-name"
_COUNT: Final = "kueue.x-k8s.io/pod-group-total-count"
_REPAIRED: Final = "kueue.x-k8s.io/retriable-in-group"


class Gang(msgspec.Struct, frozen=True):
    """What the API server serves."""

    kind: Kind
    version: str
    """``group/version`` of its PodGroup."""

    @property
    def resource(self) -> str:
        """Its name among ``kube.client.api.RESOURCES``."""
        return resource_of(self.version)


def resource_of(version: str) -> str:
    """PodGroups of three APIs have one kind, so that each has a name of its own."""
    return f"PodGroup of {version}"


class InstanceGroups(msgspec.Struct, frozen=True):
    """In which groups the pods of one instance are."""

    gang: Gang | None = None
    """For the scheduler; None: none is told."""
    queued: str = ""
    """Name of the group for Kueue, where a template names a queue."""


def add_groups(pods: tuple[Body, ...], together: InstanceGroups) -> tuple[Body, ...]:
    """The pods of one instance in their groups; one that is all of its instance stays as it is."""
    if len(pods) == 1:
        return pods
    if together.gang is not None:
        pods = tuple(join(together.gang, pod) for pod in pods)
    return tuple(queue(pod, together.queued, len(pods)) for pod in pods)


def pod_group(gang: Gang, service: DisaggService, instance: InstanceName, size: int) -> Body:
    """The group of an instance of ``size`` pods, which goes with the service."""
    match gang.kind:
        case "kubernetes":
            spec: Body = {"schedulingPolicy": {"gang": {"minCount": size}}}
            if gang.version in _WHOLE:
                spec["disruptionMode"] = {"all": {}}
        case "volcano":
            spec = {"minMember": size}
        case "coscheduling":
            spec = {"minMember": size, "scheduleTimeoutSeconds": WAIT_S}
    made = metadata("PodGroup", service, instance, labels.common(service) | {labels.INSTANCE_OF: instance})
    return {"apiVersion": gang.version, "kind": "PodGroup", "metadata": made, "spec": spec}


def join(gang: Gang, pod: Body) -> Body:
    """A pod of an instance of several, in the group of its instance, unless its template says something of groups."""
    if _groups(pod):
        return pod
    meta, spec = pod["metadata"], pod["spec"]
    instance = meta["labels"][labels.INSTANCE_OF]
    match gang.kind:
        case "kubernetes":
            spec = spec | {"schedulingGroup": {"podGroupName": instance}}
        case "volcano":
            meta = meta | {"annotations": meta["annotations"] | {_VOLCANO: instance}}
            spec = {"schedulerName": "volcano"} | spec
        case "coscheduling":
            meta = meta | {"labels": meta["labels"] | {_COSCHEDULING: instance}}
    return pod | {"metadata": meta, "spec": spec}


def joined_by(pod: Body) -> Kind | None:
    """How a pod is in the group of its instance; None where it is in none, or in one that its template names."""
    instance = (pod["metadata"].get("labels") or {}).get(labels.INSTANCE_OF)
    return next((kind for kind, name in _groups(pod).items() if name == instance), None)


def _groups(pod: Body) -> dict[Kind, str]:
    """Every group that a pod says that it is in."""
    meta = pod["metadata"]
    group = (pod.get("spec") or {}).get("schedulingGroup") or {}
    said: dict[Kind, str | None] = {
        "kubernetes": group.get("podGroupName"),
        "volcano": (meta.get("annotations") or {}).get(_VOLCANO),
        "coscheduling": (meta.get("labels") or {}).get(_COSCHEDULING),
    }
    return {kind: name for kind, name in said.items() if name}


def queue(pod: Body, name: str, size: int) -> Body:
    """A pod of an instance of several, in a group for Kueue, unless its template names no queue, or a group itself."""
    meta = pod["metadata"]
    if _QUEUE not in meta["labels"] or _QUEUED in meta["labels"]:
        return pod
    notes = {_COUNT: str(size), _REPAIRED: "false"}
    marks = {"labels": meta["labels"] | {_QUEUED: name}, "annotations": meta["annotations"] | notes}
    return pod | {"metadata": meta | marks}


def queued_as(pod: Body) -> str:
    """The group in which Kueue admits a pod; empty: none."""
    return str((pod["metadata"].get("labels") or {}).get(_QUEUED, ""))
