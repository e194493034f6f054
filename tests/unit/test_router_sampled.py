"""Sampled streams that go on with another engine, over real sockets: engines that draw, of which some break off."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from kills import FIELDS, Way
from router_fleet import Answer, RouterFleet, fleet, request_bytes
from sampled_streams import FIELDS as ASKED
from sampled_streams import MAX_TOKENS, tokens_of
from scripted_engine import Play, ScriptedEngine, Seen
from seam_judge import Sample, judge
from toy_model import ToyReplay

from xpyd_sidecar.contract.membership import Sampling

LOOPS = ("router",)
STREAMS, AT_ONCE = 200, 8
BREAKS = (Way.CLOSE, Way.HALF, Way.ERROR, Way.ABORT)


@contextlib.asynccontextmanager
async def drawing(told: Sampling | None = Sampling(), **settings: Any) -> AsyncIterator[RouterFleet]:  # noqa: B008 (frozen)
    """A fleet whose engines draw, each with a seed of its own."""
    async with fleet(1, 3, replay=ToyReplay(9), retry_budget=1.0, **settings) as f:
        for number, engine in enumerate(f.d):
            engine.replay = ToyReplay(number)
        for number, engine in enumerate((*f.p, *f.d)):
            f.beat(engine, interval_s=60.0, seq=2 + number, sampling=told)
        yield f


def breaking(f: RouterFleet, draw: random.Random) -> dict[str, int]:
    """Break every second stream at a random event; by request id."""
    broken: dict[str, int] = {}

    def chooser(engine: ScriptedEngine) -> Any:
        def choose(seen: Seen) -> Play | None:
            name = seen.headers.get("x-request-id", "")
            if int(name[1:]) % 2 or name in broken:
                return None
            broken[name] = draw.randint(0, MAX_TOKENS)
            return Play(**{FIELDS[draw.choice(BREAKS)]: broken[name]})
        return choose

    for engine in f.d:
        engine.choose = chooser(engine)
    return broken


async def ask(f: RouterFleet, number: int, **fields: Any) -> Answer:
    body = {**ASKED, "user": str(number), **fields}
    return await f.raw(request_bytes("/v1/completions", body, headers={"X-Request-Id": f"r{number}"}), 30.0)


def sample_of(number: int, answer: Answer, draw: random.Random, broken: dict[str, int]) -> Sample:
    assert (answer.status, answer.complete, answer.events[-1]) == (200, True, "[DONE]"), answer.body[-300:]
    choices = [choice for event in answer.events[:-1] for choice in event["choices"]]
    tokens = tokens_of("".join(choice["text"] for choice in choices), choices[-1]["finish_reason"])
    cut = f"r{number}" in broken
    seam = broken[f"r{number}"] if cut else draw.randint(0, MAX_TOKENS)
    return Sample(tokens, seam if seam < len(tokens) else None, cut)


@pytest.mark.timeout(120)
async def test_200_sampled_streams_of_which_half_break_are_whole_and_have_one_distribution(
        caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "xpyd_sidecar.access")
    draw = random.Random(1)
    async with drawing() as f:
        broken, answers = breaking(f, draw), dict[int, Answer]()

        async def worker(first: int) -> None:
            for number in range(first, STREAMS, AT_ONCE):
                answers[number] = await ask(f, number)

        await asyncio.gather(*map(worker, range(AT_ONCE)))
        await f.wait_quiet()
        samples = [sample_of(number, answers[number], draw, broken) for number in range(STREAMS)]
        verdict = judge(samples, MAX_TOKENS)
        assert not verdict.rejects, verdict.worst
        counts = [event.get("xpyd_continued", 0) for number in range(STREAMS)
                  for event in answers[number].events[:-1] if any(one["finish_reason"] for one in event["choices"])]
        assert len(counts) == STREAMS, "each has one finish reason"
        assert not any(counts[1::2]), "streams that nothing happened to say nothing"
        f.dispatch.observer.settle()
        value = f.dispatch.observer.metrics.registry.get_sample_value("xpyd_router_continued_total")
        assert value == sum(counts) > STREAMS / 4
        assert sum(record.__dict__.get("continued", 0) for record in caplog.records) == sum(counts)


@pytest.mark.parametrize(("told", "settings", "fields"), [
    (Sampling(), {"failover": "exact"}, {}), (Sampling(), {"failover": "error"}, {}), (None, {}, {}),
    (Sampling(own=("my.processor",)), {}, {}), (Sampling((("presence_penalty", 0.5),)), {}, {}),
    (Sampling(), {}, {"presence_penalty": 0.5}), (Sampling(), {}, {"stop": ["zz"]}),
])
async def test_where_that_is_not_sure_a_broken_sampled_stream_ends_with_an_error_event(
        told: Sampling | None, settings: dict[str, Any], fields: dict[str, Any]) -> None:
    async with drawing(told, **settings) as f:
        for engine in f.d:
            engine.plays.append(Play(close_after=4))
        answer = await ask(f, 1, **fields)
        assert answer.events[-1]["error"]["code"] == "engine_failed"
        assert sum(len(engine.seen) for engine in f.d) == 1, "nobody was asked to go on"


async def test_a_stream_that_began_when_engines_told_other_things_does_not_go_on() -> None:
    held = asyncio.Event()
    async with drawing() as f:
        for engine in f.d:
            engine.plays.append(Play(hold_after=(4, held), close_after=6))
        asking = asyncio.ensure_future(ask(f, 1))
        await f.wait(lambda: any(engine.seen for engine in f.d), "a stream")
        for number, engine in enumerate((*f.p, *f.d)):
            f.beat(engine, interval_s=60.0, seq=20 + number, sampling=Sampling((("top_k", 3.0),)))
        held.set()
        answer = await asking
        assert answer.events[-1]["error"]["code"] == "engine_failed"
