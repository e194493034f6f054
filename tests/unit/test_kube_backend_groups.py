"""Instances of several pods over a store in memory: the order of writes, an operator that is killed between any two of
them, and what becomes of the others when one pod goes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import aiohttp
import msgspec
import pytest
from kube_documents import pod
from memory_world import MemoryWorld, pods
from memory_world import settle as settle_groups

from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.plan.placing import PAUSE_S, SPREAD_S
from xpyd_operator.render import labels

WIDE = {"prefill": {"replicas": 1, "resources": {}},
        "decode": {"replicas": 2, "parallelism": {"tensor": 3, "pods": 3, "device": "none"}}}
NAMES = {"qwen-e0"} | {f"qwen-e{instance}-{member}" for instance in (1, 2) for member in range(3)}
READY = pod(0)["status"] | {"podIP": ""}
settle = partial(settle_groups, size=3)
PENDING = {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                                               "message": "0/2 nodes", "lastTransitionTime": "2026-01-01T00:00:01Z"}]}


class Killed(BaseException):
    """The operator is killed."""


@pytest.fixture
async def world() -> AsyncIterator[MemoryWorld]:
    async with aiohttp.ClientSession() as session:
        yield MemoryWorld(session)


def created(world: MemoryWorld) -> list[str]:
    return [name for verb, kind, name in world.api.asked if (verb, kind) == ("create", "Pod")]


def set_status(world: MemoryWorld, name: str, status: dict[str, Any]) -> None:
    body = world.api.put("Pod", pods(world)[name] | {"status": status})
    world.cache.on_seen("Pod", body)


def begin_end(world: MemoryWorld, name: str) -> None:
    """As somebody else's delete, or an eviction, shows in a watch."""
    body = pods(world)[name]
    mark = {"deletionTimestamp": "2099-01-01T00:00:00Z", "deletionGracePeriodSeconds": 30}
    world.cache.on_seen("Pod", world.api.put("Pod", body | {"metadata": body["metadata"] | mark}))


def lose(world: MemoryWorld, name: str) -> None:
    """It is gone at once."""
    world.cache.on_deleted("Pod", world.api.objects.pop(("Pod", "team-a", name)))


def check(world: MemoryWorld) -> None:
    """A leader is there only with all others, of one revision and layout."""
    for name, body in pods(world).items():
        if not name.endswith("-0") or body["metadata"].get("deletionTimestamp"):
            continue
        others = [pods(world).get(f"{name[:-1]}{index}") for index in range(3)]
        assert None not in others, f"{name} without all others"
        assert len({each["metadata"]["annotations"][labels.LAYOUT] for each in others if each}) == 1


async def test_the_leader_is_written_last(world: MemoryWorld) -> None:
    world.write(**WIDE)
    await settle(world)
    assert set(pods(world)) == NAMES
    order = created(world)
    for instance in (1, 2):
        assert [name for name in order if name.startswith(f"qwen-e{instance}-")][-1] == f"qwen-e{instance}-0"
    assert "qwen-engines" in world.named("Service")
    world.api.asked.clear()
    done = await world.round()
    assert (world.api.asked, done.plan.actions) == ([], ())
    assert {each.parts: each.ready for each in done.observed.instances} == {1: True, 3: True}


async def test_a_leader_is_not_written_while_another_one_cannot_be(world: MemoryWorld) -> None:
    world.write(**WIDE)
    taken = ApiError(409, "AlreadyExists", "pods qwen-e1-1 already exists")
    world.api.fault = lambda verb, kind, name: taken if (verb, kind, name) == ("create", "Pod", "qwen-e1-1") else None
    await settle(world, 3)
    assert "qwen-e1-2" in pods(world)
    assert not {"qwen-e1-0", "qwen-e1-1"} & set(pods(world))
    world.api.fault = lambda verb, kind, name: None
    await settle(world)
    assert set(pods(world)) == NAMES
    assert created(world)[-1] == "qwen-e1-0"


@pytest.mark.parametrize("after", range(7))
async def test_an_operator_that_is_killed_between_any_two_writes_goes_on(world: MemoryWorld, after: int) -> None:
    world.write(**WIDE)
    count = itertools.count()

    def fault(verb: str, kind: str, name: str) -> ApiError | None:
        if (verb, kind) == ("create", "Pod") and next(count) >= after:
            raise Killed
        return None

    world.api.fault = fault
    with pytest.raises(Killed):
        await settle(world)
    assert len(pods(world)) == after
    check(world)
    world.api.fault = lambda verb, kind, name: None
    world.restart()
    for _ in range(10):
        await world.round()
        check(world)
        world.now += 6
    assert set(pods(world)) == NAMES
    done = await world.round()
    assert done.plan.actions == ()


@pytest.mark.parametrize("gone", [0, 1, 2])
@pytest.mark.parametrize("how", ["deleted", "ends", "evicted"])
async def test_a_member_that_goes_takes_its_group_along_and_no_other(world: MemoryWorld, gone: int, how: str) -> None:
    world.write(**WIDE)
    await settle(world)
    before = {name: body["metadata"]["uid"] for name, body in pods(world).items()}
    name = f"qwen-e1-{gone}"
    if how == "deleted":
        lose(world, name)
    elif how == "ends":
        begin_end(world, name)
    else:
        set_status(world, name, {"phase": "Failed", "reason": "Evicted"})
    world.now += 20
    await world.round()
    ending = {each for each, body in pods(world).items() if body["metadata"].get("deletionTimestamp")}
    assert ending == {f"qwen-e1-{member}" for member in range(3)} - ({name} if how == "deleted" else set())
    await settle(world)
    after = {each: body["metadata"]["uid"] for each, body in pods(world).items()}
    assert len(after) == len(NAMES)
    kept = {each for each, uid in after.items() if before.get(each) == uid}
    assert kept == {"qwen-e0", "qwen-e2-0", "qwen-e2-1", "qwen-e2-2"}
    check(world)


async def test_a_quota_in_the_middle_of_a_group_leaves_no_leader_and_is_made_up_for(world: MemoryWorld) -> None:
    world.write(**WIDE)
    world.api.fault = lambda verb, kind, name: (
        ApiError(403, "Forbidden", "exceeded quota: pods") if verb == "create" and kind == "Pod" and len(pods(world)) >= 3
        else None)
    await settle(world, 3)
    assert len(pods(world)) == 3
    assert not {"qwen-e1-0", "qwen-e2-0"} & set(pods(world))
    assert "exceeded quota" in world.condition("Progressing")["message"]
    world.api.fault = lambda verb, kind, name: None
    world.now += 120
    await settle(world)
    assert set(pods(world)) == NAMES
    check(world)


async def test_what_another_operator_would_render_otherwise_is_made_anew_as_a_whole(world: MemoryWorld) -> None:
    world.write(**WIDE)
    await settle(world)
    for member in (0, 1):
        lose(world, f"qwen-e1-{member}")
    body = pods(world)["qwen-e1-2"]
    notes = body["metadata"]["annotations"] | {labels.LAYOUT: "another"}
    changed = {**body, "status": {"phase": "Pending"}, "metadata": body["metadata"] | {"annotations": notes}}
    world.cache.on_seen("Pod", world.api.put("Pod", changed))
    await world.round()
    assert pods(world)["qwen-e1-2"]["metadata"].get("deletionTimestamp")
    await settle(world)
    layouts = {each["metadata"]["annotations"].get(labels.LAYOUT) for each in pods(world).values()}
    assert len(pods(world)) == len(NAMES)
    assert "another" not in layouts
    check(world)


async def test_a_group_that_another_release_began_is_made_anew_as_a_whole(world: MemoryWorld) -> None:
    """An operator is killed before it has written the leader, and the one that goes on brings another image of xpyd."""
    world.write(**WIDE | {"decode": WIDE["decode"] | {"replicas": 1}})

    def fault(verb: str, kind: str, name: str) -> ApiError | None:
        if (verb, kind, name) == ("create", "Pod", "qwen-e1-0"):
            raise Killed
        return None

    world.api.fault = fault
    with pytest.raises(Killed):
        await settle(world)
    assert {"qwen-e1-1", "qwen-e1-2"} <= set(pods(world))
    world.api.fault = lambda verb, kind, name: None
    settings = msgspec.structs.replace(world.shared.settings, sidecar_image="sidecar:2")
    world.shared = msgspec.structs.replace(world.shared, settings=settings)
    world.restart()
    await settle(world, 12)
    images = {each["image"] for name, body in pods(world).items() if name.startswith("qwen-e1-")
              for each in body["spec"]["initContainers"]}
    assert (len(pods(world)), images) == (4, {"sidecar:2"})
    check(world)


async def test_half_a_group_gives_its_places_back_and_the_next_try_waits(world: MemoryWorld) -> None:
    world.write(**WIDE | {"decode": WIDE["decode"] | {"replicas": 1}})
    for _ in range(3):
        await world.round()
        world.now += 6
    for name in ("qwen-e1-0", "qwen-e1-1"):
        set_status(world, name, READY)
    set_status(world, "qwen-e1-2", PENDING)
    set_status(world, "qwen-e0", READY)
    done = await world.round()
    (waiting,) = [each for each in done.observed.instances if each.unplaced]
    assert (waiting.name, waiting.unplaced, waiting.parts) == ("qwen-e1", 1, 3)
    gone = {name for name, body in pods(world).items() if body["metadata"].get("deletionTimestamp")}
    assert gone == {"qwen-e1-0", "qwen-e1-1", "qwen-e1-2"}, "its time has passed long ago"
    world.run_pods()
    world.api.asked.clear()
    await world.round()
    assert created(world) == [], "others can have its places"
    assert world.backend.hurried
    world.now += PAUSE_S + SPREAD_S
    await world.round()
    assert set(created(world)) == {"qwen-e1-0", "qwen-e1-1", "qwen-e1-2"}


async def test_the_dry_run_tries_a_leader_and_one_that_is_led(world: MemoryWorld) -> None:
    world.write(**WIDE)
    await world.round()
    tried = [name for verb, kind, name in world.api.asked if (verb, kind) == ("dry-run", "Pod")]
    assert tried == ["qwen-check-prefill", "qwen-check-decode-0", "qwen-check-decode-1"]


async def test_the_pool_counts_instances_and_selects_leaders(world: MemoryWorld) -> None:
    world.write(**WIDE)
    await settle(world)
    pool = world.api.objects["DisaggPool", "team-a", "qwen-decode"]["status"]
    assert (pool["replicas"], pool["readyReplicas"]) == (2, 2)
    assert "xpyd.dev/member=0" in pool["selector"]
    budget = world.api.objects["PodDisruptionBudget", "team-a", "qwen-decode"]["spec"]
    assert budget["minAvailable"] == 2 * 3 - 1


async def test_the_service_of_names_goes_once_no_such_instance_is_left(world: MemoryWorld) -> None:
    world.write(**WIDE)
    await settle(world)
    world.write(**WIDE | {"decode": {"replicas": 2, "resources": {}}})
    await world.round()
    assert "qwen-engines" in world.named("Service"), "the old ones still meet by it"
    for name in [each for each in pods(world) if each.count("-") == 2]:
        lose(world, name)
    await settle(world)
    assert "qwen-engines" not in world.named("Service")
    assert all(each.count("-") == 1 for each in pods(world))


def minimum(world: MemoryWorld) -> int:
    least: int = world.api.objects["PodDisruptionBudget", "team-a", "qwen-decode"]["spec"]["minAvailable"]
    return least


async def test_budgets_are_about_what_serves_while_the_number_of_pods_changes(world: MemoryWorld) -> None:
    world.write(**WIDE)
    await settle(world)
    assert minimum(world) == 5
    world.write(**WIDE | {"decode": {"replicas": 2, "resources": {}}})
    await world.round()
    assert minimum(world) == 5, "else one pod of each of the two old groups may be evicted at once"
    for name in [each for each in pods(world) if each.count("-") == 2]:
        lose(world, name)
    await settle(world)
    assert minimum(world) == 1
    world.write(**WIDE)
    await world.round()
    assert minimum(world) == 1, "no node could be drained for as long as the new groups find no place"


async def test_one_pod_that_cannot_be_written_leaves_no_other_write_behind_the_round(world: MemoryWorld) -> None:
    world.write(**WIDE | {"decode": WIDE["decode"] | {"replicas": 1}})
    refused = ApiError(422, "Invalid", "not this one")
    world.api.fault = lambda verb, kind, name: refused if (verb, name) == ("create", "qwen-e1-1") else None
    create, during = world.api.create, True

    async def late(kind: str, namespace: str, body: dict[str, Any], **more: Any) -> dict[str, Any]:
        if body["metadata"]["name"] == "qwen-e1-2" and not more:
            await asyncio.sleep(0.01)
            assert during, "it is written while another round may run"
        return await create(kind, namespace, body, **more)

    world.api.create = late  # type: ignore[method-assign]
    await world.round()
    during = False
    assert "qwen-e1-2" in pods(world)
    assert "qwen-e1-0" not in pods(world)
