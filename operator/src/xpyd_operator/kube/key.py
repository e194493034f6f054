"""The Secret with a service's key: made once, read once, and kept in memory while the service is looked after."""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
from typing import Any

from xpyd_operator.api.service import DisaggService
from xpyd_operator.errors import XpydError
from xpyd_operator.kube.api import Api, ApiError
from xpyd_operator.kube.observe import controller
from xpyd_operator.render import labels
from xpyd_operator.render.objects import key_secret
from xpyd_sidecar.contract.keys import ServiceKey, mint

logger = logging.getLogger(__name__)
CHECK_S = 600.0
"""So often the Secret is looked at in any case (it is not watched, so that the operator need not list Secrets)."""
SOON_S = 10.0
"""So often at most before pods are made, which cannot start without it."""


class NameTaken(XpydError):
    """An object that the service needs has a name that somebody else's object has."""


class KeySecret:
    """Of one service."""

    def __init__(self, api: Api, *, dry_run: bool = False) -> None:
        self._api = api
        self._dry_run = dry_run
        self._key: ServiceKey | None = None
        self._looked = float("-inf")

    @property
    def key(self) -> ServiceKey:
        """The key, once ``ensure`` has found or made it."""
        if self._key is None:
            raise XpydError("the key of the service is not known yet")
        return self._key

    @property
    def identity(self) -> str:
        """Stands for the key where the key must not be."""
        return hashlib.sha256(b"xpyd key identity\n" + self.key).hexdigest()[:8]

    async def ensure(self, service: DisaggService, now: float, *, soon: bool = False) -> None:
        """See that the Secret is there. ``soon``: pods are about to be made that need it.

        Raises:
            NameTaken: the Secret of this name is somebody else's.
            XpydError: it holds no key.
            ApiError: it can be neither read nor made at present.
        """
        if self._key is not None and 0 <= now - self._looked < (SOON_S if soon else CHECK_S):
            return
        namespace, name = service.metadata.namespace or "", labels.key_name(service.name)
        try:
            found = await self._api.get("Secret", namespace, name)
        except ApiError as error:
            if not error.missing:
                raise
            await self._make(service)
        else:
            self._key = _read(found, service.metadata.uid or "")
        self._looked = now

    async def _make(self, service: DisaggService) -> None:
        key = self._key or mint()
        if not self._dry_run:
            await self._api.create("Secret", service.metadata.namespace or "", key_secret(service, key.hex()))
        self._key = key


def _read(secret: dict[str, Any], owner: str) -> ServiceKey:
    metadata = secret["metadata"]
    name = metadata["name"]
    if controller(metadata) != owner:
        raise NameTaken(f"Secret {name} is not of this service; rename or delete it, or wait until it is collected")
    try:
        raw = bytes.fromhex(base64.b64decode((secret.get("data") or {}).get(labels.KEY, "")).decode("ascii").strip())
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != 32:
        raise XpydError(f"Secret {name} holds no key (64 hex digits in {labels.KEY!r}); delete it, and a new one is made")
    return ServiceKey(raw)
