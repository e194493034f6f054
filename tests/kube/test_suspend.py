"""A service is suspended and resumed on a real API server: streams end first, all else stays, and what programs see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gitops_judge import Judge
from kube_client import Object
from kube_team import Team
from kube_watched import label
from node_agent import ROLE, Script

pytestmark = pytest.mark.timeout(1200)  # the first run on a machine builds Kubernetes
STAYS = ("Service", "NetworkPolicy", "Secret", "DisaggPool")


def stays(team: Team) -> dict[str, str]:
    return {f"{kind}/{name}": each["metadata"]["uid"] for kind in STAYS for name, each in team.of(kind).items()}


def suspended(team: Team) -> bool:
    return team.current() and team.condition("Suspended")["status"] == "True"


def scaled(team: Team, **spec: Any) -> Object:
    return team.document(decode={"scaling": {"min": 1, "max": 4}}, **spec)


async def judged(team: Team, health: str, flux: str) -> None:
    judge = Judge.found()
    if judge is not None:
        said = judge.of(await team.kube.get("DisaggService", team.namespace, "qwen"))
        assert (said.health, said.flux) == (health, flux)


def pool(team: Team, replicas: int) -> Callable[[], bool]:
    return lambda: bool(team.of("DisaggPool")["qwen-decode"]["spec"]["replicas"] == replicas)


async def test_pods_drain_all_else_stays_and_a_resumed_service_has_the_counts_of_its_pools(team: Team) -> None:
    await team.apply(scaled(team))
    await team.wait_settled("1P1D")
    await team.kubectl("scale", "dpool", "qwen-decode", "--replicas=2")
    await team.wait_settled("1P2D")
    before = stays(team)

    team.agent.ends = False
    await team.apply(scaled(team, suspend=True))
    await team.wait_condition("Ready", "False", words=("Suspending", "qwen-e0"))
    assert len(team.pods()) == 3, "they drain"
    await judged(team, "Progressing", "InProgress")
    team.agent.ends = True
    await team.wait(lambda: suspended(team), "it is suspended")
    assert team.of("Pod") == {}
    assert stays(team) == before
    assert team.condition("Ready")["status"] == ""
    shown = (await team.kubectl("get", "dsvc", "qwen", "--no-headers")).split()
    assert shown[2:4] == ["0P0D", "0P0D"]
    assert "Suspended" in shown[4:6], "the reason, after a column Ready that is empty"
    await judged(team, "Suspended", "Current")
    await team.wait(lambda: team.events("Suspended"), "an Event says so")
    assert not [each for each in team.of("Event").values() if each["reason"] == "NotReady"], "nothing is wrong"

    await team.kubectl("scale", "dpool", "qwen-decode", "--replicas=3")
    await team.wait(pool(team, 3), "an autoscaler writes the pool")
    await team.apply(scaled(team, suspend=False))
    await team.wait_settled("1P3D")
    assert stays(team) == before


async def test_routers_of_their_own_end_before_engines_and_come_back(team: Team) -> None:
    apart = {"placement": "deployment", "replicas": 2}
    team.agent.script = lambda pod: Script(drain_s=0.0 if label(pod, ROLE) else 3.0)
    await team.apply(team.document(router=apart))
    await team.wait_settled("1P1D")
    await team.wait(lambda: team.of("Deployment")["qwen-router"]["status"].get("readyReplicas") == 2, "routers serve")
    seen: list[bool] = []

    def ended() -> bool:
        routers = [each for each in team.of("Pod").values() if not label(each, ROLE)]
        engines = [each for each in team.pods() if not each["metadata"].get("deletionTimestamp")]
        seen.append(bool(routers) and len(engines) < 2)
        return suspended(team)

    await team.apply(team.document(router=apart, suspend=True))
    await team.wait(ended, "it is suspended")
    assert not any(seen), "an engine was deleted while a router still had streams"
    assert (team.of("Pod"), team.of("Deployment")) == ({}, {})
    await team.apply(team.document(router=apart))
    await team.wait_settled("1P1D")
    assert len(team.of("Deployment")) == 1


async def test_an_operator_that_begins_while_a_service_is_suspended_makes_nothing(team: Team) -> None:
    await team.apply(team.document(suspend=True))
    await team.wait(lambda: suspended(team), "it is suspended")
    await team.operator.kill()
    await team.operator.start()
    await team.wait_looked()
    assert suspended(team)
    assert team.of("Pod") == {}
    assert set(team.of("Service")) == {"qwen", "qwen-members"}
    await team.apply(team.document())
    await team.wait_settled("1P1D")
