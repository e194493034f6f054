"""Requests that are held while somebody is expected, over real sockets: until then, within bounds, and no longer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from beats import beat, bye
from router_fleet import Answer, RouterFleet, fleet, read_answer, request_bytes
from scripted_engine import Play, ScriptedEngine

from xpyd_sidecar.contract.ids import Incarnation, Role, State
from xpyd_sidecar.router.fleet import expected
from xpyd_sidecar.router.serving import hold

LONG_S = 120.0
"""A hold that no test waits for."""


@contextlib.asynccontextmanager
async def starting(prefills: int = 0, decodes: int = 1, **settings: Any) -> AsyncIterator[RouterFleet]:
    """A router that holds, whose decode instances are starting."""
    async with fleet(prefills, decodes, **({"hold_s": LONG_S} | settings)) as f:
        for engine in f.d:
            start(f, engine)
        yield f


def start(f: RouterFleet, engine: Any) -> None:
    """The instance's agent beats that it starts."""
    f.beat(engine, interval_s=60.0, state=State.STARTING)


def come(f: RouterFleet, engine: Any) -> None:
    """It is there."""
    f.beat(engine, interval_s=60.0, state=State.READY)


async def send(f: RouterFleet, path: str = "/v1/completions", body: Any = None, **options: Any) -> asyncio.Task[Answer]:
    """A request; returns once it is held."""
    before = len(f.context.hold)
    task = asyncio.create_task(f.post(path, {"prompt": "x"} if body is None else body, **options))
    await f.wait(lambda: len(f.context.hold) == before + 1 or task.done(), "it to be held")
    assert not task.done(), task.result()
    return task


async def test_requests_wait_for_an_instance_that_starts_and_are_served_in_order() -> None:
    async with starting() as f:
        tasks = [await send(f, body={"prompt": word}) for word in ("one", "two", "three")]
        assert b"xpyd_router_held 3.0" in (await f.get("/metrics")).body
        assert b"xpyd_router_queued 3.0" in (await f.get("/metrics")).body
        records = f.records()
        come(f, f.d[0])
        answers = [await task for task in tasks]
        assert [answer.status for answer in answers] == [200] * 3
        assert [seen.body["prompt"] for seen in f.d[0].seen] == ["one", "two", "three"]
        await f.wait_quiet()
        assert [record.outcome for record in records] == ["ok"] * 3
        assert all(record.queued_s > 0 for record in records), "what was waited is told"
        assert not f.context.hold.bytes, "its bytes are given back"


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/embeddings", {"input": "x"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}),
])
async def test_every_path_that_engines_answer_is_held(path: str, body: dict[str, Any]) -> None:
    async with starting() as f:
        task = await send(f, path, {"model": "tiny", **body})
        come(f, f.d[0])
        assert (await task).status == 200


async def test_nobody_is_held_where_nobody_is_expected() -> None:
    async with fleet(0, 0, hold_s=LONG_S) as f:
        await f.wait(lambda: f.context.roster.has_waited_for_agents(f.context.loop.time()),
                     "the time of agents that knew this router")
        answer = await f.complete()
        assert (answer.status, answer.json["error"]["message"]) == (503, "no decode instance is known")


async def test_while_agents_may_not_have_come_back_yet_a_new_router_holds() -> None:
    async with fleet(0, 0, hold_s=LONG_S, heartbeat_s=60.0) as f:
        task = await send(f)
        f.context.watch.on_message(beat("d0", Role.DECODE, "127.0.0.1:1", interval_s=60.0, state=State.STARTING))
        await asyncio.sleep(0.05)
        assert not task.done()
        f.context.watch.on_message(beat("p0", Role.PREFILL, "127.0.0.1:1", interval_s=60.0))
        assert len(f.context.hold) == 1, "prefill alone answers nobody"
        task.cancel()
        await f.wait(lambda: not len(f.context.hold), "it to leave")


async def test_who_left_a_short_while_ago_is_expected_and_then_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "RETURN_S", 60.0)
    async with fleet(0, 1, hold_s=LONG_S) as f:
        assert (await f.complete()).status == 200
        f.context.watch.on_message(bye("d0"))
        task = await send(f)
        again = await send(f)
        f.beat(f.d[0], interval_s=60.0, incarnation=Incarnation("again"))
        assert [(await task).status, (await again).status] == [200, 200]
        f.context.watch.on_message(bye("d0", incarnation=Incarnation("again")))
        task = await send(f)
        monkeypatch.setattr(expected, "RETURN_S", 3.0)
        answer = await task
        assert (answer.status, answer.json["error"]["message"]) == (503, "no decode instance is known")
        assert f.context.loop.time() - f.context.hold._expected._went[Role.DECODE] >= 3.0
        task = asyncio.create_task(f.complete())
        while not task.done():
            assert not len(f.context.hold), "nobody is held for who will not come"
            await asyncio.sleep(0.005)
        assert (await task).status == 503


async def test_who_waits_too_long_hears_when_to_come_again() -> None:
    async with starting(hold_s=1.5) as f:
        task = await send(f)
        answer = await task
        assert (answer.status, answer.json["error"]["code"]) == (503, "unavailable")
        assert answer.json["error"]["message"] == (
            "no instance was ready within 1.5 s: no decode instance is ready (d0 starting)")
        assert 1 <= int(answer.headers["retry-after"]) <= 10


async def test_retry_after_is_what_the_last_start_took() -> None:
    async with starting(hold_s=0.4) as f:
        now = f.context.loop.time()
        f.context.hold._expected._took[Role.DECODE] = 100.0
        f.context.hold.sweep(now)
        answer = await f.complete()
        assert answer.status == 503
        assert 90 <= int(answer.headers["retry-after"]) <= 100


async def test_held_requests_are_bounded_in_number() -> None:
    assert hold.LEAST_PLACES >= 1024
    async with starting(body_budget_bytes=1 << 20, max_body_bytes=1 << 16) as f:
        f.context.hold._queue._size = 2
        tasks = [await send(f), await send(f)]
        answer = await f.complete()
        assert (answer.status, answer.json["error"]["message"]) == (503, "2 requests wait, which is the limit")
        assert int(answer.headers["retry-after"]) >= 1
        come(f, f.d[0])
        assert [(await task).status for task in tasks] == [200, 200]


async def test_a_thousand_and_more_are_held_at_once_and_all_answered() -> None:
    async with starting() as f:
        clients = []
        raw = request_bytes("/v1/completions", {"prompt": "x"})
        for _ in range(1024):
            reader, writer = await f.connect()
            writer.write(raw)
            clients.append((reader, writer))
        await f.wait(lambda: len(f.context.hold) == 1024, "all to be held", 60.0)
        come(f, f.d[0])
        statuses = [(await read_answer(reader, 60.0)).status for reader, _ in clients]
        for _, writer in clients:
            writer.transport.abort()
        assert statuses == [200] * 1024


async def test_held_requests_are_bounded_in_bytes() -> None:
    async with starting(body_budget_bytes=6 << 20, max_body_bytes=1 << 20) as f:
        body = {"prompt": "x" * 450_000}
        tasks = [await send(f, body=body), await send(f, body=body)]
        answer = await f.post("/v1/completions", body)
        assert answer.status == 503
        assert "bytes, and may hold 3145728" in answer.json["error"]["message"]
        assert f.context.hold.bytes <= 3 << 20
        small = await send(f)
        come(f, f.d[0])
        assert [(await one).status for one in (*tasks, small)] == [200] * 3
        assert not f.context.hold.bytes


async def test_keys_share_the_places(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a\nb\n")
    a, b = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
    async with starting(api_key_file=str(tmp_path / "keys")) as f:
        f.context.hold._queue._size = 12
        tasks = [await send(f, body={"prompt": "b0"}, headers=b)]
        tasks += [await send(f, body={"prompt": f"a{number}"}, headers=a) for number in range(4)]
        answer = await f.post("/v1/completions", {"prompt": "a4"}, headers=a)
        assert (answer.status, answer.json["error"]["code"]) == (429, "rate_limit_exceeded")
        tasks.append(await send(f, body={"prompt": "b1"}, headers=b))
        come(f, f.d[0])
        assert [(await task).status for task in tasks] == [200] * 6
        order = [seen.body["prompt"] for seen in f.d[0].seen]
        assert order.index("b1") < order.index("a2"), f"keys take turns: {order}"


async def test_a_client_that_goes_away_frees_its_place_and_its_bytes_at_once() -> None:
    async with starting() as f:
        stays = await send(f)
        kept = f.context.hold.bytes
        _, writer = await f.connect()
        writer.write(request_bytes("/v1/completions", {"prompt": "gone"}))
        await f.wait(lambda: len(f.context.hold) == 2, "it to be held")
        writer.transport.abort()
        await f.wait(lambda: len(f.context.hold) == 1, "its place to be free", 10.0)
        assert f.context.hold.bytes == kept
        come(f, f.d[0])
        assert (await stays).status == 200
        assert [seen.body["prompt"] for seen in f.d[0].seen] == ["x"]


async def test_a_stream_hears_comments_and_then_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold, "COMMENT_S", 0.0)
    async with starting() as f:
        task = await send(f, body={"prompt": "x", "stream": True})
        whole = await send(f)
        for _ in range(2):
            f.context.hold.sweep(f.context.loop.time())
        come(f, f.d[0])
        answer = await task
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        comments, _, events = answer.body.partition(b"data: ")
        heard = comments.count(hold.COMMENT)
        assert heard >= 3, "one when it was held, and one at each look; the router may have looked, too"
        assert comments == hold.COMMENT * heard
        assert events.endswith(b"data: [DONE]\n\n")
        assert (await whole).headers["content-type"] == "application/json", "who gets a whole answer hears nothing before"


async def test_a_stream_that_heard_comments_ends_with_an_error_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold, "COMMENT_S", 0.0)
    async with starting(hold_s=1.0) as f:
        answer = await f.post("/v1/completions", {"prompt": "x", "stream": True})
        assert (answer.status, answer.complete) == (200, True)
        last = answer.body.rpartition(b"data: ")[2]
        assert json.loads(last)["error"]["code"] == "unavailable"


async def test_an_answer_4xx_to_a_stream_that_heard_comments_is_an_error_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold, "COMMENT_S", 0.0)
    async with starting() as f:
        f.d[0].plays.append(Play(status=400))
        task = await send(f, body={"prompt": "x", "stream": True})
        f.context.hold.sweep(f.context.loop.time())
        come(f, f.d[0])
        answer = await task
        assert (answer.status, answer.complete) == (200, True)
        assert b"data: " in answer.body


async def test_comments_are_not_written_to_who_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold, "COMMENT_S", 0.0)
    async with starting() as f:
        task = await send(f, body={"prompt": "x", "stream": True})
        (request,) = f.context.hold.waits.values()
        before = request._reply.sent_bytes
        request.on_pause()
        f.context.hold.sweep(f.context.loop.time())
        assert request._reply.sent_bytes == before
        request.on_resume()
        f.context.hold.sweep(f.context.loop.time())
        assert request._reply.sent_bytes > before
        come(f, f.d[0])
        assert (await task).status == 200


async def test_a_router_that_stops_ends_holds_at_once() -> None:
    async with starting(drain_timeout_s=60.0) as f:
        task = await send(f)
        stopped = asyncio.create_task(f.router.stop())
        answer = await asyncio.wait_for(task, 10.0)
        assert answer.status == 503
        assert answer.json["error"]["message"] == (
            "no instance is ready, and this router ends: another one may know of one")
        assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")
        await asyncio.wait_for(stopped, 10.0)


async def test_a_router_that_sends_clients_elsewhere_holds_nobody_until_that_is_taken_back() -> None:
    async with starting() as f:
        task = await send(f)
        f.router.turn_away(True)
        assert (await asyncio.wait_for(task, 10.0)).status == 503
        assert (await asyncio.wait_for(f.complete(), 10.0)).status == 503
        f.router.turn_away(False)
        task = await send(f)
        come(f, f.d[0])
        assert (await task).status == 200


async def test_where_prefill_is_a_must_its_start_is_waited_for() -> None:
    async with fleet(1, 1, hold_s=LONG_S, on_no_prefill="reject") as f:
        f.beat(f.p[0], interval_s=60.0, state=State.STARTING)
        task = await send(f)
        assert (await f.post("/v1/embeddings", {"input": "x"})).status == 200, "what needs no prefill waits for none"
        come(f, f.p[0])
        assert (await task).status == 200
        await f.wait(lambda: len(f.p[0].seen) == 1, "prefill's leg")
    async with fleet(1, 1, hold_s=LONG_S) as f:
        f.beat(f.p[0], interval_s=60.0, state=State.STARTING)
        assert (await f.complete()).status == 200, "else decode does it"


async def test_who_waited_in_the_queue_is_held_when_the_last_instance_restarts() -> None:
    async with fleet(0, 1, hold_s=LONG_S, max_per_instance=1) as f:
        held = asyncio.Event()
        f.d[0].plays.append(Play(hold=held))
        first = asyncio.create_task(f.complete())
        await f.wait(lambda: len(f.d[0].seen) == 1, "the first")
        second = asyncio.create_task(f.complete())
        await f.wait(lambda: len(f.context.line) == 1, "the second to wait")
        f.beat(f.d[0], interval_s=60.0, state=State.STARTING, incarnation=Incarnation("next"))
        assert (await first).status == 502, "what ran there is lost with it"
        await f.wait(lambda: len(f.context.hold) == 1, "the second to be held")
        f.beat(f.d[0], interval_s=60.0, incarnation=Incarnation("next"))
        assert (await second).status == 200


async def test_a_request_is_held_once() -> None:
    async with starting() as f:
        task = await send(f)
        (request,) = f.context.hold.waits.values()
        come(f, f.d[0])
        start(f, f.d[0])  # before its turn came
        f.context.hold.missing = lambda _alone: None  # its turn comes all the same
        f.context.hold.schedule()
        await asyncio.sleep(0)
        answer = await asyncio.wait_for(task, 10.0)
        assert answer.status == 503
        assert request.ticket is None


async def test_whom_no_engine_was_there_for_waits_for_the_next_one() -> None:
    async with fleet(0, 1, hold_s=LONG_S) as f:
        records = f.records()
        await f.d[0].stop()
        task = await send(f)
        assert f.context.roster.why_not(Role.DECODE) == "no decode instance is ready (d0 suspended)"
        again = await ScriptedEngine("d0").start()
        try:
            f.context.watch.on_message(beat("d0", Role.DECODE, again.address, interval_s=60.0,
                                            incarnation=Incarnation("2")))
            assert (await task).status == 200
            assert len(again.seen) == 1
            await f.wait_quiet()
            assert [record.outcome for record in records] == ["held", "ok"]
            assert f.context.observer.metrics.requests_failed == 0
        finally:
            await again.stop()


async def test_whose_engine_broke_off_is_not_asked_again_for_ever() -> None:
    async with fleet(0, 1, hold_s=LONG_S) as f:
        f.d[0].plays.append(Play(die_at="request"))
        assert (await f.complete()).status == 502, "an engine has seen it, and ended"
