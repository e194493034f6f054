"""A decode leg that was taken back before the engine answered is said farewell."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

import pytest
from router_fleet import RouterFleet, fleet, request_bytes
from scripted_engine import Play

from xpyd_sidecar.contract import legs
from xpyd_sidecar.router.upstream import pool


async def leave(f: RouterFleet, *, after: bytes = b"") -> None:
    """A client that sends a streaming request, reads up to ``after``, and goes."""
    reader, writer = await f.connect()
    writer.write(request_bytes("/v1/completions", {"prompt": "x", "stream": True}))
    await f.wait(lambda: bool(f.p[0].seen and f.d[0].seen), "both legs")
    if after:
        await reader.readuntil(after)
    writer.close()
    await f.wait(lambda: f.d[0].aborts == 1, "decode's leg is closed")


async def test_a_leg_taken_back_before_its_first_token_is_named_to_the_engine() -> None:
    async with fleet() as f:
        f.p[0].default = f.d[0].default = Play(hold=asyncio.Event())
        await leave(f)
        await f.wait(lambda: len(f.d[0].refused) == 1, "farewell")
        said, leg = f.d[0].refused[0].body[legs.FIELD], f.d[0].seen[0].body[legs.FIELD]
        assert said == leg
        assert said[legs.REMOTE] is True
        await f.wait_quiet()
        await f.wait(lambda: len(f.context.cancel_notices) == 0, "it is over")
        assert not f.p[0].refused


async def test_it_names_the_newest_attempt_that_prefill_was_asked_for() -> None:
    async with fleet(2, 1) as f:
        once = deque([Play(die_at="request")])
        for engine in f.p:
            engine.plays, engine.default = once, Play(hold=asyncio.Event())
        f.d[0].default = Play(hold=asyncio.Event())
        _, writer = await f.connect()
        writer.write(request_bytes("/v1/completions", {"prompt": "x", "stream": True}))
        await f.wait(lambda: len(f.d[0].seen) + len(f.p[0].seen) + len(f.p[1].seen) >= 3, "a second prefill leg")
        attempts = [seen.body[legs.FIELD]["attempt"] for engine in f.p for seen in engine.seen]
        writer.close()
        await f.wait(lambda: bool(f.d[0].refused), "farewell")
        assert f.d[0].refused[0].body[legs.FIELD]["attempt"] == max(attempts) == 2
        await f.wait_quiet()


@pytest.mark.parametrize("status", [400, 422, 500])
async def test_a_leg_that_the_engine_refuses_is_named_to_it(status: int) -> None:
    async with fleet() as f:
        f.d[0].default = Play(status=status)
        assert (await f.complete(stream=True)).status == status
        await f.wait(lambda: bool(f.d[0].refused), "farewell")
        await f.wait_quiet()


async def test_a_leg_that_has_begun_is_known_to_the_engine() -> None:
    async with fleet() as f:
        f.d[0].default = Play(chunks=9, hold_after=(1, asyncio.Event()))
        await leave(f, after=b"t0")
        await f.wait_quiet()
        assert not f.d[0].refused


async def test_an_engine_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "ANSWER_S", 0.05)
    async with fleet() as f:
        f.p[0].default = f.d[0].default = Play(hold=asyncio.Event())
        f.d[0].deaf = True
        await leave(f)
        await f.wait(lambda: len(f.d[0].refused) == 1, "farewell")
        await f.wait(lambda: len(f.context.cancel_notices) == 0 and not f.context.pool.calls, "given up")


async def test_no_more_than_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "OPEN_MAX", 0)
    async with fleet() as f:
        f.p[0].default = f.d[0].default = Play(hold=asyncio.Event())
        await leave(f)
        await f.wait_quiet()
        assert not f.d[0].refused


async def test_an_engine_that_takes_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with fleet() as f:
        f.p[0].default = f.d[0].default = Play(hold=asyncio.Event())
        f.d[0].refusal = 200
        with caplog.at_level(logging.WARNING, "xpyd_sidecar.router.upstream.pool"):
            await leave(f)
            await f.wait(lambda: "-1 tokens" in caplog.text, "warning")
