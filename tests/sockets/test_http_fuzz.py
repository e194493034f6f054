"""A short run of the HTTP fuzz; the long one is ``campaign-http``."""

from __future__ import annotations

import asyncio

import pytest
from http_fuzz import AMBIGUOUS, Fuzz, Shape, site
from router_fleet import fleet

LOOPS = ("uvloop",)


@pytest.mark.parametrize("seed", [1, 2])
async def test_malformed_split_and_pipelined_requests_never_desync_hang_or_harm(seed: int) -> None:
    async with site() as f:
        report = await Fuzz(f.router.port, seed).run(rounds=80)
        assert report.bad == []
        assert report.statuses[200] > 30
        assert report.statuses[400] > 10
        await f.wait_quiet()
        async with asyncio.timeout(30):
            while f.router.server.connections:  # noqa: ASYNC110 (what is waited for is the server's state)
                await asyncio.sleep(0.05)


async def test_every_ambiguous_request_is_refused_and_nothing_after_it_answered() -> None:
    async with fleet(1, 1) as f:
        fuzz = Fuzz(f.router.port, 0)
        for data in AMBIGUOUS:
            for style in (0, 1):
                await fuzz._one(Shape("ambiguous", data + fuzz._smuggled(), [], refused=True), style)
        assert fuzz.report.bad == []
        assert not [engine.seen for engine in (*f.p, *f.d) if engine.seen], "none of them reached an engine"
