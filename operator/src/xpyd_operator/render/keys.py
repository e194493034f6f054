"""Which Secret a pod has its service's key from, and under which name it finds the key there (decision 0032)."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from xpyd_operator.render import labels
from xpyd_operator.render import paths as at
from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.keys import ServiceKey

ID_CHARS: Final = 8
BEFORE: Final = "before"
"""Item and file with the key that the service had before; empty where it had none."""
_DERIVED = re.compile(rf"-{labels.KEY}-[0-9a-f]{{{ID_CHARS}}}\Z")


class PodKey(msgspec.Struct, frozen=True):
    """How pods get the key of a service."""

    secret: str
    id: str
    """Stands for the key: the beginning of its digest; empty where the key is not known (``unknown``)."""
    file: str
    """Name of the file, which is made for this key alone where it is known."""

    @property
    def path(self) -> str:
        """Path of the file in a container."""
        return f"{at.KEY_DIR}/{self.file}"

    @property
    def before_path(self) -> str | None:
        """Path of the file with the key of before; None where there is none."""
        return f"{at.KEY_DIR}/{BEFORE}" if self.id else None

    def volume(self) -> dict[str, Any]:
        """The volume of a pod, which mounts it at ``paths.KEY_DIR``."""
        files = {labels.KEY: self.file} | ({BEFORE: BEFORE} if self.id else {})
        return at.secret_files("key", self.secret, files)


def derived_pod_key(service: str, key: ServiceKey) -> PodKey:
    """How pods have a key that the operator has derived: the Secret and the file are named for it."""
    key_id = keys.digest(key)[:ID_CHARS]
    return PodKey(f"{labels.key_name(service)}-{key_id}", key_id, keys.file_name(key))


def unknown(service: str) -> PodKey:
    """Where a document is rendered without a cluster, so that there is no key."""
    return PodKey(labels.key_name(service), "", labels.KEY)


def is_derived(service: str, secret: str) -> bool:
    """Whether a Secret of this name has a derived key of the service."""
    return secret.startswith(service) and _DERIVED.fullmatch(secret, len(service)) is not None


def secret_of(pod: dict[str, Any]) -> str:
    """The Secret that a pod, or the template of one, has its service's key from."""
    return str(((_volume(pod, "key") or {}).get("secret") or {}).get("secretName", ""))


def _volume(pod: dict[str, Any], name: str) -> dict[str, Any] | None:
    volumes: list[dict[str, Any]] = pod.get("spec", {}).get("volumes") or []
    return next((volume for volume in volumes if volume.get("name") == name), None)
