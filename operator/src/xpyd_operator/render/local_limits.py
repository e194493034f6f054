"""What a service may ask for and local processes can not do: refused with the field and what to do instead.

``image`` and ``template`` are documented as not used by ``xpyd up``, and ``networkPolicy``, ``router.placement`` and the
numbers of routers say where in a cluster something is, so they change nothing here. What a document for a single host must
not say at all is among the rules of the API (``rule.Target.LOCAL``).
"""

from __future__ import annotations

from collections.abc import Iterator

from xpyd_operator.api.service import DisaggService
from xpyd_operator.errors import Unsupported
from xpyd_operator.render import not_built
from xpyd_sidecar.contract.ids import Role


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
        yield from not_built.role(service, role)
        yield from not_built.executor(service, role, devices=gpus > 0)
        yield from not_built.pipeline(service, role, devices=gpus > 0)
    yield from _router(service)


def _model(service: DisaggService) -> Iterator[tuple[str, str]]:
    model = service.spec.model
    if model.cache.claim is not None or model.cache.size is not None:
        yield "spec.model.cache", "local engines use the hub cache of their user (HF_HOME); leave it out"
    if model.token_secret is not None:
        yield "spec.model.tokenSecret", "there are no Secrets on a single host; set HF_TOKEN where you call xpyd"


def _kv(service: DisaggService, gpus: int) -> Iterator[tuple[str, str]]:
    if service.spec.kv.transport == "nccl" and not gpus:
        yield "spec.kv.transport", "nccl needs GPUs and this host has none; write tcp or auto"


def _router(service: DisaggService) -> Iterator[tuple[str, str]]:
    router = service.spec.router
    if router.api_key_secret is not None:
        yield "spec.router.apiKeySecret", "there are no Secrets on a single host; leave it out"
    if router.tls.secret is not None:
        yield "spec.router.tls.secret", "there are no Secrets on a single host; leave it out"
    yield from not_built.router(service)
