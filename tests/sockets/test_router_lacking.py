"""What a router lacks is its own: no engine is accused, no stream is moved, and the one request is told to come again."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from typing import Any

import pytest
from made_streams import MadeReplay, made_line
from recorded import seen_of
from router_fleet import RouterFleet, fleet
from scripted_engine import Play

from xpyd_sidecar.router.fleet import watch
from xpyd_sidecar.router.upstream import pool

LOOPS = ("asyncio", "uvloop")


class Lacking:
    """While ``files`` is false, no connection to an engine can be made."""

    def __init__(self, f: RouterFleet, monkeypatch: pytest.MonkeyPatch, number: int = errno.EMFILE) -> None:
        self.files = False
        self.tries = 0
        loop, make = asyncio.get_running_loop(), asyncio.get_running_loop().create_connection
        engines = {int(engine.address.rpartition(":")[2]) for engine in (*f.p, *f.d)}

        async def create(factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
            if port in engines and not self.files:
                self.tries += 1
                raise OSError(number, os.strerror(number))
            return await make(factory, host, port, **options)

        monkeypatch.setattr(loop, "create_connection", create)


def accused(f: RouterFleet) -> list[str]:
    """Instances that the router would not ask, and those that it doubts."""
    return [member.name for member in f.context.roster.members() if member.suspended or member.doubted]


WAYS: dict[str, dict[str, Any]] = {"continue": {}, "replay": {"presence_penalty": 0.5}}
ROADS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"model": "tiny", "prompt": "hi"}),
    "stream": ("/v1/completions", {"model": "tiny", "prompt": "hi", "stream": True}),
    "chat": ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
    "passed": ("/v1/embeddings", {"model": "tiny", "input": "hi"}),
    "a dialect": ("/v1/messages", {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}),
}


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EADDRNOTAVAIL])
@pytest.mark.parametrize("road", ROADS)
async def test_the_one_request_is_told_to_come_again(road: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = ROADS[road]
    async with fleet(2, 2) as f:
        lacking = Lacking(f, monkeypatch, number)
        answer = await f.post(path, body)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        error = answer.json["error"]
        assert error["code"] == "unavailable"
        assert "127.0.0.1" not in error["message"], "no addresses"
        assert "left" in error["message"]
        assert not accused(f)
        assert not any(engine.seen for engine in (*f.p, *f.d))
        assert lacking.tries <= 2, "nobody else is asked: that would fail as well"
        budget, now = f.context.budget, asyncio.get_running_loop().time()
        assert budget.remaining_retries(now) == budget.remaining_retries(0.0), "no retry"
        lacking.files = True
        assert (await f.post(path, body)).status == 200


@pytest.mark.parametrize("way", ["continue", "replay"])
async def test_a_stream_that_goes_on_elsewhere_waits_for_a_file(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "LACKING_S", 0.05)
    line = made_line("completions", random.Random(5))
    body = {"model": "tiny", **line.body, "stream": True, "max_tokens": 24, **WAYS[way]}
    async with fleet(1, 2, MadeReplay(line)) as f:
        lacking = Lacking(f, monkeypatch)
        lacking.files = True
        for engine in f.d:
            engine.plays.append(Play(delay=0.02, close_after=5))
        task = asyncio.create_task(f.post("/v1/completions", body))
        await f.wait(lambda: any(engine.seen for engine in f.d), "the stream")
        for engine in f.d:
            engine.plays.clear()
        lacking.files = False
        await f.wait(lambda: lacking.tries >= 3, "several tries")
        assert not task.done()
        lacking.files = True
        answer = await task
        assert (answer.status, answer.complete, answer.events[-1]) == (200, True, "[DONE]")
        assert seen_of(answer.events).texts == seen_of(list(MadeReplay(line).composed(line, 0, body, "r"))).texts


async def test_a_stream_that_finds_no_file_in_time_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "LACKING_S", 0.01)
    line = made_line("completions", random.Random(5))
    body = {"model": "tiny", **line.body, "stream": True, "max_tokens": 24}
    async with fleet(1, 2, MadeReplay(line)) as f:
        lacking = Lacking(f, monkeypatch)
        lacking.files = True
        for engine in f.d:
            engine.plays.append(Play(delay=0.02, close_after=5))
        task = asyncio.create_task(f.post("/v1/completions", body))
        await f.wait(lambda: any(engine.seen for engine in f.d), "the stream")
        lacking.files = False
        answer = await task
        error = answer.events[-1]["error"] if answer.events[-1] != "[DONE]" else answer.events[-2]["error"]
        assert (error["code"], "no file descriptors" in error["message"]) == ("unavailable", True)
        assert pool.LACKING_TRIES <= lacking.tries <= 3 * pool.LACKING_TRIES


async def test_a_probe_that_cannot_be_made_is_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PROBE_AGAIN_S", 0.05)
    async with fleet(1, 1) as f:
        lacking = Lacking(f, monkeypatch)
        [member] = [one for one in f.context.roster.members() if one.name == "d0"]
        now = asyncio.get_running_loop().time()
        f.context.watch.take(f.context.roster.on_doubt(now, member.name, member.incarnation))
        await f.wait(lambda: lacking.tries >= 3, "several tries")
        assert not member.suspended
        assert member.unanswered == 0
        lacking.files = True
        await f.wait(lambda: not member.doubted, "the probe, in the end")
        assert not member.suspended


async def test_idle_connections_give_way_to_those_that_are_needed() -> None:
    async with fleet(1, 3, policy="round_robin") as f:
        f.context.pool.most = 3
        for _ in range(9):
            assert (await f.complete()).status == 200
        assert len(f.context.pool.connections) <= 3
        assert pool.IDLE_MAX > 3
