"""Instances of several pods, beside what the planner says of instances: they end as a whole, and are made as a whole."""

from __future__ import annotations

from xpyd_operator.api.service import DisaggService
from xpyd_operator.kube.blueprint import KubeBlueprint
from xpyd_operator.kube.facts import facts
from xpyd_operator.kube.gangs import Gangs
from xpyd_operator.kube.pods import Pods, leader_of
from xpyd_operator.plan.actions import Create, Drain, Remove
from xpyd_operator.plan.observed import Phase
from xpyd_operator.plan.round import Round
from xpyd_operator.render.gang import Gang, Together, joined_by, queued_as
from xpyd_operator.render.labels import LAYOUT
from xpyd_sidecar.contract.ids import InstanceName, Role


async def make_whole(pods: Pods, blueprint: KubeBlueprint, gangs: Gangs, round_: Round, now: float) -> None:
    """End the others where one ends, and go on where the making of an instance ended in the middle (``groups``).

    Raises:
        ApiError: something could not be written.
        XpydError: several things could not.
    """
    await pods.end_together()
    going = {action.instance for action in round_.plan.actions if isinstance(action, Drain | Remove)}
    entries = pods.by_instance()
    for each in round_.observed.instances:
        if each.parts == 1 or each.phase is not Phase.STARTING or each.name in going:
            continue
        found = entries.get(each.name, [])
        if not found or leader_of(found) is not None:
            continue
        if blueprint.revisions.get(each.role) != each.revision:
            continue  # it is of the other role's revision, and its time to be made will pass
        there = [pod.derived(facts) for pod in found]
        # They stay in the groups that they are in, whatever is made now.
        together = Together(gangs.of(there[0].gang) if there[0].gang is not None else None, there[0].queued_as)
        rendered = blueprint.pods_of(each.name, each.role, each.revision, together)
        leader = rendered[0]
        wanted = (leader["metadata"]["annotations"][LAYOUT], joined_by(leader), queued_as(leader))
        if {(fact.layout, fact.gang, fact.queued_as) for fact in there} == {wanted}:
            await pods.create(rendered, now, blueprint.group_of(rendered, together))
        else:  # this operator renders them otherwise than the one that began, or their groups are served no more
            await pods.delete(each.name)


def in_groups(pods: Pods, gangs: Gangs, round_: Round) -> dict[InstanceName, tuple[Gang, int] | None]:
    """Instances that exist or are being made; of those whose pods are in a scheduler's group which one, and of how many."""
    found: dict[InstanceName, tuple[Gang, int] | None] = {
        action.instance: None for action in round_.plan.actions if isinstance(action, Create)}
    for fact in pods.members():
        gang = gangs.of(fact.gang) if fact.gang is not None else None
        found[fact.instance] = None if gang is None else (gang, fact.size)
    return found


def pods_of_wanted(service: DisaggService, round_: Round) -> dict[Role, int]:
    """How many pods the wanted instances of each role have: of those that serve the largest; one that is missing or does
    not serve counts as the largest that may take its place.

    So while the size changes the budgets are about what serves. By the new size alone one pod of each old group could go at
    once where it becomes smaller, and none could as long as a rollout waits where it becomes larger.
    """
    found: dict[Role, int] = {}
    for role in Role:
        wanted, size = round_.desired.target(role).replicas, service.spec.role(role).parallelism.pods
        there = [each for each in round_.observed.instances if each.role is role and not each.leaving]
        serving = sorted((each.parts for each in there if each.ready), reverse=True)[:wanted]
        late = max([size, *(each.parts for each in there if not each.ready)])
        found[role] = sum(serving) + (wanted - len(serving)) * late
    return found
