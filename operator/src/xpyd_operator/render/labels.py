"""Labels, names and owner of what belongs to a service: how its objects are found, and go with it."""

from __future__ import annotations

from typing import Any, Final

from xpyd_operator.api.base import API_VERSION, GROUP
from xpyd_operator.api.service import DisaggService
from xpyd_operator.plan.desired import revision_of
from xpyd_operator.render.dependencies import TABLE
from xpyd_sidecar.contract.ids import Role

FIELD_MANAGER: Final = "xpyd"
SHARED_MANAGER: Final = "xpyd-count"
"""Who owns the count of routers, beside whoever writes it, where the document says none."""
"""Who server-side apply says has set a field."""

NAME: Final = "app.kubernetes.io/name"
INSTANCE: Final = "app.kubernetes.io/instance"
COMPONENT: Final = "app.kubernetes.io/component"
MANAGED_BY: Final = "app.kubernetes.io/managed-by"

SERVICE: Final = f"{GROUP}/service"
"""Name of the DisaggService; on every object of it."""
SERVICE_UID: Final = f"{GROUP}/service-uid"
"""uid of that DisaggService; on every object of it but pods. What has no owner is known by it."""
ROLE: Final = f"{GROUP}/role"
REVISION: Final = f"{GROUP}/revision"
INSTANCE_OF: Final = f"{GROUP}/instance"
"""On the members of an instance of several pods: its name,"""
MEMBER: Final = f"{GROUP}/member"
"""and which of them this is; 0: the leader."""
LEADER: Final = "0"
ROSTER: Final = f"{GROUP}/roster"
"""``"true"`` on pods whose router hears the heartbeats."""
ROUTER: Final = f"{GROUP}/router"
"""``"true"`` on pods whose router is reached by clients."""
YES: Final = "true"
ASSIGNMENT: Final = f"{GROUP}/assignment"
"""Annotation: the role that a pod was told to take since it was made, with its epoch (``contract.assignment``). The label
``ROLE`` follows once the routers know."""
MEMBERS: Final = f"{GROUP}/members"
"""Annotation of such a member: how many there are,"""
LAYOUT: Final = f"{GROUP}/layout"
"""and a hash of what all of them are made of (``layout.digest``): members of two layouts never run together."""
APPLIED: Final = f"{GROUP}/applied"
"""Annotation: hash of what an applied object was rendered to."""

APPLICATION: Final = "xpyd"
ENGINE: Final = "engine"
ROUTERS: Final = "router"
PREFETCH: Final = "prefetch"
"""Component of pods that fetch something ahead of instances (``render.prefetch``)."""
PREFETCHES: Final = f"{GROUP}/prefetches"
"""On those of them that hold images: for which role of which service, ``NAME-ROLE``."""
OPERATOR: Final = "xpyd-operator"
"""``app.kubernetes.io/name`` of the operator's own pods."""

CLIENTS: Final = "http"
ADMIN: Final = "admin"
"""Ports of a router, by their names in its container."""
MAIN: Final = "main"
"""Container of the engine."""
SIDECAR: Final = "sidecar"
INSTALL: Final = "xpyd-install"

KEY: Final = "key"
"""The key inside the Secret of a service."""


def common(service: DisaggService) -> dict[str, str]:
    """Labels of every object of a service."""
    return {NAME: APPLICATION, INSTANCE: service.name, MANAGED_BY: APPLICATION, SERVICE: service.name}


def engine(service: DisaggService, role: Role, revision: str) -> dict[str, str]:
    """Labels of an engine's pod."""
    return common(service) | {COMPONENT: ENGINE, ROLE: role.value, REVISION: revision}


def selector(service: DisaggService, **more: str) -> dict[str, str]:
    """Selects pods of a service. ``role``, ``component`` and ``member`` narrow it; ``roster`` and ``router`` are
    ``"true"``.
    """
    names = {"role": ROLE, "component": COMPONENT, "member": MEMBER, "roster": ROSTER, "router": ROUTER}
    return {SERVICE: service.name} | {names[name]: str(value) for name, value in more.items()}


def key_name(service: str) -> str:
    """Name of the Secret with the service's key."""
    return f"{service}-key"


def engines_name(service: str) -> str:
    """Name of the headless Service by which the members of an instance of several pods find each other."""
    return f"{service}-engines"


def members_name(service: str) -> str:
    """Name of the headless Service that heartbeats go to."""
    return f"{service}-members"


def clients_name(service: str) -> str:
    """Name of the NetworkPolicy that lets clients in."""
    return f"{service}-clients"


def router_name(service: str) -> str:
    """Name of the Deployment of routers, and of its PodDisruptionBudget."""
    return f"{service}-router"


def role_name(service: str, role: Role) -> str:
    """Name of a role's DisaggPool, and of its PodDisruptionBudget."""
    return f"{service}-{role}"


def images_name(service: str, role: Role) -> str:
    """Name of the DaemonSet that holds the images of a role's pods on nodes."""
    return f"{service}-{role}-images"


def weights_name(service: str, digest: str) -> str:
    """Name of the Job that fetches weights; ``digest``: of what it is made of. With the longest name of a service 62
    characters: Kubernetes puts it into a label, which has 63.
    """
    return f"{service}-weights-{digest[:8]}"


def owner_reference(service: DisaggService) -> dict[str, Any]:
    """The service as controller owner. ``blockOwnerDeletion`` is false: the service goes at once, and the garbage collector
    takes what it owned, whether or not the operator runs.

    Raises:
        ValueError: the service is none that an API server knows.
    """
    if service.metadata.uid is None:
        raise ValueError(f"{service.name} has no uid")
    return {
        "apiVersion": API_VERSION,
        "kind": service.kind,
        "name": service.name,
        "uid": service.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def with_hash(made: dict[str, Any]) -> dict[str, Any]:
    """An object to be applied, with the hash of what it is made of as an annotation."""
    return made | {"metadata": made["metadata"] | {"annotations": {APPLIED: revision_of(made)}}}


def metadata(kind: str, service: DisaggService, name: str, marks: dict[str, str]) -> dict[str, Any]:
    """Name, namespace, labels, and the owner where an object of this ``kind`` has one. Without uid and owner where the
    service is only a document (``xpyd render pods``).

    What has no owner has no ``INSTANCE`` either: Argo CD takes an object with neither for one of the application of that
    name, and prunes it.
    """
    made: dict[str, Any] = {"name": name}
    if service.metadata.namespace is not None:
        made["namespace"] = service.metadata.namespace
    lasts = TABLE[kind].lasts
    made["labels"] = {name: value for name, value in marks.items() if not lasts or name != INSTANCE}
    if service.metadata.uid is not None:
        if kind != "Pod":
            made["labels"] |= {SERVICE_UID: service.metadata.uid}
        made["ownerReferences"] = [] if lasts else [owner_reference(service)]
    return made
