"""The planner over the loop and a store in memory: a load step sets the pools within one interval, and says why."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import msgspec
import pytest
from kube_documents import document, service
from kube_keys import master, turns
from memory_api import MemoryApi
from planner_traffic import PROMPT, Traffic, counted, instance

from xpyd_operator.kube.client.cache import OWNER_KIND, Entry, WatchCache
from xpyd_operator.kube.client.events import Events
from xpyd_operator.kube.client.metrics import Metrics
from xpyd_operator.kube.gangs.gangs import Gangs
from xpyd_operator.kube.gangs.topology import Topology
from xpyd_operator.kube.routes.gateways import Gateways
from xpyd_operator.kube.service.backend import KubeBackend
from xpyd_operator.kube.service.shared import SharedParts
from xpyd_operator.kube.settings import OperatorSettings
from xpyd_operator.loop import converge
from xpyd_operator.plan.desired import Revision
from xpyd_operator.plan.observed import Instance, Phase
from xpyd_operator.plan.planner.run import Planning
from xpyd_sidecar.contract.fleet import Fleet, FleetInstance
from xpyd_sidecar.contract.ids import Incarnation, InstanceName, Role, ServiceName
from xpyd_sidecar.contract.membership import Drafts, Load

INTERVAL_S = 30.0


class World:
    def __init__(self, session: aiohttp.ClientSession, mode: str) -> None:
        self.api, self.cache, self.now, self.metrics = MemoryApi(), WatchCache(), time.time(), Metrics()
        settings = OperatorSettings(sidecar_image="sidecar:1", fleet_timeout_s=0.2)
        self.events = Events(self.api, self.metrics)  # type: ignore[arg-type]
        self.said: list[tuple[str, str]] = []
        self.events.emit = self._say  # type: ignore[method-assign]
        gangs, topology = Gangs(self.api, settings), Topology(self.api)  # type: ignore[arg-type]
        shared = SharedParts(  # type: ignore[arg-type]
            self.api, self.cache, settings, self.events, session, lambda: self.now, master(self.api), turns(self.cache),
            gangs, topology, Gateways(self.api, self.cache, (), lambda *_: None), self.metrics)
        body = document(
            prefill={"scaling": {"min": 1, "max": 8}}, decode={"scaling": {"min": 1, "max": 4}},
            limits={"maxInstances": 9},
            planner={"mode": mode, "slo": {"ttftP95": "3s", "tpotP95": "60ms"}, "interval": "30s"})
        self.cache.on_seen(OWNER_KIND, self.api.put(OWNER_KIND, body))
        entry = self.cache.get(OWNER_KIND, "team-a", "qwen")
        assert entry is not None
        self.backend = KubeBackend(shared, entry)
        self.traffic = Traffic()
        planner = self.backend._planner
        self.backend._fleets = planner._fleets = self.traffic  # type: ignore[assignment]

    def _say(self, about: Entry, severity: Any, reason: str, message: str) -> None:
        self.said.append((reason, message))

    async def interval(self) -> None:
        for _ in range(6):
            self.now += INTERVAL_S / 6
            self.traffic.go_on(self.now)
            last = self.backend.last.desired if self.backend.last else None
            done = await converge(self.backend, self.now, last=last)
            assert done.failures == ()
        await self.backend.close()

    def replicas(self, role: str) -> int:
        return int(self.api.objects["DisaggPool", "team-a", f"qwen-{role}"]["spec"]["replicas"])

    def plan(self) -> str:
        return str(self.api.objects[OWNER_KIND, "team-a", "qwen"]["status"].get("plan", ""))

    def decisions(self) -> str:
        lines = self.metrics.text().decode().splitlines()
        return " ".join(line for line in lines if line.startswith("xpyd_operator_planner_decisions_total{"))


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


async def test_auto_answers_a_step_within_one_interval_and_says_why(session: aiohttp.ClientSession) -> None:
    world = World(session, "auto")
    world.traffic.rate = 3.0
    for _ in range(6):
        await world.interval()
    before = world.replicas("prefill")
    world.traffic.rate = 20.0
    await world.interval()
    assert world.replicas("prefill") > before
    assert "planner (auto): " in world.plan()
    await world.interval()
    assert "20.0 requests/s of 2000 prompt and 100 output tokens" in world.plan()
    told = [words for reason, words in world.said if reason == "Planned"]
    assert f"to {world.replicas('prefill')}P" in told[-1]
    assert 'kind="add",mode="auto"' in world.decisions()
    assert {each[2] for each in world.api.asked if each[:2] == ("patch", "DisaggPool")} >= {"qwen-prefill"}


async def test_a_round_that_went_to_zero_is_not_overruled_by_an_older_plan(session: aiohttp.ClientSession) -> None:
    world = World(session, "auto")
    world.traffic.rate = 20.0
    world.backend._planner._zero.scale = AsyncMock(return_value=True)  # type: ignore[method-assign]
    for _ in range(6):
        await world.interval()
    assert world.decisions() == ""
    assert not [each for each in world.api.asked if each[:2] == ("patch", "DisaggPool")]


async def test_observe_says_what_it_would_do_once_and_writes_no_pool(session: aiohttp.ClientSession) -> None:
    world = World(session, "observe")
    world.traffic.rate = 20.0
    for _ in range(6):
        await world.interval()
    assert (world.replicas("prefill"), world.replicas("decode")) == (1, 1)
    assert "planner (observe): 1P1D to " in world.plan()
    assert 1 <= len([words for reason, words in world.said if reason == "WouldPlan"]) <= 3
    assert not [each for each in world.api.asked if each[:2] == ("patch", "DisaggPool")]


async def test_a_suspended_service_is_not_planned_and_the_planner_begins_anew(session: aiohttp.ClientSession) -> None:
    world = World(session, "auto")
    world.traffic.rate = 3.0
    for _ in range(3):
        await world.interval()
    counts, decisions = (world.replicas("prefill"), world.replicas("decode")), world.decisions()
    body = world.api.objects[OWNER_KIND, "team-a", "qwen"]

    def set_suspend(to: bool) -> None:
        metadata = body["metadata"] | {"generation": 2 + (not to)}
        world.cache.on_seen(OWNER_KIND, world.api.put(OWNER_KIND, body | {
            "metadata": metadata, "spec": body["spec"] | {"suspend": to}}))
    set_suspend(to=True)
    world.traffic.rate = 20.0
    for _ in range(3):
        await world.interval()
    assert ((world.replicas("prefill"), world.replicas("decode")), world.decisions()) == (counts, decisions)
    assert "planner" not in world.plan()
    set_suspend(to=False)
    await world.interval()
    assert world.decisions() == decisions, "what it knew is of another time"


async def test_off_says_and_does_nothing(session: aiohttp.ClientSession) -> None:
    world = World(session, "disabled")
    world.traffic.rate = 20.0
    await world.interval()
    await world.interval()
    assert "planner" not in world.plan()
    assert world.decisions() == ""


async def test_a_router_that_was_started_again_counts_from_zero_and_nothing_is_negative() -> None:
    from xpyd_operator.plan.planner.gather import Gather

    gather, traffic = Gather(), Traffic()
    traffic.arrivals = 100
    assert gather.figures({"r0": traffic.fleet()}, 10.0) is None
    traffic.arrivals = 160
    first = gather.figures({"r0": traffic.fleet()}, 40.0)
    assert first is not None
    assert (first.arrivals, first.ended, first.over_s) == (60, 60, 30.0)
    assert first.arrived_tokens == pytest.approx(60 * PROMPT)  # sizes say half of it
    assert first.ttft_p95 == pytest.approx(0.6, rel=0.05)
    traffic.arrivals = 7
    fresh = msgspec.structs.replace(traffic.fleet(), totals=msgspec.structs.replace(traffic.fleet().totals, since=50.0))
    second = gather.figures({"r0": fresh}, 70.0)
    assert second is not None
    assert second.arrivals == 7
    assert gather.figures({}, 100.0) is None


def drafting(name: str, life: str, drafts: Drafts | None, role: Role = Role.DECODE) -> FleetInstance:
    made = instance(name, role, 4)
    return msgspec.structs.replace(made, incarnation=Incarnation(life), load=Load(running=4, drafts=drafts))


def test_tokens_of_a_step_are_those_of_decode_within_the_interval() -> None:
    from xpyd_operator.plan.planner.gather import Gather

    gather, now = Gather(), 0.0

    def told(*instances: FleetInstance) -> float:
        nonlocal now
        now += 30.0
        fleet = Fleet(ServiceName("qwen"), "r0", 10.0, settled=True, instances=instances, totals=counted(int(now)))
        figures = gather.figures({"r0": fleet}, now)
        return figures.tokens_per_step if figures is not None else 0.0

    prefill = drafting("p0", "a", Drafts(9, 0, 900), Role.PREFILL)
    assert told(prefill, drafting("d0", "a", Drafts(900, 300, 1000))) == 0.0, "there was nothing before it"
    assert told(prefill, drafting("d0", "a", Drafts(900, 300, 1000))) == 1.0, "nothing was generated yet"
    assert told(prefill, drafting("d0", "a", Drafts(1500, 700, 1600)), drafting("d1", "x", Drafts(9, 9, 10))) == 3.0
    assert told(prefill, drafting("d0", "a", Drafts(1800, 900, 1900)), drafting("d1", "x", Drafts(99, 9, 110))) == 2.0
    assert told(prefill, drafting("d0", "b", Drafts(3, 0, 2)), drafting("d1", "x", Drafts(99, 9, 110))) == 2.0, "as before"
    assert told(prefill, drafting("d0", "b", Drafts(30, 0, 22))) == 1.0, "another life counts from zero"
    assert told(prefill, drafting("d0", "c", None)) == 1.0


def test_cold_starts_are_learned() -> None:
    planning = Planning()
    name = InstanceName("qwen-e0")
    for at, phase in ((0.0, Phase.STARTING), (40.0, Phase.STARTING), (90.0, Phase.READY)):
        planning.observe(None, (Instance(name, 0, Role.DECODE, Revision("r"), phase),), at)
    assert planning._cold_s == 90.0


def test_a_forecast_reaches_as_far_as_a_cold_start_takes() -> None:
    planning, traffic, now = Planning(), Traffic(), 1000.0
    one = service(prefill={"scaling": {"min": 1, "max": 8}}, decode={"scaling": {"min": 1, "max": 4}},
                  planner={"mode": "observe", "slo": {"ttftP95": "3s", "tpotP95": "60ms"}, "interval": "30s"})
    traffic.rate = 5.0

    def sentence() -> str:
        nonlocal now
        now += INTERVAL_S
        traffic.go_on(now)
        planning.observe(traffic.fleet(), (), now)
        said = planning.conclude(one, {"r0": traffic.fleet()}, (1, 1), now)
        return said.sentence if said is not None else ""

    assert sentence() == ""
    assert " in 180 s" in sentence(), "none was seen yet"
    name = InstanceName("qwen-e0")
    for at, phase in ((0.0, Phase.STARTING), (60.0, Phase.READY)):
        planning.observe(None, (Instance(name, 0, Role.DECODE, Revision("r"), phase),), at)
    assert " in 60 s" in sentence()
