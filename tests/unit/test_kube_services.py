"""One task per service: begun, woken, kept apart and ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from kube_documents import document
from memory_api import MemoryApi

from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.client.cache import OWNER_KIND, WatchCache
from xpyd_operator.kube.client.metrics import Metrics
from xpyd_operator.kube.service.services import Services
from xpyd_operator.kube.settings import OperatorSettings
from xpyd_operator.render.labels import SERVICE, SERVICE_UID


class World:
    def __init__(self, **settings: Any) -> None:
        self.api, self.cache, self.metrics = MemoryApi(), WatchCache(), Metrics()
        made = OperatorSettings(sidecar_image="sidecar:1", **({"resync_s": 0.3, "gap_s": 0.02} | settings))
        self.services = Services(self.api, self.cache, made, self.metrics)  # type: ignore[arg-type]

    def write(self, name: str = "qwen", *, wake: bool = True, **metadata: Any) -> None:
        body = document(name)
        body["metadata"] |= {"uid": f"uid-of-{name}"} | metadata
        self.cache.on_seen(OWNER_KIND, self.api.put(OWNER_KIND, body))
        if wake:
            self.services.wake("team-a", name)

    def remove(self, name: str = "qwen") -> None:
        body = self.api.objects.pop((OWNER_KIND, "team-a", name))
        gone = body | {"metadata": body["metadata"] | {"resourceVersion": "10000000"}}
        self.cache.on_deleted(OWNER_KIND, gone)
        self.services.wake("team-a", name)

    def collect(self, kind: str) -> None:
        """As the garbage collector, once all of this kind have ended."""
        for at in [at for at in self.api.objects if at[0] == kind]:
            body = self.api.objects.pop(at)
            self.cache.on_deleted(kind, body)
            self.services.wake("team-a", body["metadata"]["labels"][SERVICE])

    def left(self) -> set[tuple[str, str]]:
        return {(at[0], at[2]) for at in self.api.objects if at[0] in ("Service", "NetworkPolicy") and "other" not in at[2]}

    def pods(self, name: str = "qwen") -> int:
        return sum(1 for at in self.api.objects if at[0] == "Pod" and at[2].startswith(f"{name}-e"))

    def tasks(self) -> float:
        return self.metrics.registry.get_sample_value("xpyd_operator_tasks") or 0.0

    def rounds(self, result: str) -> float:
        return self.metrics.registry.get_sample_value("xpyd_operator_reconcile_total", {"result": result}) or 0.0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.services.run())
        try:
            yield
        finally:
            await self.services.close()
            await asyncio.wait_for(task, 5)


async def wait(condition: Callable[[], object], deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def test_one_that_is_being_deleted_is_let_go_at_once() -> None:
    world = World()
    world.write()
    async with world.running():
        await wait(lambda: world.pods() == 3)
        world.write(deletionTimestamp="2026-01-01T00:00:00Z", finalizers=["foregroundDeletion"])
        known = world.services._services["team-a", "qwen"]
        await wait(lambda: known.backend is None)
        await asyncio.sleep(0.1)
        assert known.backend is None


async def test_what_is_there_at_the_start_is_looked_after() -> None:
    world = World()
    world.write(wake=False)
    async with world.running():
        await wait(lambda: world.pods() == 3)
        assert world.tasks() == 1
    assert world.tasks() == 0


async def test_a_service_begins_and_ends_with_its_object() -> None:
    world = World()
    async with world.running():
        world.services.wake("team-a", "nobody")
        assert world.tasks() == 0
        world.write()
        world.write("other")
        await wait(lambda: world.pods() == 3 and world.pods("other") == 3)
        world.remove()
        await asyncio.sleep(0.4)
        assert world.left() == {("NetworkPolicy", "qwen"), ("NetworkPolicy", "qwen-clients"), ("Service", "qwen"),
                                ("Service", "qwen-members")}, "until the last pod has gone"
        world.collect("Pod")
        await wait(lambda: world.tasks() == 1)
        assert world.left() == set()
        asked = len([each for each in world.api.asked if each[2].startswith("qwen")])
        world.services.wake("team-a", "qwen")
        await asyncio.sleep(0.2)
        assert len([each for each in world.api.asked if each[2].startswith("qwen")]) == asked


async def test_one_of_the_same_name_is_another_one() -> None:
    world = World()
    async with world.running():
        world.write()
        await wait(lambda: world.pods() == 3)
        world.remove()
        world.write(uid="uid-of-the-next")
        await asyncio.sleep(0.1)
        world.collect("Pod")
        await wait(lambda: world.pods() == 3)
        owners = {body["metadata"]["ownerReferences"][0]["uid"] for at, body in world.api.objects.items() if at[0] == "Pod"}
        assert owners == {"uid-of-the-next"}
        marks = {world.api.objects[kind, "team-a", name]["metadata"]["labels"][SERVICE_UID] for kind, name in world.left()}
        assert marks == {"uid-of-the-next"}, "what was left is taken over"


async def test_what_was_left_while_no_operator_ran_goes_at_the_start() -> None:
    world = World()
    async with world.running():
        world.write()
        await wait(lambda: world.pods() == 3)
    world.remove()
    world.collect("Pod")
    assert world.left()
    again = Services(world.api, world.cache, OperatorSettings(sidecar_image="sidecar:1"), world.metrics)  # type: ignore[arg-type]
    world.services = again
    async with world.running():
        await wait(lambda: not world.left())


async def test_what_cannot_be_deleted_is_tried_again_later_and_later(caplog: pytest.LogCaptureFixture) -> None:
    world = World(resync_s=0.05)
    async with world.running():
        world.write()
        await wait(lambda: world.pods() == 3)
        world.api.fault = lambda verb, kind, name: ApiError(403, "Forbidden", "no right") if verb == "delete" else None
        world.remove()
        world.collect("Pod")
        await wait(lambda: "cannot delete what is left of it" in caplog.text)
        await asyncio.sleep(0.5)
        tries = len([each for each in world.api.asked if each == ("delete", "Service", "qwen")])
        assert 2 <= tries <= 8
        world.api.fault = lambda verb, kind, name: None
        await wait(lambda: not world.left())
        await wait(lambda: world.tasks() == 0)


@pytest.mark.parametrize(("count", "pause_s"), [(0, 5.0), (200, 5.0), (1000, 25.0), (5000, 30.0)])
def test_many_services_are_each_looked_at_less_often(count: int, pause_s: float) -> None:
    world = World(resync_s=5.0)
    world.services._services = dict.fromkeys((("a", str(number)) for number in range(count)), None)  # type: ignore[arg-type]
    assert world.services._resync_s == pause_s


async def test_a_service_that_ends_is_left_alone() -> None:
    world = World()
    async with world.running():
        world.write(deletionTimestamp="2026-01-01T00:00:00Z")
        await wait(lambda: world.tasks() == 1)
        await asyncio.sleep(0.5)
        assert [each for each in world.api.asked if each[1] != "discovery"] == []
        assert world.tasks() == 1


async def test_a_refused_document_is_no_storm_of_rounds_or_words(caplog: pytest.LogCaptureFixture) -> None:
    world = World(resync_s=0.05)
    async with world.running():
        body = document(decode={"replicas": -1})
        world.cache.on_seen(OWNER_KIND, world.api.put(OWNER_KIND, body))
        world.services.wake("team-a", "qwen")
        await wait(lambda: world.rounds("refused") >= 5)
    assert len([each for each in caplog.records if "team-a/qwen" in each.getMessage()]) == 1
    assert [each[0] for each in world.api.asked if each[1] not in ("Event", "discovery")] == ["status"]


async def test_failures_slow_a_service_down_and_do_not_touch_the_others() -> None:
    world = World(resync_s=0.05)
    denied = ApiError(403, "Forbidden", "webhook says no")
    bad = ("create", "Pod", "bad")
    world.api.fault = lambda verb, kind, name: denied if (verb, kind, name.split("-")[0]) == bad else None
    async with world.running():
        world.write("bad")
        world.write("good")
        await wait(lambda: world.pods("good") == 3)
        for _ in range(150):
            world.services.wake("team-a", "bad")
            await asyncio.sleep(0.01)
        tries = len([each for each in world.api.asked if each == ("create", "Pod", "bad-e0")])
    assert 2 <= tries <= 12


async def test_a_storm_of_events_costs_few_rounds() -> None:
    world = World(gap_s=0.1, resync_s=5.0)
    async with world.running():
        world.write()
        await wait(lambda: world.pods() == 3)
        await asyncio.sleep(0.3)
        before, began = world.rounds("same") + world.rounds("changed"), time.monotonic()
        for _ in range(100):
            world.services.wake("team-a", "qwen")
            await asyncio.sleep(0.005)
        assert world.rounds("same") + world.rounds("changed") - before <= 2 + (time.monotonic() - began) / 0.1


async def test_a_dry_run_writes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    world = World(dry_run=True)
    async with world.running():
        world.write()
        await wait(lambda: "create qwen-e0 as prefill" in caplog.text)
        await asyncio.sleep(0.4)
    assert {verb for verb, _, _ in world.api.asked} <= {"get", "dry-run"}


async def test_the_end_waits_for_the_round_that_is_under_way() -> None:
    world = World()
    task = asyncio.create_task(world.services.run())
    world.write()
    await wait(lambda: world.api.asked)
    await world.services.close()
    await asyncio.wait_for(task, 5)
    left = [each for each in asyncio.all_tasks() if each is not asyncio.current_task() and "service" in each.get_name()]
    assert left == []
    assert world.pods() in (0, 3)


async def test_one_that_is_cancelled_leaves_nothing_that_runs() -> None:
    """As an operator does that is no longer the leader."""
    world = World()
    before = asyncio.all_tasks()
    task = asyncio.create_task(world.services.run())
    world.write()
    await wait(lambda: world.pods() == 3)
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.cancelled()
    assert asyncio.all_tasks() - before - {task} == set()
