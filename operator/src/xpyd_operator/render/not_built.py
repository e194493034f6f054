"""What the API has and this version cannot do yet, wherever a service runs. Refused with the field and what to write."""

from __future__ import annotations

from collections.abc import Iterator

from xpyd_operator.api.service import DisaggService
from xpyd_operator.render.engine import RAY_OWNED
from xpyd_sidecar.contract.ids import Role


def role(service: DisaggService, which: Role) -> Iterator[tuple[str, str]]:
    """One role."""
    if which is Role.PREFILL and service.spec.prefill.parallelism.data > 1:
        yield "spec.prefill.parallelism.data", "data-parallel prefill is not built yet; write 1 and more replicas"


def pipeline(service: DisaggService, which: Role, *, devices: bool) -> Iterator[tuple[str, str]]:
    """Stages of a role without devices: on CPUs vLLM makes what a later stage receives into only where it compiles."""
    given = (*service.spec.engine.args, *service.spec.role(which).args)
    if service.spec.role(which).parallelism.pipeline > 1 and not devices and "--enforce-eager" in given:
        reason = "vLLM for CPUs ends at the first request of several stages with --enforce-eager; leave that out or write 1"
        yield f"spec.{which}.parallelism.pipeline", reason


def executor(service: DisaggService, which: Role, *, devices: bool) -> Iterator[tuple[str, str]]:
    """How a role with or without devices runs its workers."""
    if service.spec.role(which).parallelism.executor != "ray":
        return
    if not devices:
        reason = "vLLM has no ray for CPUs (current platform cpu does not support ray); write mp or leave it out"
        yield f"spec.{which}.parallelism.executor", reason
    for index, variable in enumerate(service.spec.engine.env):
        if variable.name in RAY_OWNED:
            yield f"spec.engine.env[{index}].name", f"{variable.name} is set by xpyd if the executor is ray; leave it out"


def router(service: DisaggService) -> Iterator[tuple[str, str]]:
    """The router."""
    given = service.spec.router
    if given.compat == "p2p" and given.ports.members + 1 in (given.ports.http, 65536):
        yield "spec.router.ports.members", f"older engines come to {given.ports.members + 1}; leave that port free for them"
