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
"""Further pods of the Job where one fails, later and later, before it is given up (Kubernetes' own default)."""
_WAIT: Final = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {15}); signal.sigwait({15})"
_PLACE: Final = ("nodeSelector", "tolerations", "affinity", "runtimeClassName", "schedulerName")
"""What of a template says where a pod may run; of ``affinity`` that to nodes alone: who keeps engines apart from each other
does not mean these pods.
"""
_USER: Final = ("imagePullSecrets", "securityContext", "serviceAccountName")
"""What of a template says as whom a pod runs, and how its image is pulled."""
_MAIN: Final = ("env", "envFrom", "volumeMounts")
"""What of a template's container ``main`` a fetch of weights needs: proxies, mirrors, certificates."""
_NO_DEVICES: Final = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
"""Images made for CUDA ask for all devices of the node otherwise, where the runtime lets them."""
_IDLE_RESOURCES: Final = {"requests": {"cpu": "1m", "memory": "16Mi"}, "limits": {"memory": "128Mi"}}
_FETCH_RESOURCES: Final = {"requests": {"cpu": "250m", "memory": "1Gi"}}
"""Without a limit: clients of the hub take more memory for faster links."""


def prefetch_objects(service: DisaggService, settings: KubeSettings) -> tuple[Body, ...]:
    """All of them that the document asks for, as they are applied; empty where it asks for none, or is suspended."""
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
    volumes: list[Body] = [{"name": "xpyd", "emptyDir": {}}]
    main: Body = {
        "name": labels.MAIN,
        "image": service.spec.engine.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-c", _WAIT],
        "env": _NO_DEVICES,
        "resources": _IDLE_RESOURCES,
        "securityContext": at.OWN_SECURITY,
    }
    if isinstance(origin, Image):
        main["volumeMounts"] = [at.mount("model", at.CLAIM, read_only=True)]
        volumes.append({"name": "model", "image": {"reference": origin.reference}})
    pod = _pod(settings, [install_container(settings)], main, volumes)
    placed = _placed(pod, service.spec.role(role).template, (*_PLACE, *_USER))
    tolerated = [{"key": key, "operator": "Exists"} for key in devices(service.spec.role(role)).keys]
    if tolerated:  # what an admission adds for who asks for a device
        placed["tolerations"] = [*placed.get("tolerations", ()), *tolerated]
    return placed


def _weights(service: DisaggService, settings: KubeSettings) -> Body:
    model = service.spec.model
    variables = home_variables() | outside.variables(service, at.CACHE) | user_variables(service)
    variables |= {each["name"]: each["value"] for each in _NO_DEVICES} | {"PYTHONPATH": at.PACKAGE}
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
    engine = service.spec.role(Role.DECODE).template
    pod = _like_main(_pod(settings, [install_container(settings)], main, volumes), engine)
    pod = _placed(_placed(pod, engine, _USER), service.spec.router_template, _PLACE)
    pod["restartPolicy"] = "Never"  # the log of a pod that failed stays
    marks = {labels.NAME: labels.APPLICATION, labels.COMPONENT: labels.PREFETCH}
    spec = {
        "backoffLimit": TRIES,
        "activeDeadlineSeconds": math.ceil(service.spec.engine.startup_timeout_s),
        "template": {"metadata": {"labels": marks}, "spec": pod},
    }
    # A Job cannot be changed: another one has another name.
    return _made(service, "batch/v1", WEIGHTS, labels.weights_name(service.name, revision_of(spec)), spec)


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


def _placed(pod: Body, template: dict[str, Any] | None, fields: tuple[str, ...]) -> Body:
    """The pod with these fields of a template."""
    spec = _spec_of(template)
    given = {name: spec[name] for name in fields if name in spec}
    if isinstance(given.get("affinity"), dict):
        given["affinity"] = {"nodeAffinity": given["affinity"].get("nodeAffinity")}
    return merge(pod, given, LISTS)


def _like_main(pod: Body, template: dict[str, Any] | None) -> Body:
    """The pod with what a template says of the variables and mounts of ``main``, as far as it has the volumes."""
    spec = _spec_of(template)
    main: Body = next((each for each in spec.get("containers") or () if each.get("name") == labels.MAIN), {})
    volumes = [each for each in spec.get("volumes") or () if each.get("name") != "cache"]
    there = {each["name"] for each in (*pod["volumes"], *volumes)}
    given = {name: main[name] for name in _MAIN if main.get(name)}
    if "volumeMounts" in given:
        given["volumeMounts"] = [each for each in given["volumeMounts"] if each.get("name") in there]
    return merge(pod, {"containers": [{"name": labels.MAIN, **given}], "volumes": volumes}, LISTS)


def _spec_of(template: dict[str, Any] | None) -> dict[str, Any]:
    spec = (template or {}).get("spec")
    return spec if isinstance(spec, dict) else {}


def _made(service: DisaggService, version: str, kind: str, name: str, spec: Body) -> Body:
    made = metadata(kind, service, name, labels.common(service))
    return {"apiVersion": version, "kind": kind, "metadata": made, "spec": spec}
