"""Routers in pods of their own (placement Deployment)."""

from __future__ import annotations

from typing import Any

from xpyd_operator.api.service import DisaggService
from xpyd_operator.render import labels
from xpyd_operator.render import paths as at
from xpyd_operator.render.owner import metadata
from xpyd_operator.render.pods import grace_s
from xpyd_operator.render.settings import KubeSettings
from xpyd_operator.render.sidecar_container import clients_volumes, router_container


def router_deployment(service: DisaggService, settings: KubeSettings) -> dict[str, Any]:
    """The Deployment. A router drains at SIGTERM, so its pods need no hook; a new one is ready before an old one goes."""
    selector = labels.selector(service, component=labels.ROUTERS)
    pod_labels = labels.common(service) | selector | {labels.ROSTER: labels.YES, labels.ROUTER: labels.YES}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(service, labels.router_name(service.name), labels.common(service)),
        "spec": {
            "replicas": service.spec.router.replicas_or_default,
            "selector": {"matchLabels": selector},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {
                "metadata": {"labels": pod_labels},
                "spec": {
                    "enableServiceLinks": False,
                    "automountServiceAccountToken": False,
                    "terminationGracePeriodSeconds": grace_s(service),
                    "securityContext": at.POD_SECURITY,
                    "topologySpreadConstraints": at.spread(selector),
                    "containers": [router_container(service, settings)],
                    "volumes": [
                        {"name": "run", "emptyDir": {}},
                        {"name": "tmp", "emptyDir": {}},
                        at.secret_volume("key", labels.key_name(service.name), labels.KEY, labels.KEY),
                        *clients_volumes(service),
                    ],
                },
            },
        },
    }
