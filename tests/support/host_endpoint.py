"""A process of a test that an API server reaches by a Service: the address of this host, and the Service's endpoint."""

from __future__ import annotations

import socket

from kube_client import Object


def own_address() -> str:
    """The address by which this host is known on its network; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


def endpoint_slice(service: str, namespace: str, address: str, port: int) -> Object:
    """Of a Service without a selector. It takes no loopback address."""
    return {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": service, "namespace": namespace, "labels": {"kubernetes.io/service-name": service}},
            "ports": [{"port": port}], "endpoints": [{"addresses": [address], "conditions": {"ready": True}}]}
