"""Deadlines of a process that itself stood still."""

from __future__ import annotations

import asyncio
import gc
import math
import socket
import time
import weakref

import pytest

from xpyd_sidecar.process import patience
from xpyd_sidecar.process.patience import Alarm, Reminder, timeout_with_grace

LOOPS = ("asyncio", "uvloop")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "LATE_S", 0.05)
    monkeypatch.setattr(patience, "GRACE_S", 0.2)


@pytest.mark.usefixtures("short")
async def test_a_deadline_that_is_noticed_late_has_one_grace_and_no_second() -> None:
    loop = asyncio.get_running_loop()
    rung: list[float] = []
    Alarm(loop, loop.time() + 0.02, lambda: rung.append(loop.time()))
    time.sleep(0.15)  # noqa: ASYNC251 - the loop stands still
    awake = loop.time()
    await asyncio.sleep(0.1)
    time.sleep(0.3)  # noqa: ASYNC251
    await asyncio.sleep(0.1)
    assert len(rung) == 1
    assert rung[0] - awake >= 0.15


async def test_a_deadline_that_is_noticed_in_time_has_no_grace_and_a_cancelled_one_does_not_ring() -> None:
    loop, rung = asyncio.get_running_loop(), asyncio.Event()
    alarm = Alarm(loop, loop.time() + 0.01, lambda: pytest.fail("it was cancelled"))
    alarm.cancel()
    Alarm(loop, loop.time() + 0.02, rung.set)
    async with asyncio.timeout(30):
        await rung.wait()


async def test_a_moment_that_moves_rings_once_it_is_near_and_no_later_than_it_came_to_be() -> None:
    loop = asyncio.get_running_loop()
    rung: list[float] = []
    reminder = Reminder(loop)

    def at(due: float) -> None:
        reminder.schedule(due, loop.time(), lambda: rung.append(loop.time()))

    at(loop.time() + patience.SOON_S + 100)
    assert reminder._alarm is None, "far away: said again"
    at(first := loop.time() + 0.05)
    alarm = reminder._alarm
    at(first + 0.1)
    assert reminder._alarm is alarm, "too early is cheaper than anew"
    at(first - 0.02)
    assert reminder._alarm is not alarm
    async with asyncio.timeout(30):
        while not rung:  # noqa: ASYNC110 (later, where the machine stood still)
            await asyncio.sleep(0.01)
    assert rung[0] >= first - 0.025, "uvloop counts milliseconds"
    at(loop.time() + 0.02)
    at(math.inf)
    at(loop.time() + 0.02)
    reminder.cancel()
    await asyncio.sleep(0.1)
    assert len(rung) == 1


async def test_an_owner_that_is_reminded_goes_without_the_collector() -> None:
    class Owner:
        def __init__(self) -> None:
            self.reminder = Reminder(asyncio.get_running_loop())

        def remind(self, after_s: float) -> None:
            loop = asyncio.get_running_loop()
            self.reminder.schedule(loop.time() + after_s, loop.time(), self.on_time)

        def on_time(self) -> None:
            rung.set()

    rung = asyncio.Event()
    gone = []
    gc.disable()
    try:
        for ends in ("rung", "cancelled", "never"):
            owner = Owner()
            gone.append(weakref.ref(owner))
            if ends == "rung":
                owner.remind(0.01)
                async with asyncio.timeout(30):
                    await rung.wait()
            elif ends == "cancelled":
                owner.remind(1.0)
                owner.reminder.cancel()
            del owner
        await asyncio.sleep(0.01)
        assert [ref() for ref in gone] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.usefixtures("short")
async def test_what_came_while_the_loop_stood_still_is_read_before_the_time_is_up() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader, writer = await asyncio.open_connection(sock=ours)
        async with timeout_with_grace(0.05):
            reading = asyncio.ensure_future(reader.readexactly(4))
            await asyncio.sleep(0)
            theirs.send(b"here")
            time.sleep(0.2)  # noqa: ASYNC251
            assert await reading == b"here"
        for stands_s in (0.0, 0.2):
            with pytest.raises(TimeoutError):
                await _read_within(reader, 0.05, stands_s)
        writer.transport.abort()


async def _read_within(reader: asyncio.StreamReader, seconds: float, stands_s: float) -> None:
    async with timeout_with_grace(seconds):
        time.sleep(stands_s)  # noqa: ASYNC251
        await reader.readexactly(4)
