"""What a service that is gone leaves behind: whose an object is, and when it goes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from kube_documents import UID, document, pod
from memory_api import MemoryApi

from xpyd_operator.errors import XpydError
from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.client.cache import OWNER_KIND, WatchCache
from xpyd_operator.kube.objects.ownership import Ownership, ownership
from xpyd_operator.kube.objects.sweep import left_behind, may_go, sweep
from xpyd_operator.render import labels

Body = dict[str, Any]
AT = ("team-a", "qwen")
OWNER = {"apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService", "name": "qwen", "uid": UID, "controller": True}


def made(name: str = "qwen", uid: str = UID, **metadata: Any) -> Body:
    marks = {labels.SERVICE: "qwen", labels.SERVICE_UID: uid}
    return {"metadata": {"name": name, "namespace": "team-a", "labels": marks} | metadata}


class World:
    def __init__(self) -> None:
        self.api, self.cache = MemoryApi(), WatchCache()
        for kind, name in (("NetworkPolicy", "qwen"), ("NetworkPolicy", "qwen-clients"), ("Service", "qwen")):
            self.put(kind, made(name))

    def put(self, kind: str, body: Body) -> None:
        self.cache.on_seen(kind, self.api.put(kind, body))

    def take(self, kind: str, name: str) -> None:
        self.cache.on_deleted(kind, self.api.objects.pop((kind, "team-a", name)))

    async def sweep(self) -> set[str]:
        await sweep(self.api, self.cache, *AT)  # type: ignore[arg-type]
        return {f"{at[0]}/{at[2]}" for at in self.api.objects}


@pytest.mark.parametrize(("metadata", "whose"), [
    ({"labels": {labels.SERVICE_UID: UID}}, "ours"),
    ({"labels": {labels.SERVICE: "qwen", labels.SERVICE_UID: UID}, "ownerReferences": []}, "ours"),
    ({"ownerReferences": [OWNER]}, "ours"),
    ({"labels": {labels.SERVICE_UID: UID}, "ownerReferences": [OWNER | {"uid": "another"}]}, "others"),
    ({"labels": {labels.SERVICE: "qwen", labels.SERVICE_UID: "before"}}, "left"),
    ({"labels": {labels.SERVICE: "qwen"}, "annotations": {labels.APPLIED: "hash"}}, "left"),
    ({"labels": {labels.SERVICE: "qwen"}}, "others"),
    ({"labels": {labels.SERVICE: "other", labels.SERVICE_UID: "before"}}, "others"),
    ({"labels": {labels.SERVICE: "qwen", labels.SERVICE_UID: "before"},
      "ownerReferences": [{"kind": "ConfigMap", "name": "c", "uid": "1"}]}, "others"),
    ({}, "others"), ({"labels": None, "annotations": None, "ownerReferences": None}, "others"),
], ids=str)
def test_whose_an_object_is(metadata: Body, whose: Ownership) -> None:
    assert ownership(metadata, "qwen", UID) == whose


def test_a_service_without_a_uid_owns_nothing() -> None:
    assert ownership({"labels": {labels.SERVICE_UID: ""}}, "qwen", "") == "others"


async def test_all_of_it_goes_when_nothing_else_is_left() -> None:
    assert await World().sweep() == set()


@pytest.mark.parametrize("kind", ["Pod", "Deployment"])
async def test_nothing_goes_before_the_last_pod_and_what_makes_pods(kind: str) -> None:
    world = World()
    world.put(kind, pod(0) if kind == "Pod" else made("qwen-router", ownerReferences=[OWNER]))
    assert len(await world.sweep()) == 4
    assert [each for each in world.api.asked if each[0] == "delete"] == []
    world.take(kind, "qwen-e0" if kind == "Pod" else "qwen-router")
    assert await world.sweep() == set()


async def test_nothing_goes_while_there_is_a_service() -> None:
    world = World()
    world.put(OWNER_KIND, document())
    assert left_behind(world.cache, *AT) == []
    assert len(await world.sweep()) == 4


async def test_what_has_an_owner_or_is_not_ours_is_left_alone() -> None:
    world = World()
    world.put("PodDisruptionBudget", made("qwen-decode", ownerReferences=[OWNER]))
    world.put("Service", {"metadata": {"name": "mine", "namespace": "team-a", "labels": {labels.SERVICE: "qwen"}}})
    assert await world.sweep() == {"PodDisruptionBudget/qwen-decode", "Service/mine"}


async def test_what_a_deletion_orphaned_goes_with_the_last_pod_too() -> None:
    """``kubectl delete --cascade=orphan`` takes the owners away. Pods and a Deployment are a person's wish by that."""
    world = World()
    world.put("PodDisruptionBudget", made("qwen-decode"))
    world.put("DisaggPool", made("qwen-decode"))
    world.put("Deployment", made("qwen-router"))
    assert len(await world.sweep()) == 6
    world.take("Deployment", "qwen-router")
    assert await world.sweep() == set()


async def test_one_that_is_taken_over_at_that_moment_stays() -> None:
    world = World()
    seen = may_go(world.cache, *AT)
    assert len(seen) == 3
    body = copy.deepcopy(world.api.objects["NetworkPolicy", "team-a", "qwen"])
    body["metadata"]["labels"][labels.SERVICE_UID] = "next"
    world.api.put("NetworkPolicy", body)  # the watch does not show it yet
    assert await world.sweep() == {"NetworkPolicy/qwen"}


async def test_what_cannot_be_deleted_holds_up_nothing_else() -> None:
    world = World()
    refused = ApiError(403, "Forbidden", "no right")
    world.api.fault = lambda verb, kind, name: refused if (verb, name) == ("delete", "qwen-clients") else None
    with pytest.raises(XpydError, match="no right"):
        await world.sweep()
    assert {at[2] for at in world.api.objects} == {"qwen-clients"}


async def test_what_is_gone_already_is_forgotten() -> None:
    world = World()
    world.api.objects.clear()
    await world.sweep()
    assert left_behind(world.cache, *AT) == []
