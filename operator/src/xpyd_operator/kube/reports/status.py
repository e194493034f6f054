"""What only a backend of a cluster knows, added to what the planner says of a service and its pools; what is wrong with a
service as a whole, and its status while nothing can be planned for it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from xpyd_operator.api.service import DisaggService
from xpyd_operator.api.status import Condition, PoolCondition, PoolStatus, ServiceStatus
from xpyd_operator.kube.gangs.gangs import Gangs
from xpyd_operator.kube.keys.master import KeyTrouble
from xpyd_operator.plan.absent import PUT_OFF, Absence, Breakage, Waiting
from xpyd_operator.plan.conditions import FAILED, conditions, shorten
from xpyd_operator.plan.round import Round
from xpyd_operator.render import labels
from xpyd_operator.render.engine import step_sync
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.contract.ids import Role


def service_status(
    round_: Round, service: DisaggService, settings: KubeSettings, *, valid: Condition, after: Sequence[Absence] = (),
    beside: Sequence[Condition] = (),
) -> ServiceStatus:
    """The status of a service after a round, without generation and times.

    Args:
        round_: what was planned and done.
        service: the document in force.
        settings: for the URL.
        valid: what is said of the newest document.
        after: what waits for something outside of the operator.
        beside: conditions of what an instance can do without.
    """
    said = round_.status
    host = f"{service.name}.{service.metadata.namespace}.svc.{settings.cluster_domain}"
    scheme = "http" if service.spec.router.tls.secret is None else "https"
    after = (*after, *(Waiting(PUT_OFF, each) for each in round_.postponed),
             *(Breakage(FAILED, each) for each in round_.failures))
    found = conditions(round_.desired, round_.observed, round_.plan, said.roles, after)
    put_off = [each.message for each in after if isinstance(each, Waiting)]
    return msgspec.structs.replace(
        said,
        conditions=(*found, valid, *beside, *stalled_conditions(found, valid)),
        model=service.served_name,
        url=f"{scheme}://{host}:{service.spec.router.ports.http}",
        step_sync=step_sync(service),
        plan=shorten("; ".join(part for part in (said.plan, *put_off) if part)) or None,
    )


def stalled_conditions(found: Iterable[Condition], valid: Condition) -> tuple[Condition, ...]:
    """The condition ``Stalled`` while it holds, and nothing otherwise.

    It is what programs that wait for a document to take effect look at (kstatus, so Flux): the newest one is refused, or
    nothing will move before a person does something, which is never so of what waits for a place. ``Ready`` does not say
    that, as what ran before serves on.
    """
    stuck = next((each for each in found if each.type == "Progressing" and each.reason == "Stuck"), None)
    cause = valid if valid.status == "False" else stuck
    return () if cause is None else (Condition(type="Stalled", status="True", reason=cause.reason, message=cause.message),)


def pool_status(round_: Round, service: DisaggService, role: Role) -> PoolStatus:
    """The status of a pool, without generation and times; ``replicas`` counts what stays."""
    mine = [each for each in round_.observed.instances if each.role is role and not each.leaving]
    ready = sum(each.ready for each in mine)
    wanted = round_.desired.target(role).replicas
    enough = ready >= wanted
    words = f"{ready} of {wanted} ready"
    said = [PoolCondition(type="Ready", status="True" if enough else "False",
                                reason="AllReady" if enough else "NotReady", message=words)]
    held = round_.desired.limited[role is Role.DECODE]
    said.append(PoolCondition(type="Limited", status="True" if held else "False",
                                    reason="Limits" if held else "WithinLimits", message=held))
    leaders = {"member": labels.LEADER} if service.spec.role(role).parallelism.pods > 1 else {}
    selector = ",".join(f"{key}={value}" for key, value in sorted(labels.selector(service, role=role, **leaders).items()))
    return PoolStatus(replicas=len(mine), ready_replicas=ready, selector=selector, conditions=tuple(said))


def service_wide(taken: Iterable[str], valid: Condition, lacking: KeyTrouble | None) -> tuple[Breakage, ...]:
    """What is wrong with the service as a whole, not with an instance.

    Args:
        taken: objects of others whose names the service needs.
        valid: what is said of the newest document.
        lacking: why the master of all keys may be lost.
    """
    do = "rename or delete it, since this service needs the name"
    found = [Breakage("NameTaken", f"{each} is somebody else's", do) for each in taken]
    if valid.status == "False":
        found.append(Breakage(valid.reason, valid.message))
    if lacking is not None:
        found.append(Breakage(lacking.reason, str(lacking)))
    return tuple(found)


def gang_problems(gangs: Gangs, *, left_out: bool) -> tuple[Breakage, ...]:
    """Why instances of several pods are not placed as a whole though somebody asked for it. ``left_out``: the API server
    takes pods without the group that they were to be in.
    """
    found = [Breakage("GangNotServed", gangs.problem)] if gangs.problem else []
    if left_out:
        do = "turn on the feature gate GenericWorkload for it and the scheduler, or start the operator with --gang none"
        what = "the API server serves PodGroups and takes no spec.schedulingGroup of pods"
        found.append(Breakage("GangNotServed", what, do))
    return tuple(found)


def unplanned_status(before: ServiceStatus, why: Absence, valid: Condition | None = None) -> ServiceStatus:
    """The status while nothing can be planned. What runs goes on, so a Ready that was said of a document that was followed
    is left alone; where none ever was, Ready has the reason of this.

    Args:
        before: the status as it is.
        why: what is in the way.
        valid: what is said of the newest document; None: it is not the document that is in the way.
    """
    words = shorten(why.message)
    told = {each.type: each for each in before.conditions if each.type != "Stalled"}
    if valid is not None:
        told["Valid"] = valid
    else:
        told["Degraded"] = Condition(type="Degraded", status="True", reason=why.reason, message=words)
    if before.url is None:
        told["Ready"] = Condition(type="Ready", status="False", reason=why.reason, message=words)
    if isinstance(why, Breakage):
        told["Stalled"] = Condition(type="Stalled", status="True", reason=why.reason, message=words)
    return msgspec.structs.replace(before, conditions=tuple(told.values()))
