"""A service that has images and weights fetched ahead, over a store in memory: made, taken away, and what it says."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from memory_world import MemoryWorld

from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.service.prefetch import AGAIN_S

MODEL = {"source": "org/model", "cache": {"claim": "hub"}, "prefetch": True}
ZERO: dict[str, Any] = {
    "model": MODEL, "prefill": {"scaling": {"min": 0, "max": 1}}, "decode": {"scaling": {"min": 0, "max": 1}},
    "router": {"placement": "deployment", "hold": "10m"},
}
IMAGES = "qwen-decode-images"


@contextlib.asynccontextmanager
async def begun(**spec: Any) -> AsyncIterator[MemoryWorld]:
    async with aiohttp.ClientSession() as session:
        world = MemoryWorld(session)
        world.write(**(spec or ZERO))
        await world.round()
        yield world


def said(world: MemoryWorld) -> tuple[str, str]:
    found = world.condition("Prefetched")
    return (found["status"], found["reason"]) if found else ("", "")


def nodes(world: MemoryWorld, ready: int, wanted: int, updated: int | None = None) -> None:
    """The controller of DaemonSets says so."""
    body = world.api.objects["DaemonSet", "team-a", IMAGES]
    status = {"observedGeneration": body["metadata"]["generation"], "numberReady": ready, "desiredNumberScheduled": wanted,
              "updatedNumberScheduled": wanted if updated is None else updated}
    world.cache.on_seen("DaemonSet", world.api.put("DaemonSet", body | {"status": status}))


def job(world: MemoryWorld, kind: str, **more: str) -> None:
    """The controller of Jobs says so."""
    name, = world.named("Job")
    body = world.api.objects["Job", "team-a", name]
    status = {"conditions": [{"type": kind, "status": "True"} | more]}
    world.cache.on_seen("Job", world.api.put("Job", body | {"status": status}))


async def test_at_zero_images_and_weights_are_fetched_and_told() -> None:
    async with begun() as world:
        assert world.named("DaemonSet") == {IMAGES}
        assert len(world.named("Job")) == 1
        assert said(world) == ("False", "Fetching"), "no controller has said anything yet"
        nodes(world, 1, 2)
        job(world, "Complete")
        await world.round()
        assert said(world) == ("False", "Fetching")
        assert world.condition("Prefetched")["message"] == "images on 1 of 2 nodes; weights are fetched"
        nodes(world, 2, 2)
        await world.round()
        assert said(world) == ("True", "Fetched")
        world.api.asked.clear()
        await world.round()
        assert [each for each in world.api.asked if each[1] in ("DaemonSet", "Job")] == [], "nothing differs"


async def test_pods_of_an_image_before_count_for_nothing() -> None:
    async with begun() as world:
        job(world, "Complete")
        nodes(world, 2, 2, updated=1)
        await world.round()
        assert said(world) == ("False", "Fetching")


async def test_without_a_node_nobody_knows() -> None:
    async with begun() as world:
        job(world, "Complete")
        nodes(world, 0, 0)
        await world.round()
        assert said(world) == ("Unknown", "NoNode")


async def test_an_unfinished_fetch_makes_room_for_an_instance_and_comes_back_after_it() -> None:
    async with begun() as world:
        world.write(**ZERO | {"decode": {"scaling": {"min": 1, "max": 1}}})
        await world.round()
        await world.round()
        assert len(world.named("Pod")) > 0
        assert world.named("Job") == set(), "its volume may be one that a single node mounts"
        assert world.named("DaemonSet") == {IMAGES}
        nodes(world, 1, 1)
        await world.round()
        assert said(world) == ("True", "Fetched")


async def test_a_finished_fetch_stays_so_that_it_is_not_done_again() -> None:
    async with begun() as world:
        job(world, "Complete")
        before = world.named("Job")
        world.write(**ZERO | {"decode": {"scaling": {"min": 1, "max": 1}}})
        await world.round()
        await world.round()
        assert world.named("Job") == before


async def test_weights_that_cannot_be_fetched_are_named_and_nothing_else_suffers() -> None:
    async with begun() as world:
        nodes(world, 1, 1)
        job(world, "Failed", reason="BackoffLimitExceeded", message="Job has reached the specified backoff limit")
        done = await world.round()
        assert (said(world), done.failures) == (("False", "WeightsFailed"), ())
        name, = world.named("Job")
        assert f"kubectl logs -l job-name={name}" in world.condition("Prefetched")["message"]
        assert world.condition("Degraded")["status"] == "False"
        assert world.condition("Stalled") == {}


async def test_another_revision_takes_the_job_of_before_away() -> None:
    async with begun() as world:
        before = world.named("Job")
        world.write(**ZERO | {"model": MODEL | {"revision": "v2"}})
        await world.round()
        await world.round()
        assert len(world.named("Job")) == 1
        assert world.named("Job") != before


@pytest.mark.parametrize("spec", [{"model": MODEL | {"prefetch": False}}, {"suspend": True}])
async def test_who_asks_no_more_has_everything_taken_away(spec: dict[str, Any]) -> None:
    async with begun() as world:
        world.restart()
        world.write(**ZERO | spec)
        await world.round()
        await world.round()
        assert world.named("Job") | world.named("DaemonSet") == set()
        assert said(world) == ("", "")


async def test_what_is_refused_is_said_and_tried_again_later_and_everything_else_is_there() -> None:
    async with begun() as world:
        world.api.fault = lambda verb, kind, name: (
            ApiError(403, "Forbidden", "exceeded quota") if kind in ("DaemonSet", "Job") and verb == "apply" else None)
        world.write(**ZERO | {"model": MODEL | {"revision": "v2"}})
        done = await world.round()
        assert (said(world), done.failures) == (("False", "Refused"), ())
        assert "exceeded quota" in world.condition("Prefetched")["message"]
        assert world.named("Deployment") == {"qwen-router"}
        world.api.asked.clear()
        await world.round()
        assert [each for each in world.api.asked if each[1] in ("DaemonSet", "Job")] == []
        world.api.fault = lambda verb, kind, name: None
        world.now += AGAIN_S + 1
        await world.round()
        assert said(world) == ("False", "Fetching")


async def test_an_instance_gets_the_volume_whatever_else_is_refused() -> None:
    async with begun() as world:
        del world.api.objects["DaemonSet", "team-a", IMAGES]
        world.api.show(world.cache)
        world.api.fault = lambda verb, kind, name: (
            ApiError(403, "Forbidden", "no") if kind == "DaemonSet" and verb == "apply" else None)
        await world.round()
        assert said(world) == ("False", "Refused")
        assert len(world.named("Job")) == 1
        world.write(**ZERO | {"decode": {"scaling": {"min": 1, "max": 1}}})
        await world.round()
        assert world.named("Job") == set()
        await world.round()
        assert len(world.named("Pod")) > 0


async def test_what_cannot_be_deleted_keeps_nothing_from_being_made() -> None:
    async with begun() as world:
        world.api.fault = lambda verb, kind, name: (
            ApiError(403, "Forbidden", "no delete") if (verb, kind) == ("delete", "Job") else None)
        world.write(**ZERO | {"decode": {"scaling": {"min": 1, "max": 1}}})
        await world.round()
        assert "no delete" in world.condition("Prefetched")["message"]
        del world.api.objects["DaemonSet", "team-a", IMAGES]
        world.api.show(world.cache)
        await world.round()
        assert IMAGES in world.named("DaemonSet")
        assert said(world) == ("False", "Refused")
        world.api.fault = lambda verb, kind, name: None
        await world.round()
        assert world.named("Job") == set()


async def test_a_name_that_is_needed_no_more_is_not_told() -> None:
    async with aiohttp.ClientSession() as session:
        world = MemoryWorld(session)
        world.api.put("DaemonSet", {"metadata": {"name": IMAGES, "namespace": "team-a"}, "spec": {}})
        world.write(**ZERO)
        await world.round()
        assert said(world) == ("False", "NameTaken")
        world.write(**ZERO | {"model": MODEL | {"prefetch": False}})
        await world.round()
        assert said(world) == ("", "")


async def test_what_is_somebody_elses_stays_so_and_is_named() -> None:
    async with aiohttp.ClientSession() as session:
        world = MemoryWorld(session)
        theirs = {"metadata": {"name": IMAGES, "namespace": "team-a"}, "spec": {"mine": True}}
        world.api.put("DaemonSet", theirs)
        world.write(**ZERO)
        await world.round()
        await world.round()
        assert said(world) == ("False", "NameTaken")
        assert world.api.objects["DaemonSet", "team-a", IMAGES]["spec"] == {"mine": True}
