"""Requests that end engines, before a router of several real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from made_streams import MadeReplay
from poisons import Killer, asked, check_whole, code_of, line
from scripted_engine import Play
from worker_fleet import Several, several

LOOPS = ("router",)
POISON = {"model": "tiny", "user": "poison", "prompt": "poison", "max_tokens": 24}


async def count(f: Several, name: str) -> float:
    """One series of the router's metrics."""
    text = (await f.get("/metrics")).body.decode()
    return next(float(row.split(" ")[-1]) for row in text.splitlines() if row.startswith(f"{name} "))


async def wait_count(f: Several, name: str, value: float) -> None:
    """Wait until a series has this value."""
    end = asyncio.get_running_loop().time() + 20
    while (seen := await count(f, name)) != value:
        assert asyncio.get_running_loop().time() < end, f"{name} is {seen}"
        await asyncio.sleep(0.02)


@pytest.mark.unsanitized
@pytest.mark.parametrize("fields", [{"stream": True}, {}], ids=["stream", "whole"])
@pytest.mark.parametrize("how", [None, Play(chunks=24, down_after=3)], ids=["at once", "in mid-stream"])
async def test_alone_it_ends_two_engines_whichever_workers_its_client_asks(
        fields: dict[str, Any], how: Play | None) -> None:
    async with several(2, 6, 3) as f:
        killer = Killer(f.d)
        killer.how = how
        answers = [await f.post("/v1/completions", POISON | fields) for _ in range(12)]
        assert len(killer.dead) == 2, killer.dead
        assert [(answer.status, code_of(answer)) for answer in answers[2:]] == [(502, "poison_request")] * 10
        await wait_count(f, "xpyd_router_engine_deaths_total", 2)
        assert await count(f, "xpyd_router_poison_refused") == 1
        assert (await f.complete(prompt="innocent")).status == 200


@pytest.mark.unsanitized
async def test_a_worker_that_is_started_again_knows_who_is_refused() -> None:
    async with several(1, 4, 2) as f:
        killer = Killer(f.d)
        assert code_of(await f.post("/v1/completions", POISON)) == "poison_request"
        victims = f.pids
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        await f.wait(lambda: not set(victims) & set(f.pids) and len(f.pids) == 2, "new workers")
        await f.wait(lambda: all(worker.listening for worker in f.router._workers.values()), "workers that listen")
        for _ in range(8):
            assert code_of(await f.post("/v1/completions", POISON)) == "poison_request"
        assert len(killer.dead) == 2


@pytest.mark.unsanitized
async def test_of_100_honest_streams_beside_it_all_finish_and_three_engines_end_at_most() -> None:
    said = line()
    async with several(2, 8, 3, replay=MadeReplay(said)) as f:
        killer = Killer(f.d, pace_s=0.05)
        bodies = [asked(said, f"honest {number}") for number in range(100)]
        honest = [asyncio.ensure_future(f.post("/v1/completions", body)) for body in bodies]
        await f.wait(lambda: sum(len(engine.seen) for engine in f.d) == 100, "100 streams")
        answers = [await f.post("/v1/completions", POISON | {"stream": True}) for _ in range(6)]
        assert [code_of(answer) for answer in answers] == ["poison_request"] * 6
        for body, answer in zip(bodies, await asyncio.gather(*honest), strict=True):
            check_whole(answer, said, body)
        assert len(killer.dead) <= 3, killer.dead
        await wait_count(f, "xpyd_router_poison_suspects", 1)
        await wait_count(f, "xpyd_router_poison_held", 0)
