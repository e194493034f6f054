"""Instances of several pods, beside what the planner says of instances: they end as a whole, and are made as a whole."""

from __future__ import annotations

from xpyd_operator.kube.blueprint import Blueprint
from xpyd_operator.kube.facts import facts
from xpyd_operator.kube.gangs import Gangs
from xpyd_operator.kube.pods import Pods
from xpyd_operator.plan.actions import Create, Drain, Remove
from xpyd_operator.plan.observed import Phase
from xpyd_operator.plan.round import Round
from xpyd_operator.render.gang import Body, Gang, Together, joined_by, queued_as
from xpyd_operator.render.labels import LAYOUT
from xpyd_sidecar.contract.ids import InstanceName


async def make_whole(pods: Pods, blueprint: Blueprint, gangs: Gangs, round_: Round, now: float) -> None:
    """End the others where one ends, and go on where the making of an instance ended in the middle (``groups``).

    Raises:
        ApiError: something could not be written.
        XpydError: several things could not.
    """
    await pods.end_together()
    going = {action.instance for action in round_.plan.actions if isinstance(action, Drain | Remove)}
    for each in round_.observed.instances:
        if each.parts == 1 or each.phase is not Phase.STARTING or each.name in going or pods.leads(each.name):
            continue
        if blueprint.revisions.get(each.role) != each.revision:
            continue  # it is of the other role's revision, and its time to be made will pass
        there = [pod.derived(facts) for pod in pods.all_of(each.name)]
        if not there:
            continue
        # They stay in the groups that they are in, whatever is made now.
        together = Together(gangs.of(there[0].gang) if there[0].gang is not None else None, there[0].queued_as)
        rendered = blueprint.pods_of(each.name, each.role, each.revision, together)
        leader = rendered[0]
        wanted = (leader["metadata"]["annotations"][LAYOUT], joined_by(leader), queued_as(leader))
        if {(fact.layout, fact.gang, fact.queued_as) for fact in there} == {wanted}:
            await pods.create(rendered, now, blueprint.group_of(rendered, together))
        else:  # this operator renders them otherwise than the one that began, or their groups are served no more
            await pods.delete(each.name)


def in_groups(
    pods: Pods, blueprint: Blueprint, gangs: Gangs, round_: Round
) -> dict[InstanceName, tuple[Gang, Body] | None]:
    """Instances that exist or are being made, each with the group that its pods are in, if they are in one."""
    made: dict[InstanceName, tuple[Gang, Body] | None] = {
        action.instance: None for action in round_.plan.actions if isinstance(action, Create)}
    return made | {fact.instance: blueprint.group_like(fact, gangs) for fact in pods.members()}
