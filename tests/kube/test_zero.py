"""To no instances and back, on a real API server: pools, pods and what routers hear meanwhile."""

from __future__ import annotations

import pytest
from kube_client import WITH_NIC, Object
from kube_team import Team
from kube_watched import label
from node_agent import ROLE, Script

from xpyd_sidecar.contract.waking import WakeCall

pytestmark = pytest.mark.timeout(1200)  # the first run on a machine builds Kubernetes
QUOTA = """
apiVersion: v1
kind: ResourceQuota
metadata: {name: full}
spec: {hard: {pods: "2", requests.example.com/nic: "0"}}
"""
"""The pods of both routers, and no more."""
LONG_S = 10_000.0
"""Idle for longer than any rule asks for."""


def zero(team: Team) -> Object:
    """A service that may have no instances, with two routers. It goes after three starts, which take a second or two."""
    scaled = {"scaling": {"min": 0, "max": 4}}
    return team.document(prefill=scaled, decode=scaled, planner={"idleTimeout": "2s"},
                         router={"placement": "deployment", "replicas": 2, "hold": "10m"})


def routers(team: Team) -> list[Object]:
    return [pod for pod in team.of("Pod").values() if not label(pod, ROLE)]


def heard(team: Team) -> list[list[WakeCall]]:
    """What each router that runs has heard in polls."""
    lives = [life for life in team.agent.lives.values() if not life.engine and life.router is not None]
    return [life.router.wakes for life in lives if life.router is not None]


def polled(team: Team) -> bool:
    """Both routers have heard that nothing is wanted."""
    said = heard(team)
    return len(said) == 2 and all(calls and calls[-1] == WakeCall(0) for calls in said)


def pools(team: Team) -> list[int]:
    return [int(team.of("DisaggPool")[f"qwen-{role}"]["spec"]["replicas"]) for role in ("prefill", "decode")]


async def test_a_request_starts_both_roles_in_one_step_and_who_is_idle_gives_all_up(team: Team) -> None:
    await team.apply(zero(team))
    said = await team.wait_condition("Ready", words=("AtZero",))
    assert "the next request starts them" in said["message"]
    await team.wait(lambda: polled(team), "both routers are asked")
    assert (team.pods(), pools(team)) == ([], [0, 0])
    assert team.of("Deployment")["qwen-router"]["status"]["readyReplicas"] == 2, "without instances routers are ready"

    team.agent.starts, team.agent.held, team.agent.idle_s = False, 3, 0.0
    await team.wait(lambda: len(team.pods()) == 2, "pods of both roles, none of which waits for another to serve")
    assert sorted(label(pod, ROLE) for pod in team.pods()) == ["decode", "prefill"]
    assert team.ready() == []
    assert pools(team) == [1, 1]
    await team.wait(lambda: all(calls[-1].wanted == 1 for calls in heard(team)), "routers hear that somebody comes")
    team.agent.starts = True
    await team.wait_settled("1P1D")
    team.agent.held = 0
    await team.wait(lambda: team.events("Woken"), "an Event says so")
    (woken,) = team.events("Woken")
    assert woken["message"].endswith("requests wait and no instance runs: 1P1D")
    assert not team.events("ToZero"), "while a router has requests nothing goes"

    before = [len(calls) for calls in heard(team)]
    team.agent.idle_s = LONG_S
    await team.wait(lambda: pools(team) == [0, 0], "idle for long enough")
    await team.wait_settled("0P0D")
    assert team.pods() == []
    assert len(routers(team)) == 2
    await team.wait(lambda: polled(team) and all(
        len(calls) > had for calls, had in zip(heard(team), before, strict=True)), "routers are asked again")
    await team.wait(lambda: team.events("ToZero"), "an Event says so")
    team.agent.held, team.agent.idle_s = 1, 0.0
    await team.wait_settled("1P1D")
    asked = [each for each in team.requests() if each.verb == "patch" and each.object.resource == "disaggpools"]
    written = [each.object.name for each in asked if each.object.subresource != "status"]
    assert written == ["qwen-prefill", "qwen-decode"] * 3, "one write of each pool for each change"


async def test_a_quota_that_refuses_pods_is_told_to_routers_until_it_is_over(team: Team) -> None:
    await team.apply(zero(team))
    await team.wait_condition("Ready", words=("AtZero",))
    await team.wait(lambda: polled(team), "both routers are asked")
    await team.kubectl("apply", "-f", "-", stdin=QUOTA)
    await team.kube.wait_refused(team.namespace, WITH_NIC, "exceeded quota: full")
    team.agent.held = 2
    await team.wait(lambda: all("exceeded quota: full" in calls[-1].refused for calls in heard(team)), "both hear of it")
    assert all(calls[-1].wanted == 1 for calls in heard(team))
    assert (team.pods(), pools(team)) == ([], [1, 1])
    await team.wait_condition("Ready", "False")
    team.agent.starts = False
    await team.kubectl("delete", "resourcequota", "full")
    await team.wait(lambda: len(team.pods()) == 2, "pods can be made")
    await team.wait(lambda: all(calls[-1].wanted == 1 and not calls[-1].refused for calls in heard(team)),
                    "it is over when the quota is")
    team.agent.starts = True
    await team.wait_settled("1P1D")


async def test_without_an_operator_nobody_is_lost_and_another_one_starts_what_is_waited_for(team: Team) -> None:
    team.agent.script = lambda _: Script(drain_s=0.5)
    await team.apply(zero(team))
    await team.wait_condition("Ready", words=("AtZero",))
    await team.wait(lambda: polled(team), "both routers are asked")
    await team.operator.kill()
    await team.operator.start()
    await team.wait_looked()
    assert (team.pods(), pools(team)) == ([], [0, 0]), "an operator that begins starts nothing by itself"
    await team.operator.kill()
    team.agent.held, team.agent.idle_s = 1, 0.0
    await team.operator.start()
    await team.wait_settled("1P1D")
    team.agent.held = 0
    await team.delete()
    await team.wait_nothing_left()
