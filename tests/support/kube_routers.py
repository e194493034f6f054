"""Scripted routers: for every pod that runs one, ``/fleet``, ``/ready`` and ``/wake`` on its own loopback address."""

from __future__ import annotations

import asyncio
import base64
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from aiohttp import web
from kube_client import Kube, KubeError, Object

from xpyd_sidecar.contract import keys as contract
from xpyd_sidecar.contract import signing, waking
from xpyd_sidecar.contract.fleet import Fleet
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.waking import WakeAnswer, WakeCall

PORT = 10002
FLAG = "--config-json"
LOOK_S = 0.05


def router_port(pod: Object) -> int:
    """Where the router of a pod answers the operator. One of the release before has no admin port, and answers where
    clients come.
    """
    router = router_of(pod)
    return int(router.get("admin_port", router["port"])) if router else PORT


def router_of(pod: Object) -> dict[str, Any]:
    """What the configuration that a pod carries says of its router; empty where it carries none."""
    containers = [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]
    for container in containers:
        words = [*container.get("command", ()), *container.get("args", ())]
        for word, after in itertools.pairwise([*words, ""]):
            raw = after if word == FLAG else word.removeprefix(f"{FLAG}=") if word.startswith(f"{FLAG}=") else ""
            if raw:
                router = msgspec.json.decode(raw)["router"]
                if router is not None:
                    return dict(router)
    return {}


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


def opens(request: web.Request, calls: signing.CallVerifier, body: bytes = b"") -> bool:
    """Whether a router that verifies ``calls`` would answer."""
    return not calls.refusal(request.headers.get(signing.HEADER, ""), request.method, request.path, body)


class ScriptedRouter:
    """One router. The operator's signed calls open it; ``fleet()`` says what it knows, ``why_not()`` why it is not ready
    (empty: it is), ``held()`` how many requests wait there that may start instances."""

    def __init__(self, address: str, port: int, keys: Keys, *, name: str, fleet: Callable[[], Fleet],
                 why_not: Callable[[], str], held: Callable[[], int]) -> None:
        self.address = address
        self.port = port
        self.name = name
        self.asked = 0
        self.refused = 0
        self.wakes: list[WakeCall] = []
        """What the operator has said in polls, the latest last."""
        self._held = held
        self._secret = contract.derive(keys.key, "admin call")
        self._calls = signing.CallVerifier(contract.derive(keys.key, "admin call"), name)
        self._fleet = fleet
        self._why_not = why_not
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.add_routes([web.get("/fleet", self._on_fleet), web.get("/ready", self._on_ready),
                        web.post(waking.PATH, self._on_wake)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.address, self.port, reuse_address=True).start()

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _on_fleet(self, request: web.Request) -> web.Response:
        if not opens(request, self._calls):
            self.refused += 1
            return web.Response(status=401, text="a signed call is needed")
        self.asked += 1
        return web.Response(body=msgspec.json.encode(self._fleet()), content_type="application/json")

    async def _on_wake(self, request: web.Request) -> web.Response:
        body = await request.read()
        if not opens(request, self._calls, body):
            self.refused += 1
            return web.Response(status=401, text="a signed call is needed")
        call = msgspec.json.decode(body, type=WakeCall)
        self.wakes.append(call)
        end = time.monotonic() + waking.POLL_S
        while time.monotonic() < end:
            if call.wanted < 1 and self._held() > 0:
                break
            await asyncio.sleep(LOOK_S)
        answer = msgspec.json.encode(WakeAnswer(self.name, self._held()))
        mac = signing.sign_answer(self._secret, request.headers[signing.HEADER], answer)
        return web.Response(body=answer, content_type="application/json", headers={signing.HEADER: mac})

    async def _on_ready(self, _: web.Request) -> web.Response:
        reason = self._why_not()
        return web.Response(status=503 if reason else 200, text=reason or "ready")
