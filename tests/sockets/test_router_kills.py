"""100 kills at random points of recorded streams: nothing that clients have is lost, twice or wrong, and all go on."""

from __future__ import annotations

import pytest
from aborts import abort_scripted
from kills import kill_streams
from recorded import load
from replay import Replay
from router_fleet import fleet

LOOPS = ("uvloop",)
GONE_S = 15.0
"""The goal of a second is the campaign's: here other programs may have the processors."""


@pytest.mark.timeout(120)
async def test_100_kills_at_random_points_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xpyd_sidecar.router.serving.waiting.STALL_S", 0.3)
    async with fleet(1, 5, replay=Replay(load()), retry_budget=1.0) as f:
        report = await kill_streams(f, kills=100, seed=1, whole=3)
        await f.wait_quiet()
        print(report.told())
        report.check()
        assert report.kills >= 100
        assert report.finished >= 50
        assert report.whole >= 3, "some engines died as a whole"


@pytest.mark.timeout(120)
async def test_of_400_clients_that_leave_at_random_moments_nothing_is_left() -> None:
    async with fleet(2, 3, replay=Replay(load())) as f:
        report = await abort_scripted(f, count=400, seed=2, gone_s=GONE_S)
        await f.wait_quiet()
        print(report.told())
        report.check()
        assert min(report.by_moment.values()) > 50
        for engine in (*f.p, *f.d):
            engine.choose = lambda _: None
        assert (await f.post("/v1/completions", load().requests[0].body)).status == 200, "it still serves"
