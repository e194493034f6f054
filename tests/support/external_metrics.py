"""An external metrics API with one value, for the real HorizontalPodAutoscaler of a light cluster.

    async with ExternalMetrics(cluster, "team-a") as metrics:
        metrics.value = "100"            what every metric says from now on

The API server reaches it as any extension: APIService → Service without selector → EndpointSlice → this process. An
EndpointSlice takes no loopback address, so it listens on the host's own, or on another one that is given. For tests without
a loop of their own:

    with served(cluster, "team-a", address) as metrics: …
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

import yaml
from aiohttp import web
from host_endpoint import endpoint_slice, own_address
from processes import free_port
from testcluster.base import Cluster
from testcluster.pki import Pki

GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
NAME = "external-metrics"


class ExternalMetrics:
    """See the module. ``asked`` counts the answers that carried a value."""

    def __init__(self, cluster: Cluster, namespace: str, address: str = "") -> None:
        self.value = "0"
        self.asked = 0
        self._address = address
        self._cluster = cluster
        self._namespace = namespace
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        address, port = self._address or own_address(), free_port()
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        pki = Pki(self._cluster.folder / "pki")
        await asyncio.to_thread(pki.server, NAME, (address,))
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(pki.certificate(NAME), pki.key(NAME))
        await web.TCPSite(self._runner, address, port, ssl_context=tls).start()
        documents = yaml.safe_dump_all(_objects(self._namespace, address, port))
        await asyncio.to_thread(self._cluster.kubectl, "apply", "-f", "-", stdin=documents)
        await asyncio.to_thread(self._cluster.kubectl, "wait", "--for=condition=Available", "--timeout=100s",
                                f"apiservice/{VERSION}.{GROUP}")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        # First the APIService: while one is there that does not answer, no namespace can end.
        await asyncio.to_thread(self._cluster.kubectl, "delete", "apiservice", f"{VERSION}.{GROUP}", "--ignore-not-found")
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        parts = request.path.strip("/").split("/")
        version = {"groupVersion": f"{GROUP}/{VERSION}", "version": VERSION}
        group = {"kind": "APIGroup", "apiVersion": "v1", "name": GROUP, "versions": [version], "preferredVersion": version}
        if parts == ["apis", GROUP, VERSION]:
            resource = {"name": "*", "singularName": "", "namespaced": True, "kind": "ExternalMetricValueList",
                        "verbs": ["get"]}
            return web.json_response({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{GROUP}/{VERSION}",
                                      "resources": [resource]})
        if parts == ["apis", GROUP]:
            return web.json_response(group)
        if parts == ["apis"]:
            return web.json_response({"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]})
        if len(parts) != 6 or parts[:3] != ["apis", GROUP, VERSION]:
            raise web.HTTPNotFound
        self.asked += 1
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        item = {"metricName": parts[5], "metricLabels": {}, "timestamp": now, "value": self.value}
        return web.json_response({"kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {},
                                  "items": [item]})


@contextlib.contextmanager
def served(cluster: Cluster, namespace: str, address: str) -> Iterator[ExternalMetrics]:
    """The same in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="external metrics")
    thread.start()
    metrics = ExternalMetrics(cluster, namespace, address)
    try:
        asyncio.run_coroutine_threadsafe(metrics.__aenter__(), loop).result(240)
        yield metrics
    finally:
        asyncio.run_coroutine_threadsafe(metrics.__aexit__(None, None, None), loop).result(240)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def _objects(namespace: str, address: str, port: int) -> list[dict[str, Any]]:
    where = {"name": NAME, "namespace": namespace}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": where, "spec": {"ports": [{"port": 443, "targetPort": port}]}},
        endpoint_slice(NAME, namespace, address, port),
        {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": f"{VERSION}.{GROUP}"},
         "spec": {"group": GROUP, "version": VERSION, "groupPriorityMinimum": 100, "versionPriority": 100,
                  "insecureSkipTLSVerify": True, "service": {**where, "port": 443}}},
    ]
