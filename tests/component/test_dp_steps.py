"""Two data-parallel ranks that share experts, kept in step by both variants, on real engines."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dp_engines import DpEngine
from engines import HttpError, post

pytestmark = pytest.mark.engines
TIMEOUT_S = 15.0
PROMPTS = [[3 + i, 40, 50 + i, 7] * (1 + i % 5) for i in range(8)]
REQUESTS = 250


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, DpEngine]]:
    folder = tmp_path_factory.mktemp("dp")
    made = {mode: DpEngine(mode, folder, mode, timeout_s=TIMEOUT_S) for mode in ("rpc", "shm")}
    try:
        for engine in made.values():
            engine.start()
        for engine in made.values():
            engine.wait_ready()
        yield made
    finally:
        for engine in made.values():
            engine.kill()


@pytest.fixture(scope="module", params=["rpc", "shm"])
def engine(request: pytest.FixtureRequest, engines: dict[str, DpEngine]) -> DpEngine:
    return engines[request.param]


def test_both_variants_and_both_ranks_give_the_same_tokens(engines: dict[str, DpEngine]) -> None:
    answers = [[engine.ask(prompt, 12, rank) for prompt in PROMPTS] for engine in engines.values() for rank in (0, 1)]
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert len({tuple(one) for one in answers[0]}) == len(PROMPTS)


def test_requests_that_use_their_budget_waste_no_step(engine: DpEngine) -> None:
    before = engine.settled()
    for length in (1, 5, 17, 1, 30):
        engine.ask([5, 6, 7], length, 0)
    after = engine.settled()
    assert after - before == engine.useful(before)
    assert engine.wasted(before) == 0
    assert any(not step.real for step in engine.steps(1)[before:])


def test_a_request_that_no_front_end_knows_of_runs_at_once(engine: DpEngine) -> None:
    before = engine.settled()
    engine.inject(1, [9, 8, 7], 5)
    engine.group.wait_until(lambda: engine.useful(before) == 5, 120.0, "through with the injected request", poll_s=0.05)
    assert engine.settled() == before + 5
    assert all(not step.real for step in engine.steps(0)[before:])
    assert all(step.real for step in engine.steps(1)[before:])


def test_pauses_hold_at_one_step_and_requests_go_on_after_them(engine: DpEngine) -> None:
    expected = [engine.ask(PROMPTS[0], 60, rank) for rank in (0, 1)]
    found: dict[int, list[int]] = {}
    threads = [threading.Thread(target=lambda rank=rank: found.update({rank: engine.ask(PROMPTS[0], 60, rank)}))
               for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        engine.pause("keep")
        held = [len(engine.steps(rank)) for rank in (0, 1)]
        time.sleep(0.2)
        assert [len(engine.steps(rank)) for rank in (0, 1)] == held
        assert held[0] == held[1]
        engine.resume()
        time.sleep(0.1)
    for thread in threads:
        thread.join(240.0)
    assert [found[0], found[1]] == expected


def test_soak_with_aborts_and_pauses(engine: DpEngine) -> None:
    rng = random.Random(5)
    expected = [engine.ask(prompt, 24, 0) for prompt in PROMPTS]
    wrong: list[str] = []
    done = [0]

    def client(seed: int) -> None:
        mine = random.Random(seed)
        for _ in range(REQUESTS // 10):
            which, length, rank = mine.randrange(len(PROMPTS)), mine.choice((1, 2, 9, 24)), mine.randrange(2)
            leaves = mine.random() < 0.2
            try:
                tokens = engine.ask(PROMPTS[which], length, rank, timeout_s=0.02 if leaves else 240.0)
            except OSError as error:
                if not leaves:
                    wrong.append(f"{PROMPTS[which]} x {length} on rank {rank}: {error!r}")
                continue
            if tokens != expected[which][:length]:
                wrong.append(f"{PROMPTS[which]} x {length} on rank {rank}: {tokens}")
            done[0] += 1

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(10)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        engine.pause("keep")
        engine.resume()
        time.sleep(rng.uniform(0.2, 0.6))
    assert not wrong
    assert done[0] > REQUESTS // 2
    engine.settled()


@pytest.mark.parametrize(("mode", "rank"), [("rpc", 0), ("shm", 1)])
def test_the_death_of_a_rank_ends_the_engine_with_an_error(mode: str, rank: int, engines: dict[str, DpEngine]) -> None:
    """rpc: rank 0 has the coordinator, and stands still rather than dies, which only the heartbeats find."""
    engine = engines[mode]
    errors: list[BaseException] = []

    def ask() -> None:
        """Until one fails: a test that stands still may be too late for the first."""
        while not errors:
            try:
                assert len(engine.ask([5, 6, 7], 1500, 1 - rank)) == 1500, "it was cut off, and nobody said so"
            except (HttpError, OSError, AssertionError) as error:
                errors.append(error)

    client = threading.Thread(target=ask)
    client.start()
    time.sleep(0.3)
    core = engine.core(rank)
    os.kill(core, signal.SIGSTOP if mode == "rpc" else signal.SIGKILL)
    try:
        client.join(TIMEOUT_S + 120.0)
        assert not client.is_alive()
        assert isinstance(errors[0], (HttpError, OSError)), errors
        if mode == "rpc":
            end = time.monotonic() + 60.0
            words = ("cannot go on at step", "coordinator in DP rank 0: silent for")
            while missing := [each for each in words if each not in Path(engine.log).read_text()]:
                assert time.monotonic() < end, missing
                time.sleep(0.1)
        with pytest.raises((HttpError, OSError)):
            post(f"{engine.url}/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 1}, 20.0)
    finally:
        engine.kill()
