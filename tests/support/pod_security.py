"""The profile "restricted" of the Pod Security Standards (1.34), as far as it looks at fields that pods of xpyd may have.

https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}


def violations(spec: dict[str, Any]) -> Iterator[str]:
    """What the profile forbids in a pod's spec, in words."""
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield field
    for volume in spec.get("volumes", []):
        yield from (f"volume {volume['name']}: {source}" for source in volume.keys() - {"name"} - _VOLUMES)
    pod = spec.get("securityContext", {})
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        name, own = container["name"], container.get("securityContext", {})
        both = pod | own
        if own.get("privileged"):
            yield f"{name}: privileged"
        if own.get("allowPrivilegeEscalation") is not False:
            yield f"{name}: allowPrivilegeEscalation"
        capabilities = own.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", []) or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
            yield f"{name}: capabilities"
        if both.get("runAsNonRoot") is not True or both.get("runAsUser") == 0:
            yield f"{name}: root"
        if both.get("seccompProfile", {}).get("type") not in {"RuntimeDefault", "Localhost"}:
            yield f"{name}: seccompProfile"
        if any(port.get("hostPort") for port in container.get("ports", [])):
            yield f"{name}: hostPort"
