"""An external metrics API with one value, for the real HorizontalPodAutoscaler of a light cluster.

    async with ExternalMetrics(cluster, "team-a") as metrics:
        metrics.value = "100"            what every metric says from now on

The API server reaches it as any extension: APIService → Service without selector → EndpointSlice → this process. An
EndpointSlice takes no loopback address, so it listens on the host's own.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

import yaml
from aiohttp import web
from processes import free_port
from testcluster.light import LightCluster
from testcluster.pki import Pki

GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
NAME = "external-metrics"


def own_address() -> str:
    """The address by which this host is known on its network; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


class ExternalMetrics:
    """See the module. ``asked`` counts the answers that carried a value."""

    def __init__(self, cluster: LightCluster, namespace: str) -> None:
        self.value = "0"
        self.asked = 0
        self._cluster = cluster
        self._namespace = namespace
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        address, port = own_address(), free_port()
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
        await asyncio.to_thread(self._cluster.kubectl, "wait", "--for=condition=Available", "--timeout=30s",
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


def _objects(namespace: str, address: str, port: int) -> list[dict[str, Any]]:
    where = {"name": NAME, "namespace": namespace}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": where, "spec": {"ports": [{"port": 443, "targetPort": port}]}},
        {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
         "metadata": {**where, "labels": {"kubernetes.io/service-name": NAME}}, "ports": [{"port": port}],
         "endpoints": [{"addresses": [address], "conditions": {"ready": True}}]},
        {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": f"{VERSION}.{GROUP}"},
         "spec": {"group": GROUP, "version": VERSION, "groupPriorityMinimum": 100, "versionPriority": 100,
                  "insecureSkipTLSVerify": True, "service": {**where, "port": 443}}},
    ]
