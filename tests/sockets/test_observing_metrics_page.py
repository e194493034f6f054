"""The page of metrics is made at most every quarter of a second, whoever asks for it how often."""

from __future__ import annotations

import asyncio
import itertools

from router_fleet import RouterFleet, fleet, read_answer, request_bytes

LOOPS = ("uvloop",)
EVERY_S = 0.25
GET = request_bytes("/metrics", method="GET")


def counted(f: RouterFleet) -> list[float]:
    """When the page was made."""
    made: list[float] = []
    text = f.context.observer.metrics.text

    def count() -> bytes:
        made.append(asyncio.get_running_loop().time())
        return text()

    f.context.observer.metrics.text = count
    return made


async def test_many_requests_for_metrics_make_the_page_a_few_times() -> None:
    async with fleet(0, 1) as f:
        made = counted(f)
        reader, writer = await f.connect()
        began = asyncio.get_running_loop().time()
        writer.write(GET * 1000)
        for _ in range(1000):
            answer = await read_answer(reader)
            assert (answer.status, b"xpyd_router_in_flight" in answer.body) == (200, True)
        took = asyncio.get_running_loop().time() - began
        assert len(made) <= 1 + took / EVERY_S
        assert all(later - sooner >= EVERY_S for sooner, later in itertools.pairwise(made))
        writer.transport.abort()


async def test_a_page_is_made_anew_once_it_is_old() -> None:
    async with fleet(0, 1) as f:
        await f.complete()
        line = b'xpyd_router_requests_total{api="completions",outcome="ok"} '
        first = (await f.get("/metrics")).body
        assert line + b"1.0" in first
        await f.complete()
        await f.wait_quiet()
        async with asyncio.timeout(20):
            while line + b"2.0" not in (await f.get("/metrics")).body:
                pass
