"""Pods change their role: a store in memory, an agent on a loopback address, and what a router would say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kube_documents import document, pod
from memory_api import MemoryApi

from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.client.cache import OWNER_KIND, WatchCache
from xpyd_operator.kube.podstate.facts import Facts, facts
from xpyd_operator.kube.routers import calls
from xpyd_operator.kube.routers.switches import Switches
from xpyd_operator.plan.actions import Switch
from xpyd_operator.render import labels
from xpyd_sidecar.contract import assignment, signing
from xpyd_sidecar.contract.assignment import Assignment
from xpyd_sidecar.contract.fleet import Fleet, FleetInstance
from xpyd_sidecar.contract.ids import Fingerprint, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.membership import Load

KEY = ServiceKey(bytes(range(32)))


def key_of(pod: Facts) -> ServiceKey | None:
    return KEY


NAME = InstanceName("qwen-e2")
TO_PREFILL = Switch(NAME, Role.PREFILL, 2, "asked for")


class World:
    """``told``: what the agent took; ``status``: what it answers."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.api, self.cache = MemoryApi(), WatchCache()
        self.told: list[tuple[str, bytes]] = []
        self.status = 200
        self.session = session
        self.cache.on_seen(OWNER_KIND, self.api.put(OWNER_KIND, document()))
        body = pod(2, labelled={labels.ROSTER: labels.YES, labels.ROUTER: labels.YES})
        body["status"]["podIP"] = "127.0.0.1"
        self.cache.on_seen("Pod", self.api.put("Pod", body))

    def switches(self) -> Switches:
        """Of an operator that has just begun."""
        owner = self.cache.get(OWNER_KIND, "team-a", "qwen")
        assert owner is not None
        return Switches(self.api, self.cache, owner, self.session, timeout_s=5.0)  # type: ignore[arg-type]

    @property
    def metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = self.api.objects["Pod", "team-a", NAME]["metadata"]
        return found

    async def answer(self, request: web.Request) -> web.Response:
        self.told.append((request.headers.get(signing.HEADER, ""), await request.read()))
        return web.Response(status=self.status)


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    async with aiohttp.ClientSession() as session:
        made = World(session)
        app = web.Application()
        app.add_routes([web.post(assignment.PATH, made.answer)])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        monkeypatch.setattr(calls, "AGENT_PORT", runner.addresses[0][1])
        yield made
        await runner.cleanup()


def heard(role: Role, epoch: int) -> Fleet:
    known = (NAME, role, epoch, State.READY, Incarnation("i"), Fingerprint("f"))
    each = FleetInstance(*known, (), (), "m", Load(), False, 0, 0.1)
    return Fleet(ServiceName("qwen"), "r0", 9.0, True, (each,))


async def test_the_annotation_comes_first_and_the_label_last(world: World) -> None:
    switches = world.switches()
    await switches.assign(TO_PREFILL, key_of, 1000.0)
    assert assignment.decode(world.metadata["annotations"][labels.ASSIGNMENT]) == Assignment(Role.PREFILL, 2, 1000.0)
    assert world.metadata["labels"][labels.ROLE] == "decode"
    assert not {labels.ROSTER, labels.ROUTER} & world.metadata["labels"].keys(), "it routes no more"
    [(signed, raw)] = world.told
    assert signed, "an agent takes no call without"
    assert assignment.decode(raw) == Assignment(Role.PREFILL, 2, 1000.0)
    entry = world.cache.get("Pod", "team-a", NAME)
    assert entry is not None
    fact = entry.derive(facts)
    assert (fact.role, fact.switching) == (Role.PREFILL, True)

    await switches.reconcile(heard(Role.DECODE, 1), key_of)
    assert (len(world.told), world.metadata["labels"][labels.ROLE]) == (2, "decode"), "told once more, the label waits"
    await switches.reconcile(heard(Role.PREFILL, 2), key_of)
    assert world.metadata["labels"][labels.ROLE] == "prefill"
    world.api.asked.clear()
    await switches.reconcile(heard(Role.PREFILL, 2), key_of)
    assert (world.api.asked, len(world.told)) == ([], 2), "nothing more to do"


async def test_an_operator_that_begins_in_the_middle_goes_on(world: World) -> None:
    world.status = 503
    await world.switches().assign(TO_PREFILL, key_of, 1000.0)
    world.status = 200
    again = world.switches()
    await again.reconcile(None, key_of)
    assert len(world.told) == 2
    await world.switches().reconcile(heard(Role.PREFILL, 2), key_of)
    assert world.metadata["labels"][labels.ROLE] == "prefill"


async def test_an_agent_that_cannot_be_told_is_no_failure_and_said_once(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calls, "AGENT_PORT", 1)
    switches = world.switches()
    await switches.assign(TO_PREFILL, key_of, 1000.0)
    for _ in range(3):
        await switches.reconcile(None, key_of)
    assert caplog.text.count("was not told its role") == 1
    await switches.reconcile(heard(Role.PREFILL, 2), key_of)
    assert world.metadata["labels"][labels.ROLE] == "prefill", "its volume told it"


async def test_what_has_changed_meanwhile_is_no_error_and_tells_nobody(world: World) -> None:
    world.api.fault = lambda verb, *_: ApiError(409, "Conflict", "changed") if verb == "patch" else None
    await world.switches().assign(TO_PREFILL, key_of, 1000.0)
    world.api.fault = lambda verb, *_: ApiError(404, "NotFound", "gone") if verb == "patch" else None
    await world.switches().assign(TO_PREFILL, key_of, 1000.0)
    assert not world.told
    assert world.cache.get("Pod", "team-a", NAME) is None
    await world.switches().assign(TO_PREFILL, key_of, 1000.0)
    await world.switches().reconcile(heard(Role.PREFILL, 2), key_of)


def test_an_annotation_that_a_person_broke_counts_for_nothing() -> None:
    body = pod(2, annotations={labels.ASSIGNMENT: "prefill please"})
    fact = facts(body)
    assert (fact.role, fact.told, fact.switching) == (Role.DECODE, None, False)


async def test_of_several_pods_the_leader_is_told_and_the_labels_of_all_follow_its(world: World) -> None:
    for index in range(2):
        body = pod(2, name=f"{NAME}-{index}", uid=f"pod-2-{index}")
        body["status"]["podIP"] = "127.0.0.1"
        world.cache.on_seen("Pod", world.api.put("Pod", body))
    world.cache.on_deleted("Pod", world.api.objects.pop(("Pod", "team-a", NAME)))

    def roles() -> list[str]:
        pods = [world.api.objects["Pod", "team-a", f"{NAME}-{index}"] for index in range(2)]
        return [each["metadata"]["labels"][labels.ROLE] for each in pods]

    switches = world.switches()
    await switches.assign(TO_PREFILL, key_of, 1000.0)
    await switches.reconcile(heard(Role.DECODE, 1), key_of)
    assert (len(world.told), roles()) == (2, ["decode", "decode"])
    assert "annotations" not in world.api.objects["Pod", "team-a", f"{NAME}-1"]["metadata"]
    await switches.reconcile(heard(Role.PREFILL, 2), key_of)
    await world.switches().reconcile(heard(Role.PREFILL, 2), key_of)  # an operator that begins in the middle
    assert roles() == ["prefill", "prefill"]
    world.api.asked.clear()
    await switches.reconcile(heard(Role.PREFILL, 2), key_of)
    assert world.api.asked == []
