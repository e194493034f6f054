"""Models of several KV cache groups on real engines: 49 prompts of 1 to 1,500 tokens, in every order and with every fault.

One by one a hand-over must say what one engine says (``model_pairs`` says how near). Eight at once, where sums are made in
batches of another shape, texts must be equal, or differ where two tokens are nearly alike. What was seen goes into
``bench/results/campaign_models.json`` by model; what ``-k`` leaves out stays as it is.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from cluster import Cluster
from corpus import TIE, Case, Reference, Tokens
from engine_pair import leave, new, started, wait_until
from engines import HttpError, get, samples
from model_pairs import BLOCK, FACTS, NO_PREFIXES, PATIENCE_S, Compared, ModelPair, answer, compared, prompt_of
from model_variants import ensure
from traffic import client, plain_answers

from xpyd_sidecar.contract import legs, metrics
from xpyd_sidecar.contract.ids import Attempt, Role, TransferId
from xpyd_sidecar.router.api import audited

pytestmark = pytest.mark.timeout(1800)
RESULTS = Path(__file__).parents[2] / "bench/results/campaign_models.json"
LENGTHS: Final = (
    1, 2, 3, 4, 5, 64, 127, 128, 129, 130, 198, 199, 200, 201, 202, 255, 256, 257, 258, 327, 328, 329, 330, 383, 384, 385,
    455, 456, 511, 512, 513, 514, 520, 639, 640, 641, 642, 700, 768, 769, 1023, 1024, 1025, 1026, 1279, 1280, 1281, 1400,
    1500)
"""Around blocks of 128, windows of 128 and 200, chunks of 512 and 1024; 327, 455, 583 … and 383, 511, 639 … are the edges
where ``(N - W + 1) % 128`` is 0."""
GROWING: Final = (300, 700, 700, 701, 640, 641, 1000, 1024, 1025, 1281, 1500, 1500, 130, 129, 128)
SEEDS: Final = itertools.count(100000)
"""Of prompts whose faults do not depend on what they say."""
SLOW: Final = Path(__file__).parents[2] / "tests/support/slow_steps"
NEAR: Final = 0.15
"""Of log probabilities: two steps of bfloat16 at these sizes."""


@pytest.fixture(scope="module", params=FACTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelPair]:
    yield from started(ModelPair(tmp_path_factory.mktemp(request.param), request.param))


def record(pair: ModelPair, name: str, **figures: Any) -> None:
    """Put figures into the file."""
    record_of(pair.model, name, **figures)


def record_of(model_name: str, name: str, **figures: Any) -> None:
    """The same for a model."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    facts = FACTS[model_name]
    model = found.setdefault(model_name, {"window": facts.window, "arguments": list(facts.args)})
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
    """By the bytes that have come in by any link."""
    if not FACTS[pair.model].window:
        pytest.skip("no windows")
    moved = next(filter(None, (_moved(pair, prompt_of(1500, 30000 + turn)) for turn in range(3))), 0)
    layer = 2 * BLOCK * 2 * 32 * 4
    full = {"tiny-gemma-3": 1, "tiny-gpt-oss": 2}[pair.model]
    blocks = (moved / layer - full * -(-1499 // BLOCK)) / (4 - full)
    record(pair, "1500 tokens", link_bytes=int(moved), blocks_of_a_window_layer=blocks)
    assert blocks == -(-1499 // BLOCK) - (1499 - FACTS[pair.model].window + 1) // BLOCK
    assert blocks <= 1 + -(-FACTS[pair.model].window // BLOCK)


def _moved(pair: ModelPair, prompt: list[int]) -> int:
    """Bytes that links say have come in for a hand-over; 0 where its load has failed, of which links count what came."""
    names = (metrics.LINK_BYTES, metrics.LOADED_BYTES, metrics.TRANSFERS)
    before = [pair.d.metric(f"{name}_total") for name in names]
    pair.handed(prompt)
    pair.wait_empty()

    def rose() -> list[int]:
        text = get(f"{pair.d.url}/metrics")  # at one time
        return [int(sum(samples(text, f"{name}_total", {})) - then) for name, then in zip(names, before, strict=True)]

    wait_until(lambda: rose()[2] > 0, 20.0, "told of")
    moved, loaded, _ = rose()
    assert not loaded or moved == loaded, "what was loaded came over links once"
    return loaded


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


class Faulty(NamedTuple):
    """One prefill, before which is the wire, and a decode of each kind."""

    strict: ModelPair
    """Checks sums; what cannot be loaded is an error."""
    bare: ModelPair
    """Checks nothing; what cannot be loaded is computed."""

    def hands_over(self) -> bool:
        """Whether both still answer like one engine, with KV from prefill."""
        for pair in self:
            before = pair.computed()
            if not pair.same(pair.compare(prompt_of(600, next(SEEDS)))):
                return False
            pair.wait_empty()
            if pair.computed() - before != 13:
                return False
        return True


ARRAYS = 4
"""Of each model."""
ONE_CHUNK = 400
"""Tokens of a prompt whose data come in one piece for each array."""


@pytest.fixture(scope="module", params=FACTS)
def faulty(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    strict = ModelPair(tmp_path_factory.mktemp(request.param), request.param, policy="fail", wired=True)
    bare = strict.other("bare", checksum="disabled")
    with bare.d:
        for _ in started(strict):
            bare.d.wait_ready()
            made = Faulty(strict, bare)
            for pair in made:  # what engines compile once is behind them
                pair.compare(prompt_of(300, next(SEEDS)))
                pair.first(prompt_of(300, next(SEEDS)), handed=False)
            yield made


def refused(one: Future[Any]) -> int:
    """The status of a request that must fail."""
    with pytest.raises(HttpError) as failed:
        one.result(PATIENCE_S)
    return failed.value.status


def test_each_arrays_data_ruined_in_turn_is_found_by_its_sum_and_without_sums_by_log_probabilities(faulty: Faulty) -> None:
    strict, bare = faulty
    apart: dict[str, float] = {}
    clean = []

    def first_of(*, ruined: int | None) -> float:
        """How far a first token is from one that decode computes, where the nth array's data were ruined."""
        prompt = prompt_of(ONE_CHUNK, next(SEEDS))
        alone, before = bare.first(prompt, handed=False), strict.wire.frames
        strict.wire.spare, strict.wire.corrupt = ruined or 0, int(ruined is not None)
        found = audited.difference(alone, bare.first(prompt, handed=True))
        assert strict.wire.frames - before == ARRAYS, "a piece for each array"
        return found

    for array in range(ARRAYS):
        prompt, before = prompt_of(ONE_CHUNK, next(SEEDS)), strict.outcomes(strict.d, "receive", "checksum")
        strict.wire.spare, strict.wire.corrupt = array, 1
        assert refused(strict.pool.submit(strict.handed, prompt)) == 500, array
        wait_until(partial(_ended, strict, "checksum", before + 1), 10.0, "counted")
        apart[str(array)] = first_of(ruined=array)
        clean.append(first_of(ruined=None))
    record(strict, "ruined", arrays=len(apart), found_by_sums=len(apart), least_apart=min(apart.values()),
           apart=apart, apart_when_whole=max(clean))
    assert min(apart.values()) >= 1e-2
    assert max(clean) < min(apart.values()) / 2
    assert faulty.hands_over()


def test_what_cannot_be_loaded_fails_or_is_computed_as_the_policy_says(faulty: Faulty) -> None:
    strict, bare = faulty
    nothing = strict.d_leg(prompt_of(700, next(SEEDS)), new(), wait_s=1.0)
    statuses = [refused(nothing)]
    strict.wire.half = 1
    statuses.append(refused(strict.pool.submit(strict.handed, prompt_of(700, next(SEEDS)))))
    assert strict.wire.half == 0
    strict.wire.half, prompt = 1, prompt_of(700, next(SEEDS))
    computed = bare.compare(prompt)
    assert strict.wire.half == 0
    bare.wait_empty()
    record(strict, "cannot be loaded", statuses=statuses, **{"policy recompute": summed([computed])})
    assert statuses == [500, 500]
    assert computed.at is None or computed.apart < NEAR
    assert faulty.hands_over()


def test_clients_that_leave_while_they_wait_or_load_leave_nothing_behind(faulty: Faulty) -> None:
    left = 0
    for pair in faulty:
        parked, loading = new(), new()
        legs_of = [legs.encode(legs.Leg(legs.VERSION, Role.DECODE, TransferId(one), Attempt(1), 30.0))
                   for one in (parked, loading)]
        leave(pair.d, prompt_of(700, next(SEEDS)), legs_of[0], pair.wait_parked)
        pair.wait_empty(pair.d)
        prompt = prompt_of(700, next(SEEDS))
        pair.wire.hold.set()
        try:
            pair.p_leg(prompt, loading).result(PATIENCE_S)
            leave(pair.d, prompt, legs_of[1], pair.wait_loading)
            wait_until(partial(_no_blocks, pair), 5.0, "decode's blocks are free")
        finally:
            pair.wire.hold.clear()
        pair.wait_empty()
        left += 2
    record(faulty.strict, "clients left", clients=left)
    assert faulty.hands_over()


def test_decode_is_killed_in_the_middle_of_a_load_and_prefill_lets_go(faulty: Faulty) -> None:
    """Last of those that share these engines: it is started again."""
    pair, transfer, prompt = faulty.strict, new(), prompt_of(1400, next(SEEDS))
    pair.wire.hold.set()
    try:
        pair.p_leg(prompt, transfer).result(PATIENCE_S)
        waits = pair.d_leg(prompt, transfer)
        pair.wait_loading()
        pair.d.kill()
        began = time.monotonic()
    finally:
        pair.wire.hold.clear()
    with pytest.raises((OSError, HttpError)):
        waits.result(PATIENCE_S)
    pair.wait_empty(pair.p, deadline_s=20.0)
    took = time.monotonic() - began
    pair.d.start().wait_ready()
    pair.compare(prompt_of(300, next(SEEDS)))
    record(pair, "decode killed", prefill_let_go_after_s=round(took, 1))
    assert faulty.hands_over()


@pytest.mark.parametrize("model", FACTS)
def test_a_stream_goes_on_elsewhere_when_its_decode_is_killed(tmp_path: Path, model: str) -> None:
    """With the router, as it is used: what the client has is one answer, whole, and that of one engine."""
    slow = {"SLOW_STEP_S": "0.02", "PYTHONPATH": os.pathsep.join(filter(None, (str(SLOW), os.environ.get("PYTHONPATH"))))}
    bfloat16 = "bfloat16" in FACTS[model].args
    with Cluster(tmp_path, prefill=1, decode=0, model=ensure(model), engine_args=FACTS[model].args,
                 router={"policy": "round_robin"}) as cluster:
        for _ in range(2):
            cluster.add(Role.DECODE, env=slow).start()
        cluster.wait_ready()
        cases = [Case(f"{length} tokens", tuple(prompt_of(length, 90000)), 200) for length in (300, 327, 700, 1281)]
        expected = asyncio.run(plain_answers(cluster.plain_url, cases, at_once=1, timeout_s=600.0))
        for one in cluster.decode:  # what an engine compiles once is behind it
            one.engine.complete(prompt_of(300, next(SEEDS)), 2, timeout_s=PATIENCE_S)
        got = asyncio.run(_streams_and_a_kill(cluster, cases))
        moved = (tmp_path / "router.log").read_text().count("a stream goes on elsewhere")
        differs = [_first_other(expected[case], tokens) for case, tokens in zip(cases, got, strict=True)]
        record_of(model, "decode killed in mid-stream", streams=len(cases), moved=moved,
                  equal=sum(at is None for at in differs))
        cluster.instances.remove(next(one for one in cluster.instances if not one.engine.alive()))
        cluster.wait_idle()
        assert moved >= 1
        for case, at in zip(cases, differs, strict=True):
            assert at is None or expected[case].gaps[at] < (NEAR if bfloat16 else TIE), (case.name, at)


async def _streams_and_a_kill(cluster: Cluster, cases: list[Case]) -> list[Tokens]:
    """Every stream's tokens; the first decode dies while all of them run."""
    begun, all_run = [0] * len(cases), asyncio.Event()

    async def stream(api: Any, at: int, case: Case) -> Tokens:
        tokens: list[int] = []
        extra = {"ignore_eos": True, "return_token_ids": True}
        async for event in await api.completions.create(model="tiny", prompt=list(case.prompt), temperature=0, stream=True,
                                                        max_tokens=case.max_tokens, extra_body=extra):
            tokens += [token for choice in event.choices for token in choice.token_ids or ()]
            begun[at] = len(tokens)
            if min(begun) >= 20:
                all_run.set()
        return tuple(tokens)

    async with client(cluster.url, PATIENCE_S) as api:
        asked = [asyncio.ensure_future(stream(api, at, case)) for at, case in enumerate(cases)]
        await asyncio.wait_for(all_run.wait(), PATIENCE_S)
        assert max(begun) < 180, "steps are slow enough"
        await asyncio.to_thread(cluster.decode[0].kill)
        return list(await asyncio.gather(*asked))


def _first_other(reference: Reference, tokens: Tokens) -> int | None:
    """The first token that is not the reference's."""
    assert len(tokens) == len(reference.tokens)
    return next((at for at, (a, b) in enumerate(zip(tokens, reference.tokens, strict=True)) if a != b), None)


def _ended(pair: ModelPair, outcome: str, count: float) -> bool:
    return pair.outcomes(pair.d, "receive", outcome) == count


def _no_blocks(pair: ModelPair) -> bool:
    return pair.d.metric("vllm:kv_cache_usage_perc") == 0


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
