"""Routers for pods that do not really run: one server on all loopback addresses, and one address for each router's pod.

KWOK gives pods addresses that nobody can reach. A pod that is told to hear the roster gets another one here, as if its
network were this machine's; the server knows by the address it was reached at whose router it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import TracebackType
from typing import Self

import aiohttp
import msgspec
from aiohttp import web
from kube_client import Kube, KubeError, Mirror, Object
from kube_routers import Keys, key_secret_of, opens, read_keys
from kube_team import is_ready, label
from node_agent import INSTANCE, MEMBER, ROLE, ROSTER, SERVICE
from processes import free_port

from xpyd_sidecar.contract import signing
from xpyd_sidecar.contract.fleet import Fleet, FleetInstance
from xpyd_sidecar.contract.ids import Fingerprint, HostPort, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.keys import derive
from xpyd_sidecar.contract.membership import Load

SETTLE_S = 1.0
KEPT_S = 0.5
"""An answer is made anew so late, so that this program's work does not slow down the operator's."""
_PRINT = Fingerprint("0" * 32)


class Routers:
    """Of all services of one namespace."""

    def __init__(self, kube: Kube, namespace: str, pods: Mirror) -> None:
        self.port = free_port()
        self._kube = kube
        self._namespace = namespace
        self._pods = pods
        self._keys: dict[str, Keys | None] = {}
        """By the Secret that pods have."""
        self._calls: dict[str, signing.CallVerifier] = {}
        """By pod."""
        self._of: dict[str, Object] = {}
        """Address → pod."""
        self._since: dict[str, float] = {}
        self._answers: dict[str, tuple[float, bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._runner: web.AppRunner | None = None
        self._next = 1

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.add_routes([web.get("/fleet", self._fleet)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "0.0.0.0", self.port).start()
        self._pods.listeners.append(self._on_pod)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        assert self._runner is not None
        self._pods.listeners.remove(self._on_pod)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._runner.cleanup()

    def _on_pod(self, _: Object | None, now: Object | None) -> None:
        if now is None or label(now, ROSTER) != "true" or not (now.get("status") or {}).get("podIP"):
            return
        uid = now["metadata"]["uid"]
        if uid not in self._since:
            self._since[uid] = time.monotonic()
            address = f"127.77.{self._next // 250}.{self._next % 250 + 1}"
            self._next += 1
            self._of[address] = now
            task = asyncio.create_task(self._move(now, address))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _move(self, pod: Object, address: str) -> None:
        status = {"podIP": address, "podIPs": [{"ip": address}]}
        with contextlib.suppress(KubeError, aiohttp.ClientError):  # it was deleted meanwhile
            await self._kube.merge("Pod", self._namespace, pod["metadata"]["name"],
                                   {"metadata": {"uid": pod["metadata"]["uid"]}, "status": status}, "status")

    async def _fleet(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        pod = self._of.get(request.transport.get_extra_info("sockname")[0])
        if pod is None:
            return web.Response(status=404)
        service = label(pod, SERVICE)
        secret, name = key_secret_of(pod), pod["metadata"]["name"]
        if secret not in self._keys:
            self._keys[secret] = await read_keys(self._kube, self._namespace, pod)
        keys = self._keys[secret]
        if keys is None:
            return web.Response(status=503)
        if name not in self._calls:
            self._calls[name] = signing.CallVerifier(derive(keys.key, "admin call"), name)
        if not opens(request, self._calls[name]):
            return web.Response(status=401)
        settled = time.monotonic() - self._since[pod["metadata"]["uid"]] >= SETTLE_S
        return web.Response(body=self._answer(service, settled=settled), content_type="application/json")

    def _answer(self, service: str, *, settled: bool) -> bytes:
        key = f"{service} {settled}"
        when, body = self._answers.get(key, (0.0, b""))
        if time.monotonic() - when > KEPT_S:
            known = tuple(_told(pod) for pod in self._pods.objects.values()
                          if label(pod, SERVICE) == service and label(pod, ROLE) and label(pod, MEMBER) in ("", "0"))
            fleet = Fleet(service=ServiceName(service), router="bench", uptime_s=1.0, settled=settled, instances=known)
            body = msgspec.json.encode(fleet)
            self._answers[key] = (time.monotonic(), body)
        return body


def _told(pod: Object) -> FleetInstance:
    address = (pod.get("status") or {}).get("podIP", "")
    ready = is_ready(pod)
    ends = bool(pod["metadata"].get("deletionTimestamp"))
    return FleetInstance(
        instance=InstanceName(label(pod, INSTANCE) or pod["metadata"]["name"]), role=Role(label(pod, ROLE)), epoch=1,
        state=State.DRAINING if ends else State.READY if ready else State.STARTING,
        incarnation=Incarnation(pod["metadata"]["uid"].replace("-", "")),
        fingerprint=_PRINT if ready else Fingerprint(""), http=(HostPort(f"{address}:8000"),),
        control=(HostPort(f"{address}:7000"),), model="org/tiny", load=Load(), drained=ends, in_flight=0, beat_age_s=0.5)
