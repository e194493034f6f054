"""The master of tests, and what follows from it."""

from __future__ import annotations

import base64
from typing import Any

from kube_documents import UID
from memory_api import MemoryApi

from xpyd_operator.kube.client.cache import WatchCache
from xpyd_operator.kube.keys.key import ServiceKeys
from xpyd_operator.kube.keys.master import Master
from xpyd_operator.kube.keys.turns import Turns
from xpyd_operator.render import keys as render
from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.keys import ServiceKey

SYSTEM, NAME = "xpyd-system", "xpyd-master"
MASTERS = {number: bytes([number]) * 32 for number in (1, 2, 3)}


def key(generation: int = 1, uid: str = UID) -> ServiceKey:
    """The key of a service by ``MASTERS``."""
    return keys.of_service(MASTERS[generation], generation, uid)


def secret_name(generation: int = 1, uid: str = UID, service: str = "qwen") -> str:
    """The Secret that pods have it from."""
    return render.derived_pod_key(service, key(generation, uid)).secret


def encoded(data: dict[str, str]) -> dict[str, str]:
    """As the API server shows the items of a Secret."""
    return {item: base64.b64encode(text.encode()).decode() for item, text in data.items()}


def store_master(api: MemoryApi, *generations: int, **more: str) -> None:
    """Put the master there."""
    data = encoded({str(number): MASTERS[number].hex() for number in generations} | more)
    api.put("Secret", {"metadata": {"name": NAME, "namespace": SYSTEM}, "data": data})


def master(api: MemoryApi, *, in_use: bool = False, dry_run: bool = False) -> Master:
    """What reads it."""
    return Master(api, SYSTEM, NAME, lambda: in_use, dry_run=dry_run)  # type: ignore[arg-type]


def service_keys(api: MemoryApi, of: Master | None = None) -> ServiceKeys:
    """Those of the service of ``kube_documents``."""
    return ServiceKeys(api, of or master(api))  # type: ignore[arg-type]


def turns(cache: WatchCache | None = None) -> Turns:
    """Who may roll."""
    return Turns(cache or WatchCache())


def volume(name: str) -> dict[str, Any]:
    """Of a pod that has its key from this Secret."""
    return {"name": "key", "secret": {"secretName": name}}
