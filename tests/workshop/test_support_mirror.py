"""A mirror of objects catches up with what had been written, however late its watch is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from kube_client import KubeError, Mirror, Object


def item(name: str, version: int) -> Object:
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


class LateWatch:
    """Stands for the API server: ``there`` is what it has, by name, and watches show what a test puts into ``told``."""

    def __init__(self, now: int, **there: int) -> None:
        self.now, self.there = now, there
        self.told: asyncio.Queue[tuple[str, Object]] = asyncio.Queue()
        self.away = False

    def path(self, *_: str) -> str:
        return "/pods"

    async def request(self, *_: str) -> Object:
        return {"metadata": {"resourceVersion": str(self.now)}, "items": [item(*each) for each in self.there.items()]}

    async def versions(self, *_: str) -> tuple[int, dict[str, int]]:
        if self.away:
            raise KubeError(503, {})
        return self.now, dict(self.there)

    async def watch(self, *_: str) -> AsyncIterator[tuple[str, Object]]:
        while True:
            yield await self.told.get()


async def caught_up(mirror: Mirror, by: LateWatch, *events: tuple[str, Object]) -> None:
    """It is not caught up before the last of these events."""
    waits = asyncio.create_task(mirror.catch_up())
    for event in events:
        await asyncio.sleep(0.05)
        assert not waits.done(), event
        by.told.put_nowait(event)
    await asyncio.wait_for(waits, 60)


async def test_what_was_written_and_deleted_is_waited_for() -> None:
    server = LateWatch(3, a=2, b=3)
    async with Mirror(server, "Pod", "team") as mirror:  # type: ignore[arg-type]
        await caught_up(mirror, server)
        server.now, server.there = 7, {"a": 5, "c": 6}
        await caught_up(mirror, server, ("MODIFIED", item("a", 5)), ("ADDED", item("c", 6)), ("DELETED", item("b", 7)))
        assert set(mirror.objects) == {"a", "c"}


async def test_a_mirror_that_has_heard_more_waits_for_nothing() -> None:
    server = LateWatch(3, a=2)
    async with Mirror(server, "Pod", "team") as mirror:  # type: ignore[arg-type]
        gone = asyncio.Event()
        mirror.listeners.append(lambda _was, _now: gone.set())
        server.told.put_nowait(("DELETED", item("a", 9)))
        await asyncio.wait_for(gone.wait(), 60)
        server.now = 8  # listed before it was deleted
        await caught_up(mirror, server)
        server.now, server.there = 12, {}
        await caught_up(mirror, server)


async def test_an_api_server_that_is_away_is_waited_for() -> None:
    server = LateWatch(3, a=2)
    async with Mirror(server, "Pod", "team") as mirror:  # type: ignore[arg-type]
        server.away = True
        waits = asyncio.create_task(mirror.catch_up())
        await asyncio.sleep(0.05)
        assert not waits.done()
        server.away = False
        await asyncio.wait_for(waits, 60)
