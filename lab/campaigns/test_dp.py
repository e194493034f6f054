"""Step sync at length, outside CI: larger bounds of the model, a thousand deaths in it, 10,000 requests, 15 real kills.

Figures go into bench/results/campaign_dp.json. ``REQUESTS`` and ``KILLS`` in the environment change the sizes.
What is done so far is kept in .cache: a campaign that was ended goes on from there (remove the file to begin anew).
"""

import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from dp_engines import DpEngine
from engines import HttpError, ProcessFailed
from step_model import Bounds, explore, walk

from xpyd_sidecar.dp.look_ahead import LookAhead

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "campaign_dp.json"
SO_FAR = ROOT / ".cache" / "campaign_dp.json"
REQUESTS = int(os.environ.get("REQUESTS", "10000"))
KILLS = int(os.environ.get("KILLS", "15"))
CLIENTS = 96
PART = 500
"""Requests after which the ranks must come to rest at one step, and figures are kept."""
ANSWER_S = 300.0
STARTS_LOST = 10
START_S = 1200.0
"""Other campaigns may run beside this one."""
TIMEOUT_S = 15.0
DEATH_S = TIMEOUT_S + 30.0
LARGE = {
    "two ranks, early stop, kv, two losses": Bounds((3, 2), kv=(0, 2), early_stop=True, losses=2),
    "two ranks, pause, kv, a loss": Bounds((2, 1), kv=(0, 1), pause=True, losses=1),
    "three ranks, pause": Bounds((2, 1, 0), pause=True),
    "three ranks, kv, a loss": Bounds((2, 1, 0), kv=(0, 0, 1), losses=1),
    "three ranks, fixed look-ahead, early stop": Bounds((2, 2, 1), policy=LookAhead(2), early_stop=True),
    "three ranks, a death": Bounds((2, 1, 1), deaths=1, early_stop=True),
}


def note(**figures: object) -> None:
    known = json.loads(RESULTS.read_text("ascii")) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(known | figures, indent=2, sort_keys=True) + "\n", "ascii")
    print(figures, flush=True)


def so_far(name: str) -> Any:
    return json.loads(SO_FAR.read_text("ascii")).get(name) if SO_FAR.exists() else None


def keep(name: str, figures: object) -> None:
    known = json.loads(SO_FAR.read_text("ascii")) if SO_FAR.exists() else {}
    SO_FAR.write_text(json.dumps(known | {name: figures}), "ascii")
    print(name, figures, flush=True)


@pytest.mark.parametrize("name", LARGE)
def test_model(name: str) -> None:
    found = explore(LARGE[name], 5_000_000)
    note(**{f"model: {name}": {"states": found.states, "transitions": found.transitions, "verdict": found.verdict}})
    assert found.verdict == "ok", found.trace


def test_a_thousand_deaths_in_the_model() -> None:
    rng = random.Random(2)
    bounds = Bounds((5, 4, 3), kv=(0, 3, 1), losses=3, pause=True, deaths=1, early_stop=True)
    verdicts = Counter(walk(bounds, rng).verdict for _ in range(1000))
    note(deaths_in_the_model=dict(verdicts))
    assert verdicts == {"ok": 1000}


@pytest.mark.parametrize("mode", ["rpc", "shm"])
def test_soak(mode: str, tmp_path: Path) -> None:
    """Requests of both ranks, a fifth of whose clients leave, while all ranks are paused again and again."""
    figures: Counter[str] = Counter(so_far(f"soak_{mode}") or {})
    rng = random.Random(7)
    prompts = [[rng.randrange(2, 250) for _ in range(rng.randint(2, 60))] for _ in range(12)]
    with DpEngine(mode, tmp_path, mode) as engine:
        engine.wait_ready(START_S)
        expected = [engine.ask(prompt, 40, 0, ANSWER_S) for prompt in prompts]
        while figures["requests"] < REQUESTS:
            before, began = engine.settled(60.0), time.monotonic()
            seeds = range(figures["requests"], min(figures["requests"] + PART, REQUESTS))
            figures += part(engine, prompts, expected, seeds)
            engine.settled(60.0)
            figures += Counter(steps=len(engine.steps(0)) - before, wasted=engine.wasted(before),
                               seconds=round(time.monotonic() - began))
            keep(f"soak_{mode}", figures)
    note(**{f"soak_{mode}": {"wrong": 0, **figures}})
    assert not figures["wrong"]
    assert figures["answered"] > 0.7 * REQUESTS
    assert figures["left"] > 0.1 * REQUESTS
    assert figures["pauses"] >= REQUESTS // PART


def part(engine: DpEngine, prompts: Sequence[list[int]], expected: Sequence[list[int]], seeds: range) -> Counter[str]:
    """One request for each seed, ``CLIENTS`` at a time, and pauses until they are through."""

    def client(seed: int) -> str:
        mine = random.Random(seed)
        which, length, rank = mine.randrange(len(prompts)), mine.choice((1, 2, 9, 40)), mine.randrange(2)
        leaves = mine.random() < 0.2
        try:
            tokens = engine.ask(prompts[which], length, rank, mine.uniform(0.005, 0.3) if leaves else ANSWER_S)
        except OSError as error:
            if leaves:
                return "left"
            print(f"{engine.name}, seed {seed}: {error!r}", flush=True)
            return "wrong"
        if tokens != expected[which][:length]:
            print(f"{engine.name}, seed {seed}: {tokens}", flush=True)
            return "wrong"
        return "answered"

    rng, figures = random.Random(seeds.start), Counter[str](requests=len(seeds))
    with ThreadPoolExecutor(CLIENTS) as clients:
        asked = [clients.submit(client, seed) for seed in seeds]
        while not all(one.done() for one in asked):
            engine.pause(rng.choice(("keep", "keep", "wait")))
            engine.resume()
            figures["pauses"] += 1
            time.sleep(rng.uniform(0.1, 1.0))
        figures.update(one.result() for one in asked)
    return figures


def test_ranks_that_are_started_apart(tmp_path: Path) -> None:
    """As on two hosts: grants go through the broadcast queue, and the death of one process is known before the timeout."""
    with DpEngine("one", tmp_path, "rpc") as one:
        one.wait_ready(START_S)
        expected = [one.ask([5, 6, 7 + rank], 20, rank, ANSWER_S) for rank in (0, 1)]
    with DpEngine("apart", tmp_path, "rpc", timeout_s=300.0, apart=True) as engine:
        engine.wait_ready(START_S)
        assert [engine.ask([5, 6, 7 + rank], 20, rank, ANSWER_S) for rank in (0, 1)] == expected
        engine.settled(60.0)
        wasted = engine.wasted()
        assert "runs in step by rpc over several hosts" in engine.log.read_text("utf-8")
        with ThreadPoolExecutor(1) as clients:
            asked = clients.submit(engine.ask, [5, 6, 7], 1900, 0, ANSWER_S)
            time.sleep(1.0)
            began = time.monotonic()
            engine.far[0].kill()
            error = asked.exception(DEATH_S)
            seconds = round(time.monotonic() - began, 1)
        assert isinstance(error, (HttpError, OSError)), repr(error)
    note(apart={"steps_wasted": wasted, "death_known_s": seconds})


def test_kills(tmp_path: Path) -> None:
    """Ranks that are killed or stand still under load; over rpc, rank 0 has the coordinator."""
    ends: list[dict[str, Any]] = so_far("kills") or []
    starts = itertools.count()
    while len(ends) < KILLS:
        number, start = len(ends), next(starts)
        mode = ("rpc", "shm")[number % 2]
        with DpEngine(f"{mode}-{start}", tmp_path, mode, timeout_s=TIMEOUT_S) as engine:
            try:
                engine.wait_ready(START_S)
            except ProcessFailed:  # vLLM gives its own processes fixed times to start, which a busy machine may exceed
                if start - number >= STARTS_LOST:
                    raise
                continue
            ends.append(death(engine, mode, random.Random(number)))
        keep("kills", ends)
    note(kills=ends)
    assert all(end["seconds"] < DEATH_S for end in ends)


def death(engine: DpEngine, mode: str, rng: random.Random) -> dict[str, Any]:
    """Kill a rank (SIGKILL) or let it stand still (SIGSTOP) while a request runs on the other."""
    rank, how = rng.randrange(2), rng.choice((signal.SIGKILL, signal.SIGSTOP))
    with ThreadPoolExecutor(1) as clients:
        asked = clients.submit(engine.ask, [5, 6, 7], 1900, 1 - rank, DEATH_S + 60.0)
        time.sleep(rng.uniform(0.0, 1.0))
        assert not asked.done(), f"{mode}: {asked.exception()!r} before rank {rank} was killed"
        began = time.monotonic()
        os.kill(engine.core(rank), how)
        error = asked.exception(DEATH_S)
        seconds = round(time.monotonic() - began, 1)
    assert isinstance(error, (HttpError, OSError)), f"{mode}, rank {rank}, {how.name}: {error!r}"
    with pytest.raises((HttpError, OSError)):
        engine.ask([5, 6, 7], 1, 1 - rank, DEATH_S)
    log = engine.log.read_text("utf-8", errors="replace")
    assert "EngineDeadError" in log, engine.log
    return {"mode": mode, "rank": rank, "how": how.name, "seconds": seconds, "error": type(error).__name__,
            "named": "cannot go on at step" in log}
