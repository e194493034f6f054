"""What goes with a service, over a store in memory: made, compared, put back, removed, or left to others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from kube_documents import service
from memory_api import MemoryApi

from xpyd_operator.errors import NotYet, XpydError
from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.client.cache import WatchCache
from xpyd_operator.kube.client.events import Events
from xpyd_operator.kube.client.metrics import Metrics
from xpyd_operator.kube.objects.children import AGAIN_S, Children
from xpyd_operator.render import labels
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.contract.ids import Role

COUNTS = {Role.PREFILL: 1, Role.DECODE: 2}
Body = dict[str, Any]


class World:
    def __init__(self) -> None:
        self.api, self.cache, self.now = MemoryApi(), WatchCache(), 0.0
        self.events = Events(self.api, Metrics())  # type: ignore[arg-type]
        settings = KubeSettings(sidecar_image="sidecar:1")
        self.children = Children(self.api, self.cache, self.events, settings)  # type: ignore[arg-type]
        self.waits = ""
        """For what those wait that need others."""

    async def reconcile(self, *, before: bool = False, several: bool = False, **spec: Any) -> list[tuple[str, str, str]]:
        """What was asked for that."""
        self.api.asked.clear()
        self.api.show(self.cache)
        await self.children.reconcile(
            service(**spec), COUNTS, self.now, lacking=self._lacking, before=before, several=several)
        return list(self.api.asked)

    def _lacking(self, made: Body) -> str:
        return self.waits if made["kind"] == "Deployment" else ""

    def edit(self, kind: str, name: str, **changes: Any) -> None:
        body = copy.deepcopy(self.api.objects[kind, "team-a", name])
        body["metadata"]["generation"] += 1
        self.api.put(kind, body | changes)

    async def told(self) -> list[str]:
        await self.events.flush()
        return [body["reason"] for at, body in self.api.objects.items() if at[0] == "Event"]


async def test_made_once() -> None:
    world = World()
    first = await world.reconcile()
    assert {name for verb, kind, name in first if kind == "Service" and verb == "apply"} == {"qwen", "qwen-members"}
    assert ("create", "DisaggPool", "qwen-decode") in first
    assert await world.reconcile() == []


async def test_what_differs_is_applied_and_nothing_else() -> None:
    world = World()
    await world.reconcile()
    world.edit("PodDisruptionBudget", "qwen-decode", spec={"minAvailable": 7})
    assert await world.reconcile() == [("apply", "PodDisruptionBudget", "qwen-decode")]


async def test_what_is_not_asked_for_any_more_goes() -> None:
    world = World()
    await world.reconcile()
    asked = await world.reconcile(networkPolicy={"enabled": False})
    assert ("delete", "NetworkPolicy", "qwen") in asked
    assert ("delete", "NetworkPolicy", "qwen-clients") in asked
    assert await world.reconcile(networkPolicy={"enabled": False}) == []


ROUTERS = {"placement": "deployment"}


async def test_the_count_of_routers_is_written_once_and_left_to_whoever_writes_it_then() -> None:
    world = World()
    await world.reconcile(router=ROUTERS)
    deployment = world.api.objects["Deployment", "team-a", "qwen-router"]
    assert deployment["spec"]["replicas"] == 2
    assert await world.reconcile(router=ROUTERS) == []
    world.edit("Deployment", "qwen-router", spec=deployment["spec"] | {"replicas": 7})
    assert await world.reconcile(router=ROUTERS) == [], "an autoscaler's count is no difference"
    changed = ROUTERS | {"policy": "round_robin"}
    assert await world.reconcile(router=changed) == [(verb, "Deployment", "qwen-router") for verb in ("share", "apply")]
    assert world.api.objects["Deployment", "team-a", "qwen-router"]["spec"]["replicas"] == 7


async def test_a_count_of_the_document_is_put_back_and_kept_when_the_document_says_none_any_more() -> None:
    world = World()
    await world.reconcile(router=ROUTERS | {"replicas": 3})
    deployment = world.api.objects["Deployment", "team-a", "qwen-router"]
    world.edit("Deployment", "qwen-router", spec=deployment["spec"] | {"replicas": 7})
    assert await world.reconcile(router=ROUTERS | {"replicas": 3}) == [("apply", "Deployment", "qwen-router")]
    assert ("share", "Deployment", "qwen-router") in await world.reconcile(router=ROUTERS)
    assert world.api.objects["Deployment", "team-a", "qwen-router"]["spec"]["replicas"] == 3


async def test_a_count_that_changes_meanwhile_is_waited_for() -> None:
    world = World()
    await world.reconcile(router=ROUTERS)
    world.api.fault = lambda verb, kind, name: ApiError(409, "Conflict", "another value") if verb == "share" else None
    with pytest.raises(NotYet, match="the count of Deployment qwen-router has just changed"):
        await world.reconcile(router=ROUTERS | {"policy": "round_robin"})


async def test_a_pool_that_was_scaled_by_hand_is_put_back_and_told() -> None:
    world = World()
    await world.reconcile()
    world.edit("DisaggPool", "qwen-decode", status={"observedGeneration": 1}, spec={"replicas": 9})
    assert await world.reconcile() == [("patch", "DisaggPool", "qwen-decode")]
    assert world.api.objects["DisaggPool", "team-a", "qwen-decode"]["spec"]["replicas"] == 2
    assert await world.told() == ["PoolScaledBack"]


async def test_a_service_that_changes_its_count_scales_nobody_back() -> None:
    world = World()
    await world.reconcile()
    pool = world.api.objects["DisaggPool", "team-a", "qwen-decode"]
    world.api.put("DisaggPool", pool | {"status": {"observedGeneration": pool["metadata"]["generation"]}})
    for count in (3, 5):
        asked = await world.reconcile(decode={"replicas": count, "resources": {}})
        assert asked == [("patch", "DisaggPool", "qwen-decode")]
    assert await world.told() == []


async def test_a_pool_of_a_role_that_scales_is_left_to_whoever_scales_it() -> None:
    world = World()
    scaling = {"scaling": {"min": 1, "max": 8}, "resources": {}}
    await world.reconcile(decode=scaling)
    world.edit("DisaggPool", "qwen-decode", spec={"replicas": 6})
    assert await world.reconcile(decode=scaling) == []


async def test_a_name_that_is_taken_is_looked_up_now_and_then() -> None:
    world = World()
    theirs = {"metadata": {"name": "qwen", "namespace": "team-a"}, "spec": {"type": "ExternalName"}}
    world.api.put("Service", theirs)
    first = await world.reconcile()
    assert [verb for verb, kind, name in first if (kind, name) == ("Service", "qwen")] == ["get"]
    assert world.children.taken_names == ["Service qwen"]
    assert await world.reconcile() == []
    world.now = AGAIN_S + 1
    assert await world.reconcile() == [("get", "Service", "qwen")]
    del world.api.objects["Service", "team-a", "qwen"]
    world.now += AGAIN_S + 1
    assert await world.reconcile() == [("get", "Service", "qwen"), ("apply", "Service", "qwen")]
    assert world.children.taken_names == []


async def test_what_is_being_deleted_is_waited_for() -> None:
    world = World()
    await world.reconcile()
    body = copy.deepcopy(world.api.objects["Service", "team-a", "qwen"])
    body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.api.put("Service", body | {"spec": {}})
    assert await world.reconcile() == []


async def test_one_refusal_holds_up_nothing_else() -> None:
    world = World()
    denied = ApiError(403, "Forbidden", "no rights")
    world.api.fault = lambda verb, kind, name: denied if (verb, kind) == ("apply", "NetworkPolicy") else None
    with pytest.raises(XpydError, match="no rights"):
        await world.reconcile()
    made = {(at[0], at[2]) for at in world.api.objects}
    assert {("Service", "qwen"), ("PodDisruptionBudget", "qwen-decode"), ("DisaggPool", "qwen-prefill")} <= made


APART = {"router": {"placement": "deployment"}}


async def test_what_needs_others_comes_after_them_and_not_at_all_while_they_lack() -> None:
    world = World()
    world.waits = "NetworkPolicy qwen is not there yet"
    with pytest.raises(NotYet, match="NetworkPolicy qwen is not there yet"):
        await world.reconcile(**APART)
    there = {(at[0], at[2]) for at in world.api.objects}
    assert {("NetworkPolicy", "qwen"), ("PodDisruptionBudget", "qwen-router")} <= there
    assert "Deployment" not in {kind for kind, _ in there}
    world.waits = ""
    assert await world.reconcile(**APART) == [("get", "Deployment", "qwen-router"), ("apply", "Deployment", "qwen-router")]
    world.waits = "NetworkPolicy qwen is not there yet"
    assert await world.reconcile(**APART) == [], "what is there as it should be waits for nothing"


def _left(body: Body) -> Body:
    """As a service of this name before leaves it, after its end."""
    meta = body["metadata"]
    return body | {"metadata": meta | {"labels": meta["labels"] | {labels.SERVICE_UID: "before"}}}


async def test_what_a_service_of_this_name_before_left_is_taken_over() -> None:
    world = World()
    await world.reconcile()
    for name in ("qwen", "qwen-members"):
        world.api.put("Service", _left(world.api.objects["Service", "team-a", name]))
    assert await world.reconcile() == [("apply", "Service", "qwen"), ("apply", "Service", "qwen-members")]
    assert world.children.taken_names == []
    uid = service().metadata.uid
    assert world.api.objects["Service", "team-a", "qwen"]["metadata"]["labels"][labels.SERVICE_UID] == uid
    assert await world.reconcile() == []


async def test_policies_stay_as_long_as_pods_of_the_service_before_or_a_group_that_goes_may_need_them() -> None:
    world = World()
    await world.reconcile()
    open_ = {"networkPolicy": {"enabled": False}}
    assert [each for each in await world.reconcile(before=True, **open_) if each[0] == "delete"] == []
    assert [each for each in await world.reconcile(several=True, **open_) if each[0] == "delete"] == []
    gone = {name for verb, kind, name in await world.reconcile(**open_) if (verb, kind) == ("delete", "NetworkPolicy")}
    assert gone == {"qwen", "qwen-clients"}


async def test_an_owner_that_a_release_before_wrote_is_taken_away() -> None:
    world = World()
    await world.reconcile()
    body = world.api.objects["NetworkPolicy", "team-a", "qwen"]
    owner = {"apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService", "name": "qwen", "uid": service().metadata.uid,
             "controller": True}
    world.api.put("NetworkPolicy", body | {"metadata": body["metadata"] | {"ownerReferences": [owner]}})
    assert ("apply", "NetworkPolicy", "qwen") in await world.reconcile()
    assert not world.api.objects["NetworkPolicy", "team-a", "qwen"]["metadata"]["ownerReferences"]


async def test_a_name_of_another_services_object_is_not_taken_over_although_nothing_owns_it() -> None:
    """``qwen-members`` is the Service for clients of a service of that name."""
    world = World()
    await world.reconcile()
    body = _left(world.api.objects["Service", "team-a", "qwen-members"])
    theirs = {"labels": body["metadata"]["labels"] | {labels.SERVICE: "qwen-members"}}
    world.api.put("Service", body | {"metadata": body["metadata"] | theirs})
    await world.reconcile()
    assert world.children.taken_names == ["Service qwen-members"]
