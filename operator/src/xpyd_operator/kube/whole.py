"""Instances of several pods, beside what the planner says of instances: they end as a whole, and are made as a whole."""

from __future__ import annotations

from xpyd_operator.kube.blueprint import Blueprint
from xpyd_operator.kube.facts import facts
from xpyd_operator.kube.pods import Pods
from xpyd_operator.plan.actions import Drain, Remove
from xpyd_operator.plan.observed import Phase
from xpyd_operator.plan.round import Round
from xpyd_operator.render.labels import LAYOUT


async def make_whole(pods: Pods, blueprint: Blueprint, round_: Round, now: float) -> None:
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
        rendered = blueprint.pods_of(each.name, each.role, each.revision)
        layouts = {pod.derived(facts).layout for pod in pods.all_of(each.name)}
        if layouts == {rendered[0]["metadata"]["annotations"][LAYOUT]}:
            await pods.create(rendered, now)
        else:  # this operator renders them otherwise than the one that began
            await pods.delete(each.name)
