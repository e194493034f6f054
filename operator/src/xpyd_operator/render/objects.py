"""Every object of a service: the pods of engines come from ``pod``, all others are made here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xpyd_operator.api.base import API_VERSION
from xpyd_operator.api.service import DisaggService
from xpyd_operator.plan.names import instance_name
from xpyd_operator.render import keys, labels
from xpyd_operator.render import paths as at
from xpyd_operator.render.gateway import gateway_objects
from xpyd_operator.render.keys import PodKey
from xpyd_operator.render.labels import metadata
from xpyd_operator.render.overlay import overlay
from xpyd_operator.render.paths import AGENT_PORT
from xpyd_operator.render.pod import engine_pods, pod_revision
from xpyd_operator.render.policies import budget, clients_policy, pods_policy
from xpyd_operator.render.prefetch import prefetch_objects
from xpyd_operator.render.settings import KubeSettings
from xpyd_operator.render.sidecar import clients_volumes, router_container
from xpyd_sidecar.contract.ids import Role, ServiceName

ROUTERS = 2
"""Routers in pods of their own that a service begins with."""
NO_KEY = "made once by the operator"
"""In place of the key: whoever used it as one would be told that it is none."""


def manifests(service: DisaggService, settings: KubeSettings) -> tuple[dict[str, Any], ...]:
    """The objects of a service with the counts that the document asks for, the pods of every instance.

    Revisions are not those of a cluster, since they depend on the key.

    Raises:
        UnsupportedField: as ``engine_pods``.
    """
    counts = {role: 0 if service.spec.suspend else service.spec.replicas(role) for role in Role}
    found = [key_secret(service, NO_KEY), *(initial_object(each) for each in children(service, counts, settings)),
             *gateway_objects(service), *prefetch_objects(service, settings)]
    found += [pool(service, role, service.spec.replicas(role)) for role in Role]
    ordinal = 0
    for role in Role:
        revision = pod_revision(service, role, "")
        for _ in range(counts[role]):
            name = instance_name(ServiceName(service.name), ordinal)
            found += engine_pods(service, role, name, revision, settings)
            ordinal += 1
    return tuple(found)


def children(
    service: DisaggService,
    counts: Mapping[Role, int],
    settings: KubeSettings,
    key: PodKey | None = None,
    *,
    several: bool = False,
    pods: Mapping[Role, int] | None = None,
) -> tuple[dict[str, Any], ...]:
    """Everything that is server-side applied. ``counts``: wanted instances of each role; ``key``: of routers in pods of
    their own; ``several``: there are instances of several pods, whatever the document asks for; ``pods``: how many pods of
    each role the wanted instances have, where there are some of other sizes than the document asks for.

    Each object carries a hash of what it was rendered to: without it, a field that is no longer rendered would look like
    one that others added (``differs``), and stay.
    """
    found = [_clients_service(service), _members_service(service)]
    if several or spans(service):
        found.append(_engines_service(service))
    found += _policies(service, settings)
    for role in Role:
        selector = labels.selector(service, role=role)
        missing = service.spec.rollout.unavailable(counts[role])
        wanted = counts[role] * service.spec.role(role).parallelism.pods if pods is None else pods[role]
        found.append(budget(service, labels.role_name(service.name, role), selector, wanted, missing))
    if routers_apart(service):
        name = labels.router_name(service.name)
        selector = labels.selector(service, component=labels.ROUTERS)
        found.append(router_deployment(service, settings, key or keys.unknown(service.name)))
        found.append(budget(service, name, selector, service.spec.router.replicas, 1))
    return tuple(labels.with_hash(one) for one in found)


def initial_object(made: dict[str, Any]) -> dict[str, Any]:
    """An object as it is made at first: a Deployment with a count, which is nobody's afterwards where the document has
    none.
    """
    if made["kind"] != "Deployment" or "replicas" in made["spec"]:
        return made
    return made | {"spec": made["spec"] | {"replicas": ROUTERS}}


def count_of(live: dict[str, Any]) -> dict[str, Any]:
    """What says of a Deployment that its count is what it is, and nothing else."""
    named = {key: live["metadata"][key] for key in ("name", "namespace")}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": named,
            "spec": {"replicas": live["spec"].get("replicas", 1)}}


def policies(service: DisaggService, settings: KubeSettings) -> tuple[dict[str, Any], ...]:
    """Of the objects that ``children`` makes, the NetworkPolicies: empty where the document wants none."""
    return tuple(labels.with_hash(one) for one in _policies(service, settings))


def _policies(service: DisaggService, settings: KubeSettings) -> tuple[dict[str, Any], ...]:
    return (pods_policy(service, settings), clients_policy(service)) if service.spec.network_policy.enabled else ()


def spans(service: DisaggService) -> bool:
    """Whether instances of some role have several pods."""
    return any(service.spec.role(role).parallelism.pods > 1 for role in Role)


def routers_apart(service: DisaggService) -> bool:
    """Whether there are to be routers in pods of their own."""
    return service.spec.router.placement == "deployment" and not service.spec.suspend


def unwanted_objects(
    service: DisaggService, *, several: bool = False, before: bool = False
) -> tuple[tuple[str, str], ...]:
    """Kinds and names of what other settings would make, to be deleted where it exists and nothing left needs it.

    Args:
        service: the document.
        several: there are instances of several pods, whatever the document asks for.
        before: there are pods of a service of this name that was deleted.
    """
    found: list[tuple[str, str]] = []
    leftover = before or (several and not spans(service))
    if not leftover and not spans(service):
        found.append(("Service", labels.engines_name(service.name)))
    if not leftover and not service.spec.network_policy.enabled:
        found += [("NetworkPolicy", service.name), ("NetworkPolicy", labels.clients_name(service.name))]
    if not routers_apart(service):
        name = labels.router_name(service.name)
        found += [("Deployment", name), ("PodDisruptionBudget", name)]
    return tuple(found)


def key_secret(
    service: DisaggService, key_hex: str, key: PodKey | None = None, before_hex: str = ""
) -> dict[str, Any]:
    """The Secret with the service's key, and the one before it (64 hex digits each); made once."""
    key = key or keys.unknown(service.name)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata("Secret", service, key.secret, labels.common(service)),
        "type": "Opaque",
        "immutable": True,
        "stringData": {labels.KEY: key_hex} | ({keys.BEFORE: before_hex} if key.id else {}),
    }


def pool(service: DisaggService, role: Role, replicas: int) -> dict[str, Any]:
    """A role's DisaggPool, to be created; later only its ``replicas`` are ever written."""
    its_labels = labels.common(service) | {labels.ROLE: role.value}
    return {
        "apiVersion": API_VERSION,
        "kind": "DisaggPool",
        "metadata": metadata("DisaggPool", service, labels.role_name(service.name, role), its_labels),
        "spec": {"service": service.name, "role": role.value, "replicas": replicas},
    }


def _clients_service(service: DisaggService) -> dict[str, Any]:
    protocol = "http" if service.spec.router.tls.secret is None else "https"
    port = {"name": "http", "port": service.spec.router.ports.http, "protocol": "TCP", "appProtocol": protocol}
    return _service(
        service,
        service.name,
        {
            "type": "ClusterIP",
            "ipFamilyPolicy": "PreferDualStack",
            "selector": labels.selector(service, router=labels.YES),
            "sessionAffinity": "None",
            "ports": [port | {"targetPort": port["port"]}],
        },
    )


def _members_service(service: DisaggService) -> dict[str, Any]:
    """Resolves to every router, ready or not: else agents and routers would wait for each other. People reach the admin
    port by it (``kubectl port-forward``); the clients' Service, which may be published, has it not.
    """
    ports = service.spec.router.ports
    named: list[dict[str, Any]] = [
        {"name": "members", "port": ports.members, "protocol": "TCP"},
        {"name": labels.ADMIN, "port": ports.admin_or_default, "protocol": "TCP"},
    ]
    return _service(
        service,
        labels.members_name(service.name),
        {
            "type": "ClusterIP",
            "clusterIP": "None",
            "ipFamilyPolicy": "PreferDualStack",
            "publishNotReadyAddresses": True,
            "selector": labels.selector(service, roster=labels.YES),
            "ports": [port | {"targetPort": port["port"]} for port in named],
        },
    )


def _engines_service(service: DisaggService) -> dict[str, Any]:
    """Gives every member of an instance a name, ready or not: they must meet before any of them can be ready. Only
    by the label without which the operator does not see a pod: one more that somebody takes away would take the name away
    for ever.
    """
    port = {"name": "agent", "port": AGENT_PORT, "protocol": "TCP"}
    return _service(
        service,
        labels.engines_name(service.name),
        {
            "type": "ClusterIP",
            "clusterIP": "None",
            "ipFamilyPolicy": "PreferDualStack",
            "publishNotReadyAddresses": True,
            "selector": labels.selector(service),
            "ports": [port | {"targetPort": port["port"]}],
        },
    )


def _service(service: DisaggService, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    made = metadata("Service", service, name, labels.common(service))
    return {"apiVersion": "v1", "kind": "Service", "metadata": made, "spec": spec}


def router_deployment(service: DisaggService, settings: KubeSettings, key: PodKey) -> dict[str, Any]:
    """The Deployment of routers, without a count where the document has none (``initial_object``). A router drains at
    SIGTERM, so its pods need no hook; a new one is ready before an old one goes.

    Raises:
        UnsupportedField: the template takes away what xpyd needs.
    """
    selector = labels.selector(service, component=labels.ROUTERS)
    replicas = service.spec.router.replicas
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata("Deployment", service, labels.router_name(service.name), labels.common(service)),
        "spec": {
            **({"replicas": replicas} if replicas is not None else {}),
            "selector": {"matchLabels": selector},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": _router_template(service, selector, settings, key),
        },
    }


def router_pod(
    service: DisaggService, name: str, settings: KubeSettings, key: PodKey | None = None
) -> dict[str, Any]:
    """A pod as the Deployment would make it, for a dry run.

    Raises:
        UnsupportedField: the template takes away what xpyd needs.
    """
    selector = labels.selector(service, component=labels.ROUTERS)
    template = _router_template(service, selector, settings, key or keys.unknown(service.name))
    of_all = metadata("Pod", service, name, labels.common(service))
    return {"apiVersion": "v1", "kind": "Pod", "metadata": of_all | template["metadata"], "spec": template["spec"]}


def _router_template(
    service: DisaggService, selector: dict[str, str], settings: KubeSettings, key: PodKey
) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "metadata": {"labels": labels.common(service) | selector | {labels.ROSTER: labels.YES, labels.ROUTER: labels.YES}},
        "spec": {
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": at.grace_s(service),
            "securityContext": at.pod_security(settings),
            "topologySpreadConstraints": at.spread(selector),
            "containers": [router_container(service, settings, key)],
            "volumes": [
                {"name": "run", "emptyDir": {}},
                {"name": "tmp", "emptyDir": {}},
                key.volume(),
                *clients_volumes(service),
            ],
        },
    }
    template = service.spec.router_template
    return pod if template is None else overlay(pod, template, "spec.router.template")
