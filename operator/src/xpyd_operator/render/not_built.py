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


def sizes(service: DisaggService) -> Iterator[tuple[str, str]]:
    """Both roles together. KV is cut by heads; that stages may differ has not been seen with engines."""
    here, there = service.spec.decode.parallelism.pipeline, service.spec.prefill.parallelism.pipeline
    if service.spec.prefill.most > 0 and here != there:
        yield "spec.decode.parallelism.pipeline", f"must be {there} as in prefill, not {here}; tensor sizes may differ"


def router(service: DisaggService) -> Iterator[tuple[str, str]]:
    """The router."""
    given = service.spec.router
    if given.compat == "p2p" and given.ports.members + 1 in (given.ports.http, 65536):
        yield "spec.router.ports.members", f"older engines come to {given.ports.members + 1}; leave that port free for them"
