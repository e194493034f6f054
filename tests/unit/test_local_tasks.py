"""What is done to parts of a local service: how it ends."""

from __future__ import annotations

import asyncio

import pytest

from xpyd_operator.local.observe import Work
from xpyd_operator.local.tasks import Tasks


async def test_what_is_not_over_in_time_is_ended_and_what_is_has_ended_by_itself() -> None:
    tasks, ended = Tasks(), list[str]()

    async def work(name: str, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
            ended.append(f"{name} done")
        except asyncio.CancelledError:
            ended.append(f"{name} cancelled")
            raise

    tasks.begin("e0", Work.STARTING, work("e0", 0.01))
    tasks.begin("e1", Work.REMOVING, work("e1", 600.0))
    await asyncio.wait_for(tasks.finish(0.5), 20)
    assert ended == ["e0 done", "e1 cancelled"]
    assert tasks.working() == {}


async def test_a_removal_takes_the_place_of_a_start_and_waits_until_that_has_ended() -> None:
    tasks, said = Tasks(), list[str]()

    async def start() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0.01)
            said.append("start ended")

    async def remove() -> None:
        said.append("removed")

    tasks.begin("e0", Work.STARTING, start())
    await asyncio.sleep(0)
    tasks.begin("e0", Work.REMOVING, remove())
    tasks.begin("e0", Work.STARTING, start())  # there is no way back
    assert tasks.working() == {"e0": Work.REMOVING}
    await asyncio.wait_for(tasks.finish(10), 20)
    assert said == ["start ended", "removed"]


async def test_work_that_fails_is_logged_and_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    tasks = Tasks()

    async def fails() -> None:
        raise RuntimeError("a bug")

    tasks.begin("e0", Work.STARTING, fails())
    await asyncio.wait_for(tasks.finish(10), 20)
    assert "e0: unexpected" in caplog.text
    assert tasks.working() == {}
