"""What is said about a service: counts, conditions with reasons a person can act on, the plan in words.

The result is the ``status`` of the API, so that both backends say the same; what only a backend knows (URL, fingerprints,
times of transition) is the backend's to add.
"""

from __future__ import annotations

from typing import Literal

from xpyd_operator.api.status import Condition, RolesStatus, RoleStatus, ServiceStatus
from xpyd_operator.plan.actions import Plan, Wait
from xpyd_operator.plan.backoff import LOOPING
from xpyd_operator.plan.desired import Desired, shape
from xpyd_operator.plan.observed import Instance, Observed, Phase
from xpyd_sidecar.contract.ids import Role


def status(desired: Desired, observed: Observed, plan: Plan, now: float) -> ServiceStatus:
    """Say it. ``now`` is in unix seconds."""
    roles = RolesStatus(prefill=_count(Role.PREFILL, desired, observed), decode=_count(Role.DECODE, desired, observed))
    return ServiceStatus(
        wanted=desired.shape,
        ready=shape(roles.prefill.ready, roles.decode.ready),
        roles=roles,
        conditions=(_ready(desired, observed, roles), _progressing(desired, observed, plan), _degraded(observed)),
        revisions=tuple(dict.fromkeys(instance.revision for instance in reversed(observed.instances))),
        plan=words(plan, now) or None,
    )


def words(plan: Plan, now: float) -> str:
    """What is done and what waits, in one line; empty when nothing is to do."""
    return "; ".join([str(action) for action in plan.actions] + [_wait(wait, now) for wait in plan.waits])


def is_true(said: ServiceStatus, kind: str) -> bool:
    """Whether a condition holds; one that is not there does not."""
    return any(condition.type == kind and condition.status == "True" for condition in said.conditions)


def _count(role: Role, desired: Desired, observed: Observed) -> RoleStatus:
    mine = [instance for instance in observed.instances if instance.role is role]
    return RoleStatus(
        wanted=desired.target(role).replicas,
        ready=sum(instance.ready for instance in mine),
        starting=sum(instance.phase is Phase.STARTING for instance in mine),
        draining=sum(instance.leaving for instance in mine),
        failed=sum(instance.phase is Phase.CRASHED for instance in mine),
    )


def _ready(desired: Desired, observed: Observed, roles: RolesStatus) -> Condition:
    router = observed.router
    if desired.stopping:
        return _say("Ready", "False", "Stopping", "the service ends")
    if desired.router is not None and (router is None or not router.unit.alive):
        return _say("Ready", "False", "RouterDown", "no router process runs")
    if desired.router is not None and router is not None and not router.ready:
        return _say("Ready", "False", "RouterNotReady", "the router does not answer yet or still learns the roster")
    short = ", ".join(
        f"{counts.ready} of {counts.wanted} {role} instances ready"
        for role, counts in ((Role.PREFILL, roles.prefill), (Role.DECODE, roles.decode))
        if counts.ready < counts.wanted
    )
    if not short:
        return _say("Ready", "True", "AllReady", f"{desired.shape} ready")
    crashed = ", ".join(instance.name for instance in observed.instances if instance.phase is Phase.CRASHED)
    if crashed:
        return _say("Ready", "False", "Crashed", f"{short}; crashed: {crashed}")
    return _say("Ready", "False", "Starting", short)


def _progressing(desired: Desired, observed: Observed, plan: Plan) -> Condition:
    moving = [instance.name for instance in observed.instances if instance.leaving or instance.phase is Phase.STARTING]
    if desired.stopping:
        return _say("Progressing", "True", "Stopping", "the service ends")
    if plan.settled and not moving:
        return _say("Progressing", "False", "Settled", "everything is as asked for")
    parts = [str(part) for part in (*plan.actions, *plan.waits)]
    if moving:
        parts.append(f"changing: {', '.join(moving)}")
    return _say("Progressing", "True", "Changing", "; ".join(parts))


def _degraded(observed: Observed) -> Condition:
    bad = [_complaint(instance) for instance in observed.instances if instance.crashes >= LOOPING and not instance.leaving]
    router = observed.router
    if router is not None and not router.unit.alive and not router.stopping:
        bad.append(f"router: {router.unit.exit or 'it ended'}")
    if bad:
        return _say("Degraded", "True", "CrashLoop", "; ".join(bad))
    return _say("Degraded", "False", "Healthy", "nothing crashes again and again")


def _complaint(instance: Instance) -> str:
    worst = max(instance.units, key=lambda unit: unit.crashes)
    return f"{instance.name}: {worst.name} crashed {worst.crashes} times in a row ({worst.exit or 'it ended'})"


def _wait(wait: Wait, now: float) -> str:
    return f"{wait} (in {wait.until - now:.0f} s)" if wait.until > now else str(wait)


def _say(kind: str, holds: Literal["True", "False"], reason: str, message: str) -> Condition:
    return Condition(type=kind, status=holds, reason=reason, message=message)
