"""The container ``main`` of an engine's pod: vLLM, with the connector on its path."""

from __future__ import annotations

import math
import posixpath
from typing import Any, Final

from xpyd_operator.api.roles import RoleSpec
from xpyd_operator.api.service import DisaggService
from xpyd_operator.api.source import Beside, Claim, Folder, Hub
from xpyd_operator.errors import Unsupported
from xpyd_operator.render import labels
from xpyd_operator.render import paths as at
from xpyd_operator.render.data_parallel import dp_env
from xpyd_operator.render.engine import CPU_ENV, MODULE, engine_args, executor_env, shutdown_args
from xpyd_operator.render.literal import literal
from xpyd_sidecar.contract import launch
from xpyd_sidecar.contract.ids import InstanceName, Role

HOST_VAR: Final = f"$({launch.ENV_HOST})"
"""Stands for the pod's address in what follows its definition."""
ASK: Final = ["python3", "-m", "xpyd_sidecar.agent.ask"]
_BACK: Final = ["python3", "-c", "from xpyd_sidecar.agent.ask import main; main(['undrain'])"]
"""An engine that a probe has ended was drained before, and starts again in a pod that stays: the agent is told that it is
back. Where no agent answers there is no drain to take back, so this never fails."""
_STARTUP_PERIOD_S: Final = 5


def model_path(service: DisaggService) -> str:
    """The model as the engine of a pod sees it.

    Raises:
        Unsupported: it lies beside the document.
    """
    match service.spec.model.origin:
        case Hub(id=name):
            return name
        case Folder(path=path):
            return path
        case Claim(path=path):
            return posixpath.join(at.CLAIM, path) if path else at.CLAIM
        case Beside(path=path):
            reason = f"{path} lies beside the document, where no pod can read it; write a hub id, a path or pvc://"
            raise Unsupported("spec.model.source", reason)


def engine_container(service: DisaggService, role: Role, name: InstanceName) -> dict[str, Any]:
    """The container, before the user's template.

    Raises:
        Unsupported: as ``model_path``.
    """
    engine = service.spec.engine
    shared = at.KV_SHARED if service.spec.kv.shared_memory is not None else ""
    args = [*engine_args(service, role, model_path(service), shared), *shutdown_args(service)]
    args += ["--host", "0.0.0.0", "--port", str(at.ENGINE_PORT)]
    return {
        "name": labels.MAIN,
        "image": engine.image,
        "imagePullPolicy": engine.image_pull_policy,
        "command": ["python3", "-m", MODULE],
        "args": [literal(argument) for argument in args],
        "env": engine_variables(service, role, name),
        "ports": [{"name": "engine", "containerPort": at.ENGINE_PORT, "protocol": "TCP"}],
        "resources": _resources(service.spec.role(role)),
        "startupProbe": at.killing(_health(_STARTUP_PERIOD_S, math.ceil(engine.startup_timeout_s / _STARTUP_PERIOD_S))),
        "livenessProbe": at.killing(_health(10, 12)),
        "readinessProbe": _health(2, 3),
        "lifecycle": {"preStop": {"exec": {"command": [*ASK, "drain"]}}, "postStart": {"exec": {"command": _BACK}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": at.CONTAINER_SECURITY,
        "volumeMounts": _mounts(service),
    }


def engine_variables(service: DisaggService, role: Role, name: InstanceName) -> list[dict[str, Any]]:
    """The environment: defaults, then what the user wrote, then what nobody may change.

    The address comes first, since a variable can be used only after it.
    """
    spec = service.spec
    address = {launch.ENV_HOST: {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}}
    defaults: dict[str, Any] = {
        "HOME": at.HOME,
        "USER": "xpyd",  # asked for by torch, which finds no user 65532 in the image's list of users
        "LOGNAME": "xpyd",
        "TMPDIR": at.TMP,
        "XDG_CACHE_HOME": f"{at.HOME}/.cache",
        "VLLM_CACHE_ROOT": f"{at.HOME}/.cache/vllm",
        "TRITON_CACHE_DIR": f"{at.HOME}/.cache/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{at.HOME}/.cache/inductor",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": at.RUN,
    }
    defaults |= {"HF_HOME": at.CACHE} if isinstance(spec.model.origin, Hub) else {"HF_HUB_OFFLINE": "1"}
    if spec.model.token_secret is not None:
        reference = {"name": spec.model.token_secret.name, "key": spec.model.token_secret.key}
        defaults["HF_TOKEN"] = {"valueFrom": {"secretKeyRef": reference}}
    if not has_devices(spec.role(role)):
        defaults |= CPU_ENV
    users: dict[str, Any] = {
        variable.name: literal(variable.value or "") if variable.value_from is None else {"valueFrom": variable.value_from}
        for variable in spec.engine.env
    }
    fixed = {
        launch.ENV_RUN_DIR: at.RUN,
        launch.ENV_KEY_FILE: f"{at.KEY_DIR}/{labels.KEY}",
        launch.ENV_SERVICE: service.name,
        launch.ENV_INSTANCE: name,
        "PYTHONPATH": at.PACKAGE,
        "VLLM_HOST_IP": HOST_VAR,
    }
    everything = address | defaults | users | fixed | executor_env(service, role, at.TMP) | dp_env(service, role)
    return [{"name": key, **(one if isinstance(one, dict) else {"value": one})} for key, one in everything.items()]


def has_devices(role: RoleSpec) -> bool:
    """Whether an instance gets devices: extended resources have a domain in their names (``nvidia.com/gpu``)."""
    return any("/" in resource for resource in role.limits)


def _resources(role: RoleSpec) -> dict[str, Any]:
    limits = role.limits
    requests = limits | (dict(role.resources.requests) if role.resources is not None else {})
    return {name: values for name, values in (("limits", limits), ("requests", requests)) if values}


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
    if isinstance(service.spec.model.origin, Claim):
        mounts.append(at.mount("model", at.CLAIM, read_only=True))
    if service.spec.kv.shared_memory is not None:
        mounts.append(at.mount("kv", at.KV_SHARED))
    return mounts
