"""What fetches the images and the weights of a service before an instance needs them (``model.prefetch``).

    DaemonSet NAME-ROLE-images    a pod on each node that an instance of the role may run on. It runs the engine's image and
                                  does nothing, so that the images of an instance are there, and the kubelet keeps them
    Job NAME-weights-DIGEST       brings the hub's files onto ``model.cache.claim``, while the service has no instances:
                                  one that runs has brought them itself, and may need the volume for its own node

Both roles have one DaemonSet where the same nodes are meant. None of these pods has the label of the service: the operator
does not count them among its own, and no policy selects them. The Job runs where routers in pods of their own run, which
asks for no node with devices.
"""

from __future__ import annotations

import math
from typing import Any, Final

from xpyd_operator.api import outside
from xpyd_operator.api.devices import devices
from xpyd_operator.api.service import DisaggService
from xpyd_operator.api.source import Hub, Image
from xpyd_operator.api.templates import LISTS, merge
from xpyd_operator.plan.desired import revision_of
from xpyd_operator.render import labels
from xpyd_operator.render import paths as at
from xpyd_operator.render.labels import metadata
from xpyd_operator.render.literal import literal
from xpyd_operator.render.pod import home_variables, user_variables
from xpyd_operator.render.settings import KubeSettings
from xpyd_operator.render.sidecar import install_container
from xpyd_sidecar.contract.ids import Role

Body = dict[str, Any]
IMAGES: Final = "DaemonSet"
WEIGHTS: Final = "Job"
KINDS: Final = (IMAGES, WEIGHTS)
TRIES: Final = 6
"""Pods of the Job that may fail, later and later, before it is given up (Kubernetes' own default)."""
_WAIT: Final = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {15}); signal.sigwait({15})"
_PLACE: Final = ("nodeSelector", "tolerations", "affinity", "runtimeClassName", "imagePullSecrets", "schedulerName",
                 "securityContext", "serviceAccountName")
"""What of a template says where a pod may run, as whom, and how its image is pulled."""
_IDLE_RESOURCES: Final = {"requests": {"cpu": "1m", "memory": "16Mi"}, "limits": {"memory": "128Mi"}}
_FETCH_RESOURCES: Final = {"requests": {"cpu": "250m", "memory": "1Gi"}}
"""Without a limit: clients of the hub take more memory for faster links."""


def prefetch_objects(service: DisaggService, settings: KubeSettings) -> tuple[Body, ...]:
    """All of them that the document asks for, as they are applied; empty where it asks for none, or is suspended.

    Raises:
        UnsupportedField: the template takes away what xpyd needs.
    """
    if not service.spec.model.prefetch or service.spec.suspend:
        return ()
    found = [*_images(service, settings), *([_weights(service, settings)] if fetches_weights(service) else [])]
    return tuple(labels.with_hash(each) for each in found)


def fetches_weights(service: DisaggService) -> bool:
    """Whether there are weights to fetch, and a place where they stay."""
    return isinstance(service.spec.model.origin, Hub) and service.spec.model.cache.claim is not None


def _images(service: DisaggService, settings: KubeSettings) -> list[Body]:
    made: dict[Role, Body] = {}
    for role in (Role.DECODE, Role.PREFILL):
        pod = _image_pod(service, role, settings)
        if service.spec.role(role).max_instances and pod not in made.values():
            made[role] = pod
    return [_daemon_set(service, role, pod) for role, pod in made.items()]


def _daemon_set(service: DisaggService, role: Role, pod: Body) -> Body:
    mark = {labels.PREFETCHES: f"{service.name}-{role}"}
    marks = {labels.NAME: labels.APPLICATION, labels.COMPONENT: labels.PREFETCH} | mark
    return _made(service, "apps/v1", IMAGES, labels.images_name(service.name, role), {
        "selector": {"matchLabels": mark},
        # A new image is pulled by a part of the nodes at a time: registries have limits, and uplinks.
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "25%"}},
        "template": {"metadata": {"labels": marks}, "spec": pod},
    })


def _image_pod(service: DisaggService, role: Role, settings: KubeSettings) -> Body:
    origin = service.spec.model.origin
    model = isinstance(origin, Image)
    main: Body = {
        "name": labels.MAIN,
        "image": service.spec.engine.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-c", _WAIT],
        "resources": _IDLE_RESOURCES,
        "securityContext": at.OWN_SECURITY,
    }
    if model:
        main["volumeMounts"] = [at.mount("model", at.CLAIM, read_only=True)]
    volumes: list[Body] = [{"name": "xpyd", "emptyDir": {}}]
    if isinstance(origin, Image):
        volumes.append({"name": "model", "image": {"reference": origin.reference}})
    pod = _pod(settings, [install_container(settings)], main, volumes)
    placed = _placed(pod, service.spec.role(role).template)
    tolerated = [{"key": key, "operator": "Exists"} for key in devices(service.spec.role(role)).keys]
    if tolerated:  # what an admission adds for who asks for a device
        placed["tolerations"] = [*placed.get("tolerations", ()), *tolerated]
    return placed


def _weights(service: DisaggService, settings: KubeSettings) -> Body:
    model = service.spec.model
    variables = home_variables() | outside.variables(service, at.CACHE) | user_variables(service)
    variables["PYTHONPATH"] = at.PACKAGE
    main: Body = {
        "name": labels.MAIN,
        "image": service.spec.engine.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-m", "xpyd_sidecar.engine.model_download"],
        "args": [literal(each) for each in (model.source, model.revision) if each is not None],
        "env": [{"name": key, **(one if isinstance(one, dict) else {"value": one})} for key, one in variables.items()],
        "resources": _FETCH_RESOURCES,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": at.CONTAINER_SECURITY,
        "volumeMounts": [at.mount("xpyd", at.PACKAGE, read_only=True), at.mount("tmp", at.TMP), at.mount("home", at.HOME),
                         at.mount("cache", at.CACHE)],
    }
    volumes: list[Body] = [{"name": name, "emptyDir": {}} for name in ("xpyd", "tmp", "home")]
    volumes.append({"name": "cache", "persistentVolumeClaim": {"claimName": model.cache.claim}})
    pod = _pod(settings, [install_container(settings)], main, volumes)
    pod = _placed(pod, service.spec.router_template)
    pod["restartPolicy"] = "OnFailure"
    marks = {labels.NAME: labels.APPLICATION, labels.COMPONENT: labels.PREFETCH}
    # A Job cannot be changed: another one has another name.
    name = labels.weights_name(service.name, revision_of(pod))
    return _made(service, "batch/v1", WEIGHTS, name, {
        "backoffLimit": TRIES,
        "activeDeadlineSeconds": math.ceil(service.spec.engine.startup_timeout_s),
        "template": {"metadata": {"labels": marks}, "spec": pod},
    })


def _pod(settings: KubeSettings, before: list[Body], main: Body, volumes: list[Body]) -> Body:
    return {
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 5,
        "securityContext": at.pod_security(settings),
        "initContainers": before,
        "containers": [main],
        "volumes": volumes,
    }


def _placed(pod: Body, template: dict[str, Any] | None) -> Body:
    """The pod where the pods of a template may run."""
    spec = (template or {}).get("spec")
    given = {name: spec[name] for name in _PLACE if name in spec} if isinstance(spec, dict) else {}
    return merge(pod, given, LISTS)


def _made(service: DisaggService, version: str, kind: str, name: str, spec: Body) -> Body:
    made = metadata(kind, service, name, labels.common(service))
    return {"apiVersion": version, "kind": kind, "metadata": made, "spec": spec}
