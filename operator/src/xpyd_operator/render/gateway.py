"""What a gateway of the Gateway API needs to reach the routers of a service.

    HTTPRoute ──backendRefs──▶ Service of the clients ◀──targetRefs── BackendTLSPolicy   (routers serve HTTPS)
              └─────or───────▶ InferencePool ──selector──▶ pods that route
                                  └──endpointPickerRef──▶ Service of a picker, the user's own

Field names: Gateway API v1 (``HTTPRoute``, ``BackendTLSPolicy``) and its inference extension v1 (``InferencePool``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from xpyd_operator.api.gateway import PICKER_PORT, GatewayOptions, GatewayRef
from xpyd_operator.api.service import DisaggService
from xpyd_operator.render import labels
from xpyd_operator.render.labels import metadata

Body = dict[str, Any]
GROUP: Final = "gateway.networking.k8s.io"
POOLS: Final = "inference.networking.k8s.io"
ROUTE: Final = "HTTPRoute"
TLS: Final = "BackendTLSPolicy"
POOL: Final = "InferencePool"
GATEWAY: Final = "Gateway"
KINDS: Final[Mapping[str, tuple[str, str]]] = {
    ROUTE: (f"{GROUP}/v1", "httproutes"),
    TLS: (f"{GROUP}/v1", "backendtlspolicies"),
    POOL: (f"{POOLS}/v1", "inferencepools"),
}
"""What a service may have of them: version and plural by kind."""
GATEWAY_NAME: Final = f"{GROUP}/gateway-name"
"""On the pods that an implementation runs for a Gateway: its name (GEP-1762)."""
MARGIN_S: Final = 10
"""So much later than a router a gateway gives up: the router's own answer is there by then."""


def gateway_objects(service: DisaggService) -> tuple[Body, ...]:
    """The route of a service, and what it needs first; empty where the document names no gateway."""
    gateway = service.spec.router.gateway
    if gateway is None:
        return ()
    found = [_pool(service, gateway), _tls(service, gateway), _route(service, gateway)]
    return tuple(labels.with_hash(each) for each in found if each is not None)


def peers(service: DisaggService) -> list[Body]:
    """The pods of the gateways, as a NetworkPolicy means them: by the label that Gateway API wants of them, where the
    Gateway is. What an implementation runs elsewhere is named in ``networkPolicy.clients``.
    """
    gateway = service.spec.router.gateway
    found: dict[tuple[str | None, str], Body] = {}
    for ref in () if gateway is None else gateway.parent_refs:
        where = ref.namespace or service.metadata.namespace
        peer: Body = {"podSelector": {"matchLabels": {GATEWAY_NAME: ref.name}}}
        if where is not None:
            peer["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": where}}
        found[where, ref.name] = peer
    return list(found.values())


def duration(seconds: float) -> str:
    """As Gateway API writes it (GEP-2257), in whole seconds, rounded up: 36610.2 → ``10h10m11s``."""
    left = math.ceil(seconds)
    parts = ((left // 3600, "h"), (left // 60 % 60, "m"), (left % 60, "s"))
    return "".join(f"{count}{unit}" for count, unit in parts if count) or "0s"


def _route(service: DisaggService, gateway: GatewayOptions) -> Body:
    """One rule. The gateway waits a little longer than a router may take for a whole answer, since many gateways end a
    stream after 15 s by default; both times are the same, as some know only one of them.
    """
    limit = duration(service.spec.router.request_timeout_s + MARGIN_S)
    rule: Body = {
        "matches": [{"path": {"type": "PathPrefix", "value": gateway.path}}],
        "backendRefs": [_backend(service, gateway)],
        "timeouts": {"request": limit, "backendRequest": limit},
    }
    if gateway.path != "/":
        path = {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}
        rule["filters"] = [{"type": "URLRewrite", "urlRewrite": {"path": path}}]
    spec: Body = {"parentRefs": [parent(each) for each in gateway.parent_refs], "rules": [rule]}
    if gateway.hostnames:
        spec["hostnames"] = list(gateway.hostnames)
    return _made(service, ROUTE, spec)


def parent(ref: GatewayRef) -> Body:
    """A Gateway as a route names it."""
    made: Body = {"group": GROUP, "kind": GATEWAY, "name": ref.name}
    if ref.namespace is not None:
        made["namespace"] = ref.namespace
    if ref.section_name is not None:
        made["sectionName"] = ref.section_name
    return made


def _backend(service: DisaggService, gateway: GatewayOptions) -> Body:
    if gateway.pool is not None:
        return {"group": POOLS, "kind": POOL, "name": service.name, "weight": 1}
    port = service.spec.router.ports.http
    return {"group": "", "kind": "Service", "name": service.name, "port": port, "weight": 1}


def _pool(service: DisaggService, gateway: GatewayOptions) -> Body | None:
    """Every router is as good as another, so a gateway goes on without its picker (``FailOpen``)."""
    if gateway.pool is None:
        return None
    picker = {"group": "", "kind": "Service", "name": gateway.pool.picker, "port": {"number": PICKER_PORT},
              "failureMode": "FailOpen"}
    spec = {
        "selector": {"matchLabels": labels.selector(service, router=labels.YES)},
        "targetPorts": [{"number": service.spec.router.ports.http}],
        "endpointPickerRef": picker,
    }
    return _made(service, POOL, spec)


def _tls(service: DisaggService, gateway: GatewayOptions) -> Body | None:
    if gateway.tls is None:
        return None
    validation: Body = {"hostname": gateway.tls.hostname}
    if gateway.tls.ca_config_map is None:
        validation["wellKnownCACertificates"] = "System"
    else:
        validation["caCertificateRefs"] = [{"group": "", "kind": "ConfigMap", "name": gateway.tls.ca_config_map}]
    spec = {"targetRefs": [{"group": "", "kind": "Service", "name": service.name}], "validation": validation}
    return _made(service, TLS, spec)


def _made(service: DisaggService, kind: str, spec: Body) -> Body:
    made = metadata(kind, service, service.name, labels.common(service))
    return {"apiVersion": KINDS[kind][0], "kind": kind, "metadata": made, "spec": spec}
