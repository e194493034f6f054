"""Prefill and decode engines that differ in tensor or pipeline size, or whose KV is out of the ordinary, with vLLM.

Both legs are sent straight to the engines. Answers are compared with those of the prefill engine without
``kv_transfer_params``; ``iteration_tokens_total`` shows that decode computed the last prompt token alone. Workers of one
engine poll at full speed, so deadlines are generous. What was seen goes into ``bench/results/campaign_parallel.json`` by
pair; what ``-k`` leaves out stays as it is.
"""

from __future__ import annotations

import json
import os
import random
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engines import Engine, held
from model_variants import ensure
from parallel_engines import PATIENCE_S, ask

from xpyd_sidecar.contract import legs, metrics
from xpyd_sidecar.contract.ids import Attempt, InstanceName, Role, TransferId
from xpyd_sidecar.contract.launch import KvOptions

pytestmark = pytest.mark.timeout(600)
RESULTS = Path(__file__).parents[2] / "bench/results/campaign_parallel.json"
OUTPUT = 12
LENGTHS = (1, 127, 129, 700, 1300)
AT_ONCE = 6
PLUGIN = Path(__file__).parents[2] / "tests/support/pp_on_cpu"


class Kind(NamedTuple):
    """Of engine."""

    tensor: int = 1
    pipeline: int = 1
    model: str = "tiny-llama-1"
    args: tuple[str, ...] = ()


class Fleet(NamedTuple):
    """Engines that run side by side, of four workers at most, and which of them are prefill for which."""

    engines: dict[str, Kind]
    ways: tuple[tuple[str, str], ...]


MQA, MLA = "tiny-mqa-1", "tiny-mla-1"
LATENT = Kind(model=MLA, args=("--attention-backend", "CPU_MLA", "--compilation-config", '{"custom_ops": ["none"]}'))
"""The other backend for latent attention on CPUs knows bfloat16 alone, in which prefill and decode round differently."""
HYBRID, FP8 = Kind(model="tiny-gemma-2"), Kind(args=("--kv-cache-dtype", "fp8_e5m2"))
FLEETS = {
    "tensor": Fleet({"tp2": Kind(tensor=2), "tp1": Kind()}, (("tp2", "tp1"), ("tp1", "tp2"))),
    "pipeline": Fleet({"pp2": Kind(pipeline=2), "pp1": Kind()}, (("pp1", "pp2"), ("pp2", "pp1"))),
    "both": Fleet({"tp2": Kind(tensor=2), "pp2": Kind(pipeline=2)}, (("tp2", "pp2"), ("pp2", "tp2"))),
    "equal": Fleet({"tp2": Kind(tensor=2), "tp2 again": Kind(tensor=2)}, (("tp2", "tp2 again"),)),
    "mqa": Fleet({"mqa tp2": Kind(tensor=2, model=MQA), "mqa tp1": Kind(model=MQA)},
                 (("mqa tp2", "mqa tp1"), ("mqa tp1", "mqa tp2"))),
    "mla": Fleet({"mla tp2": LATENT._replace(tensor=2), "mla tp1": LATENT},
                 (("mla tp2", "mla tp1"), ("mla tp1", "mla tp2"))),
    "kinds": Fleet({"windows": HYBRID, "windows again": HYBRID, "fp8": FP8, "fp8 again": FP8},
                   (("windows", "windows again"), ("fp8", "fp8 again"))),
}


def engine(name: str, folder: Path, kind: Kind) -> Engine:
    options = KvOptions(claim_s=20.0, peer_timeout_s=PATIENCE_S, load_timeout_s=PATIENCE_S)
    path = [str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]
    return Engine(name.replace(" ", "-"), folder, model=ensure(kind.model), on_load_failure="fail", options=options,
                  env={"PYTHONPATH": os.pathsep.join(path)}, args=(
                      "--tensor-parallel-size", str(kind.tensor), "--pipeline-parallel-size", str(kind.pipeline),
                      "--distributed-executor-backend", "mp" if kind.tensor * kind.pipeline > 1 else "uni",
                      "--num-gpu-blocks-override", "272" if kind.model == MLA else "34",
                      "--max-num-batched-tokens", "512", *kind.args))


class Way:
    """Which engine is prefill for which, and what has been asked of both."""

    def __init__(self, p: Engine, d: Engine) -> None:
        self.p, self.d = p, d
        self.pool = ThreadPoolExecutor(2 * AT_ONCE)
        self.answers = 0

    def both(self, prompt: list[int]) -> list[int]:
        known = self.d.record()
        assert known is not None
        transfer = TransferId(uuid.uuid4().hex)
        decode = self.pool.submit(ask, self.d, prompt, OUTPUT, legs.Leg(1, Role.DECODE, transfer, Attempt(1), PATIENCE_S))
        peer = legs.Peer(InstanceName(self.d.name), known.incarnation, known.control)
        ask(self.p, prompt, 1, legs.Leg(1, Role.PREFILL, transfer, Attempt(1), PATIENCE_S, peer))
        return decode.result(PATIENCE_S)

    def plain(self, prompt: list[int]) -> list[int]:
        return ask(self.p, prompt, OUTPUT)

    def figures(self) -> dict[str, float]:
        """What the checks compare: tokens that decode ran, tokens that came from prefill, bytes, loads."""
        return {"ran": self.d.metric("vllm:iteration_tokens_total_sum"),
                "external": self.d.metric("vllm:external_prefix_cache_hits_total"),
                "reused": self.p.metric("vllm:prefix_cache_hits_total"),
                "pushed": self.p.metric(metrics.PUSHED_BYTES + "_total"),
                "tokens": self.d.metric(metrics.LOADED_TOKENS + "_total"),
                "loads": self.d.metric(metrics.TRANSFERS + "_total", side="receive", outcome="ok")}

    def wait_empty(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while held(self.p.url) or held(self.d.url):
            assert time.monotonic() < end, (held(self.p.url), held(self.d.url))
            time.sleep(0.05)

    def check(self, prompts: list[list[int]], *, held_before: int = 0, at_once: bool = False) -> dict[str, float]:
        """Ask for all; every answer is as from one engine and the last prompt token alone was computed. What the figures
        rose by.

        ``held_before``: tokens of each prompt, in whole blocks, that decode has already.
        """
        before = self.figures()
        if at_once:
            with ThreadPoolExecutor(len(prompts)) as clients:
                answers = list(clients.map(self.both, prompts))
        else:
            answers = [self.both(prompt) for prompt in prompts]
        self.wait_empty()
        after = self.figures()
        rose = {name: after[name] - before[name] for name in before}
        assert rose["loads"] == sum(len(prompt) > 1 for prompt in prompts)
        assert rose["tokens"] == rose["external"] == sum(max(0, len(prompt) - 1 - held_before) for prompt in prompts)
        assert rose["ran"] == len(prompts) * (OUTPUT + 1)
        assert answers == [self.plain(prompt) for prompt in prompts]
        self.answers += len(answers)
        return rose


def tokens(n: int) -> list[int]:
    source = random.Random(uuid.uuid4().hex)
    return [source.randrange(3, 500) for _ in range(n)]


class Running:
    """One fleet at a time; the next one takes its place."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._name = ""
        self._engines: dict[str, Engine] = {}

    def fleet(self, name: str) -> dict[str, Engine]:
        """Engines of that fleet, ready."""
        if name == self._name:
            return self._engines
        self.stop()
        folder = self._factory.mktemp(name)
        self._engines = {one: engine(one, folder, kind) for one, kind in FLEETS[name].engines.items()}
        for one in self._engines.values():
            one.start()
        for one in self._engines.values():
            one.wait_ready()
        for one in self._engines.values():  # the first request is slow; it should not be beside an engine that waits
            ask(one, tokens(300), 2)
        self._name = name
        return self._engines

    def stop(self) -> None:
        for one in self._engines.values():
            one.kill()
        self._name, self._engines = "", {}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory)
    yield running
    running.stop()


def record(pair: str, found: dict[str, Any]) -> None:
    known = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    known[pair] = {"date": datetime.now(UTC).date().isoformat(), **found}
    RESULTS.write_text(json.dumps(dict(sorted(known.items())), indent=2) + "\n", "utf-8")


@pytest.mark.parametrize(("fleet", "prefill", "decode"), [
    pytest.param(name, *way, id=" to ".join(way)) for name, one in FLEETS.items() for way in one.ways
])
def test_decode_answers_like_one_engine_and_computes_no_prompt_token(
        running: Running, fleet: str, prefill: str, decode: str) -> None:
    engines = running.fleet(fleet)
    pair, way = f"{prefill} to {decode}", Way(engines[prefill], engines[decode])
    begun = time.monotonic()
    try:
        sums: dict[str, float] = {}

        def add(rose: dict[str, float]) -> dict[str, float]:
            for name, value in rose.items():
                sums[name] = sums.get(name, 0) + value
            return rose

        each = {length: add(way.check([tokens(length)])) for length in LENGTHS}
        block = 16 if fleet == "mla" else 128  # of the kernel for latent attention
        blocks = {length: -(-(length - 1) // block) for length in LENGTHS}  # all but the last token are handed over
        assert each[127]["pushed"] > 0
        for length, rose in each.items():  # whole blocks, each once, and of a window those in it
            pushed, all_of_them = rose["pushed"] * blocks[127], blocks[length] * each[127]["pushed"]
            assert pushed <= all_of_them if prefill == "windows" else pushed == all_of_them
        add(way.check([tokens(150 + 40 * n) for n in range(AT_ONCE)], at_once=True))

        if fleet != "mla":  # vLLM has no cache of prefixes there
            ours = tokens(700)  # prefill has it already: sent like what is computed
            way.plain(ours)
            assert add(way.check([ours]))["reused"] >= 640
            assert add(way.check([[*ours[:640], *tokens(200)]], held_before=640))["tokens"] == 199
    except BaseException as error:
        record(pair, {"outcome": f"failed: {type(error).__name__}: {str(error).splitlines()[:1]}"})
        raise
    finally:
        way.pool.shutdown(wait=False, cancel_futures=True)
    record(pair, {"outcome": "equal", "answers": way.answers, "prompt_tokens_from_prefill": int(sums["tokens"]),
                  "tokens_made_by_decode": way.answers * OUTPUT, "tokens_run_by_decode": int(sums["ran"]),
                  "bytes": int(sums["pushed"]), "seconds": round(time.monotonic() - begun, 1)})
