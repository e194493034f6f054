"""Requests that wait for room, over real sockets: order, bounds, clients that go away, and the end of a router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from router_fleet import Answer, RouterFleet, fleet, request_bytes
from scripted_engine import Play

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.contract.membership import Load


class Busy:
    """A router whose only instance serves one request at a time, and holds it until it is told."""

    def __init__(self, made: RouterFleet) -> None:
        self.f = made
        self.tasks: list[asyncio.Task[Answer]] = []
        self.held = asyncio.Event()

    async def send(self, prompt: str, *, waits: bool = True, **options: Any) -> asyncio.Task[Answer]:
        """A request; returns once it waits (or is being served)."""
        fields = options.pop("fields", {})
        before = len(self.f.context.line)
        task = asyncio.create_task(self.f.post("/v1/completions", {"prompt": prompt, **fields}, **options))
        self.tasks.append(task)
        if waits:
            await self.f.wait(lambda: len(self.f.context.line) == before + 1, f"{prompt} to wait")
        else:
            await self.f.wait(lambda: bool(self.f.context.servings), f"{prompt} to be served")
        return task

    async def release(self) -> list[str]:
        """Let all through; the prompts in the order in which the engine got them."""
        self.held.set()
        await asyncio.gather(*self.tasks)
        return [seen.body["prompt"] for seen in self.f.d[0].seen]


@asynccontextmanager
async def busy(**settings: Any) -> AsyncIterator[Busy]:
    async with fleet(0, 1, **({"max_per_instance": 1} | settings)) as made:
        one = Busy(made)
        made.d[0].default = Play(hold=one.held)
        await one.send("first", waits=False, headers={"Authorization": "Bearer a"})
        await made.wait(lambda: len(made.d[0].seen) == 1, "the first")
        try:
            yield one
        finally:
            one.held.set()


@pytest.fixture
def keys(tmp_path: Path) -> str:
    (tmp_path / "keys").write_text("a\nb\n")
    return str(tmp_path / "keys")


async def test_requests_without_room_wait_and_are_served_in_order(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "xpyd_sidecar.access")
    async with busy() as one:
        for prompt in ("one", "two", "three"):
            await one.send(prompt)
        await asyncio.sleep(0.1)
        assert len(one.f.d[0].seen) == 1, "an instance with room for one has one"
        assert (await one.f.get("/metrics")).body.count(b"xpyd_router_queued 3.0") == 1
        assert await one.release() == ["first", "one", "two", "three"]
        assert [task.result().status for task in one.tasks] == [200] * 4
        await one.f.wait_quiet()


async def test_a_lower_priority_is_served_first_by_header_or_field() -> None:
    async with busy() as one:
        await one.send("usual")
        await one.send("later", fields={"priority": 5})
        await one.send("sooner", fields={"priority": -5})
        await one.send("soonest", fields={"priority": 5}, headers={"X-Vllm-Priority": "-6"})
        assert await one.release() == ["first", "soonest", "sooner", "usual", "later"]


@pytest.mark.parametrize(("headers", "fields", "words"), [
    ({"X-Vllm-Priority": "high"}, {}, "X-Vllm-Priority must be a whole number"),
    ({}, {"priority": "high"}, "'priority': Expected `int | null`, got `str`"),
    ({}, {"priority": 1.5}, "'priority': Expected `int | null`, got `float`"),
])
async def test_a_priority_that_is_none_is_refused(headers: dict[str, str], fields: dict[str, Any], words: str) -> None:
    async with fleet() as f:
        answer = await f.post("/v1/completions", {"prompt": "x", **fields}, headers=headers)
        assert answer.status == 400
        assert words in answer.json["error"]["message"]
        assert (await f.post("/v1/completions", {"prompt": "x", "priority": None})).status == 200


async def test_keys_take_turns_and_a_flood_gets_429(keys: str) -> None:
    async with busy(queue_size=12, api_key_file=keys) as one:
        a, b = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
        await one.send("b0", headers=b)
        for number in range(4):
            await one.send(f"a{number}", headers=a, fields={"priority": -9})
        answer = await one.f.post("/v1/completions", {"prompt": "a4"}, headers=a)
        assert (answer.status, answer.json["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        await one.send("b1", headers=b)
        assert await one.release() == ["first", "b0", "a0", "b1", "a1", "a2", "a3"]


async def test_a_full_queue_answers_503_with_retry_after() -> None:
    async with busy(queue_size=2) as one:
        await one.send("one")
        await one.send("two")
        answer = await one.f.complete()
        assert (answer.status, answer.json["error"]["message"]) == (503, "2 requests wait, which is the limit")
        assert int(answer.headers["retry-after"]) >= 1


async def test_who_waits_too_long_gets_503_and_the_others_go_on_waiting() -> None:
    async with busy(queue_timeout_s=2.0) as one:  # time enough to be seen while it waits
        task = await one.send("late")
        answer = await task
        assert (answer.status, answer.json["error"]["message"]) == (503, "no instance had room within 2 s")
        assert "retry-after" in answer.headers
        await one.send("in time")
        assert await one.release() == ["first", "in time"]


async def test_a_client_that_goes_away_leaves_the_queue_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "xpyd_sidecar.access")
    async with busy() as one:
        _, writer = await one.f.connect()
        writer.write(request_bytes("/v1/completions", {"prompt": "gone"}, headers={"X-Request-Id": "gone"}))
        await one.f.wait(lambda: len(one.f.context.line) == 1, "it to wait")
        await one.send("stays")
        writer.transport.abort()
        await one.f.wait(lambda: len(one.f.context.line) == 1, "it to leave", 10.0)
        assert await one.release() == ["first", "stays"]
    lines = {record.__dict__["request"]: record.getMessage() for record in caplog.records
             if record.name == "xpyd_sidecar.access"}  # an exporter of another test may speak, too
    assert lines["gone"] == "client_gone"


async def test_room_is_used_where_it_becomes_free() -> None:
    async with fleet(0, 2, max_per_instance=1) as f:
        holds = [asyncio.Event(), asyncio.Event()]
        for engine, hold in zip(f.d, holds, strict=True):
            engine.plays.append(Play(hold=hold))
        tasks = [asyncio.create_task(f.complete()) for _ in range(3)]
        await f.wait(lambda: len(f.context.line) == 1, "the third to wait")
        await f.wait(lambda: [len(engine.seen) for engine in f.d] == [1, 1], "one on each")
        holds[1].set()
        await f.wait(lambda: len(f.d[1].seen) == 2, "the third on the free one")
        holds[0].set()
        assert [(await task).status for task in tasks] == [200] * 3


async def test_a_new_instance_takes_what_waits() -> None:
    async with fleet(0, 2, max_per_instance=1) as f:
        f.context.watch.on_message(_gone(f, 1))
        f.d[0].plays.append(Play(hold=(held := asyncio.Event())))
        tasks = [asyncio.create_task(f.complete()) for _ in range(2)]
        await f.wait(lambda: len(f.context.line) == 1, "one to wait")
        f.beat(f.d[1], interval_s=60.0)
        assert (await asyncio.wait_for(tasks[1], 30.0)).status == 200
        held.set()
        assert (await tasks[0]).status == 200


def _gone(f: RouterFleet, index: int) -> Any:
    from beats import AGENT, SERVICE

    from xpyd_sidecar.contract.ids import InstanceName
    from xpyd_sidecar.contract.membership import WIRE_VERSION, GoodbyeMessage

    return GoodbyeMessage(WIRE_VERSION, SERVICE, InstanceName(f.d[index].name), AGENT)


async def test_when_the_last_instance_goes_those_who_wait_hear_of_it() -> None:
    async with busy() as one:
        task = await one.send("waits")
        one.f.context.watch.on_message(_gone(one.f, 0))
        answer = await asyncio.wait_for(task, 30.0)
        assert (answer.status, answer.json["error"]["message"]) == (503, "no decode instance is known")


async def test_a_router_that_stops_serves_those_who_wait() -> None:
    async with busy(drain_timeout_s=60.0) as one:
        await one.send("waits")
        stopped = asyncio.create_task(one.f.router.stop())
        await asyncio.sleep(0.1)
        assert await one.release() == ["first", "waits"]
        assert [task.result().status for task in one.tasks] == [200, 200]
        await asyncio.wait_for(stopped, 30.0)


async def test_a_router_that_can_wait_no_longer_answers_them() -> None:
    async with busy(drain_timeout_s=0.3) as one:
        task = await one.send("waits")
        await one.f.router.stop()
        answer = await task
        assert (answer.status, answer.json["error"]["message"]) == (503, "the router stopped")


async def test_limits_follow_from_beats_and_go_again() -> None:
    async with fleet(0, 1) as f:
        f.d[0].default = Play(hold=(held := asyncio.Event()))
        tasks = [asyncio.create_task(f.complete()) for _ in range(30)]
        await f.wait(lambda: len(f.d[0].seen) == 30, "all of them at once: there is no limit")

        async def beat(running: int, waiting: int) -> None:
            f.beat(f.d[0], interval_s=60.0, load=Load(running=running, waiting=waiting))
            f.context.sweep()
            await asyncio.sleep(0.01)

        for _ in range(3):
            await beat(2, 28)
        tasks.append(asyncio.create_task(f.complete()))
        await f.wait(lambda: len(f.context.line) == 1, "one more to wait")
        member = f.context.roster.pickable(Role.DECODE)[0]
        assert f.context.rooms.limit_of(member) < 30
        for _ in range(6):
            await beat(30, 0)
        await f.wait(lambda: len(f.d[0].seen) == 31, "it to be served")
        held.set()
        assert {(await task).status for task in tasks} == {200}
        f.context.sweep()
        assert f.context.rooms._seen[member.name].rate.per_s(f.context.loop.time()) > 0, "legs that end are its rate"
