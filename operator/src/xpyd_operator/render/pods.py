"""The pod of one engine, and the revision that says when it must be replaced."""

from __future__ import annotations

import math
from typing import Any

from xpyd_operator.api.service import DisaggService
from xpyd_operator.api.source import Claim
from xpyd_operator.plan.desired import Revision, revision_of
from xpyd_operator.render import labels
from xpyd_operator.render import paths as at
from xpyd_operator.render.defaults import without_defaults
from xpyd_operator.render.engine_container import engine_container
from xpyd_operator.render.overlay import overlay
from xpyd_operator.render.owner import metadata
from xpyd_operator.render.paths import ENGINE_PORT
from xpyd_operator.render.settings import KubeSettings
from xpyd_operator.render.sidecar_container import clients_volumes, install_container, sidecar_container
from xpyd_sidecar.contract.ids import InstanceName, Role

__all__ = ["ENGINE_PORT", "engine_pod", "pod_revision"]


def engine_pod(
    service: DisaggService, role: Role, name: InstanceName, revision: Revision, settings: KubeSettings
) -> dict[str, Any]:
    """The pod, ready to be created.

    Raises:
        Unsupported: the model cannot be read in a pod, or the template takes away what xpyd needs.
    """
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata(service, name, labels.engine(service, role, revision))
        | {"annotations": {"kubectl.kubernetes.io/default-container": labels.MAIN}},
        "spec": {
            "restartPolicy": "Always",
            "enableServiceLinks": False,  # a Service named vllm would set VLLM_PORT to a URL, on which vLLM ends
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": grace_s(service),
            "securityContext": at.POD_SECURITY,
            "topologySpreadConstraints": at.spread(labels.selector(service, role=role)),
            "initContainers": [install_container(settings), sidecar_container(service, role, name, settings)],
            "containers": [engine_container(service, role, name)],
            "volumes": _volumes(service),
        },
    }
    template = service.spec.role(role).template
    return pod if template is None else overlay(pod, template, f"spec.{role}.template")


def grace_s(service: DisaggService) -> int:
    """Seconds from the deletion of a pod until it is killed."""
    return math.ceil(service.spec.drain.timeout_s) + at.MARGIN_S


def pod_revision(service: DisaggService, role: Role, key_id: str) -> Revision:
    """Changes with everything that the user wrote and that an engine must be restarted for, and with nothing else.

    Made from the document and never from what is rendered of it: an upgrade of xpyd restarts no engine. Defaults are left
    out, so that a new field changes nothing. The role itself is left out, since engines run as ``kv_both``: equal roles
    can switch. ``key_id`` stands for the service's key.
    """
    spec = service.spec
    if spec.router.placement == "Sidecar":
        router = _without(without_defaults(spec.router), ("maxSidecars",))
    else:  # what agents know of routers that are elsewhere
        router = {"members": spec.router.ports.members, "heartbeat": spec.router.heartbeat_s}
    parts = {
        "model": without_defaults(spec.model),
        "engine": _without(without_defaults(spec.engine), ("startupTimeout", "imagePullPolicy")),
        "role": _without(without_defaults(spec.role(role)), ("replicas", "scaling")),
        "kv": without_defaults(spec.kv),
        "router": router,
        "key": key_id,
    }
    return revision_of(parts)


def _without(parts: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: part for name, part in parts.items() if name not in names}


def _volumes(service: DisaggService) -> list[dict[str, Any]]:
    model = service.spec.model
    cache: dict[str, Any] = {"emptyDir": {}}
    if model.cache.claim is not None:
        cache = {"persistentVolumeClaim": {"claimName": model.cache.claim}}
    elif model.cache.size is not None:
        cache = {"emptyDir": {"sizeLimit": model.cache.size}}
    volumes: list[dict[str, Any]] = [
        {"name": "xpyd", "emptyDir": {}},
        {"name": "run", "emptyDir": {}},
        at.secret_volume("key", labels.key_name(service.name), labels.KEY, labels.KEY),
        at.annotation_volume("assignment", labels.ASSIGNMENT, at.ASSIGNMENT_FILE),
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "home", "emptyDir": {}},
        {"name": "cache", **cache},
    ]
    if service.spec.router.placement == "Sidecar":
        volumes += clients_volumes(service)
    if isinstance(model.origin, Claim):
        claim = {"claimName": model.origin.claim, "readOnly": True}
        volumes.append({"name": "model", "persistentVolumeClaim": claim})
    shared = service.spec.kv.shared_memory
    if shared is not None:
        volumes.append({"name": "kv", "hostPath": {"path": shared.host_path, "type": "Directory"}})
    return volumes
