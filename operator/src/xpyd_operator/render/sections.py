"""The two halves of a sidecar's configuration, as far as they do not depend on where it runs. Shared by the backends."""

from __future__ import annotations

from xpyd_operator.api.durations import seconds
from xpyd_operator.api.service import DisaggService
from xpyd_sidecar.contract.ids import HostPort, Role
from xpyd_sidecar.contract.launch import AgentConfig, RouterConfig


def router_section(service: DisaggService, listen: str) -> RouterConfig:
    """A router that listens on the address ``listen``."""
    spec = service.spec.router
    return RouterConfig(
        host=listen,
        port=spec.ports.http,
        members_port=spec.ports.members,
        admin_port=spec.ports.admin_or_default,
        policy=spec.policy,
        on_no_prefill=spec.on_no_prefill,
        failover=spec.failover,
        model=service.served_name,
        max_body_bytes=spec.max_body_bytes,
        body_budget_bytes=spec.body_budget_bytes,
        max_in_flight=spec.max_in_flight,
        queue_size=spec.queue_size,
        queue_timeout_s=spec.queue_timeout_s,
        hold_s=spec.hold_s,
        skip_prefill_below=spec.skip_prefill.below_tokens,
        skip_prefill_rest=spec.skip_prefill.below_tokens,
        first_token=spec.first_token,
        otlp_endpoint=spec.tracing.endpoint or "",
        hosts=spec.hosts,
        trusted_proxies=spec.trusted_proxies,
        cors_origins=spec.cors.origins,
        request_timeout_s=spec.request_timeout_s,
        pair_timeout_s=spec.pair_timeout_s,
        audit=service.spec.kv.audit,
    )


def agent_section(
    service: DisaggService, role: Role, engine: HostPort, advertised: tuple[str, int], routers: tuple[HostPort, ...]
) -> AgentConfig:
    """The agent of an engine: where it finds it, on which host and port routers find it, and the routers' membership
    addresses.
    """
    return AgentConfig(
        role=role,
        engine=engine,
        advertise_host=advertised[0],
        advertise_port=advertised[1],
        routers=routers,
        model=service.served_name,
        data_parallel=service.spec.role(role).parallelism.data,
        drain_timeout_s=service.spec.drain.timeout_s,
        startup_timeout_s=seconds(service.spec.engine.startup_timeout),
    )
