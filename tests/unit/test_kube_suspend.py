"""A suspended service over a store in memory: what goes, what stays, and what is not asked meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from kube_documents import service
from memory_world import MemoryWorld

from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.client.cache import OWNER_KIND
from xpyd_operator.plan.suspension import MARGIN_S
from xpyd_operator.render.objects import manifests
from xpyd_operator.render.settings import KubeSettings

APART = {"placement": "deployment"}
STAYS = ("Service", "NetworkPolicy", "Secret", "DisaggPool")


@pytest.fixture
async def world() -> AsyncIterator[MemoryWorld]:
    async with aiohttp.ClientSession() as session:
        yield MemoryWorld(session)


async def settle(world: MemoryWorld, rounds: int = 4) -> None:
    for _ in range(rounds):
        await world.round()
        world.run_pods()
        world.now += 6


def stays(world: MemoryWorld) -> dict[tuple[str, str, str], str]:
    return {at: body["metadata"]["uid"] for at, body in world.api.objects.items() if at[0] in STAYS}


def conditions(world: MemoryWorld) -> list[tuple[str, str, str]]:
    said = world.api.objects[OWNER_KIND, "team-a", "qwen"]["status"]["conditions"]
    return [(each["type"], each["status"], each["reason"]) for each in said]


RESTS = [("Suspended", "True", "Suspended"), ("Progressing", "False", "Suspended"), ("Degraded", "False", "Healthy"),
         ("Valid", "True", "Valid")]


async def test_pods_go_all_else_stays_and_it_comes_back_with_the_counts_of_its_pools(world: MemoryWorld) -> None:
    scaled = {"scaling": {"min": 1, "max": 6}, "resources": {}}
    world.write(decode=scaled)
    await settle(world)
    pool = world.api.objects["DisaggPool", "team-a", "qwen-decode"]
    world.cache.on_seen("DisaggPool", world.api.put("DisaggPool", pool | {"spec": pool["spec"] | {"replicas": 3}}))
    await settle(world)
    assert len(world.named("Pod")) == 4
    before = stays(world)
    world.write(decode=scaled, suspend=True)
    await world.round()
    assert world.condition("Ready")["reason"] == "Suspending"
    await settle(world)
    assert world.named("Pod") == set()
    assert stays(world) == before
    assert conditions(world) == RESTS
    world.api.asked.clear()
    done = await world.round()
    assert (world.api.asked, done.plan.actions, done.failures) == ([], (), ())
    world.restart()
    await world.round()
    assert conditions(world) == RESTS, "an operator that begins anew says the same"
    world.write(decode=scaled)
    await settle(world, 6)
    assert len(world.named("Pod")) == 4
    assert "Suspended" not in [kind for kind, _, _ in conditions(world)]


async def test_a_service_that_begins_suspended_has_pools_with_the_counts_of_its_document(world: MemoryWorld) -> None:
    world.write(decode={"scaling": {"min": 2, "max": 6}, "resources": {}}, prefill={"replicas": 3}, suspend=True)
    await settle(world)
    assert world.named("Pod") == set()
    assert {name: world.api.objects["DisaggPool", "team-a", name]["spec"]["replicas"] for name in world.named("DisaggPool")
            } == {"qwen-prefill": 3, "qwen-decode": 2}
    assert conditions(world) == RESTS


def router(world: MemoryWorld, **metadata: Any) -> None:
    labels = world.api.objects["Deployment", "team-a", "qwen-router"]["spec"]["template"]["metadata"]["labels"]
    world.cache.on_seen("Pod", world.api.put("Pod", {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "qwen-router-x", "namespace": "team-a", "labels": labels},
        "status": {"phase": "Running", "podIP": ""}}))


async def test_routers_of_their_own_end_before_the_engines_that_they_have_streams_from(world: MemoryWorld) -> None:
    world.write(router=APART)
    await settle(world)
    router(world)
    world.write(router=APART, suspend=True)
    await world.round()
    assert "qwen-router" not in world.named("Deployment")
    assert "qwen-router" not in world.named("PodDisruptionBudget")
    assert len(world.named("Pod")) == 4
    pods = [body["metadata"] for at, body in world.api.objects.items() if at[0] == "Pod"]
    assert not [each for each in pods if "deletionTimestamp" in each]
    assert "qwen-router-x" in world.condition("Progressing")["message"]
    pod = world.api.objects.pop(("Pod", "team-a", "qwen-router-x"))
    world.cache.on_deleted("Pod", pod)
    await settle(world)
    assert world.named("Pod") == set()
    assert conditions(world) == RESTS
    world.write(router=APART)
    await settle(world, 6)
    assert (world.named("Deployment"), len(world.named("Pod"))) == ({"qwen-router"}, 3)


async def test_routers_that_do_not_end_hold_the_engines_up_for_a_drains_time_and_no_longer(world: MemoryWorld) -> None:
    world.write(router=APART, drain={"timeout": "20s"})
    await settle(world)
    router(world)
    world.write(router=APART, drain={"timeout": "20s"}, suspend=True)
    await world.round()
    world.now += 20 + MARGIN_S - 1
    await world.round()
    assert len(world.named("Pod")) == 4
    world.now += 2
    await settle(world)
    assert world.named("Pod") == {"qwen-router-x"}
    assert world.condition("Suspended")["status"] == "False", "something of it runs"


async def test_pods_that_the_api_server_would_refuse_do_not_keep_a_service_running(world: MemoryWorld) -> None:
    world.write()
    await settle(world)
    refusal = ApiError(422, "Invalid", "Pod is invalid: spec.priorityClassName")
    world.api.fault = lambda verb, kind, name: refusal if (verb, kind) == ("dry-run", "Pod") else None
    template = {"spec": {"priorityClassName": "gone"}}
    world.write(template=template, suspend=True)
    await settle(world)
    assert (world.named("Pod"), conditions(world)) == (set(), RESTS)
    world.write(template=template)
    await settle(world)
    assert world.condition("Valid")["reason"] == "TemplateRejected"
    assert (world.named("Pod"), world.condition("Suspended")["status"]) == (set(), "True"), "the last good one goes on"


async def test_a_refused_document_is_told_of_a_suspended_service_too(world: MemoryWorld) -> None:
    world.write(suspend=True)
    await settle(world)
    world.write(suspend=True, decode={"replicas": -1})
    await settle(world)
    assert (world.condition("Valid")["status"], world.condition("Stalled")["reason"]) == ("False", "Invalid")
    assert world.condition("Suspended")["status"] == "True"


async def test_half_a_group_is_not_made_whole(world: MemoryWorld) -> None:
    """Its routers still end, so that it is not deleted yet."""
    several = {"replicas": 1, "parallelism": {"tensor": 2, "pods": 2}}
    world.write(router=APART, decode=several)
    await world.round()
    router(world)
    body = world.api.objects.pop(("Pod", "team-a", "qwen-e1-0"))
    world.cache.on_deleted("Pod", body)
    world.write(router=APART, decode=several, suspend=True)
    before = world.named("Pod")
    assert "qwen-e1-1" in before
    await world.round()
    assert world.named("Pod") == before


@pytest.mark.parametrize("spec", [{}, {"router": APART}])
def test_what_is_rendered_of_a_suspended_service_is_what_stays(spec: dict[str, Any]) -> None:
    made = manifests(service(suspend=True, **spec), KubeSettings(sidecar_image="sidecar:1"))
    assert {each["kind"] for each in made} == {*STAYS, "PodDisruptionBudget"}
    assert [each["spec"]["replicas"] for each in made if each["kind"] == "DisaggPool"] == [1, 2]
