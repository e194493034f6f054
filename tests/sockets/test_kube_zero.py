"""From no instances to one of each and back, with the operator's loop over a store in memory and a real router before
scripted engines: one wake, nobody lost, nothing left.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import router_fleet
from beats import beat, bye
from kube_keys import key, secret_name, store_master, volume
from memory_world import MemoryWorld
from router_fleet import Answer, RouterFleet, fleet

from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.client.cache import OWNER_KIND
from xpyd_operator.kube.podstate.facts import facts
from xpyd_operator.kube.service.backend import KubeBackend
from xpyd_operator.loop import converge
from xpyd_operator.plan.round import Round
from xpyd_operator.render import labels
from xpyd_sidecar.contract.ids import Incarnation, Role, State

ROUNDS = 20
FIRST_S = 2000.0
"""Idle time that is enough: more than ``idleTimeout``, and than three starts."""


class ZeroWorld:
    """A service that may have no instances: its router runs here, its engines are scripted and come with their pods."""

    def __init__(self, world: MemoryWorld, f: RouterFleet) -> None:
        self.world, self.f = world, f
        self.wake = asyncio.Event()
        self.lives = 0
        self.alive: dict[str, tuple[Role, str]] = {}
        """Instances that beat: role and life."""

    def begin(self, **spec: Any) -> None:
        store_master(self.world.api, 1)
        scaling = {"scaling": {"min": 0, "max": 4}, "resources": {}}
        self.world.write(**{"prefill": scaling, "decode": scaling, "planner": {"idleTimeout": "10m"},
                            "router": {"placement": "deployment", "hold": "10m"}} | spec)
        self.world.cache.on_seen("Pod", self.world.api.put("Pod", self.router_pod("r0", self.f.router.admin_port)))
        self.lead()

    def lead(self) -> None:
        """An operator that leads from now on."""
        entry = self.world.cache.get(OWNER_KIND, "team-a", "qwen")
        assert entry is not None
        self.world.backend = KubeBackend(self.world.shared, entry, self.wake.set)
        self.world.backend._fleets._timeout_s = 10.0

    async def rest(self) -> Round:
        """An operator begins, and the service is at rest with no instances; the last round."""
        self.begin()
        await self.round()
        return await self.round()

    async def wake_by_request(self) -> asyncio.Task[Answer]:
        """A request at a service at rest, of which the operator has heard."""
        await self.rest()
        task = await self.ask()
        await self.woken()
        return task

    def router_pod(self, name: str, port: int) -> dict[str, Any]:
        marks = {labels.SERVICE: "qwen", labels.COMPONENT: labels.ROUTERS}
        owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "qwen-router", "uid": "set", "controller": True}
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:05:00Z"}
        ports = [{"name": labels.ADMIN, "containerPort": port}]
        return {"metadata": {"name": name, "namespace": "team-a", "labels": marks, "ownerReferences": [owner]},
                "spec": {"containers": [{"name": labels.ROUTERS, "ports": ports}], "volumes": [volume(secret_name())]},
                "status": {"phase": "Running", "podIP": "127.0.0.1", "conditions": [ready],
                           "containerStatuses": [{"name": labels.ROUTERS, "ready": True, "restartCount": 0,
                                                  "state": {"running": {"startedAt": "2026-01-01T00:00:05Z"}}}]}}

    async def round(self) -> Round:
        self.world.now += 6.0
        last = self.world.backend.last.desired if self.world.backend.last else None
        return await converge(self.world.backend, self.world.now, last=last)

    def pods(self) -> dict[str, dict[str, Any]]:
        found = {at[2]: body for at, body in self.world.api.objects.items() if at[0] == "Pod"}
        return {name: body for name, body in found.items() if name.startswith("qwen-e")}

    def replicas(self) -> tuple[int, int]:
        first, second = (int(self.world.api.objects["DisaggPool", "team-a", f"qwen-{role}"]["spec"]["replicas"])
                         for role in Role)
        return first, second

    def drain(self) -> None:
        """Who is being deleted says that it takes nothing new."""
        for name, body in self.pods().items():
            if body["metadata"].get("deletionTimestamp") and name in self.alive:
                self.tell(name, State.DRAINING)

    def run(self) -> None:
        """Kubelets and agents: what was made runs and beats, what was deleted says goodbye and is gone."""
        self.world.run_pods()
        there = self.pods()
        for name in [each for each in self.alive if each not in there]:
            self.f.context.watch.on_message(bye(name, incarnation=Incarnation(self.alive.pop(name)[1])))
        for name, body in there.items():
            if name not in self.alive:
                self.lives += 1
                self.alive[name] = (Role(body["metadata"]["labels"][labels.ROLE]), f"life-{self.lives}")
                self.tell(name, State.READY)

    def tell(self, name: str, state: State) -> None:
        role, life = self.alive[name]
        engine = self.f.p[0] if role is Role.PREFILL else self.f.d[0]
        self.f.context.watch.on_message(beat(
            name, role, engine.address, interval_s=6000.0, state=state, incarnation=Incarnation(life),
            seq=2 if state is State.DRAINING else 1))

    def pass_idle(self, seconds: float) -> None:
        """So long nothing happens; answers of before are forgotten."""
        fleets = self.world.backend._fleets
        fleets.close()
        fleets._fleet = None
        self.f.context.used -= seconds
        self.world.now += seconds

    async def ask(self) -> asyncio.Task[Answer]:
        before = len(self.f.context.hold)
        task = asyncio.create_task(self.f.complete())
        await self.f.wait(lambda: len(self.f.context.hold) > before or task.done(), "it to be held or served")
        return task

    async def woken(self) -> float:
        """Until the operator knows that somebody is held; seconds."""
        began = asyncio.get_running_loop().time()
        await asyncio.wait_for(self.wake.wait(), 30.0)
        self.wake.clear()
        return asyncio.get_running_loop().time() - began

    async def polled(self) -> None:
        await self.f.wait(lambda: len(self.f.router.wakes) > 0, "a poll to be open")

    async def up(self) -> None:
        """Rounds until one of each runs."""
        for _ in range(3):
            await self.round()
            self.run()
        assert (self.replicas(), sorted(role for role, _ in self.alive.values())) == ((1, 1), sorted(Role))

    async def down(self, idle_s: float) -> None:
        """Idle for so long, and rounds until pods are told to end."""
        await self.f.wait_quiet()
        self.pass_idle(idle_s)
        await self.round()
        assert self.replicas() == (0, 0)
        await self.round()
        assert all(body["metadata"].get("deletionTimestamp") for body in self.pods().values())
        self.drain()


@pytest.fixture
async def zero(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ZeroWorld]:
    monkeypatch.setattr(router_fleet, "KEY", key())
    async with fleet(1, 1, hold_s=600.0, wakes=True, model="tiny") as f, aiohttp.ClientSession() as session:
        for name in ("p0", "d0"):
            f.context.watch.on_message(bye(name))
        await f.wait(lambda: f.context.roster.is_settled(f.context.loop.time()), "a settled router")
        made = ZeroWorld(MemoryWorld(session), f)
        yield made
        with contextlib.suppress(AttributeError):
            await made.world.backend.close()


async def test_rounds_from_none_to_one_of_each_and_back(zero: ZeroWorld) -> None:
    await zero.rest()
    assert (zero.replicas(), zero.pods()) == ((0, 0), {})
    await zero.polled()
    left = {at for at in zero.world.api.objects if at[0] != "Event"}
    served, idle_s, longest = 0, FIRST_S, 0.0
    for number in range(ROUNDS):
        tasks = [await zero.ask() for _ in range(3)]
        longest = max(longest, await zero.woken())
        assert not any(task.done() for task in tasks)
        await zero.up()
        tasks.append(await zero.ask())
        assert [(await task).status for task in tasks] == [200] * 4
        served += 4
        idle_s += 700.0  # longer than any gap before, of which none is then known that came back soon
        await zero.down(idle_s)
        if number % 10 == 0:  # a request during the last step
            last = await zero.ask()
            assert not last.done()
            await zero.polled() if not zero.wake.is_set() else None
            await zero.woken()
            zero.run()
            await zero.up()
            assert (await last).status == 200
            served += 1
            idle_s += 700.0
            await zero.down(idle_s)
        zero.run()
        await zero.round()
        assert (zero.pods(), zero.alive) == ({}, {})
        await zero.polled()
    assert served == ROUNDS * 4 + -(-ROUNDS // 10)
    assert longest < 5.0, "a poll that is open is answered at once"
    assert {at for at in zero.world.api.objects if at[0] != "Event"} == left
    f = zero.f
    hold = f.context.hold
    assert (len(hold), hold.bytes, hold.wakers, f.context.generating) == (0, 0, 0, 0)
    assert not f.context.roster.members()
    assert len(zero.world.backend._planner._zero._caller) == 1


async def test_many_requests_are_one_wake_and_another_leader_goes_on(zero: ZeroWorld) -> None:
    await zero.rest()
    await zero.world.backend.close()
    await zero.f.wait(lambda: not len(zero.f.router.wakes), "the leader's polls to end with it")
    tasks = [await zero.ask() for _ in range(20)]
    zero.lead()
    await zero.round()
    await zero.woken()
    zero.world.api.asked.clear()
    await zero.up()
    assert [(await task).status for task in tasks] == [200] * 20
    assert [each for each in zero.world.api.asked if each[:2] == ("patch", "DisaggPool")] == [
        ("patch", "DisaggPool", "qwen-prefill"), ("patch", "DisaggPool", "qwen-decode")]


async def test_a_write_that_fails_leaves_decode_where_it_was_and_is_done_again(zero: ZeroWorld) -> None:
    task = await zero.wake_by_request()
    zero.world.api.fault = lambda verb, kind, name: (
        ApiError(500, "InternalError", "no") if (verb, name) == ("patch", "qwen-decode") else None)
    done = await zero.round()
    assert done.failures
    assert zero.replicas() == (1, 0)
    assert not zero.pods(), "prefill alone serves nobody"
    zero.world.api.fault = lambda verb, kind, name: None
    await zero.woken()
    await zero.up()
    assert (await task).status == 200


async def test_a_quota_that_refuses_is_told_to_who_waits(zero: ZeroWorld) -> None:
    task = await zero.wake_by_request()
    zero.world.api.fault = lambda verb, kind, name: (
        ApiError(403, "Forbidden", "exceeded quota: gpus, limited: 0") if (verb, kind) == ("create", "Pod") else None)
    for _ in range(3):
        await zero.round()
    answer = await asyncio.wait_for(task, 20.0)
    assert answer.status == 503
    assert "exceeded quota: gpus, limited: 0" in answer.json["error"]["message"]
    zero.world.api.fault = lambda verb, kind, name: None
    for _ in range(20):
        await zero.round()
        zero.run()
        if zero.alive:
            break
    assert (await zero.f.complete()).status == 200, "it is over when the quota is"


async def test_where_a_quota_has_one_place_decode_has_it_and_serves(zero: ZeroWorld) -> None:
    task = await zero.wake_by_request()
    zero.world.api.fault = lambda verb, kind, name: (
        ApiError(403, "Forbidden", "exceeded quota: gpus, limited: 1") if (verb, kind) == ("create", "Pod") and zero.pods()
        else None)
    for _ in range(3):
        await zero.round()
        zero.run()
    assert [role for role, _ in zero.alive.values()] == [Role.DECODE]
    assert (await asyncio.wait_for(task, 20.0)).status == 200


async def test_a_router_that_does_not_answer_or_has_work_keeps_instances(zero: ZeroWorld) -> None:
    task = await zero.wake_by_request()
    await zero.up()
    assert (await task).status == 200
    zero.world.cache.on_seen("Pod", zero.world.api.put("Pod", zero.router_pod("r1", 1)))  # nobody listens there
    zero.pass_idle(FIRST_S)
    await zero.round()
    assert zero.replicas() == (1, 1)
    body = zero.world.api.objects.pop(("Pod", "team-a", "r1"))
    zero.world.cache.on_deleted("Pod", body)
    zero.f.context.generating = 1
    zero.pass_idle(FIRST_S)
    await zero.round()
    assert zero.replicas() == (1, 1)
    zero.f.context.generating = 0
    zero.pass_idle(FIRST_S)
    await zero.round()
    assert zero.replicas() == (0, 0)


async def test_a_service_without_instances_is_ready_and_says_so(zero: ZeroWorld) -> None:
    done = await zero.rest()
    ready = next(each for each in done.status.conditions if each.type == "Ready")
    assert (ready.status, ready.reason) == ("True", "AtZero")
    assert (done.status.wanted, done.plan.actions) == ("0P0D", ())
    entry = zero.world.cache.get("Pod", "team-a", "r0")
    assert entry is not None
    assert entry.derive(facts).component == labels.ROUTERS
