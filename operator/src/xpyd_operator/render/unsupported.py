"""What a service may ask for and a backend can not do: refused with the field and what to do instead.

    kube_refusals    in a cluster. What only the API server can judge (the rest of a template, a quota, a name that is
                     taken) is left to its dry run
    local_refusals   on one host. ``image`` and ``template`` are documented as not used by ``xpyd up``; and
                     ``networkPolicy``, ``router.placement`` and the numbers of routers say where in a cluster something
                     is, so they change nothing there

What a document for one of them must not say at all is among the rules of the API (``rule.Target``).
"""

from __future__ import annotations

from collections.abc import Iterator

from xpyd_operator.api.devices import devices, limits
from xpyd_operator.api.quantity import size
from xpyd_operator.api.service import DisaggService
from xpyd_operator.render import offload, overlay
from xpyd_operator.render.engine import kv_options
from xpyd_operator.render.paths import AGENT_PORT, ENGINE_PORT
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.contract.launch import DEVICE_KEEP_BYTES, DEVICE_RING_BYTES, KEEP_BYTES, NIXL_SLOT_BYTES


def kube_refusals(service: DisaggService) -> Iterator[tuple[str, str]]:
    """Every field that is refused, and why."""
    for role in Role:
        yield from _role(service, role)
        yield from _pipeline(service, role, devices=bool(devices(service.spec.role(role))))
        yield from _memory(service, role)
        template = service.spec.written_section(role).template
        if template is not None:
            yield from overlay.faults(template, f"spec.{role}.template")
    yield from offload.refusals(service, tuple(role for role in Role if not devices(service.spec.role(role))))
    if service.spec.router.template is not None:
        yield from overlay.faults(service.spec.router.template, "spec.router.template", overlay.ROUTER_POD)
    if service.spec.template is not None:
        yield from overlay.common_faults(service.spec.template, "spec.template")
    yield from _ports(service)


def _memory(service: DisaggService, role: Role) -> Iterator[tuple[str, str]]:
    """The connector's own memory on the host, all ranks of a pod together, in either role: less than this can never do.

    On a device it may take more, as the model asks for; of a limit it takes so much more by itself that room is left. What
    it takes is in docs/operations.md.
    """
    limit = limits(service.spec.role(role)).get("memory")
    ranks = service.spec.role(role).parallelism.devices_of_pod
    on_device = bool(devices(service.spec.role(role)))
    stated = kv_options(service).keep_bytes
    keep = max(stated or 0, DEVICE_KEEP_BYTES) if on_device else stated or KEEP_BYTES
    buffer = service.spec.kv.buffer_bytes or 0
    keep += buffer if service.spec.kv.mode == "get" else 0
    transport = service.spec.kv.transport
    slots = NIXL_SLOT_BYTES if transport == "rdma" else 0
    ring = slots + (DEVICE_RING_BYTES if on_device and transport != "shm" else 0)  # shared memory is read into the device
    beside = offload.memory_bytes(service)
    needed = ranks * (keep + ring + buffer) + beside
    if limit is not None and size(limit) < needed:
        reason = (
            f"must be above {needed >> 20}Mi, not {limit}: each of {ranks} ranks keeps "
            f"{'at least' if on_device and stated is None else 'up to'} {keep >> 20}Mi of KV to send "
            f"{f'and {ring >> 20}Mi to receive' if ring else ''}"
            f"{f', {buffer >> 20}Mi for what comes early, ' if buffer else ', '}"
            f"{f'{beside >> 20}Mi are those of kv.offload, ' if beside else ''}"
            f"beside what vLLM itself takes"
        )
        yield f"spec.{role}.resources.limits.memory", reason


def _ports(service: DisaggService) -> Iterator[tuple[str, str]]:
    if service.spec.router.placement == "sidecar":
        ports = service.spec.router.ports
        for name, port in (("http", ports.http), ("members", ports.members), ("admin", ports.admin_or_default)):
            whose = {ENGINE_PORT: "engine", AGENT_PORT: "agent"}.get(port)
            if whose is not None:
                yield f"spec.router.ports.{name}", f"{port} is the {whose}'s own port in the same pod; take another one"


def local_refusals(service: DisaggService, gpus: int) -> Iterator[tuple[str, str]]:
    """Every field that is refused, and why."""
    if service.spec.suspend:
        yield "spec.suspend", "what runs on a single host ends with `xpyd down`; leave it out"
    yield from _model(service)
    yield from _kv(service, gpus)
    yield from offload.refusals(service, () if gpus else tuple(Role))
    for role in Role:
        yield from _role(service, role)
        yield from _pipeline(service, role, devices=gpus > 0)
    yield from _local_router(service)


def _model(service: DisaggService) -> Iterator[tuple[str, str]]:
    model = service.spec.model
    if model.cache.claim is not None:
        yield "spec.model.cache", "local engines use the hub cache of their user (HF_HOME); leave it out"
    if model.token_secret is not None:
        yield "spec.model.tokenSecret", "there are no Secrets on a single host; set HF_TOKEN where you call xpyd"


def _kv(service: DisaggService, gpus: int) -> Iterator[tuple[str, str]]:
    if service.spec.kv.transport == "nccl" and not gpus:
        yield "spec.kv.transport", "nccl needs GPUs and this host has none; write tcp or auto"
    if service.spec.kv.offload is not None and service.spec.kv.offload.disk_bytes:
        yield "spec.kv.offload.disk", "engines of a single host have no volume for it; write memory, or leave it out"


def _local_router(service: DisaggService) -> Iterator[tuple[str, str]]:
    router = service.spec.router
    if router.api_key_secret is not None:
        yield "spec.router.apiKeySecret", "there are no Secrets on a single host; leave it out"
    if router.tls.secret is not None:
        yield "spec.router.tls.secret", "there are no Secrets on a single host; leave it out"


def _role(service: DisaggService, which: Role) -> Iterator[tuple[str, str]]:
    """One role."""
    if service.spec.role(which).parallelism.pods > 1:
        yield from _members(service, which)


def _members(service: DisaggService, which: Role) -> Iterator[tuple[str, str]]:
    """What an instance of several members cannot do yet, or never."""
    if service.spec.kv.transport == "shm":
        yield "spec.kv.transport", f"shm does not reach the other pods of {which}'s instances; write auto or tcp"
    if service.spec.kv.offload is not None:
        yield "spec.kv.offload", f"has not run beside instances of several pods ({which}); leave it out, or write pods: 1"


def _pipeline(service: DisaggService, which: Role, *, devices: bool) -> Iterator[tuple[str, str]]:
    """Stages of a role without devices: on CPUs vLLM makes what a later stage receives into only where it compiles."""
    given = (*service.spec.engine.args, *service.spec.role(which).args)
    if service.spec.role(which).parallelism.pipeline > 1 and not devices and "--enforce-eager" in given:
        reason = "vLLM for CPUs ends at the first request of several stages with --enforce-eager; leave that out or write 1"
        yield f"spec.{which}.parallelism.pipeline", reason

