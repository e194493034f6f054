"""Which versions the store holds: every object written anew, then the CRD told so; what cannot be done is done later."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from kube_documents import document
from memory_api import MemoryApi

from xpyd_operator.kube import stored
from xpyd_operator.kube.api import ApiError
from xpyd_operator.kube.stored import CRD, KINDS, StoredVersions, crd_name

Body = dict[str, Any]
NEW, OLD = "v1beta1", "v1alpha1"


class World:
    """Two CRDs, three services and six pools over two namespaces."""

    def __init__(self, *held: str, stores: str = NEW) -> None:
        self.api = MemoryApi()
        for kind in KINDS:
            names = dict.fromkeys((stores, NEW, OLD))
            versions = [{"name": name, "served": True, "storage": name == stores} for name in names]
            self.api.put(CRD, {"metadata": {"name": crd_name(kind)}, "spec": {"versions": versions},
                               "status": {"storedVersions": list(held)}})
        for number, namespace in enumerate(("a", "a", "b")):
            self.api.put("DisaggService", document(f"s{number}", namespace))
            for role in ("prefill", "decode"):
                self.api.put("DisaggPool", {"metadata": {"name": f"s{number}-{role}", "namespace": namespace}})
        self.stored = StoredVersions(self.api, settle_s=0.0)  # type: ignore[arg-type]

    def held(self, kind: str = "DisaggService") -> list[str]:
        found: list[str] = self.api.objects[CRD, "", crd_name(kind)]["status"]["storedVersions"]
        return found

    def rewritten(self) -> list[str]:
        written = {f"{kind}/status" for kind in KINDS}
        return [name for verb, kind, name in self.api.asked if verb == "patch" and kind in written]


async def test_every_object_is_written_before_the_crd_is_told() -> None:
    world = World(OLD, NEW)
    before = {at: dict(body) for at, body in world.api.objects.items()}
    await asyncio.wait_for(world.stored.run(), 5)
    assert sorted(world.rewritten()) == sorted(name for kind, _, name in before if kind != CRD)
    assert [world.held(kind) for kind in KINDS] == [[NEW], [NEW]]
    for kind in KINDS:
        asked = [(verb, what) for verb, what, name in world.api.asked if kind in what or name.endswith(crd_name(kind))]
        first, tried, *between, last = asked
        assert (first, tried, last) == (("list", CRD), ("try", f"{CRD}/status"), ("patch", f"{CRD}/status"))
        assert set(between) == {("list", kind), ("patch", f"{kind}/status")}
    for at, body in world.api.objects.items():
        same = {part: value for part, value in body.items() if part != "metadata"}
        assert at[0] == CRD or same == {part: value for part, value in before[at].items() if part != "metadata"}


@pytest.mark.parametrize(("held", "stores"), [((NEW,), NEW), ((OLD, NEW, "v1"), "v1"), ((OLD,), OLD)])
async def test_where_nothing_of_ours_is_to_do_nothing_is_written(held: tuple[str, ...], stores: str) -> None:
    """Also where a newer release stores another version, or an older one's CRD came back."""
    world = World(*held, stores=stores)
    await asyncio.wait_for(world.stored.run(), 5)
    assert {verb for verb, _, _ in world.api.asked} == {"list"}
    assert world.held() == list(held)


async def test_a_list_in_parts_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "PAGE", 2)
    world = World(OLD, NEW)
    await asyncio.wait_for(world.stored.run(), 5)
    assert len(world.rewritten()) == 9
    assert [kind for verb, kind, _ in world.api.asked if verb == "list"].count("DisaggPool") == 3


async def test_without_the_right_nothing_is_rewritten_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    world = World(OLD, NEW)
    forbidden = ApiError(403, "Forbidden", "cannot patch resource customresourcedefinitions/status")
    world.api.fault = lambda verb, kind, name: forbidden if verb == "try" else None
    for kind in KINDS:
        with pytest.raises(ApiError, match="cannot patch resource"):
            await world.stored.tend(kind)
    assert world.rewritten() == []
    assert world.held() == [OLD, NEW]
    with caplog.at_level(logging.INFO):
        before = len(world.api.asked)
        task = asyncio.create_task(world.stored.run())
        async with asyncio.timeout(5):
            while [verb for verb, _, _ in world.api.asked[before:]].count("try") < len(KINDS):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        asked = len(world.api.asked)
        await asyncio.sleep(0.05)
        assert len(world.api.asked) == asked, "it waits for long"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    said = [record.getMessage() for record in caplog.records]
    words = "versions that the store holds: cannot patch resource customresourcedefinitions/status"
    assert said == [f"{crd_name('DisaggService')}: {words}"]


async def test_what_fails_is_done_again_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "AGAIN_S", 0.0)
    world = World(OLD, NEW)
    faults = iter([ApiError(0, "Unreachable", "no answer"), ApiError(500, "InternalError", "etcd")])
    world.api.fault = lambda verb, kind, name: next(faults, None) if kind == "DisaggPool/status" else None
    await asyncio.wait_for(world.stored.run(), 5)
    assert [world.held(kind) for kind in KINDS] == [[NEW], [NEW]]
    assert set(world.rewritten()) == {name for kind, _, name in world.api.objects if kind != CRD}


async def test_an_object_that_goes_meanwhile_holds_nothing_up() -> None:
    world = World(OLD, NEW)
    gone = ApiError(404, "NotFound", "s1 not found")
    world.api.fault = lambda verb, kind, name: gone if name == "s1" and verb == "patch" else None
    await asyncio.wait_for(world.stored.run(), 5)
    assert world.held() == [NEW]


async def test_a_crd_that_changes_meanwhile_is_not_told() -> None:
    """Somebody stores another version again: what was written in between is of that one."""
    world = World(OLD, NEW)

    def changed(verb: str, kind: str, name: str) -> None:
        if (verb, kind, name) == ("patch", "DisaggService/status", "s2"):
            world.api.put(CRD, world.api.objects[CRD, "", crd_name("DisaggService")])

    world.api.fault = changed  # type: ignore[assignment]
    with pytest.raises(ApiError, match="has been modified"):
        await world.stored.tend("DisaggService")
    assert world.held() == [OLD, NEW]


async def test_a_crd_that_is_not_there_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "AGAIN_S", 0.01)
    world = World(OLD, NEW)
    crd = world.api.objects.pop((CRD, "", crd_name("DisaggPool")))
    task = asyncio.create_task(world.stored.run())
    async with asyncio.timeout(5):
        while world.held() != [NEW]:  # noqa: ASYNC110 (the other one is not held up)
            await asyncio.sleep(0.01)
    assert not task.done()
    world.api.put(CRD, crd)
    await asyncio.wait_for(task, 5)
    assert world.held("DisaggPool") == [NEW]


async def test_an_answer_of_another_form_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    world = World(OLD, NEW)
    del world.api.objects[CRD, "", crd_name("DisaggService")]["spec"]
    await asyncio.wait_for(world.stored.run(), 5)
    assert world.held("DisaggPool") == [NEW]
    assert "cannot be told" in caplog.text


async def test_it_waits_until_other_api_servers_know_the_crd() -> None:
    world = World(OLD, NEW)
    task = asyncio.create_task(StoredVersions(world.api, settle_s=0.2).run())  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    assert world.api.asked == []
    await asyncio.wait_for(task, 5)
    assert world.held() == [NEW]
