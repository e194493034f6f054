"""700 streams at once on a service of `xpyd up` that may open 1,024 files: whole or refused, and no engine is blamed.

    soft limit 1,024     raised by the router to the hard one: every stream is whole
    hard limit 1,024     each is whole, or 503 with Retry-After; also while an engine really dies

The streams are greedy: a sampled one that breaks off inside a character cannot always go on.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import resource
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from engines import MODEL_NAME
from service import Service

RESULTS = Path(__file__).parents[2] / "bench/results/campaign_files.json"
STREAMS, FILES, TOKENS = 700, 1024, 8
WHOLE_S = 240.0


async def stream(session: aiohttp.ClientSession, url: str, number: int) -> str:
    """One request; ``whole``, ``refused`` or what is wrong with it."""
    body = {"model": MODEL_NAME, "prompt": f"{number} is a number", "max_tokens": TOKENS, "ignore_eos": True,
            "temperature": 0, "stream": True}
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            text = (await answer.read()).decode()
            if answer.status == 503 and answer.headers.get("Retry-After"):
                return "refused"
            if answer.status != 200:
                return f"{answer.status} {text[:120]}"
            events = [one.removeprefix("data: ") for one in text.split("\n\n") if one.startswith("data: ")]
            finished = [one for one in events[:-1] if json.loads(one)["choices"][0]["finish_reason"] == "length"]
            return "whole" if events[-1:] == ["[DONE]"] and len(finished) == 1 else f"200 {text[-200:]}"
    except (aiohttp.ClientError, TimeoutError) as error:
        return repr(error)[:120]


@contextlib.asynccontextmanager
async def watched(session: aiohttp.ClientSession, url: str) -> AsyncIterator[set[str]]:
    """States of instances that the router shows meanwhile, as ``role state``."""
    seen: set[str] = set()

    async def look() -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/metrics") as page:
                    for line in (await page.text()).splitlines():
                        if line.startswith("xpyd_router_instances{") and not line.endswith(" 0.0"):
                            seen.add(line.split("{")[1].split("}")[0])
            await asyncio.sleep(0.3)

    task = asyncio.create_task(look())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def all_at_once(url: str, victim: int | None = None) -> tuple[collections.Counter[str], set[str]]:
    """What became of the streams, and the states that instances were in. ``victim``: killed when they are under way."""
    timeout = aiohttp.ClientTimeout(total=WHOLE_S)
    async with (aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session,
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as other, watched(other, url) as states):
        tasks = [asyncio.create_task(stream(session, url, number)) for number in range(STREAMS)]
        if victim is not None:
            await asyncio.sleep(3.0)
            os.killpg(victim, signal.SIGKILL)
        ends = collections.Counter(await asyncio.gather(*tasks))
        await asyncio.sleep(0.5)
        return ends, set(states)


@pytest.mark.parametrize("limit", ["soft", "hard"])
async def test_no_stream_is_cut_and_no_engine_blamed_for_files_that_are_lacking(tmp_path: Path, limit: str) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with Service(tmp_path) as service:
        service.before = ("prlimit", f"--nofile={FILES}:{hard if limit == 'soft' else FILES}")
        service.up(1, 2)
        ends, states = await all_at_once(service.url)
        figures = {"streams": STREAMS, "whole": ends["whole"], "refused": ends["refused"],
                   "other": STREAMS - ends["whole"] - ends["refused"]}
        assert not figures["other"], ends
        assert not [one for one in states if "suspended" in one], states
        assert limit == "hard" or figures["whole"] == STREAMS
        if limit == "hard":
            decode = next(one["name"] for one in service.status()["instances"] if one["role"] == "decode")
            ends, _ = await all_at_once(service.url, service.processes()[f"{decode}/engine"])
            figures |= {"whole_beside_a_death": ends["whole"], "refused_beside_a_death": ends["refused"],
                        "other_beside_a_death": STREAMS - ends["whole"] - ends["refused"]}
            assert not figures["other_beside_a_death"], ends
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(known | {limit: figures}, indent=2) + "\n")
