"""Data-parallel ranks of one instance: what their engine is told about keeping in step."""

from __future__ import annotations

from xpyd_operator.api.service import DisaggService
from xpyd_sidecar.contract import launch
from xpyd_sidecar.contract.ids import Role


def dp_env(service: DisaggService, role: Role) -> dict[str, str]:
    """The environment of a role's engine; nothing for a role of one rank, so that its revision stays what it was."""
    if service.spec.role(role).parallelism.data == 1:
        return {}
    return {launch.ENV_DP_SYNC: service.spec.engine.dp_step_sync}


def step_sync(service: DisaggService) -> str | None:
    """How data-parallel ranks are kept in step, for the status; None where no role has several."""
    ranks = (service.spec.prefill.parallelism.data, service.spec.decode.parallelism.data)
    return service.spec.engine.dp_step_sync if max(ranks) > 1 else None
