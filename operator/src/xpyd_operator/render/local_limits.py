"""What a service may ask for and local processes can not do: refused with the field and what to do instead.

``image`` and ``template`` are documented as not used by ``xpyd up``, and ``networkPolicy``, ``router.placement`` and the
numbers of routers say where in a cluster something is, so they change nothing here. What a document for a single host must
not say at all is among the rules of the API (``rule.Target.LOCAL``).
"""

from __future__ import annotations

from collections.abc import Iterator

from xpyd_operator.api.router import PolicyOptions
from xpyd_operator.api.service import DisaggService
from xpyd_operator.errors import Unsupported
from xpyd_sidecar.contract.ids import Role

POLICIES = ("round_robin", "random", "least_loaded")


def check_local(service: DisaggService, gpus: int) -> None:
    """Refuse what this backend cannot do on a host with so many GPUs.

    Raises:
        Unsupported: the first such field.
    """
    for path, reason in refusals(service, gpus):
        raise Unsupported(path, reason)


def refusals(service: DisaggService, gpus: int) -> Iterator[tuple[str, str]]:
    """Every field that is refused, and why."""
    yield from _model(service)
    yield from _kv(service, gpus)
    for role in Role:
        yield from _role(service, role)
    yield from _router(service)
    if service.spec.planner.mode != "Off":
        yield "spec.planner.mode", "nothing sets the counts of local processes; write Off and change replicas"


def _model(service: DisaggService) -> Iterator[tuple[str, str]]:
    model = service.spec.model
    if model.cache.claim is not None or model.cache.size is not None:
        yield "spec.model.cache", "local engines use the hub cache of their user (HF_HOME); leave it out"
    if model.token_secret is not None:
        yield "spec.model.tokenSecret", "there are no Secrets on a single host; set HF_TOKEN where you call xpyd"


def _kv(service: DisaggService, gpus: int) -> Iterator[tuple[str, str]]:
    kv = service.spec.kv
    if kv.transport == "nccl" and not gpus:
        yield "spec.kv.transport", "nccl needs GPUs and this host has none; write tcp or auto"
    elif kv.transport not in ("auto", "tcp"):
        yield "spec.kv.transport", f"{kv.transport} is not built yet; write tcp or auto"
    if kv.mode != "put_async":
        yield "spec.kv.mode", f"{kv.mode} is not built yet; write put_async"
    if kv.buffer_size is not None:
        yield "spec.kv.bufferSize", "decode keeps no lookup buffer yet; leave it out"
    if kv.host_pool_bytes:
        yield "spec.kv.hostPool", "there is no host pool yet; leave it out"
    if kv.shared_memory is not None:
        yield "spec.kv.sharedMemory", "needs transport shm, which is not built yet; leave it out"


def _role(service: DisaggService, role: Role) -> Iterator[tuple[str, str]]:
    parallel = service.spec.role(role).parallelism
    if parallel.data > 1:
        yield f"spec.{role}.parallelism.data", "data-parallel instances are not built yet; write 1 and more replicas"
    if parallel.executor == "ray":
        yield f"spec.{role}.parallelism.executor", "ray spreads an instance over hosts; write mp or leave it out"


def _router(service: DisaggService) -> Iterator[tuple[str, str]]:
    router = service.spec.router
    if router.api_key_secret is not None:
        yield "spec.router.apiKeySecret", "there are no Secrets on a single host; leave it out"
    if router.skip_prefill_below:
        yield "spec.router.skipPrefillBelow", "the router does not weigh prompts yet; write 0"
    if router.compat != "none":
        yield "spec.router.compat", f"{router.compat} is not built yet; write none"
    if router.policy not in POLICIES:
        yield "spec.router.policy", f"{router.policy} is not built yet; write {' or '.join(POLICIES)}"
    if router.policy_options != PolicyOptions():
        yield "spec.router.policyOptions", "the policies that are built have no settings yet; leave it out"
