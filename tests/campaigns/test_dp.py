"""Step sync at length, outside CI: larger bounds of the model, a thousand deaths in it, 10,000 requests, 15 real kills.

Figures go into bench/results/campaign_dp.json. ``REQUESTS=`` and ``DP_KILLS=`` of ``make campaign-dp`` change the sizes.
"""

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from dp_engines import DpEngine
from engines import HttpError
from step_model import Bounds, explore, walk

from xpyd_sidecar.dp.look_ahead import LookAhead

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "campaign_dp.json"
REQUESTS = int(os.environ.get("REQUESTS", "10000"))
KILLS = int(os.environ.get("KILLS", "15"))
TIMEOUT_S = 10.0
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
    print(figures)


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
    rng, wrong, done, lock = random.Random(7), [], Counter[str](), threading.Lock()
    prompts = [[rng.randrange(2, 250) for _ in range(rng.randint(2, 60))] for _ in range(12)]
    with DpEngine(mode, tmp_path, mode) as engine:
        engine.wait_ready()
        expected = [engine.ask(prompt, 40, 0) for prompt in prompts]

        def client(seed: int) -> None:
            mine = random.Random(seed)
            for _ in range(REQUESTS // 16):
                which, length, rank = mine.randrange(len(prompts)), mine.choice((1, 2, 9, 40)), mine.randrange(2)
                leaves = mine.random() < 0.2
                try:
                    patience = mine.uniform(0.01, 0.3) if leaves else 120.0
                    tokens = engine.ask(prompts[which], length, rank, timeout_s=patience)
                    good = tokens == expected[which][:length]
                except OSError:
                    good = leaves
                with lock:
                    done["left" if leaves else "answered"] += 1
                    if not good:
                        wrong.append((which, length, rank))

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(16)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            engine.pause(rng.choice(("keep", "keep", "wait")))
            engine.resume()
            done["pauses"] += 1
            time.sleep(rng.uniform(0.1, 1.0))
        engine.settled(60.0)
        note(**{f"soak_{mode}": {**done, "wrong": len(wrong), "steps": len(engine.steps(0)), "wasted": engine.wasted()}})
    assert not wrong


def test_kills(tmp_path: Path) -> None:
    rng, ends = random.Random(8), []
    for number in range(KILLS):
        mode, rank = ("rpc", "shm")[number % 2], rng.randrange(2)
        how = rng.choice((signal.SIGKILL, signal.SIGSTOP))
        with DpEngine(f"{mode}-{number}", tmp_path, mode, timeout_s=TIMEOUT_S) as engine:
            engine.wait_ready()
            client = threading.Thread(target=_doomed, args=(engine, 1 - rank))
            client.start()
            time.sleep(rng.uniform(0.0, 1.0))
            began = time.monotonic()
            os.kill(engine.core(rank), how)
            client.join(DEATH_S)
            assert not client.is_alive(), f"{mode}, rank {rank}, {how.name}: a request hangs"
            ends.append({"mode": mode, "rank": rank, "how": how.name, "seconds": round(time.monotonic() - began, 1)})
    note(kills=ends)


def _doomed(engine: DpEngine, rank: int) -> None:
    with pytest.raises((HttpError, OSError)):
        engine.ask([5, 6, 7], 1900, rank, timeout_s=DEATH_S + 60.0)
