"""Scripted routers: for every pod that runs one, ``/fleet`` and ``/ready`` on its own loopback address."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from aiohttp import web
from kube_client import Kube, KubeError, Object

from xpyd_sidecar.contract import keys as contract
from xpyd_sidecar.contract import signing
from xpyd_sidecar.contract.fleet import Fleet
from xpyd_sidecar.contract.keys import ServiceKey

PORT = 10002
FLAG = "--config-json"


def router_port(pod: Object) -> int:
    """Where the router of a pod answers the operator, from the configuration that the pod carries. One of the release
    before has no admin port, and answers where clients come.
    """
    containers = [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]
    for container in containers:
        words = [*container.get("command", ()), *container.get("args", ())]
        for word, after in itertools.pairwise([*words, ""]):
            raw = after if word == FLAG else word.removeprefix(f"{FLAG}=") if word.startswith(f"{FLAG}=") else ""
            if raw:
                router = msgspec.json.decode(raw)["router"]
                if router is not None:
                    return int(router.get("admin_port", router["port"]))
    return PORT


class Keys(NamedTuple):
    """What a pod has from its Secret."""

    key: ServiceKey
    before: ServiceKey | None
    mark: str
    """What its agent puts behind the fingerprint."""


def key_secret_of(pod: Object) -> str:
    """The Secret that a pod has its key from."""
    volumes = pod["spec"].get("volumes") or ()
    return next((str(each["secret"]["secretName"]) for each in volumes if each["name"] == "key"), "")


async def read_keys(kube: Kube, namespace: str, pod: Object) -> Keys | None:
    """The keys by the pod's Secret as it is now; None while there is none."""
    name = key_secret_of(pod)
    if not name:
        return None  # a pod that is none of ours
    try:
        secret = await kube.get("Secret", namespace, name)
    except KubeError as error:
        if error.status != 404:
            raise
        return None
    key, before = (contract.parse(base64.b64decode(secret["data"].get(item, "")).decode()) for item in ("key", "before"))
    assert key is not None, f"{name} holds no key"
    return Keys(key, before, contract.digest(key)[:8] if "before" in secret["data"] else "")


def opens(request: web.Request, keys: Keys, calls: signing.CallVerifier) -> bool:
    """Whether a router with these keys would answer."""
    return not calls.refusal(request.headers.get(signing.HEADER, ""), request.method, request.path)


class ScriptedRouter:
    """One router. The operator's signed calls open it; ``fleet()`` says what it
    knows, ``why_not()`` why it is not ready (empty: it is)."""

    def __init__(self, address: str, port: int, keys: Keys, *, name: str, fleet: Callable[[], Fleet],
                 why_not: Callable[[], str]) -> None:
        self.address = address
        self.port = port
        self.asked = 0
        self.refused = 0
        self._keys = keys
        self._calls = signing.CallVerifier(contract.derive(keys.key, "admin call"), name)
        self._fleet = fleet
        self._why_not = why_not
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.add_routes([web.get("/fleet", self._on_fleet), web.get("/ready", self._on_ready)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.address, self.port, reuse_address=True).start()

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _on_fleet(self, request: web.Request) -> web.Response:
        if not opens(request, self._keys, self._calls):
            self.refused += 1
            return web.Response(status=401, text="a signed call is needed")
        self.asked += 1
        return web.Response(body=msgspec.json.encode(self._fleet()), content_type="application/json")

    async def _on_ready(self, _: web.Request) -> web.Response:
        reason = self._why_not()
        return web.Response(status=503 if reason else 200, text=reason or "ready")
