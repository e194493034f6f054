"""The pod of one engine: its containers, its volumes, and the revision that says when it must be replaced.

The container ``main`` runs vLLM, with the connector on its path; those beside it are in ``sidecar``. What an instance of
several pods has besides is in ``group``.
"""

from __future__ import annotations

import math
import posixpath
from typing import Any, Final

import msgspec

from xpyd_operator.api import outside
from xpyd_operator.api.devices import devices, limits
from xpyd_operator.api.roles import GPU, NO_DEVICE, RoleSpec
from xpyd_operator.api.router import HEARTBEAT_S
from xpyd_operator.api.service import DisaggService
from xpyd_operator.api.source import Bucket, Claim, Folder, Hub, Image, RelativePath
from xpyd_operator.errors import UnsupportedField
from xpyd_operator.plan.desired import Revision, revision_of
from xpyd_operator.render import group, keys, labels
from xpyd_operator.render import paths as at
from xpyd_operator.render.defaults import without_defaults
from xpyd_operator.render.engine import CPU_ENV
from xpyd_operator.render.keys import PodKey
from xpyd_operator.render.labels import metadata
from xpyd_operator.render.layout import Member, layout
from xpyd_operator.render.literal import literal
from xpyd_operator.render.overlay import overlay
from xpyd_operator.render.settings import KubeSettings
from xpyd_operator.render.sidecar import clients_volumes, install_container, sidecar_container
from xpyd_sidecar.contract import launch
from xpyd_sidecar.contract.ids import InstanceName, Role

_BACK: Final = ["python3", "-c", "from xpyd_sidecar.agent.ask import main; main(['undrain'])"]
"""An engine that a probe has ended was drained before, and starts again in a pod that stays: the agent is told that it is
back. Where no agent answers there is no drain to take back, so this never fails."""
_STARTUP_PERIOD_S: Final = 5


def engine_pods(
    service: DisaggService, role: Role, name: InstanceName, revision: Revision, settings: KubeSettings,
    *, key: PodKey | None = None,
) -> tuple[dict[str, Any], ...]:
    """The pods of an instance, ready to be created, the leader's first. Without a ``key`` they are only to be looked at.

    Raises:
        UnsupportedField: the model cannot be read in a pod, or the template takes away what xpyd needs.
    """
    members = _members(service, role, name)
    return tuple(_pod(service, role, members, index, revision=revision, settings=settings, key=key)
                 for index in range(len(members)))


def _members(service: DisaggService, role: Role, name: InstanceName) -> tuple[Member, ...]:
    shared = at.KV_SHARED if service.spec.kv.shared_folder is not None else ""
    return layout(service, role, name, model_path(service), shared)


def _pod(
    service: DisaggService, role: Role, members: tuple[Member, ...], index: int, *, revision: Revision,
    settings: KubeSettings, key: PodKey | None,
) -> dict[str, Any]:
    key = key or keys.unknown(service.name)
    member = members[index]
    several = member.size > 1
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata(
            "Pod", service, member.name, labels.engine(service, role, revision) | (group.marks(member) if several else {})
        ) | {"annotations": {"kubectl.kubernetes.io/default-container": labels.MAIN}
             | (group.notes(members, settings) if several else {})},
        "spec": (group.hostname_fields(service, member) | group.placement(service, member) if several else {}) | {
            "restartPolicy": "Always",
            "enableServiceLinks": False,  # a Service named vllm would set VLLM_PORT to a URL, on which vLLM ends
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": at.grace_s(service),
            "securityContext": at.pod_security(settings),
            "topologySpreadConstraints": at.spread(labels.selector(service, role=role)),
            "initContainers": [install_container(settings),
                               sidecar_container(service, role, members, index, settings=settings, key=key)],
            "containers": [engine_container(service, role, member, key)],
            "volumes": _volumes(service, key, leads=index == 0),
        },
    }
    template = service.spec.role(role).template
    return pod if template is None else overlay(pod, template, f"spec.{role}.template")


def pod_revision(service: DisaggService, role: Role, key_id: str) -> Revision:
    """Changes with everything that the user wrote and that an engine must be restarted for, and with nothing else.

    Made from the document and never from what is rendered of it: an upgrade of xpyd restarts no engine. Defaults are left
    out, so that a new field changes nothing. The role itself is left out, since engines run as ``kv_both``: equal roles
    can switch. ``key_id`` stands for the service's key.
    """
    spec = service.spec
    if spec.router.placement == "sidecar":
        router = _without(without_defaults(spec.router), ("replicas", "gateway"))
        router |= {"audit": spec.kv.audit} if spec.kv.audit else {}
    else:  # what agents know of routers that are elsewhere
        router = {"members": spec.router.ports.members, "heartbeat": HEARTBEAT_S}
    several = spec.role(role).parallelism.pods > 1
    parts: dict[str, Any] = {
        "model": _without(without_defaults(spec.model), ("prefetch",)),
        "engine": _without(without_defaults(spec.engine), ("startupTimeout", *(() if several else ("topology",)))),
        "role": _without(without_defaults(spec.role(role)), ("replicas", "scaling", "parallelism")),
        "kv": _without(without_defaults(spec.kv),
                       ("audit", *(("encryption",) if spec.kv.engines_encrypt == "disabled" else ()))),
        "router": router,
        "key": key_id,
    }
    if parallelism := _without(without_defaults(spec.role(role).parallelism), ("device",)):
        parts["role"]["parallelism"] = parallelism
    return revision_of(parts | _device(spec.role(role)))


def _device(role: RoleSpec) -> dict[str, str]:
    """The device that is added, where it is not the default, or that there is none; devices that are named elsewhere stand
    with what names them.
    """
    found = devices(role)
    if not found:
        return {"device": NO_DEVICE}
    return {"device": found.added} if found.added not in ("", GPU) else {}


def _without(parts: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: part for name, part in parts.items() if name not in names}


def _volumes(service: DisaggService, key: PodKey, *, leads: bool) -> list[dict[str, Any]]:
    """``leads``: it is the leader of its instance, or all of it: told its role, and perhaps with a router beside it."""
    model = service.spec.model
    cache: dict[str, Any] = {"emptyDir": {}}
    if model.cache.claim is not None:
        cache = {"persistentVolumeClaim": {"claimName": model.cache.claim}}
    volumes: list[dict[str, Any]] = [
        {"name": "xpyd", "emptyDir": {}},
        {"name": "run", "emptyDir": {}},
        key.volume(),
        *((at.annotation_volume("assignment", labels.ASSIGNMENT, at.ASSIGNMENT_FILE),) if leads else ()),
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "home", "emptyDir": {}},
        {"name": "cache", **cache},
    ]
    if service.spec.router.placement == "sidecar" and leads:
        volumes += clients_volumes(service)
    match model.origin:
        case Claim(claim=claim):
            volumes.append({"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
        case Image(reference=reference):
            volumes.append({"name": "model", "image": {"reference": reference}})
    shared = service.spec.kv.shared_folder
    if shared is not None:
        volumes.append({"name": "kv", "hostPath": {"path": shared, "type": "Directory"}})
    if disk := _disk(service):
        volumes.append({"name": "offload", "emptyDir": {"sizeLimit": disk}})
    return volumes


def _disk(service: DisaggService) -> int | str | None:
    """The size of the volume for what is offloaded; None: there is none."""
    offload = service.spec.kv.offload
    return None if offload is None else offload.disk


def model_path(service: DisaggService) -> str:
    """The model as the engine of a pod sees it.

    Raises:
        UnsupportedField: it lies beside the document.
    """
    match service.spec.model.origin:
        case Hub(id=name):
            return name
        case Folder(path=path):
            return path
        case Bucket(url=url):
            return url
        case Claim(path=path) | Image(path=path):
            return posixpath.join(at.CLAIM, path) if path else at.CLAIM
        case RelativePath(path=path):
            reason = f"{path} lies beside the document, where no pod can read it; write a hub id, a path or pvc://"
            raise UnsupportedField("spec.model.source", reason)


def engine_container(service: DisaggService, role: Role, member: Member, key: PodKey) -> dict[str, Any]:
    """The container ``main`` of a member, before the user's template."""
    engine = service.spec.engine
    several = member.size > 1
    return {
        "name": labels.MAIN,
        "image": engine.image,
        "imagePullPolicy": "IfNotPresent",
        "command": group.command(service, member) if several else [*at.LISTENING, member.module],
        "args": [literal(argument) for argument in (*member.args, *group.port_args(member))],
        "env": engine_variables(service, role, member, key),
        **({"ports": [{"name": "engine", "containerPort": at.ENGINE_PORT, "protocol": "TCP"}]} if member.serves else {}),
        "resources": _resources(service.spec.role(role)),
        **(group.probes(service) if several else _probes(service)),
        "lifecycle": {"preStop": {"exec": {"command": [*at.ASK, "drain"]}}, "postStart": {"exec": {"command": _BACK}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": at.CONTAINER_SECURITY,
        "volumeMounts": _mounts(service),
    }


def engine_variables(service: DisaggService, role: Role, member: Member, key: PodKey) -> list[dict[str, Any]]:
    """The environment: defaults, then what the user wrote, then what nobody may change.

    The address comes first, since a variable can be used only after it.
    """
    spec = service.spec
    address = {launch.ENV_HOST: {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}}
    compiled = f"{at.CACHE}/compiled" if spec.model.cache.claim is not None else f"{at.HOME}/.cache"
    defaults: dict[str, Any] = home_variables() | {
        "VLLM_CACHE_ROOT": f"{compiled}/vllm",
        "TRITON_CACHE_DIR": f"{compiled}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{compiled}/inductor",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": at.RUN,
    }
    if member.size > 1:
        del defaults[group.COMPILED]
    defaults |= outside.variables(service, at.CACHE)
    if not devices(spec.role(role)):
        defaults |= CPU_ENV
    fixed = {
        launch.ENV_RUN_DIR: at.RUN,
        launch.ENV_KEY_FILE: key.path,
        launch.ENV_INSTANCE: member.instance,
        "PYTHONPATH": at.PACKAGE,
        "VLLM_HOST_IP": at.HOST_VAR,
    }
    everything = address | defaults | user_variables(service) | fixed | member.env
    return [{"name": key, **(one if isinstance(one, dict) else {"value": one})} for key, one in everything.items()]


def home_variables() -> dict[str, Any]:
    """Where a process of the engine's image may write, by variable, and who it is: nobody whom the image knows."""
    return {
        "HOME": at.HOME,
        "USER": "xpyd",  # asked for by torch, which finds no user 65532 in the image's list of users
        "LOGNAME": "xpyd",
        "TMPDIR": at.TMP,
        "XDG_CACHE_HOME": f"{at.HOME}/.cache",
    }


def user_variables(service: DisaggService) -> dict[str, Any]:
    """``spec.engine.env`` by name: a value as a container takes it literally, or ``valueFrom`` with where it comes from."""
    return {
        variable.name: literal(variable.value or "") if variable.value_from is None else {"valueFrom": variable.value_from}
        for variable in service.spec.engine.env
    }


def _resources(role: RoleSpec) -> dict[str, Any]:
    most = limits(role)
    requests = most | (dict(role.resources.requests) if role.resources is not None else {})
    claims = [msgspec.to_builtins(claim) for claim in role.resources.claims] if role.resources is not None else []
    parts = (("limits", most), ("requests", requests), ("claims", claims))
    return {name: values for name, values in parts if values}


def _probes(service: DisaggService) -> dict[str, Any]:
    failures = math.ceil(service.spec.engine.startup_timeout_s / _STARTUP_PERIOD_S)
    return {
        "startupProbe": at.killing(_health(_STARTUP_PERIOD_S, failures)),
        "livenessProbe": at.live_probe(),
        "readinessProbe": _health(2, 3),
    }


def _health(period_s: int, failures: int) -> dict[str, Any]:
    return at.http_probe("/health", at.ENGINE_PORT, period_s=period_s, failures=failures)


def _mounts(service: DisaggService) -> list[dict[str, Any]]:
    mounts = [
        at.mount("xpyd", at.PACKAGE, read_only=True),
        at.mount("run", at.RUN),
        at.mount("key", at.KEY_DIR, read_only=True),
        at.mount("shm", at.SHM),
        at.mount("tmp", at.TMP),
        at.mount("home", at.HOME),
        at.mount("cache", at.CACHE),
    ]
    if isinstance(service.spec.model.origin, Claim | Image):
        mounts.append(at.mount("model", at.CLAIM, read_only=True))
    if service.spec.kv.shared_folder is not None:
        mounts.append(at.mount("kv", at.KV_SHARED))
    if _disk(service):
        mounts.append(at.mount("offload", at.OFFLOAD))
    return mounts
