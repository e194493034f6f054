"""Where things are inside a pod, and who it runs as. Volumes by name, paths inside the containers."""

from __future__ import annotations

import math
from typing import Any, Final

from xpyd_operator.api.service import DisaggService
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.contract import launch, liveness

ENGINE_PORT: Final = 8000
EVERYWHERE: Final = "::"
"""All addresses of a pod, of both families where its node has both (the sidecar's ``listening``)."""
AGENT_PORT: Final = 8009
"""Where an agent takes a new role from the operator."""
USER: Final = 65532
"""User and group; what the images of xpyd are made for."""

PACKAGE: Final = "/xpyd"
RUN: Final = "/run/xpyd"
"""Sockets and records of agent and engine; short, since the path of a socket holds 107 bytes."""
KEY_DIR: Final = "/etc/xpyd/key"
CLIENTS_DIR: Final = "/etc/xpyd/clients"
CLIENTS_FILE: Final = "keys"
TLS_DIR: Final = "/etc/xpyd/tls"
TLS_CERT: Final = "tls.crt"
TLS_KEY: Final = "tls.key"
ASSIGNMENT_DIR: Final = "/etc/xpyd/assignment"
ASSIGNMENT_FILE: Final = "role"
CLAIM: Final = "/models/claim"
CACHE: Final = "/cache"
HOME: Final = "/home/xpyd"
TMP: Final = "/tmp"  # noqa: S108  # a volume of the pod's own
SHM: Final = "/dev/shm"  # noqa: S108  # likewise, in memory

OFFLOAD: Final = "/run/xpyd-offload"
"""The volume of ``kv.offload.disk``."""
KV_SHARED: Final = "/run/xpyd-kv"
"""The node's folder of ``kv.sharedMemory``."""

LISTENING: Final = ["python3", "-m", "xpyd_sidecar.listening"]
"""Stands before a module and its arguments; tells it to listen on all addresses, by what the pod's node has."""
ASK: Final = ["python3", "-m", "xpyd_sidecar.agent.ask"]
"""Asks the agent of the pod, from a container of it."""
HOST_VAR: Final = f"$({launch.ENV_HOST})"
"""Stands for the pod's address in what follows its definition."""

SECRET_MODE: Final = 0o440
MARGIN_S: Final = 30
"""What a pod gets beyond its drain, before it is killed."""
LISTEN_ON_S: Final = 5.0
"""How long a stopping router takes connections from nodes that have not heard of it."""

_FIXED: Final[dict[str, Any]] = {"runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}
CONTAINER_SECURITY: Final[dict[str, Any]] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
OWN_SECURITY: Final[dict[str, Any]] = {**CONTAINER_SECURITY, "readOnlyRootFilesystem": True}
"""Of the containers that run images of xpyd."""


def pod_security(settings: KubeSettings) -> dict[str, Any]:
    """Of a pod. Where users are assigned, a pod that names one would be refused, and one that names none gets its own."""
    return {
        "runAsNonRoot": True,
        **(_FIXED if settings.pod_user == "fixed" else {}),
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def mount(volume: str, path: str, *, read_only: bool = False) -> dict[str, Any]:
    """A volume mount."""
    return {"name": volume, "mountPath": path} | ({"readOnly": True} if read_only else {})


def http_probe(
    path: str, port: int, *, period_s: int, failures: int, timeout_s: int = 5, tls: bool = False
) -> dict[str, Any]:
    """A probe that asks ``path``. With ``tls``, the kubelet takes any certificate."""
    scheme = {"scheme": "HTTPS"} if tls else {}
    return {"httpGet": {"path": path, "port": port} | scheme} | _pace(period_s, failures, timeout_s)


def exec_probe(command: list[str], *, period_s: int, failures: int, timeout_s: int = 10) -> dict[str, Any]:
    """A probe that runs a command."""
    return {"exec": {"command": command}} | _pace(period_s, failures, timeout_s)


def live_probe() -> dict[str, Any]:
    """Ends an engine of which its agent says for ``PERIOD_S`` times ``FAILURES`` seconds that it stands still.

    A command in the engine's container can tell a silent agent from a bad word, and ask the engine's processes for stacks.
    """
    return killing(exec_probe([*ASK, "live"], period_s=liveness.PERIOD_S, failures=liveness.FAILURES))


def killing(probe: dict[str, Any]) -> dict[str, Any]:
    """The same for a probe that ends its container: what answers no probe need not be given the time of a drain."""
    return probe | {"terminationGracePeriodSeconds": MARGIN_S}


def _pace(period_s: int, failures: int, timeout_s: int) -> dict[str, Any]:
    return {"periodSeconds": period_s, "failureThreshold": failures, "timeoutSeconds": timeout_s}


def secret_volume(name: str, secret: str, key: str, file: str) -> dict[str, Any]:
    """A volume that holds one key of a Secret as a file."""
    return secret_files(name, secret, {key: file})


def secret_files(name: str, secret: str, files: dict[str, str]) -> dict[str, Any]:
    """A volume that holds keys of a Secret as files."""
    items = [{"key": key, "path": file} for key, file in files.items()]
    return {"name": name, "secret": {"secretName": secret, "items": items, "defaultMode": SECRET_MODE}}


def annotation_volume(name: str, annotation: str, file: str) -> dict[str, Any]:
    """A volume that shows an annotation of its pod as a file; empty while there is none."""
    item = {"path": file, "fieldRef": {"fieldPath": f"metadata.annotations['{annotation}']"}}
    return {"name": name, "downwardAPI": {"items": [item]}}


def spread(labels: dict[str, str]) -> list[dict[str, Any]]:
    """Pods with these labels on different nodes, as far as that is possible."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": labels},
        }
    ]


def grace_s(service: DisaggService) -> int:
    """Seconds from the deletion of a pod until it is killed."""
    return math.ceil(service.spec.drain.timeout_s) + MARGIN_S
