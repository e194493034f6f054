"""What a service may ask for and the Kubernetes backend can not do: refused with the field and what to do instead.

What only the API server can judge (the rest of a template, a quota, a name that is taken) is left to its dry run.
"""

from __future__ import annotations

from collections.abc import Iterator

from xpyd_operator.api.quantity import size
from xpyd_operator.api.service import DisaggService
from xpyd_operator.api.source import Beside
from xpyd_operator.errors import Unsupported
from xpyd_operator.render import not_built, overlay
from xpyd_operator.render.engine import kv_options
from xpyd_operator.render.engine_container import has_devices
from xpyd_operator.render.paths import AGENT_PORT, ENGINE_PORT
from xpyd_sidecar.contract.ids import Role

STAGING_BYTES = 64 << 20
"""What the connector of one rank takes in before it is in the cache (its ``worker_side.STAGING_BYTES``)."""


def check_kube(service: DisaggService) -> None:
    """Refuse what this backend cannot do.

    Raises:
        Unsupported: the first such field.
    """
    for path, reason in refusals(service):
        raise Unsupported(path, reason)


def refusals(service: DisaggService) -> Iterator[tuple[str, str]]:
    """Every field that is refused, and why."""
    if isinstance(service.spec.model.origin, Beside):
        reason = f"{service.spec.model.source} lies beside the document, where no pod reads it; write a hub id, a path or pvc://"
        yield "spec.model.source", reason
    for role in Role:
        yield from not_built.role(service, role)
        yield from not_built.executor(service, role, devices=has_devices(service.spec.role(role)))
        yield from not_built.pipeline(service, role, devices=has_devices(service.spec.role(role)))
        yield from _memory(service, role)
        template = service.spec.role(role).template
        if template is not None:
            yield from overlay.faults(template, f"spec.{role}.template")
    yield from not_built.router(service)
    yield from _ports(service)
    router = service.spec.router
    if router.compat == "p2p" and (router.placement != "Deployment" or router.replicas_or_default != 1):
        yield "spec.router.compat", "older engines beat to one router; write placement Deployment and replicas 1 with p2p"


def _memory(service: DisaggService, role: Role) -> Iterator[tuple[str, str]]:
    """The connector's own copies on the host, all ranks together: less than this can never do."""
    limit = service.spec.role(role).limits.get("memory")
    ranks = service.spec.role(role).parallelism.devices
    keep = kv_options(service).keep_bytes
    buffers = (service.spec.kv.buffer_bytes or 0) + 2 * service.spec.kv.host_pool_bytes
    needed = ranks * (keep + STAGING_BYTES + buffers)
    if limit is not None and size(limit) < needed:
        reason = (
            f"must be above {needed >> 20}Mi, not {limit}: each of {ranks} ranks keeps up to {keep >> 20}Mi of KV to send "
            f"and {STAGING_BYTES >> 20}Mi to receive{', and its buffers, ' if buffers else ', '}"
            f"beside what vLLM itself takes"
        )
        yield f"spec.{role}.resources.limits.memory", reason


def _ports(service: DisaggService) -> Iterator[tuple[str, str]]:
    if service.spec.router.placement == "Sidecar":
        ports = service.spec.router.ports
        for name, port in (("http", ports.http), ("members", ports.members)):
            whose = {ENGINE_PORT: "engine", AGENT_PORT: "agent"}.get(port)
            if whose is not None:
                yield f"spec.router.ports.{name}", f"{port} is the {whose}'s own port in the same pod; take another one"
