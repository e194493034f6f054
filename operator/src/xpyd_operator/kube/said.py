"""What only a backend of a cluster knows, added to what the planner says of a service and its pools. Pure."""

from __future__ import annotations

import msgspec

from xpyd_operator.api.service import DisaggService
from xpyd_operator.api.status import Condition, PoolStatus, ServiceStatus
from xpyd_operator.plan.desired import Revision
from xpyd_operator.plan.round import Round
from xpyd_operator.render import labels
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.contract.ids import Role

LISTED = 16


def service_status(
    round_: Round, service: DisaggService, settings: KubeSettings, *, valid: Condition, revision: Revision, taken: str,
    holds: str,
) -> ServiceStatus:
    """The status of a service after a round, without generation and times.

    Args:
        round_: what was planned and done.
        service: the document in force.
        settings: for the URL.
        valid: what is said of the newest document.
        revision: of decode, as the document in force asks for.
        taken: objects of others whose names the service needs, in words.
        holds: what waits for something outside of the operator, in words.
    """
    said = round_.status
    conditions = tuple(_with(each, taken, holds, round_.failures) for each in said.conditions if each.type != "Valid")
    port = service.spec.router.ports.http
    host = f"{service.name}.{service.metadata.namespace}.svc.{settings.cluster_domain}"
    prints = dict.fromkeys(each.fingerprint for each in round_.observed.instances if each.fingerprint)
    return msgspec.structs.replace(
        said,
        conditions=(*conditions, valid),
        model=service.served_name,
        url=f"http://{host}:{port}",
        revision=revision,
        revisions=tuple(each for each in said.revisions if each)[:LISTED],
        fingerprints=(said.fingerprints or tuple(sorted(prints)))[:LISTED],
        plan="; ".join(part for part in (said.plan, holds) if part) or None,
    )


def pool_status(round_: Round, service: DisaggService, role: Role) -> PoolStatus:
    """The status of a pool, without generation and times; ``replicas`` counts what stays."""
    mine = [each for each in round_.observed.instances if each.role is role and not each.leaving]
    ready = sum(each.ready for each in mine)
    wanted = round_.desired.target(role).replicas
    enough = ready >= wanted
    words = f"{ready} of {wanted} ready"
    conditions = [Condition(type="Ready", status="True" if enough else "False",
                            reason="AllReady" if enough else "NotReady", message=words)]
    held = round_.desired.held
    conditions.append(Condition(type="Limited", status="True" if held else "False",
                                reason="Limits" if held else "WithinLimits", message=held))
    selector = ",".join(f"{key}={value}" for key, value in sorted(labels.selector(service, role=role).items()))
    return PoolStatus(replicas=len(mine), ready_replicas=ready, selector=selector, conditions=tuple(conditions))


def _with(condition: Condition, taken: str, holds: str, failures: tuple[str, ...]) -> Condition:
    """Degraded also says what no plan can mend."""
    if condition.type == "Progressing" and holds:
        words = f"{condition.message}; {holds}" if condition.status == "True" else holds
        return msgspec.structs.replace(condition, status="True", reason="Waiting", message=words)
    if condition.type != "Degraded" or not (taken or failures):
        return condition
    troubles = [condition.message] if condition.status == "True" else []
    reason = condition.reason if condition.status == "True" else "NameTaken" if taken else "RequestFailed"
    if taken:
        troubles.append(f"somebody else has the name of {taken}; rename or delete it")
    troubles += failures
    return msgspec.structs.replace(condition, status="True", reason=reason, message="; ".join(troubles))
