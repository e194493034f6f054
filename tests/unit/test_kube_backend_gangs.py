"""Groups that schedulers know, over a store in memory: made before their pods, gone after them, and never mixed."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import aiohttp
import pytest
from memory_world import MemoryWorld, pods
from memory_world import settle as settle_groups

from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.gangs.gangs import LOOK_S
from xpyd_operator.kube.gangs.podgroups import LIST_S
from xpyd_operator.kube.gangs.topology import AGAIN_S
from xpyd_operator.render.gang import joined_by, queued_as, resource_of

VERSION = "scheduling.k8s.io/v1beta1"
GROUP = resource_of(VERSION)
WIDE = {"prefill": {"replicas": 1, "resources": {}},
        "decode": {"replicas": 2, "parallelism": {"tensor": 2, "pods": 2, "device": "none"}}}
settle = partial(settle_groups, size=2)
Body = dict[str, Any]


class Killed(BaseException):
    """The operator is killed."""


@pytest.fixture
async def world() -> AsyncIterator[MemoryWorld]:
    async with aiohttp.ClientSession() as session:
        made = MemoryWorld(session)
        made.api.resources = {VERSION: frozenset({"podgroups"})}
        yield made


def members(world: MemoryWorld) -> dict[str, Body]:
    return {name: body for name, body in pods(world).items() if name.count("-") == 2}


def made(world: MemoryWorld) -> list[str]:
    return [name for verb, kind, name in world.api.asked if verb == "create" and kind in ("Pod", GROUP)]


def lose(world: MemoryWorld, name: str) -> None:
    """It is gone at once."""
    world.cache.on_deleted("Pod", world.api.objects.pop(("Pod", "team-a", name)))


async def test_a_group_is_made_before_its_pods_and_goes_after_them(world: MemoryWorld) -> None:
    world.write(**WIDE)
    await settle(world)
    assert [name for name in made(world) if name.startswith("qwen-e1")] == ["qwen-e1", "qwen-e1-1", "qwen-e1-0"]
    assert world.named(GROUP) == {"qwen-e1", "qwen-e2"}, "and none for the prefill instance, which is one pod"
    assert {joined_by(each) for each in members(world).values()} == {"kubernetes"}
    world.api.asked.clear()
    await world.round()
    assert world.api.asked == []
    world.write(**WIDE | {"decode": WIDE["decode"] | {"replicas": 1}})
    lose(world, "qwen-e1-0")
    await world.round()
    assert world.named(GROUP) == {"qwen-e1", "qwen-e2"}, "one of its pods is still there"
    lose(world, "qwen-e1-1")
    await world.round()
    assert world.named(GROUP) == {"qwen-e2"}
    world.write(**WIDE | {"decode": {"replicas": 1, "resources": {}}})
    for name in members(world):
        lose(world, name)
    await settle(world)
    assert (world.named(GROUP), members(world)) == (set(), {})


@pytest.mark.parametrize("after", range(7))
async def test_an_operator_that_is_killed_between_any_two_writes_goes_on(world: MemoryWorld, after: int) -> None:
    world.write(**WIDE)
    count = itertools.count()

    def fault(verb: str, kind: str, name: str) -> ApiError | None:
        if verb == "create" and kind in ("Pod", GROUP) and next(count) >= after:
            raise Killed
        return None

    world.api.fault = fault
    with pytest.raises(Killed):
        await settle(world)
    world.api.fault = lambda verb, kind, name: None
    world.restart()
    await settle(world)
    assert world.named(GROUP) == {"qwen-e1", "qwen-e2"}
    assert {name: joined_by(body) for name, body in members(world).items()} == dict.fromkeys(
        (f"qwen-e{instance}-{index}" for instance in (1, 2) for index in (0, 1)), "kubernetes")
    assert (await world.round()).plan.actions == ()


def kill_before_the_leader(verb: str, kind: str, name: str) -> ApiError | None:
    if (verb, kind, name) == ("create", "Pod", "qwen-e1-0"):
        raise Killed
    return None


async def begin(world: MemoryWorld, served: dict[str, frozenset[str]], then: dict[str, frozenset[str]]) -> None:
    """An operator is killed in the middle of a group, and another one goes on with what is served then."""
    world.api.resources, world.api.fault = served, kill_before_the_leader
    with pytest.raises(Killed):
        await settle(world)
    assert "qwen-e1-1" in members(world)
    world.api.resources, world.api.fault = then, lambda verb, kind, name: None
    world.now += LOOK_S
    world.restart()
    await settle(world, 12)
    assert len(members(world)) == 4
    for name in ("qwen-e1", "qwen-e2"):
        assert len({joined_by(members(world)[f"{name}-{index}"]) for index in range(2)}) == 1


async def test_what_began_without_a_group_ends_without_one(world: MemoryWorld) -> None:
    world.write(**WIDE)
    await begin(world, {}, {VERSION: frozenset({"podgroups"})})
    assert joined_by(members(world)["qwen-e1-0"]) is None
    for index in range(2):
        lose(world, f"qwen-e1-{index}")
    await settle(world)
    assert joined_by(members(world)["qwen-e1-0"]) == "kubernetes", "one that is made now has it"


async def test_half_a_group_whose_scheduler_is_gone_is_made_anew(world: MemoryWorld) -> None:
    world.write(**WIDE)
    await begin(world, {VERSION: frozenset({"podgroups"})}, {})
    assert joined_by(members(world)["qwen-e1-0"]) is None, "and those that were whole stay as they are"


async def test_a_name_that_somebody_else_has_is_reported_and_no_pod_is_made_without_its_group(world: MemoryWorld) -> None:
    theirs = {"metadata": {"name": "qwen-e1", "namespace": "team-a"}, "spec": {}}
    world.api.put(GROUP, theirs)
    world.write(**WIDE | {"decode": WIDE["decode"] | {"replicas": 1}})
    await settle(world, 3)
    assert members(world) == {}
    said = world.condition("Degraded")
    assert (said["status"], said["reason"]) == ("True", "NameTaken")
    assert "PodGroup qwen-e1 is somebody else's" in said["message"]
    del world.api.objects[GROUP, "team-a", "qwen-e1"]
    await settle(world)
    assert set(members(world)) == {"qwen-e1-0", "qwen-e1-1"}
    assert world.condition("Degraded")["status"] == "False"


@pytest.mark.parametrize("decode", [1, 2])
async def test_a_name_that_somebody_else_has_is_no_trouble_once_nothing_needs_it(world: MemoryWorld, decode: int) -> None:
    world.api.put(GROUP, {"metadata": {"name": f"qwen-e{decode}", "namespace": "team-a"}, "spec": {}})
    world.write(**WIDE | {"decode": WIDE["decode"] | {"replicas": decode}})
    await settle(world, 3)
    assert world.condition("Degraded")["reason"] == "NameTaken"
    world.write(**WIDE | {"decode": WIDE["decode"] | ({"replicas": 1} if decode > 1 else {"parallelism": {}})})
    await settle(world, 3)
    assert world.condition("Degraded")["status"] == "False"


async def test_a_group_of_another_size_that_was_left_is_made_anew(world: MemoryWorld) -> None:
    world.write(**WIDE)
    await settle(world)
    left = world.api.objects[GROUP, "team-a", "qwen-e1"]
    for name in pods(world):
        lose(world, name)
    left["spec"]["schedulingPolicy"]["gang"]["minCount"] = 7
    world.restart()
    await settle(world)
    counts = {at[2]: body["spec"]["schedulingPolicy"]["gang"]["minCount"]
              for at, body in world.api.objects.items() if at[0] == GROUP}
    assert counts == {"qwen-e1": 2, "qwen-e2": 2}


async def test_one_that_is_lost_comes_back_and_one_that_is_left_goes(world: MemoryWorld) -> None:
    world.write(**WIDE)
    await settle(world)
    before = world.api.objects[GROUP, "team-a", "qwen-e1"]
    world.api.put(GROUP, before | {"metadata": before["metadata"] | {"name": "qwen-e9", "uid": "another"}})
    del world.api.objects[GROUP, "team-a", "qwen-e1"]
    world.now += LIST_S
    await world.round()
    assert world.named(GROUP) == {"qwen-e1", "qwen-e2"}


async def test_an_api_server_that_leaves_the_group_of_pods_out_is_named(world: MemoryWorld) -> None:
    """It serves PodGroups, and the feature gate of the pods' field is off: they are placed one at a time then."""
    create = world.api.create

    async def drops(kind: str, namespace: str, body: Body, *, dry_run: bool = False) -> Body:
        spec = {key: value for key, value in body.get("spec", {}).items() if key != "schedulingGroup"}
        return await create(kind, namespace, body | ({"spec": spec} if kind == "Pod" else {}), dry_run=dry_run)

    world.api.create = drops  # type: ignore[method-assign]
    world.write(**WIDE)
    await settle(world)
    assert len(members(world)) == 4
    said = world.condition("Degraded")
    assert (said["status"], said["reason"]) == ("True", "GangNotServed")
    assert "turn on the feature gate GenericWorkload" in said["message"]


async def test_a_kind_that_is_not_served_is_named_and_the_groups_serve_all_the_same() -> None:
    async with aiohttp.ClientSession() as session:
        world = MemoryWorld(session, gang="volcano")
        world.write(**WIDE)
        await settle(world)
        assert len(members(world)) == 4
        said = world.condition("Degraded")
        assert (said["status"], said["reason"]) == ("True", "GangNotServed")
        assert "install Volcano, or write --gang auto or none" in said["message"]


async def test_kueue_is_told_one_name_for_the_pods_of_one_life(world: MemoryWorld) -> None:
    template = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team-a"}}}
    world.write(**WIDE | {"decode": WIDE["decode"] | {"template": template}})
    await begin(world, {}, {})
    begun = queued_as(members(world)["qwen-e1-1"])
    names = {instance: {queued_as(members(world)[f"{instance}-{index}"]) for index in range(2)}
             for instance in ("qwen-e1", "qwen-e2")}
    assert names["qwen-e1"] == {begun}
    assert len(names["qwen-e2"]) == 1
    lose(world, "qwen-e1-1")
    world.now += 20
    await settle(world)
    after = {queued_as(each) for name, each in members(world).items() if not name.startswith("qwen-e2")}
    assert len(after) == 1
    assert after.isdisjoint({begun}), "Kueue remembers that one as ended"


async def test_a_label_that_no_node_has_is_said_with_its_field_at_once(world: MemoryWorld) -> None:
    world.write(**WIDE, engine={"topology": "example.com/rack"})
    await world.round()
    said = world.condition("Degraded")
    assert (said["status"], said["reason"]) == ("True", "TopologyUnknown")
    assert said["message"].startswith("spec.engine.topology: no node has the label example.com/rack")
    world.api.put("Node", {"metadata": {"name": "n1", "labels": {"example.com/rack": "r1"}}})
    await world.round()
    assert world.condition("Degraded")["status"] == "True", "it is not asked in each round"
    world.now += AGAIN_S
    await settle(world)
    assert world.condition("Degraded")["status"] == "False"


async def test_who_may_not_look_at_nodes_says_nothing_of_them(world: MemoryWorld) -> None:
    world.api.fault = lambda verb, kind, name: ApiError(403, "Forbidden", "nodes is forbidden") if kind == "Node" else None
    world.write(**WIDE, engine={"topology": "example.com/rack"})
    await settle(world)
    assert world.condition("Degraded")["status"] == "False"
    assert len(members(world)) == 4
