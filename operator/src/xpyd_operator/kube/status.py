"""What only a backend of a cluster knows, added to what the planner says of a service and its pools; what is wrong with a
service as a whole, and its status while nothing can be planned for it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from xpyd_operator.api.service import DisaggService
from xpyd_operator.api.status import Condition, PoolCondition, PoolStatus, ServiceStatus
from xpyd_operator.errors import XpydError
from xpyd_operator.kube.gangs import Gangs
from xpyd_operator.kube.master import KeyTrouble
from xpyd_operator.plan.conditions import bounded
from xpyd_operator.plan.observed import Problem
from xpyd_operator.plan.round import Round
from xpyd_operator.render import labels
from xpyd_operator.render.engine import step_sync
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.contract.ids import Role


def service_status(
    round_: Round, service: DisaggService, settings: KubeSettings, *, valid: Condition, holds: str
) -> ServiceStatus:
    """The status of a service after a round, without generation and times.

    Args:
        round_: what was planned and done.
        service: the document in force.
        settings: for the URL.
        valid: what is said of the newest document.
        holds: what waits for something outside of the operator, in words.
    """
    said = round_.status
    host = f"{service.name}.{service.metadata.namespace}.svc.{settings.cluster_domain}"
    scheme = "http" if service.spec.router.tls.secret is None else "https"
    holds = "; ".join(part for part in (holds, *round_.postponed) if part)
    conditions = tuple(_with(each, holds, round_.failures) for each in said.conditions)
    return msgspec.structs.replace(
        said,
        conditions=(*conditions, valid, *stalled(conditions, valid)),
        model=service.served_name,
        url=f"{scheme}://{host}:{service.spec.router.ports.http}",
        step_sync=step_sync(service),
        plan=bounded("; ".join(part for part in (said.plan, holds) if part)) or None,
    )


def stalled(conditions: Iterable[Condition], valid: Condition) -> tuple[Condition, ...]:
    """The condition ``Stalled`` while it holds, and nothing otherwise.

    It is what programs that wait for a document to take effect look at (kstatus, so Flux): the newest one is refused, or
    nothing will move before a person does something. ``Ready`` does not say that, as what ran before serves on.
    """
    stuck = next((each for each in conditions if each.type == "Progressing" and each.reason == "Stuck"), None)
    cause = valid if valid.status == "False" else stuck
    return () if cause is None else (Condition(type="Stalled", status="True", reason=cause.reason, message=cause.message),)


def pool_status(round_: Round, service: DisaggService, role: Role) -> PoolStatus:
    """The status of a pool, without generation and times; ``replicas`` counts what stays."""
    mine = [each for each in round_.observed.instances if each.role is role and not each.leaving]
    ready = sum(each.ready for each in mine)
    wanted = round_.desired.target(role).replicas
    enough = ready >= wanted
    words = f"{ready} of {wanted} ready"
    conditions = [PoolCondition(type="Ready", status="True" if enough else "False",
                                reason="AllReady" if enough else "NotReady", message=words)]
    held = round_.desired.limited[role is Role.DECODE]
    conditions.append(PoolCondition(type="Limited", status="True" if held else "False",
                                    reason="Limits" if held else "WithinLimits", message=held))
    leaders = {"member": labels.LEADER} if service.spec.role(role).parallelism.pods > 1 else {}
    selector = ",".join(f"{key}={value}" for key, value in sorted(labels.selector(service, role=role, **leaders).items()))
    return PoolStatus(replicas=len(mine), ready_replicas=ready, selector=selector, conditions=tuple(conditions))


def troubles(taken: Iterable[str], valid: Condition, lacking: KeyTrouble | None) -> tuple[Problem, ...]:
    """Problems of the service as a whole, not of an instance.

    Args:
        taken: objects of others whose names the service needs.
        valid: what is said of the newest document.
        lacking: why the master of all keys may be lost.
    """
    found = [
        Problem("NameTaken", f"{each} is somebody else's; rename or delete it, since this service needs the name")
        for each in taken
    ]
    if valid.status == "False":
        found.append(Problem(valid.reason, valid.message))
    if lacking is not None:
        found.append(Problem(lacking.reason, str(lacking)))
    return tuple(found)


def gang_troubles(gangs: Gangs, *, ungrouped: bool) -> tuple[Problem, ...]:
    """Why instances of several pods are not placed as a whole though somebody asked for it. ``ungrouped``: the API server
    takes pods without the group that they were to be in.
    """
    found = [Problem("GangNotServed", gangs.trouble)] if gangs.trouble else []
    if ungrouped:
        words = ("the API server serves PodGroups and takes no spec.schedulingGroup of pods: turn on the feature gate "
                 "GenericWorkload for it and the scheduler, or start the operator with --gang none")
        found.append(Problem("GangNotServed", words))
    return tuple(found)


def refused(before: ServiceStatus, valid: Condition, error: XpydError) -> ServiceStatus | None:
    """Nothing was ever accepted while this process lives: say why. What runs goes on, so its Ready is left alone.

    None where it cannot be told at present, and will be.
    """
    there = {each.type for each in before.conditions}
    if valid.status != "False":
        if "Valid" in there:
            return None
        valid = Condition(type="Valid", status="Unknown", reason="NotReached", message=str(error))
    conditions = [each for each in before.conditions if each.type not in ("Valid", "Stalled")]
    if "Ready" not in there:
        conditions.append(Condition(type="Ready", status="False", reason=valid.reason, message=valid.message))
    return msgspec.structs.replace(before, conditions=(*conditions, valid, *stalled(conditions, valid)))


def keyless(before: ServiceStatus, error: KeyTrouble) -> ServiceStatus:
    """The key of its pods is not known, so nothing can be done. What runs goes on, so its Ready is left alone."""
    words = bounded(str(error))
    conditions = [each for each in before.conditions if each.type not in ("Degraded", "Stalled")]
    if not any(each.type == "Ready" for each in conditions):
        conditions.append(Condition(type="Ready", status="False", reason=error.reason, message=words))
    stuck = (Condition(type=kind, status="True", reason=error.reason, message=words) for kind in ("Degraded", "Stalled"))
    return msgspec.structs.replace(before, conditions=(*conditions, *stuck))


def _with(condition: Condition, holds: str, failures: tuple[str, ...]) -> Condition:
    """Progressing also says what waits; Degraded what the round could not carry out."""
    if condition.type == "Progressing" and holds:
        words = f"{condition.message}; {holds}" if condition.status == "True" else holds
        return msgspec.structs.replace(condition, status="True", reason="Waiting", message=bounded(words))
    if condition.type != "Degraded" or not failures:
        return condition
    bad = condition.status == "True"
    words = "; ".join([condition.message, *failures] if bad else failures)
    return msgspec.structs.replace(
        condition, status="True", reason=condition.reason if bad else "Failed", message=bounded(words)
    )
