"""A service with a gateway over a store in memory: made, kept, taken away, refused; kinds that are absent, come and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from memory_world import MemoryWorld

from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.client.cache import OWNER_KIND
from xpyd_operator.kube.objects.sweep import sweep
from xpyd_operator.kube.routes.gateways import PARENTS
from xpyd_operator.kube.service.gateway import AGAIN_S
from xpyd_operator.render.gateway import GATEWAY, KINDS, POOL, ROUTE, TLS

AT = ("team-a", "qwen")
PUBLIC = {"parentRefs": [{"name": "public", "namespace": "gateways"}]}
WITH_POOL = PUBLIC | {"pool": {"picker": "epp"}}


def serve(world: MemoryWorld, *kinds: str) -> None:
    served: dict[str, set[str]] = {}
    for kind in kinds:
        served.setdefault(KINDS[kind][0], set()).add(KINDS[kind][1])
    world.api.resources = {version: frozenset(plurals) for version, plurals in served.items()}


@contextlib.asynccontextmanager
async def begun(*kinds: str, gateway: dict[str, Any] | None = PUBLIC, **router: Any) -> AsyncIterator[MemoryWorld]:
    async with aiohttp.ClientSession() as session:
        world = MemoryWorld(session)
        serve(world, *kinds)
        world.api.put(GATEWAY, {"metadata": {"name": "public", "namespace": "gateways"}})
        world.write(router={"gateway": gateway} | router)
        await world.round()
        yield world


async def turn(world: MemoryWorld) -> None:
    await world.gateways.refresh()
    await world.round()


def answered(world: MemoryWorld, kind: str = ROUTE, status: str = "True", reason: str = "Accepted") -> None:
    """A controller says so."""
    body = world.api.objects[kind, *AT]
    conditions = [{"type": "Accepted", "status": status, "reason": reason, "message": "",
                   "observedGeneration": body["metadata"]["generation"]}]
    parents = [{"parentRef": {"name": "public", "namespace": "gateways"}, "conditions": conditions}]
    world.api.put(kind, body | {"status": {"parents": parents}})


def ready(world: MemoryWorld) -> tuple[str, str]:
    found = world.condition("GatewayReady")
    return (found["status"], found["reason"]) if found else ("", "")


async def told(world: MemoryWorld) -> list[str]:
    await world.events.flush()
    return [body["reason"] for at, body in world.api.objects.items() if at[0] == "Event" and "Gateway" in body["reason"]]


async def test_a_route_is_made_once_and_what_its_gateway_says_is_copied() -> None:
    async with begun(ROUTE, TLS) as world:
        await world.round()
        assert world.named(ROUTE) == {"qwen"}
        assert ready(world) == ("Unknown", "NotTold")
        answered(world)
        world.api.asked.clear()
        await turn(world)
        assert ready(world) == ("True", "Accepted")
        assert AT in world.woken, "nobody watches routes: who lists them wakes the service"
        await turn(world)
        writes = [each for each in world.api.asked if each[0] in ("apply", "patch", "delete", "create")]
        assert [each for each in writes if each[1] in KINDS] == [], "nothing differs, so nothing is written"


async def test_a_gateway_that_rejects_is_told_once_and_nothing_else_suffers() -> None:
    async with begun(ROUTE) as world:
        world.run_pods()
        await world.round()
        answered(world, status="False", reason="NotAllowedByListeners")
        await turn(world)
        await turn(world)
        assert ready(world) == ("False", "NotAccepted")
        assert world.condition("Degraded")["status"] == "False"
        assert world.condition("Progressing")["reason"] != "Stuck"
        assert world.condition("Stalled") == {}
        assert await told(world) == ["NotGatewayReady"]
        answered(world)
        await turn(world)
        assert ready(world) == ("True", "Accepted")
        assert await told(world) == ["NotGatewayReady", "GatewayReady"]


async def test_without_the_crds_everything_but_the_route_is_there() -> None:
    async with begun() as world:
        assert ready(world) == ("False", "CRDMissing")
        assert "install the CRDs of gateway.networking.k8s.io" in world.condition("GatewayReady")["message"]
        assert len(world.named("Pod")) == 3
        assert world.condition("Degraded")["status"] == "False"
        assert not world.named(ROUTE)
        assert world.backend.last is not None
        assert world.backend.last.failures == ()
        serve(world, ROUTE)
        await turn(world)
        assert world.named(ROUTE) == {"qwen"}, "they come later"
        assert AT in world.woken


async def test_crds_that_vanish_take_the_condition_and_nothing_else() -> None:
    async with begun(ROUTE) as world:
        answered(world)
        await turn(world)
        serve(world)
        del world.api.objects[ROUTE, *AT]
        world.api.asked.clear()
        await turn(world)
        assert ready(world) == ("False", "CRDMissing")
        assert world.condition("Degraded")["status"] == "False"
        assert not [each for each in world.api.asked if each[0] == "apply" and each[1] == ROUTE]
        serve(world, ROUTE)
        await turn(world)
        assert world.named(ROUTE) == {"qwen"}


async def test_a_crd_that_goes_between_a_turn_and_a_write_is_no_failure() -> None:
    async with begun() as world:
        world.api.fault = lambda verb, kind, name: ApiError(404, "NotFound", "page not found") if kind == ROUTE else None
        serve(world, ROUTE)
        world.gateways._troubles.pop(ROUTE)  # a turn saw it
        done = await world.round()
        assert done.failures == ()
        await turn(world)
        assert ready(world) == ("False", "CRDMissing")


@pytest.mark.parametrize("there", [(ROUTE,), (ROUTE, TLS)])
async def test_a_route_waits_for_its_pool(there: tuple[str, ...]) -> None:
    async with begun(*there, gateway=WITH_POOL) as world:
        assert not world.named(ROUTE)
        assert ready(world) == ("False", "CRDMissing")
        assert "inferencepools" in world.condition("GatewayReady")["message"]
        serve(world, ROUTE, POOL)
        await turn(world)
        assert world.named(ROUTE) == world.named(POOL) == {"qwen"}
        order = [each[1] for each in world.api.asked if each[0] == "apply" and each[1] in KINDS]
        assert order == [POOL, ROUTE]


async def test_a_route_to_routers_of_https_waits_for_the_policy_that_says_so() -> None:
    gateway = PUBLIC | {"tls": {"hostname": "qwen.internal"}}
    async with begun(ROUTE, gateway=gateway, tls={"secret": "certificate"}) as world:
        assert not world.named(ROUTE), "prompts would go in clear"
        serve(world, ROUTE, TLS)
        await turn(world)
        assert world.named(ROUTE) == world.named(TLS) == {"qwen"}


async def test_a_pool_goes_only_after_the_route_has_left_it() -> None:
    async with begun(ROUTE, POOL, gateway=WITH_POOL) as world:
        world.api.fault = lambda verb, kind, name: (
            ApiError(400, "Invalid", "a webhook says no") if (verb, kind) == ("apply", ROUTE) else None)
        world.write(router={"gateway": PUBLIC})
        await turn(world)
        assert world.named(POOL) == {"qwen"}, "the route still goes there"
        assert ready(world) == ("False", "Refused")
        world.api.fault = lambda *_: None
        world.now += AGAIN_S
        await turn(world)
        assert not world.named(POOL)
        (rule,) = world.api.objects[ROUTE, *AT]["spec"]["rules"]
        assert [each["kind"] for each in rule["backendRefs"]] == ["Service"]


async def test_what_the_api_server_refuses_is_said_tried_again_later_and_holds_nothing_up() -> None:
    async with begun() as world:
        world.api.fault = lambda verb, kind, name: (
            ApiError(403, "Forbidden", "admission webhook denied it") if (verb, kind) == ("apply", ROUTE) else None)
        serve(world, ROUTE)
        await turn(world)
        assert ready(world) == ("False", "Refused")
        assert "admission webhook denied it" in world.condition("GatewayReady")["message"]
        assert world.condition("Degraded")["status"] == "False"
        world.api.asked.clear()
        done = await world.round()
        assert done.failures == ()
        assert ("apply", ROUTE, "qwen") not in world.api.asked, "not in every round"
        world.now += AGAIN_S
        await world.round()
        assert ("apply", ROUTE, "qwen") in world.api.asked


async def test_a_route_of_somebody_else_is_left_alone() -> None:
    async with begun() as world:
        world.api.put(ROUTE, {"metadata": {"name": "qwen", "namespace": "team-a"}, "spec": {"mine": True}})
        serve(world, ROUTE)
        await turn(world)
        assert world.api.objects[ROUTE, *AT]["spec"] == {"mine": True}
        assert ready(world) == ("False", "NameTaken")
        assert world.condition("Degraded")["status"] == "False"


async def test_the_roles_of_a_release_before_are_said_and_nothing_is_written() -> None:
    async with aiohttp.ClientSession() as session:
        world = MemoryWorld(session)
        serve(world, ROUTE)
        world.api.fault = lambda verb, kind, name: ApiError(403, "Forbidden", f"cannot {verb}") if kind in KINDS else None
        world.write(router={"gateway": PUBLIC})
        done = await world.round()
        assert done.failures == ()
        assert ready(world) == ("False", "NotAllowed")
        assert not [each for each in world.api.asked if each[0] == "apply" and each[1] in KINDS]


async def test_an_api_server_that_says_nothing_of_its_kinds_is_no_verdict() -> None:
    async with aiohttp.ClientSession() as session:
        world = MemoryWorld(session)
        world.api.fault = lambda verb, kind, name: ApiError(0, "Timeout", "no answer") if kind == "discovery" else None
        world.write(router={"gateway": PUBLIC})
        await world.round()
        assert ready(world) == ("Unknown", "NotReached")
        world.api.fault = lambda *_: None
        world.api.put(GATEWAY, {"metadata": {"name": "public", "namespace": "gateways"}})
        serve(world, ROUTE)
        await turn(world)
        assert world.named(ROUTE) == {"qwen"}
        world.api.fault = lambda verb, kind, name: ApiError(0, "Timeout", "no answer") if verb in ("get", "list") else None
        await turn(world)
        assert ready(world) == ("Unknown", "NotTold"), "what was known goes on"


async def test_a_document_that_names_no_gateway_any_more_has_its_route_deleted() -> None:
    async with begun(ROUTE, POOL, gateway=WITH_POOL) as world:
        world.write()
        await turn(world)
        assert not world.named(ROUTE) | world.named(POOL)
        assert ready(world) == ("", "")
        world.api.asked.clear()
        await world.gateways.refresh()
        assert ("get", GATEWAY, "public") not in world.api.asked, "nobody names it"


async def test_the_route_stays_until_the_last_pod_of_a_deleted_service_has_gone() -> None:
    async with begun(ROUTE) as world:
        await world.gateways.refresh()
        world.backend.forget()
        world.cache.on_deleted(OWNER_KIND, world.api.objects.pop((OWNER_KIND, *AT)))
        await sweep(world.api, world.cache, *AT)  # type: ignore[arg-type]
        assert world.named(ROUTE) == {"qwen"}, "streams of what drains still come through it"
        for name in world.named("Pod"):
            world.cache.on_deleted("Pod", world.api.objects.pop(("Pod", "team-a", name)))
        await sweep(world.api, world.cache, *AT)  # type: ignore[arg-type]
        assert not world.named(ROUTE)


async def test_a_gateway_that_comes_or_goes_wakes_those_that_name_it() -> None:
    async with begun(ROUTE) as world:
        answered(world)
        await turn(world)
        gateway = world.api.objects.pop((GATEWAY, "gateways", "public"))
        world.woken.clear()
        await turn(world)
        assert AT in world.woken
        assert ready(world) == ("False", "NoParent")
        down = [{"type": "Programmed", "status": "False", "reason": "Invalid"}]
        world.api.put(GATEWAY, gateway | {"status": {"conditions": down}})
        await turn(world)
        assert ready(world) == ("False", "NotProgrammed")


async def test_the_first_of_many_services_looks_for_all() -> None:
    async with begun(ROUTE) as world:
        world.api.asked.clear()
        for number in range(50):
            await world.gateways.want(("team-a", f"other-{number}"), [("gateways", "public")])
        assert world.api.asked == []
        await world.gateways.refresh()
        assert len([each for each in world.api.asked if each[:2] == ("get", GATEWAY)]) == 1


async def test_a_kind_that_is_not_served_for_a_while_has_its_objects_back() -> None:
    """The version of a CRD that is turned off and on again: nothing was deleted, and nobody changed anything."""
    async with begun(ROUTE) as world:
        answered(world)
        await turn(world)
        serve(world)
        await turn(world)
        assert ready(world) == ("False", "CRDMissing")
        world.api.asked.clear()
        serve(world, ROUTE)
        await turn(world)
        assert ready(world) == ("True", "Accepted")
        assert ("apply", ROUTE, "qwen") not in world.api.asked, "it is there, as it should be"
        world.write()
        await turn(world)
        assert not world.named(ROUTE), "it is known, so it can be taken away"


async def test_a_kind_whose_list_never_comes_has_nothing_made_and_says_why() -> None:
    async with begun() as world:
        broken = ApiError(500, "InternalError", "conversion webhook failed")
        world.api.fault = lambda verb, kind, name: broken if (verb, kind) == ("list", ROUTE) else None
        serve(world, ROUTE)
        await turn(world)
        assert ready(world) == ("Unknown", "NotReached"), "it is not absent any more"
        assert "conversion webhook failed" in world.condition("GatewayReady")["message"]
        assert not world.named(ROUTE)
        world.api.fault = lambda *_: None
        await turn(world)
        assert world.named(ROUTE) == {"qwen"}
        world.api.fault = lambda verb, kind, name: broken if (verb, kind) == ("list", ROUTE) else None
        await turn(world)
        assert ready(world) == ("Unknown", "NotTold"), "what was known goes on"


async def test_what_does_not_answer_is_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    def lines(words: str) -> int:
        return len([each for each in caplog.records if words in each.getMessage()])

    async with begun(ROUTE) as world:
        no_answer = ApiError(0, "Timeout", "no answer")
        world.api.fault = lambda verb, kind, name: no_answer if "discovery" in kind or verb == "list" else None
        for _ in range(5):
            await world.gateways.refresh()
        assert lines("cannot tell what is served of gateway.networking.k8s.io/v1") == 1
        world.api.fault = lambda *_: None
        await world.gateways.refresh()
        world.api.fault = lambda verb, kind, name: no_answer if verb == "list" else None
        for _ in range(5):
            await world.gateways.refresh()
        assert lines("cannot list httproutes") == 1
        world.api.fault = lambda *_: None
        await world.gateways.refresh()
        world.api.fault = lambda verb, kind, name: no_answer if verb == "list" else None
        await world.gateways.refresh()
        assert lines("cannot list httproutes") == 2, "it was answered in between"


async def test_an_answer_that_nobody_thought_of_ends_one_turn_and_not_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    async with begun() as world:
        monkeypatch.setattr("xpyd_operator.kube.routes.gateways.GAP_S", 0.0)
        monkeypatch.setattr("xpyd_operator.kube.routes.gateways.POLL_S", 0.001)
        serve(world, ROUTE)
        nameless: list[dict[str, Any]] = [{"metadata": {"labels": {}}}]
        whole, turns = world.api.items, asyncio.Event()

        async def items(kind: str, namespace: str = "", **more: Any) -> dict[str, Any]:
            if nameless:
                return {"items": [nameless.pop()]}
            turns.set()
            return await whole(kind, namespace, **more)

        monkeypatch.setattr(world.api, "items", items)
        task = asyncio.create_task(world.gateways.run())
        try:
            async with asyncio.timeout(10):
                await turns.wait()
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_hundreds_of_gateways_are_looked_at_in_turn_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with begun(ROUTE) as world:
        for number in range(2 * PARENTS):
            await world.gateways.want(("team-a", f"other-{number}"), [("gateways", f"g-{number}")])
        asked: list[str] = []
        inside, most = 0, 0

        async def get(kind: str, namespace: str, name: str) -> dict[str, Any]:
            nonlocal inside, most
            inside, asked[:] = inside + 1, [*asked, name]
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1
            return {"metadata": {"name": name, "namespace": namespace, "resourceVersion": "1"}}

        monkeypatch.setattr(world.api, "get", get)
        await world.gateways.refresh()
        assert len(asked) == PARENTS
        assert most <= 8
        await world.gateways.refresh()
        await world.gateways.refresh()
        assert set(asked) == {"public", *(f"g-{number}" for number in range(2 * PARENTS))}
        assert world.gateways.parent(("gateways", "g-0")) is not None, "what was seen before is still known"


async def test_a_route_that_may_not_be_deleted_is_said_while_it_is_there() -> None:
    """Else clients would still come through a gateway that no document names."""
    async with begun(ROUTE) as world:
        world.api.fault = lambda verb, kind, name: (
            ApiError(403, "Forbidden", "cannot delete httproutes") if (verb, kind) == ("delete", ROUTE) else None)
        world.write()
        await turn(world)
        assert ready(world) == ("False", "Refused")
        assert "cannot delete httproutes" in world.condition("GatewayReady")["message"]
        assert world.condition("Degraded")["status"] == "False"
        world.api.fault = lambda *_: None
        world.now += AGAIN_S
        await world.round()
        assert not world.named(ROUTE)
        assert ready(world) == ("", "")


async def test_a_crd_that_is_being_deleted_is_no_refusal() -> None:
    async with begun() as world:
        ending = ApiError(405, "MethodNotAllowed", "create not allowed while custom resource definition is terminating")
        world.api.fault = lambda verb, kind, name: ending if (verb, kind) == ("apply", ROUTE) else None
        serve(world, ROUTE)
        await turn(world)
        assert ready(world) == ("Unknown", "Creating")
        world.api.fault = lambda *_: None
        await turn(world)
        assert world.named(ROUTE) == {"qwen"}, "another CRD of the name is not kept waiting"
