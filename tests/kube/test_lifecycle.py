"""From the first apply to the last object: what belongs to a service comes, changes and goes with it."""

from __future__ import annotations

import pytest
from kube_routers import key_secret_of
from kube_team import CHILDREN, LASTING, Team
from kube_watchdog import Watchdog
from kube_watched import label
from node_agent import REVISION, ROLE, SERVICE, Script

pytestmark = pytest.mark.timeout(1200)  # the first run on a machine builds Kubernetes
SERVICE_UID = "xpyd.dev/service-uid"
NAMES = {"Service/qwen", "Service/qwen-members", "NetworkPolicy/qwen", "NetworkPolicy/qwen-clients",
         "PodDisruptionBudget/qwen-decode", "PodDisruptionBudget/qwen-prefill",
         "DisaggPool/qwen-prefill", "DisaggPool/qwen-decode"}


async def test_a_service_comes_up_changes_its_shape_and_leaves_nothing(team: Team) -> None:
    dog = Watchdog(team, most={"prefill": 2, "decode": 4})
    await team.apply(team.document(prefill=1, decode=3))
    await team.wait_settled("1P3D")
    made = {f"{kind}/{name}" for kind in CHILDREN for name, each in team.of(kind).items() if label(each, SERVICE)}
    assert made >= NAMES | {f"Secret/{key_secret_of(team.pods()[0])}"}
    assert "Deployment/qwen-router" not in made
    uid = team.of("DisaggService")["qwen"]["metadata"]["uid"]
    for kind in (*CHILDREN, "Pod"):
        for name, each in team.of(kind).items():
            if label(each, SERVICE):
                owners = each["metadata"].get("ownerReferences", [])
                wanted = [] if kind in LASTING else [(uid, True)]
                assert [(one["uid"], one["controller"]) for one in owners] == wanted, f"{kind} {name}"
                assert kind == "Pod" or label(each, SERVICE_UID) == uid, f"{kind} {name}"
                assert "finalizers" not in each["metadata"], f"{kind} {name}"
    assert len({label(pod, REVISION) for pod in team.pods(role="decode")}) == 1
    assert [pod["metadata"]["name"] for pod in team.pods()] == [f"qwen-e{ordinal}" for ordinal in range(4)]
    status = team.status()
    assert (status["wanted"], status["ready"]) == ("1P3D", "1P3D")
    assert len(status["fingerprints"]) == 1
    assert team.of("PodDisruptionBudget")["qwen-decode"]["spec"]["minAvailable"] == 2
    pool = team.of("DisaggPool")  # its status is written after that of the service
    await team.wait(lambda: (pool["qwen-decode"].get("status") or {}).get("replicas") == 3, "the pool says so")

    before = {pod["metadata"]["uid"] for pod in team.pods()}
    dog.most["prefill"] = 3
    await team.apply(team.document(prefill=2, decode=1))
    await team.wait_settled("2P1D")
    stayed = [pod for pod in team.pods() if pod["metadata"]["uid"] in before]
    assert len(stayed) == 2, "what is asked for as before stays"
    assert team.routers() == [pod["metadata"]["name"] for pod in team.pods(role="decode")]

    await team.delete()
    await team.wait_nothing_left()
    await dog.end()


async def test_routers_in_pods_of_their_own(team: Team) -> None:
    dog = Watchdog(team)
    await team.apply(team.document(router={"placement": "deployment", "replicas": 2}))
    await team.wait_settled("1P1D")
    deployment = team.of("Deployment")["qwen-router"]
    assert deployment["spec"]["replicas"] == 2

    def routers() -> set[str]:
        return {name for name, pod in team.of("Pod").items() if label(pod, SERVICE) == "qwen" and not label(pod, ROLE)}

    await team.wait(lambda: len(routers()) == 2, "the Deployment has made both; one is enough to be settled")
    assert set(team.routers()) == routers()
    await team.delete()
    await team.wait_nothing_left()
    await dog.end()


async def test_a_service_deleted_while_the_operator_is_away_leaves_nothing(team: Team) -> None:
    await team.apply(team.document(decode=2))
    await team.wait_settled("1P2D")
    await team.operator.kill()
    await team.delete()
    await team.wait(lambda: len(team.left()) == 4, "only what has no owner is left")
    assert {each.partition("/")[0] for each in team.left()} == set(LASTING)
    await team.operator.start()
    await team.wait_nothing_left()
    await team.apply(team.document())
    await team.wait_settled("1P1D")


async def test_a_namespace_is_deleted_with_a_service_in_it(team: Team) -> None:
    await team.apply(team.document())
    await team.wait_settled("1P1D")
    await team.kube.delete("Namespace", "", team.namespace)
    await team.wait_nothing_left()
    assert team.operator.running
    assert await team.operator.said("/healthz") == "ok"


@pytest.mark.parametrize("pods", [0, 1, 4])
async def test_a_service_deleted_while_half_created_leaves_nothing(team: Team, pods: int) -> None:
    team.agent.script = lambda _: Script(start_s=3, drain_s=0.1)
    await team.apply(team.document(prefill=3, decode=5))
    await team.wait(lambda: len(team.pods()) >= pods, f"{pods} pods exist")
    await team.delete()
    await team.wait_nothing_left()


async def test_a_service_of_the_same_name_comes_after_a_deleted_one(team: Team) -> None:
    await team.apply(team.document(decode=2))
    await team.wait_settled("1P2D")
    old = {pod["metadata"]["uid"] for pod in team.pods()}
    team.agent.ends = False
    await team.delete()
    await team.wait(lambda: "qwen" not in team.of("DisaggService"), "the service is gone")
    assert {pod["metadata"]["uid"] for pod in team.pods()} == old, "the old pods still drain"
    await team.apply(team.document(decode=2))
    team.agent.ends = True
    await team.wait_settled("1P2D")
    uid = team.of("DisaggService")["qwen"]["metadata"]["uid"]
    assert not old & {pod["metadata"]["uid"] for pod in team.pods()}
    assert {pod["metadata"]["ownerReferences"][0]["uid"] for pod in team.pods()} == {uid}
