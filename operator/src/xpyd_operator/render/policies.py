"""Who may reach the pods of a service, and how many may be evicted at once."""

from __future__ import annotations

from typing import Any

from xpyd_operator.api.outside import ALWAYS_OUT
from xpyd_operator.api.service import DisaggService
from xpyd_operator.render import labels
from xpyd_operator.render.gateway import peers
from xpyd_operator.render.labels import metadata
from xpyd_operator.render.paths import AGENT_PORT
from xpyd_operator.render.settings import KubeSettings

_DNS_PORT, _HTTPS_PORT = ALWAYS_OUT
_AGENT_PORT = {"protocol": "TCP", "port": AGENT_PORT}


def pods_policy(service: DisaggService, settings: KubeSettings) -> dict[str, Any]:
    """For all pods of the service.

    In: everything among themselves (NCCL and torch choose their ports), and the operator to routers and agents; to the
    client port, too, where routers of the release before answer it. Out: to each other, name resolution, HTTPS and what the
    user added.
    """
    own = {"podSelector": {"matchLabels": labels.selector(service)}}
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": settings.operator_namespace}},
        "podSelector": {"matchLabels": {labels.NAME: labels.OPERATOR}},
    }
    admin = {"protocol": "TCP", "port": service.spec.router.ports.admin_or_default}
    return _policy(
        service,
        service.name,
        {
            "podSelector": {"matchLabels": labels.selector(service)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [own]}, {"from": [operator], "ports": [_router_port(service), admin, _AGENT_PORT]}],
            "egress": [
                {"to": [own]},
                {"ports": [{"protocol": protocol, "port": _DNS_PORT} for protocol in ("UDP", "TCP")]},
                {"ports": [{"protocol": "TCP", "port": _HTTPS_PORT}]},
                *service.spec.network_policy.egress,
            ],
        },
    )


def clients_policy(service: DisaggService) -> dict[str, Any]:
    """The pods that route: clients to the router's port, and the pods of gateways, where not everybody may."""
    clients = list(service.spec.network_policy.clients)
    clients += peers(service) if clients else ()
    rule = {"ports": [_router_port(service)]} | ({"from": clients} if clients else {})
    return _policy(
        service,
        labels.clients_name(service.name),
        {
            "podSelector": {"matchLabels": labels.selector(service, router=labels.YES)},
            "policyTypes": ["Ingress"],
            "ingress": [rule],
        },
    )


def budget(service: DisaggService, name: str, selector: dict[str, str], wanted: int | None, missing: int) -> dict[str, Any]:
    """As many of the ``wanted`` pods (None: those that their Deployment wants) may be evicted at a time as instances may be
    missing in a rollout; those not ready always. Of an instance of several pods all count: the first that is evicted makes
    its whole group unready, so that the others of that group may go, and none of another group.

    At least one, also where a rollout lets none be missing: an eviction makes nothing new beforehand, so that a budget of
    none would hold up every drain of a node for ever. A number, since a share would need a controller with ``/scale`` above
    the pods.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata("PodDisruptionBudget", service, name, labels.common(service)),
        "spec": {
            **({"maxUnavailable": missing} if wanted is None else {"minAvailable": max(0, wanted - max(1, missing))}),
            "selector": {"matchLabels": selector},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def _policy(service: DisaggService, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata("NetworkPolicy", service, name, labels.common(service)),
        "spec": spec,
    }


def _router_port(service: DisaggService) -> dict[str, Any]:
    return {"protocol": "TCP", "port": service.spec.router.ports.http}
