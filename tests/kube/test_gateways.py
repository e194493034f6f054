"""A service behind a gateway, on a real API server: CRDs absent, come, gone and turned off; what controllers say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from kube_client import Object
from kube_gateways import GATEWAY, POOL, ROUTE, TLS, GatewayStage, said
from kube_team import Team
from node_agent import Script

pytestmark = pytest.mark.timeout(1200)  # the first run on a machine builds Kubernetes
PUBLIC: Object = {"parentRefs": [{"name": "public"}]}
GOOD = (said("Accepted"), said("ResolvedRefs"))
NOT_FOLLOWED = {"Ready": "True", "Progressing": "False", "Degraded": "False"}


@pytest.fixture
async def stage(team: Team) -> AsyncIterator[GatewayStage]:
    """Without any CRD yet."""
    made = GatewayStage(team.kube, team.namespace)
    try:
        yield made
    finally:
        await made.end()


def routed(team: Team, gateway: Object | None = None, **router: Any) -> Object:
    return team.document(router={"gateway": gateway or PUBLIC} | router)


def uids(team: Team) -> set[str]:
    return {pod["metadata"]["uid"] for pod in team.pods()}


def unharmed(team: Team, before: set[str]) -> None:
    """A gateway concerns its own condition alone."""
    assert {kind: team.condition(kind)["status"] for kind in NOT_FOLLOWED} == NOT_FOLLOWED
    assert team.condition("Stalled")["status"] in ("", "False")
    assert uids(team) == before


async def begun(team: Team, stage: GatewayStage, *kinds: str) -> Object:
    """A service that serves, with a route to it."""
    await stage.serve(*(kinds or (ROUTE, GATEWAY)))
    await stage.make(GATEWAY, "public", spec={"gatewayClassName": "scripted"})
    await team.apply(routed(team))
    await team.wait_settled("1P1D")
    return await stage.wait(ROUTE, "a route is made")


async def test_without_crds_a_service_serves_and_its_route_is_made_when_they_come(team: Team, stage: GatewayStage) -> None:
    gateway: Object = {
        "parentRefs": [{"name": "public", "sectionName": "https"}, {"name": "inner", "namespace": "edge"}],
        "hostnames": ["chat.example.com"], "path": "/qwen"}
    await team.apply(routed(team, gateway))
    await team.wait_settled("1P1D")
    missing = await team.wait_condition("GatewayReady", "False", words=("CRDMissing", "httproutes"))
    assert "install the CRDs of gateway.networking.k8s.io" in missing["message"]
    await team.wait(lambda: team.events("NotGatewayReady"), "an Event says so")
    before = uids(team)

    await stage.serve(ROUTE, GATEWAY)
    route = await stage.wait(ROUTE, "they have come")
    group = {"group": "gateway.networking.k8s.io", "kind": "Gateway"}
    assert route["spec"]["parentRefs"] == [group | each for each in gateway["parentRefs"]]
    assert route["spec"]["hostnames"] == ["chat.example.com"]
    (rule,) = route["spec"]["rules"]
    (port,) = [each["port"] for each in team.of("Service")["qwen"]["spec"]["ports"] if each["name"] == "http"]
    assert rule["backendRefs"] == [{"group": "", "kind": "Service", "name": "qwen", "port": port, "weight": 1}]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/qwen"}}]
    said_so = await team.wait_condition("GatewayReady", "False", words=("NoParent", "/public (https) does not exist"))
    assert "Gateway edge/inner does not exist" in said_so["message"]
    unharmed(team, before)


async def test_the_condition_follows_what_a_controller_writes(team: Team, stage: GatewayStage) -> None:
    await begun(team, stage)
    await team.wait_condition("GatewayReady", "Unknown", words=("NotTold", "a controller for its class"))
    before = uids(team)
    steps: tuple[tuple[tuple[Object, ...], str, str, str], ...] = (
        (GOOD, "True", "Accepted", "accepted"),
        ((said("Accepted", "False", "NotAllowedByListeners", "no listener allows it"), said("ResolvedRefs")),
         "False", "NotAccepted", "NotAllowedByListeners: no listener allows it"),
        ((said("Accepted"), said("ResolvedRefs", "False", "BackendNotFound", "no Service")), "False", "RefsNotResolved",
         "BackendNotFound: no Service"),
        ((said("Accepted"), said("ResolvedRefs", "Unknown", "Pending")), "Unknown", "RefsNotResolved", "Pending"),
        (GOOD, "True", "Accepted", "accepted"),
    )
    for conditions, status, reason, words in steps:
        await stage.answer(ROUTE, *conditions)
        await team.wait_condition("GatewayReady", status, words=(reason, words))
        unharmed(team, before)
    rejected = [each["message"].partition(":")[0] for each in team.events("NotGatewayReady")]
    assert rejected.count("NotAccepted") == rejected.count("RefsNotResolved") == 1
    await team.wait(lambda: team.events("GatewayReady"), "an Event says that it is taken at last")

    await stage.answer(ROUTE, *GOOD, current=False)
    await team.wait_condition("GatewayReady", "Unknown", words=("NotTold",))
    await stage.answer(ROUTE, *GOOD)
    await stage.state(GATEWAY, {"conditions": [said("Programmed", "False", "AddressNotAssigned", "no address")]}, "public")
    await team.wait_condition("GatewayReady", "False", words=("NotProgrammed", "AddressNotAssigned: no address"))
    await stage.state(GATEWAY, {"conditions": [said("Programmed")]}, "public")
    await team.wait_condition("GatewayReady", "True", words=("accepted, programmed",))
    unharmed(team, before)


@pytest.mark.test_all
async def test_a_status_that_makes_no_sense_is_no_agreement_and_harms_nothing(team: Team, stage: GatewayStage) -> None:
    """A schema that lets anything pass, and whoever may write it."""
    await begun(team, stage)
    await team.wait_condition("GatewayReady", "Unknown", words=("NotTold",))
    before = uids(team)
    ours = {"parentRef": {"name": "public"}, "controllerName": "example.com/scripted"}
    for status, words in (("all is well", "nothing of the route"), ({"parents": {"public": True}}, "nothing of the route"),
                          ({"parents": [3, ours | {"conditions": "Accepted"}]}, "cannot be read")):
        await stage.answer(ROUTE, *GOOD)
        await team.wait_condition("GatewayReady", "True", words=("accepted",))
        await stage.state(ROUTE, status)
        await team.wait_condition("GatewayReady", "Unknown", words=("NotTold", words))
    others = [{"parentRef": {"name": f"other-{number}"}, "conditions": [said("Accepted", "False", "No")]}
              for number in range(300)]
    await stage.state(ROUTE, {"parents": [*others, ours | {"conditions": list(GOOD)}, {"parentRef": 3}]})
    await team.wait_condition("GatewayReady", "True", words=("accepted",))
    loud = said("Accepted", "False", "R" * 900, "\x1b[2J" + "long " * 5000)
    await stage.state(ROUTE, {"parents": [*others, ours | {"conditions": [loud]}]})
    found = await team.wait_condition("GatewayReady", "False", words=("NotAccepted",))
    assert found["message"].isprintable()
    assert len(found["message"]) <= 1000
    unharmed(team, before)


@pytest.mark.test_all
async def test_crds_that_are_deleted_take_the_route_and_nothing_else(team: Team, stage: GatewayStage) -> None:
    first = await begun(team, stage)
    await stage.answer(ROUTE, *GOOD)
    await team.wait_condition("GatewayReady", "True")
    before = uids(team)
    await stage.withdraw(ROUTE, GATEWAY)
    await team.wait_condition("GatewayReady", "False", words=("CRDMissing", "httproutes"))
    unharmed(team, before)
    await team.apply(team.document(decode=2, router={"gateway": PUBLIC}))
    await team.wait_settled("1P2D")
    assert before < uids(team), "it is looked after as ever"
    await stage.serve(ROUTE, GATEWAY)
    again = await stage.wait(ROUTE, "they are back")
    assert again["metadata"]["uid"] != first["metadata"]["uid"]
    await team.wait_condition("GatewayReady", "False", words=("NoParent",))


@pytest.mark.test_all
async def test_a_version_that_is_turned_off_and_on_has_the_same_route_afterwards(team: Team, stage: GatewayStage) -> None:
    route = await begun(team, stage)
    await stage.answer(ROUTE, *GOOD)
    await team.wait_condition("GatewayReady", "True")
    before = uids(team)
    await stage.serve(ROUTE, served=False)
    await team.wait_condition("GatewayReady", "False", words=("CRDMissing", "httproutes"))
    unharmed(team, before)
    await stage.serve(ROUTE)
    await team.wait_condition("GatewayReady", "True", words=("accepted",))
    same = await stage.wait(ROUTE, "it is back")
    assert same["metadata"]["uid"] == route["metadata"]["uid"]
    await team.apply(team.document())
    await stage.wait_gone(ROUTE)


async def test_a_gateway_comes_changes_and_goes_and_no_pod_is_replaced(team: Team, stage: GatewayStage) -> None:
    await team.apply(team.document())
    await team.wait_settled("1P1D")
    before = uids(team)
    await begun(team, stage)
    await team.wait_condition("GatewayReady", "Unknown", words=("NotTold",))
    unharmed(team, before)
    await team.apply(routed(team, PUBLIC | {"hostnames": ["chat.example.com"]}))
    await stage.wait(ROUTE, "it has the host name", lambda each: each["spec"].get("hostnames") == ["chat.example.com"])
    await team.wait_condition("GatewayReady", "Unknown", words=("NotTold",))
    unharmed(team, before)
    await stage.make(ROUTE, "somebody-elses", spec={"parentRefs": [{"name": "public"}]})
    await team.apply(team.document())
    await stage.wait_gone(ROUTE)
    await team.wait(lambda: team.current() and not team.condition("GatewayReady")["status"], "nothing is said of gateways")
    assert await stage.find(ROUTE, "somebody-elses") is not None
    unharmed(team, before)


async def test_what_a_route_needs_is_made_before_it_and_goes_after_it(team: Team, stage: GatewayStage) -> None:
    await stage.serve(ROUTE, TLS, GATEWAY)
    await stage.make(GATEWAY, "public", spec={"gatewayClassName": "scripted"})
    await team.apply(routed(team, PUBLIC | {"pool": {"picker": "lwepp"}}))
    await team.wait_settled("1P1D")
    await team.wait_condition("GatewayReady", "False", words=("CRDMissing", "inferencepools"))
    assert await stage.find(ROUTE) is None, "it would answer 500 to everybody"
    await stage.serve(POOL)
    route = await stage.wait(ROUTE, "the pool's CRD has come")
    pool = await stage.wait(POOL, "behind it")
    assert int(pool["metadata"]["resourceVersion"]) < int(route["metadata"]["resourceVersion"])
    assert route["spec"]["rules"][0]["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": POOL, "name": "qwen", "weight": 1}]
    assert pool["spec"]["endpointPickerRef"]["name"] == "lwepp"
    await stage.answer(ROUTE, *GOOD)
    await stage.answer(POOL, said("ResolvedRefs", "False", "InvalidExtensionRef", "no picker"))
    await team.wait_condition("GatewayReady", "False", words=("PoolNotAccepted", "InvalidExtensionRef: no picker"))

    await team.apply(routed(team))
    await stage.wait(ROUTE, "it goes to the Service",
                     lambda each: each["spec"]["rules"][0]["backendRefs"][0]["kind"] == "Service")
    await stage.wait_gone(POOL)
    await stage.answer(ROUTE, *GOOD)
    await team.wait_condition("GatewayReady", "True")


async def test_the_route_lasts_until_the_last_pod_of_a_deleted_service_has_gone(team: Team, stage: GatewayStage) -> None:
    await begun(team, stage)
    team.agent.script = lambda _: Script(drain_s=4.0)
    await team.delete()

    async def ended() -> bool:
        there = await stage.find(ROUTE) is not None
        pods = await team.kube.items("Pod", team.namespace)  # asked for last: one that is seen was there before, too
        assert there or not pods, "what drains still answers through the route"
        return not pods

    await stage.until(ended, "its pods have gone")
    await team.wait_nothing_left()
    await stage.wait_gone(ROUTE)
