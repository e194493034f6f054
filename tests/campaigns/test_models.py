"""Models of several KV cache groups on real engines: 49 prompts of 1 to 1,500 tokens, in every order and with every fault.

One by one a hand-over must say what one engine says (``model_pairs`` says how near). Eight at once, where sums are made in
batches of another shape, texts must be equal, or differ where two tokens are nearly alike. What was seen goes into
``bench/results/campaign_models.json`` by model; what ``-k`` leaves out stays as it is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from engine_pair import new, started, wait_until
from engines import HttpError
from model_pairs import BLOCK, FACTS, NO_PREFIXES, PATIENCE_S, Compared, ModelPair, answer, compared, prompt_of

from xpyd_sidecar.contract import legs, metrics
from xpyd_sidecar.contract.ids import Attempt, Role, TransferId

pytestmark = pytest.mark.timeout(1800)
RESULTS = Path(__file__).parents[2] / "bench/results/campaign_models.json"
LENGTHS: Final = (
    1, 2, 3, 4, 5, 64, 127, 128, 129, 130, 198, 199, 200, 201, 202, 255, 256, 257, 258, 327, 328, 329, 330, 383, 384, 385,
    455, 456, 511, 512, 513, 514, 520, 639, 640, 641, 642, 700, 768, 769, 1023, 1024, 1025, 1026, 1279, 1280, 1281, 1400,
    1500)
"""Around blocks of 128, windows of 128 and 200, chunks of 512 and 1024; 327, 455, 583 … and 383, 511, 639 … are the edges
where ``(N - W + 1) % 128`` is 0."""
GROWING: Final = (300, 700, 700, 701, 640, 641, 1000, 1024, 1025, 1281, 1500, 1500, 130, 129, 128)
NEAR: Final = 0.15
"""Of log probabilities: two steps of bfloat16 at these sizes."""


@pytest.fixture(scope="module", params=FACTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelPair]:
    yield from started(ModelPair(tmp_path_factory.mktemp(request.param), request.param))


def record(pair: ModelPair, name: str, **figures: Any) -> None:
    """Put figures into the file."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    model = found.setdefault(pair.model, {"window": FACTS[pair.model].window, "arguments": list(FACTS[pair.model].args)})
    model[name] = figures
    model["at"] = datetime.now(UTC).isoformat(timespec="seconds")
    RESULTS.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


def summed(answers: list[Compared]) -> dict[str, Any]:
    """Figures of answers."""
    return {"prompts": len(answers), "equal": sum(one.at is None for one in answers),
            "apart": max(one.apart for one in answers)}


def test_there_are_49_prompts() -> None:
    assert len(LENGTHS) == len(set(LENGTHS)) == 49
    for window in (128, 200):
        assert sum((length - window + 1) % BLOCK == 0 and length >= window + BLOCK - 1 for length in LENGTHS) >= 2


@pytest.mark.parametrize("first", ["prefill first", "decode first"])
def test_one_by_one(pair: ModelPair, first: str) -> None:
    seed, before = (1, 2)[first == "decode first"], pair.d.metric(metrics.LOADED_BYTES + "_total")
    answers = [pair.compare(prompt_of(length, seed * 10000), n=16, decode_first=first == "decode first")
               for length in LENGTHS]
    pair.wait_empty()
    moved = pair.d.metric(metrics.LOADED_BYTES + "_total") - before
    record(pair, first, **summed(answers), bytes=int(moved))
    assert [(length, one) for length, one in zip(LENGTHS, answers, strict=True) if not pair.same(one)] == []


def test_of_a_window_at_most_two_blocks_are_moved(pair: ModelPair) -> None:
    """By two prompts of one length, of which decode has all but the window's blocks of the second."""
    if not FACTS[pair.model].window:
        pytest.skip("no windows")
    before = pair.d.metric(metrics.LOADED_BYTES + "_total")
    pair.handed(prompt_of(1500, 30000))
    pair.wait_empty()
    moved = pair.d.metric(metrics.LOADED_BYTES + "_total") - before
    layer = 2 * BLOCK * 2 * 32 * 4
    full = {"tiny-gemma-3": 1, "tiny-gpt-oss": 2}[pair.model]
    blocks = (moved / layer - full * -(-1499 // BLOCK)) / (4 - full)
    record(pair, "1500 tokens", bytes=int(moved), blocks_of_a_window_layer=blocks)
    assert blocks == -(-1499 // BLOCK) - (1499 - FACTS[pair.model].window + 1) // BLOCK
    assert blocks <= 1 + -(-FACTS[pair.model].window // BLOCK)


def test_eight_at_once_half_of_them_decode_first(pair: ModelPair) -> None:
    prompts = [prompt_of(length, 40000) for length in LENGTHS[::2]]

    def handed(at: int) -> Any:
        return pair.handed(prompts[at], 16, decode_first=bool(at % 2))

    with ThreadPoolExecutor(8) as clients:
        got = list(clients.map(handed, range(len(prompts))))
    pair.wait_empty()
    answers = [pair.compared(one, prompt) for one, prompt in zip(got, prompts, strict=True)]
    record(pair, "eight at once", **summed(answers))
    assert all(one.apart < NEAR for one in answers)
    if "bfloat16" not in FACTS[pair.model].args:
        assert all(one.at is None for one in answers)


def test_growing_prefixes_that_both_caches_have(pair: ModelPair) -> None:
    if NO_PREFIXES in FACTS[pair.model].args:
        pytest.skip("without prefix caches")
    base = prompt_of(1500, 50000)
    hits = [engine.metric("vllm:prefix_cache_hits_total") for engine in (pair.d, pair.p)]
    answers = [pair.compare(base[:length]) for length in GROWING]
    rose = [engine.metric("vllm:prefix_cache_hits_total") - before
            for engine, before in zip((pair.d, pair.p), hits, strict=True)]
    record(pair, "growing prefixes", **summed(answers), hits_of_decode=int(rose[0]), hits_of_prefill=int(rose[1]))
    assert min(rose) > 0
    assert all(one.at is None and one.apart < 1e-4 for one in answers)


def test_nothing_comes_and_decode_computes_the_same(pair: ModelPair) -> None:
    prompts = [prompt_of(length, 60000) for length in (5, 300, 700)]
    leg = [legs.encode(legs.Leg(legs.VERSION, Role.DECODE, TransferId(new()), Attempt(1), 1.0)) for _ in prompts]
    answers = [pair.compared(answer(pair.d, prompt, 12, kv_transfer_params=one), prompt)
               for prompt, one in zip(prompts, leg, strict=True)]
    record(pair, "nothing comes", **summed(answers))
    assert all(one.at is None or one.apart < NEAR for one in answers)


def test_a_client_that_leaves_and_a_prefill_that_dies_hold_up_nobody(pair: ModelPair) -> None:
    """Last: prefill is killed while decode waits for it, and is started again."""
    transfer = new()
    leg = legs.encode(legs.Leg(legs.VERSION, Role.DECODE, TransferId(transfer), Attempt(1), PATIENCE_S))
    prompt = prompt_of(700, 70000)
    expected = pair.alone(prompt)
    left = pair.pool.submit(answer, pair.d, prompt_of(900, 70000), 12, kv_transfer_params=legs.encode(
        legs.Leg(legs.VERSION, Role.DECODE, TransferId(new()), Attempt(1), 3.0)))
    waits = pair.pool.submit(answer, pair.d, prompt, 12, kv_transfer_params=leg)
    wait_until(lambda: pair.d.metric(metrics.RECEIVES_OPEN) > 0, PATIENCE_S, "parked")
    slow = [pair.p_leg(prompt_of(1500, seed), new()) for seed in range(70001, 70004)]
    pair.p.kill()
    for one in slow:
        with pytest.raises((OSError, HttpError)):
            one.result(PATIENCE_S)
    pair.p.start().wait_ready()
    pair.p_leg(prompt, transfer).result(PATIENCE_S)
    began = time.monotonic()
    got = compared(waits.result(PATIENCE_S), expected)
    assert len(left.result(PATIENCE_S).tokens) == 12
    wait_until(partial(_empty_handed, pair), PATIENCE_S, "decode is empty")
    record(pair, "prefill killed", **summed([got]), seconds=round(time.monotonic() - began, 1))
    assert got.at is None


def _empty_handed(pair: ModelPair) -> bool:
    return pair.d.metric(metrics.RECEIVES_OPEN) == pair.d.metric("vllm:kv_cache_usage_perc") == 0


def test_preempted_on_decode(tmp_path: Path) -> None:
    """Decode has too few blocks for what runs: requests are loaded once, and computed again when they are preempted."""
    pair = ModelPair(tmp_path, "tiny-gpt-oss", d_args=("--num-gpu-blocks-override", "40"))
    for made in started(pair):
        prompts = [prompt_of(length, 80000) for length in (100, 110, 120, 125, 126, 127, 128, 129)]
        with ThreadPoolExecutor(8) as clients:
            got = list(clients.map(partial(made.handed, n=400), prompts))
        made.wait_empty()
        preempted = made.d.metric("vllm:num_preemptions_total")
        answers = [compared(type(one)(one.tokens[:60], one.logprobs[:60]), made.alone(prompt, 60))
                   for one, prompt in zip(got, prompts, strict=True)]
        record(made, "preempted", **summed(answers), preemptions=int(preempted))
        assert preempted > 0
        assert all(one.at is None for one in answers)
