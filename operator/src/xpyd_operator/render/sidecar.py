"""The containers that run xpyd's own image: the one that brings the package, and router and agent."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from xpyd_operator.api.quantity import value
from xpyd_operator.api.router import PROCESS_BYTES, Router, RouterResources
from xpyd_operator.api.service import DisaggService
from xpyd_operator.render import group, labels
from xpyd_operator.render import paths as at
from xpyd_operator.render.keys import PodKey
from xpyd_operator.render.layout import Member
from xpyd_operator.render.literal import literals
from xpyd_operator.render.paths import ASK, HOST_VAR
from xpyd_operator.render.sections import agent_section, router_section
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.contract import launch
from xpyd_sidecar.contract.ids import HostPort, InstanceName, Role, ServiceName, join_host_port
from xpyd_sidecar.contract.launch import RouterConfig, SidecarConfig

COMMAND: Final = ["python3", "-m", "xpyd_sidecar"]
_INSTANCE_VAR: Final = f"$({launch.ENV_INSTANCE})"
_AGENT_RESOURCES: Final = {"requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
_ROUTER_REQUESTS: Final = {"cpu": "250m", "memory": "256Mi"}
_INSTALL_RESOURCES: Final = {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}


def install_container(settings: KubeSettings) -> dict[str, Any]:
    """Copies the package onto the volume that the engine reads it from."""
    return {
        "name": labels.INSTALL,
        "image": settings.sidecar_image,
        "imagePullPolicy": settings.sidecar_pull_policy,
        "command": ["python3", "-m", "xpyd_sidecar.install", at.PACKAGE],
        "resources": _INSTALL_RESOURCES,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": at.OWN_SECURITY,
        "volumeMounts": [at.mount("xpyd", at.PACKAGE)],
    }


def sidecar_container(
    service: DisaggService, role: Role, members: tuple[Member, ...], index: int, *, settings: KubeSettings, key: PodKey
) -> dict[str, Any]:
    """Agent of an engine, and with placement sidecar its router, as a native sidecar. Only the leader of several members
    is told a role, speaks to routers, and has one.
    """
    leads = index == 0
    own_router = service.spec.router.placement == "sidecar" and leads
    container = _container(service, labels.SIDECAR, settings, clients=own_router)
    config = _sidecar_config(service, role, members, index, settings=settings, key=key)
    container |= {"command": _command(config), "restartPolicy": "Always"}
    if leads:
        container["volumeMounts"].append(at.mount("assignment", at.ASSIGNMENT_DIR, read_only=True))
    container["env"] = [_field(launch.ENV_HOST, "status.podIP"), {"name": launch.ENV_RUN_DIR, "value": at.RUN}]
    if own_router:
        container |= _router_probes(service)
    else:
        status = [*ASK, "status"]
        container["startupProbe"] = at.killing(at.exec_probe(status, period_s=2, failures=30))
        container["livenessProbe"] = at.killing(at.exec_probe(status, period_s=30, failures=4))
    return container


def router_container(service: DisaggService, settings: KubeSettings, key: PodKey) -> dict[str, Any]:
    """A router in a pod of its own."""
    container = _container(service, labels.ROUTERS, settings, clients=True)
    config = SidecarConfig(
        service=ServiceName(service.name),
        instance=InstanceName(""),
        key_file=key.path,
        run_dir=at.RUN,
        router=_router(service, beside_engine=False),
    )
    container["command"] = _command(config, instance=_INSTANCE_VAR)
    container["env"] = [_field(launch.ENV_INSTANCE, "metadata.name")]
    return container | _router_probes(service)


def router_resources(router: Router) -> dict[str, Any]:
    """Resources of a router, beside an engine with its agent: what is written, and defaults for what is not.

    Memory: all that it may hold for its clients, and 512 MiB for the process itself (51 MiB when idle), 16,384 connections
    (4 KiB each) and 4,096 requests (whole answers below 64 KiB, what a socket does not take at once), the roster, metrics
    and their history. What is written as a limit is also reserved.
    """
    given = router.resources
    if given == RouterResources():
        return {}
    limits: dict[str, int | str] = {"memory": _size(PROCESS_BYTES + router.held_bodies_bytes)}
    requests: dict[str, int | str] = dict(_ROUTER_REQUESTS)
    if given is not None:
        requests |= {**given.limits, **given.requests}
        if value(requests["memory"]) > value(limits["memory"]):
            limits["memory"] = requests["memory"]
        limits |= given.limits
    return {"requests": requests, "limits": limits}


def _size(memory: int) -> str:
    """A quantity of so many bytes, in whole GiB where it is."""
    mib = -(-memory // (1 << 20))
    return f"{mib}Mi" if mib % 1024 else f"{mib // 1024}Gi"


def members_address(service: DisaggService, settings: KubeSettings) -> HostPort:
    """The name that stands for every router. Without the dot at its end a pod's resolver would try other domains first."""
    namespace = service.metadata.namespace or "default"
    host = f"{labels.members_name(service.name)}.{namespace}.svc.{settings.cluster_domain}."
    return join_host_port(host, service.spec.router.ports.members)


def clients_volumes(service: DisaggService) -> list[dict[str, Any]]:
    """The volumes with the clients' keys and the certificate, where there are any."""
    found = []
    keys, certificate = service.spec.router.api_key_secret, service.spec.router.tls.secret
    if keys is not None:
        found.append(at.secret_volume("clients", keys.name, keys.key, at.CLIENTS_FILE))
    if certificate is not None:
        found.append(at.secret_files("tls", certificate, {name: name for name in (at.TLS_CERT, at.TLS_KEY)}))
    return found


def _sidecar_config(
    service: DisaggService, role: Role, members: tuple[Member, ...], index: int, *, settings: KubeSettings, key: PodKey
) -> SidecarConfig:
    engine = join_host_port("127.0.0.1", at.ENGINE_PORT)
    routers = (members_address(service, settings),) if index == 0 else ()
    agent = msgspec.structs.replace(
        agent_section(service, role, engine, ("", at.ENGINE_PORT), routers),
        assignment_file=f"{at.ASSIGNMENT_DIR}/{at.ASSIGNMENT_FILE}" if index == 0 else None,
        listen=join_host_port(at.EVERYWHERE, at.AGENT_PORT),
        previous_key_file=key.before_path,
        key_mark=key.id,
        group=group.group_config(service, members, index, settings) if len(members) > 1 else None,
    )
    return SidecarConfig(
        service=ServiceName(service.name),
        instance=members[index].instance,
        key_file=key.path,
        run_dir=at.RUN,
        agent=agent,
        router=_router(service, beside_engine=True) if service.spec.router.placement == "sidecar" and index == 0 else None,
    )


def _router(service: DisaggService, *, beside_engine: bool) -> RouterConfig:
    key_file = f"{at.CLIENTS_DIR}/{at.CLIENTS_FILE}" if service.spec.router.api_key_secret is not None else None
    tls = service.spec.router.tls.secret is not None
    return msgspec.structs.replace(
        router_section(service, at.EVERYWHERE),
        api_key_file=key_file,
        tls_cert_file=f"{at.TLS_DIR}/{at.TLS_CERT}" if tls else None,
        tls_key_file=f"{at.TLS_DIR}/{at.TLS_KEY}" if tls else None,
        listen_on_s=at.LISTEN_ON_S,
        drain_timeout_s=service.spec.drain.timeout_s,
        beside_engine=beside_engine,
        wakes=service.spec.to_zero,
    )


def _command(config: SidecarConfig, instance: str = "") -> list[str]:
    """The command, every text in it as it is but for the pod's own address and name, which Kubernetes fills in."""
    plain = literals(msgspec.to_builtins(config))
    if instance:
        plain["instance"] = instance
    if plain["agent"] is not None:
        plain["agent"]["advertise_host"] = HOST_VAR
    return [*COMMAND, "--config-json", msgspec.json.encode(plain, order="sorted").decode()]


def _container(service: DisaggService, name: str, settings: KubeSettings, *, clients: bool) -> dict[str, Any]:
    mounts = [at.mount("run", at.RUN), at.mount("key", at.KEY_DIR, read_only=True), at.mount("tmp", at.TMP)]
    ports = []
    if clients:
        given = service.spec.router.ports
        ports = [
            {"name": labels.CLIENTS, "containerPort": given.http, "protocol": "TCP"},
            {"name": "members", "containerPort": given.members, "protocol": "TCP"},
            {"name": labels.ADMIN, "containerPort": given.admin_or_default, "protocol": "TCP"},
        ]
        if service.spec.router.api_key_secret is not None:
            mounts.append(at.mount("clients", at.CLIENTS_DIR, read_only=True))
        if service.spec.router.tls.secret is not None:
            mounts.append(at.mount("tls", at.TLS_DIR, read_only=True))
    return {
        "name": name,
        "image": settings.sidecar_image,
        "imagePullPolicy": settings.sidecar_pull_policy,
        "resources": router_resources(service.spec.router) if clients else _AGENT_RESOURCES,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": at.OWN_SECURITY,
        "volumeMounts": mounts,
    } | ({"ports": ports} if ports else {})


def _router_probes(service: DisaggService) -> dict[str, Any]:
    port, tls = service.spec.router.ports.admin_or_default, service.spec.router.tls.secret is not None
    return {
        "startupProbe": at.killing(at.http_probe("/health", port, period_s=1, failures=60, timeout_s=2, tls=tls)),
        "livenessProbe": at.killing(at.http_probe("/health", port, period_s=10, failures=6, tls=tls)),
        "readinessProbe": at.http_probe("/ready", port, period_s=2, failures=2, timeout_s=2, tls=tls),
    }


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
