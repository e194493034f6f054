"""What is said about a service: counts, conditions (``conditions``), revisions, fingerprints, the plan in words.

The result is the ``status`` of the API, so that both backends say the same; what only a backend knows (URL, model, times of
transition, whether the document is valid) is the backend's to add.
"""

from __future__ import annotations

from xpyd_operator.api.status import RolesStatus, RoleStatus, ServiceStatus
from xpyd_operator.plan.absent import Waiting
from xpyd_operator.plan.actions import Plan
from xpyd_operator.plan.conditions import conditions, shorten
from xpyd_operator.plan.desired import DesiredService, shape
from xpyd_operator.plan.observed import Instance, ObservedService, Phase
from xpyd_sidecar.contract.ids import Role

_MOST = 16
"""Revisions and fingerprints that are listed."""


def status(desired: DesiredService, observed: ObservedService, plan: Plan, now: float) -> ServiceStatus:
    """Say it. ``now`` is in unix seconds."""
    roles = RolesStatus(prefill=_count(Role.PREFILL, desired, observed), decode=_count(Role.DECODE, desired, observed))
    there = [instance for instance in observed.instances if instance.phase is not Phase.LOST]
    return ServiceStatus(
        wanted=desired.shape,
        ready=shape(roles.prefill.ready, roles.decode.ready),
        roles=roles,
        conditions=conditions(desired, observed, plan, roles),
        revision="/".join(dict.fromkeys((desired.prefill.revision, desired.decode.revision))),
        revisions=tuple(dict.fromkeys(instance.revision for instance in reversed(there)))[:_MOST],
        fingerprints=tuple(sorted({one.fingerprint for one in there if one.fingerprint}))[:_MOST],
        plan=shorten(words(plan, now)) or None,
    )


def words(plan: Plan, now: float) -> str:
    """What is done and what waits, in one line; empty when nothing is to do."""
    return "; ".join([str(action) for action in plan.actions] + [_wait(wait, now) for wait in plan.waits])


def is_true(said: ServiceStatus, kind: str) -> bool:
    """Whether a condition holds; one that is not there does not."""
    return any(condition.type == kind and condition.status == "True" for condition in said.conditions)


def complete(said: ServiceStatus) -> bool:
    """Whether requests are answered and as many instances serve as are wanted."""
    roles = (said.roles.prefill, said.roles.decode)
    return is_true(said, "Ready") and all(role.ready >= role.wanted for role in roles)


def _count(role: Role, desired: DesiredService, observed: ObservedService) -> RoleStatus:
    mine = [one for one in observed.instances if one.role is role and one.phase is not Phase.LOST]
    target = desired.target(role)
    return RoleStatus(
        wanted=target.replicas,
        ready=sum(instance.ready and not instance.switching for instance in mine),
        starting=sum(instance.phase is Phase.STARTING or (instance.ready and instance.switching) for instance in mine),
        draining=sum(instance.leaving for instance in mine),
        failed=sum(instance.phase is Phase.CRASHED for instance in mine),
        updated=sum(_updated(instance, target.revision) for instance in mine),
        revision=target.revision,
    )


def _updated(instance: Instance, revision: str) -> bool:
    return not instance.leaving and instance.revision == revision


def _wait(wait: Waiting, now: float) -> str:
    return f"{wait} (in {wait.until - now:.0f} s)" if wait.until > now else str(wait)
