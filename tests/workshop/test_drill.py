"""The drill's engines and its play: real routers take them for engines, and their times are the simulation's."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from beats import SERVICE
from processes import kept_waiting_s
from router_fleet import KEY, RouterFleet, fleet

from xpyd_operator.simulation.controllers import Static
from xpyd_operator.simulation.engine import EngineModel
from xpyd_operator.simulation.outcome import Run
from xpyd_operator.simulation.rules import PATIENT
from xpyd_operator.simulation.trace import Arrival
from xpyd_operator.simulation.world import World
from xpyd_operator.traffic.drive import TrafficTarget, drive
from xpyd_sidecar.contract.ids import HostPort, Role

FOLDER = str(Path(__file__).resolve().parents[2] / "lab/bench/drill")
ENGINE = EngineModel(prefill_rate=1300, step_base=0.06, step_per_request=0.006, kv_tokens=100_000, handover=0.06)
"""So slow that the way of a token through the router, all in one process, is little beside it."""


@pytest.fixture(scope="module")
def drill() -> Any:
    """Its modules."""
    sys.path.insert(0, FOLDER)
    try:
        yield {name: importlib.import_module(name) for name in ("core", "model_engine", "play")}
    finally:
        sys.path.remove(FOLDER)


@contextlib.asynccontextmanager
async def served(drill: Any, prefills: int, decodes: int) -> AsyncIterator[tuple[RouterFleet, list[Any]]]:
    """A router before so many engines, which beat."""
    context = zmq.Context()
    handed = drill["model_engine"].Handed()
    async with fleet(0, 0) as routed:
        roles = [Role.PREFILL] * prefills + [Role.DECODE] * decodes
        engines = [drill["model_engine"].ModelEngine(f"e{at}", role, f"127.0.9.{at + 1}", ENGINE, handed, service=SERVICE,
                                                     served="tiny", key=KEY) for at, role in enumerate(roles)]
        at = [HostPort(f"127.0.0.1:{routed.router.members_port}")]

        async def beats() -> None:
            while True:
                for each in engines:
                    each.tell(context, at, draining=False)
                await asyncio.sleep(0.1)

        for each in engines:
            await each.begin()
        beating = asyncio.create_task(beats())
        try:
            await routed.wait(lambda: len(list(routed.context.roster.members())) == len(roles), "all are known")
            yield routed, engines
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            for each in engines:
                each.farewell()
                await each.die()
            context.term()


async def ask(routed: RouterFleet, trace: list[Arrival]) -> Any:
    """All of it, as the drill does."""
    target = TrafficTarget(f"http://127.0.0.1:{routed.router.port}/v1", "tiny", timeout_s=60)
    return await drive(target, trace, lambda: 0.5, lambda _: None)


def world(trace: list[Arrival], counts: tuple[int, int]) -> Run:
    return World(trace, ENGINE, counts, Static(), rules=PATIENT).play()


async def test_what_a_client_sees_is_what_the_simulation_says(drill: Any) -> None:
    trace = [Arrival(0.45 * at, 200 + 40 * (at % 7), 20 + at % 5) for at in range(20)]
    async with served(drill, 1, 1) as (routed, engines):
        before_s = kept_waiting_s([os.getpid()])
        outcomes = await ask(routed, trace)
    kept_s = kept_waiting_s([os.getpid()]) - before_s  # client, router and engines are all of this process
    run = world(trace, (1, 1))
    assert [each.output_tokens for each in outcomes] == [each.output for each in trace]
    assert not any(each.error for each in outcomes)
    assert engines[1].requests == 0
    ttfts = sorted(each.ttft for each in outcomes)
    assert ttfts[10] >= sorted(run.ttft)[10], "nothing is sooner than it can be"
    assert ttfts[10] < sorted(run.ttft)[10] + 0.75 + kept_s
    tpots, tpot = sorted(each.tpot for each in outcomes), sorted(run.tpot)[10]
    assert 0.7 * tpot < tpots[10] < 1.3 * tpot + kept_s / 19, "of twenty tokens at least"


async def test_a_stream_whose_engine_dies_goes_on_elsewhere_to_its_full_length(drill: Any) -> None:
    async with served(drill, 1, 2) as (routed, engines):
        asking = asyncio.create_task(ask(routed, [Arrival(0.0, 100, 150), Arrival(0.01, 100, 150)]))
        await routed.wait(lambda: all(each.requests for each in engines[1:]), "both decode")
        await asyncio.sleep(1.0)
        await engines[1].die()
        outcomes = await asking
    assert [(each.error, each.output_tokens) for each in outcomes] == [("", 150), ("", 150)]


async def test_decode_computes_what_no_prefill_engine_can(drill: Any) -> None:
    async with served(drill, 0, 1) as (routed, _):
        [outcome] = await ask(routed, [Arrival(0.0, 2000, 5)])
    assert not outcome.error
    assert outcome.output_tokens == 5
    assert outcome.ttft > ENGINE.prefill_s(2000)


def test_a_play_is_the_hour_in_a_tenth_of_its_time(drill: Any) -> None:
    play = drill["play"].play_of("flat:hours=0.2,rate=2,prompt=500,output=50", 3)
    hour = drill["play"].HOUR_ENGINE
    assert play.lasts_s == pytest.approx(72, rel=0.05)
    for tokens in (100, 5000):
        assert play.engine.prefill_s(tokens) == pytest.approx(hour.prefill_s(tokens) / 10)
        assert play.engine.link_s(tokens) == pytest.approx(hour.link_s(tokens) / 10)
    assert play.engine.step_s(9, 1000) == pytest.approx(hour.step_s(9, 1000) / 10)
    unchanged = ("kv_tokens", "kv_bytes", "max_requests", "chunk", "cold_spread", "cold_failures", "gpus", "pods")
    assert all(getattr(play.engine, name) == getattr(hour, name) for name in unchanged)
    times = set(msgspec.structs.asdict(hour)) - set(unchanged)
    assert len(times) == 11, "a new field is a time, a rate or neither: say which in hurried()"
    run = drill["play"].simulated(play, 2)
    assert run.attainment(play.ttft_s, play.tpot_s) > 0.5
