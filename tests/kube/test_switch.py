"""A role switch on a real API server: annotation first, label last, and an operator that dies in between."""

from __future__ import annotations

import pytest
from kube_team import Team
from kube_watched import label
from node_agent import ASSIGNMENT, ROLE, ROSTER, ROUTER

from xpyd_sidecar.contract import assignment
from xpyd_sidecar.contract.ids import Role

pytestmark = pytest.mark.timeout(1200)  # the first run on a machine builds Kubernetes
WINDOW = {"switchWindow": "30s"}


def uids(team: Team) -> set[str]:
    return {pod["metadata"]["uid"] for pod in team.pods()}


async def test_a_pod_changes_its_role_and_the_label_comes_last_also_with_an_operator_killed_in_between(team: Team) -> None:
    await team.apply(team.document(prefill=1, decode=2, rollout=WINDOW))
    await team.wait_settled("1P2D")
    before = uids(team)
    team.agent.shows_roles = False  # nobody hears of it yet
    await team.apply(team.document(prefill=2, decode=1, rollout=WINDOW))

    def told() -> list[assignment.Assignment]:
        texts = [(pod["metadata"].get("annotations") or {}).get(ASSIGNMENT) for pod in team.pods()]
        return [assignment.decode(text) for text in texts if text]

    await team.wait(told, "a pod is told another role")
    [one] = told()
    assert (one.role, one.epoch) == (Role.PREFILL, 2)
    assert len(team.pods(role="decode")) == 2, "the label waits for the routers"
    await team.wait(lambda: team.events("Switched"), "the Event of it")  # Events are lost with the operator that owes them
    await team.operator.kill()
    team.operator.spawn()
    team.agent.shows_roles = True
    await team.wait_settled("2P1D")
    assert uids(team) == before, "no pod ended and none was made"
    assert told() == [one], "told once, by whichever operator"
    [switched] = [pod for pod in team.pods() if (pod["metadata"].get("annotations") or {}).get(ASSIGNMENT)]
    assert label(switched, ROLE) == "prefill"
    assert not label(switched, ROSTER)
    assert not label(switched, ROUTER)
    await team.apply(team.document(prefill=1, decode=2, rollout=WINDOW))
    await team.wait_settled("1P2D")
    assert uids(team) == before
    assert [one.epoch for one in told()] == [3]
