"""The modes and the lookup buffer with real engines: equal answers, nothing computed twice, nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from mode_engines import MODES, Trio, prompt_of

from xpyd_sidecar.contract import metrics

pytestmark = pytest.mark.timeout(500)
LENGTHS = (1, 130, 700, 1900)
OUTPUT = 12


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """``a`` keeps the KV of four prompts of 1,000 tokens, and presses decode to take what is above half of that; ``b`` and
    ``c`` have blocks for two long prompts, and ``b`` keeps nothing for longer than 1.5 s."""
    folder = tmp_path_factory.mktemp("modes")
    with Trio(folder, a={"keep_bytes": 8 << 20}, b={"buffer_bytes": 16 << 20, "keep_ttl_s": 1.5},
              c={"buffer_bytes": 16 << 20}, d_args=("--num-gpu-blocks-override", "34")) as trio:
        trio.wait_ready()
        yield trio


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_equal_and_the_prompt_is_loaded(trio: Trio, mode: str) -> None:
    draw = random.Random(mode)
    _, d = trio.pair(mode)
    for length in LENGTHS:
        prompt = prompt_of(length, draw)
        loaded = trio.total(d, metrics.LOADED_TOKENS)
        answer = trio.send(mode, prompt, OUTPUT).result(120)
        trio.wait_empty()
        assert answer.tokens == trio.timed(trio.b if d is not trio.b else trio.a, prompt, OUTPUT)[0]
        if length > 1:
            assert trio.total(d, metrics.LOADED_TOKENS) - loaded >= length - 128
    if mode == "put":
        assert trio.b.metric(metrics.PUT_WAIT_SECONDS + "_total") > 0


def test_what_prefill_cannot_keep_waits_in_decodes_buffer(trio: Trio) -> None:
    draw = random.Random(5)
    for _ in range(5):
        busy = [trio.pool.submit(trio.timed, trio.c, prompt_of(1800, draw), 240) for _ in range(2)]
        prompts = [prompt_of(1000, draw) for _ in range(4)]
        answers = [trio.send("get", prompt, OUTPUT) for prompt in prompts]
        got = [answer.result(120).tokens for answer in answers]
        for one in busy:
            one.result(120)
        trio.wait_empty()
        assert got == [trio.timed(trio.b, prompt, OUTPUT)[0] for prompt in prompts]
        if trio.total(trio.c, metrics.BUFFERED_BYTES):
            break
    assert trio.total(trio.c, metrics.BUFFERED_BYTES) > 0
    print({(engine.name, name): value for engine in (trio.a, trio.c) for name in (
        metrics.BUFFERED_BYTES, metrics.STORE_RETRIES, metrics.BUFFER_BUSY, metrics.UNCLAIMED)
        if (value := trio.total(engine, name))})


def test_what_no_request_claims_is_dropped_from_the_buffer(trio: Trio) -> None:
    """Requests without blocks for longer than that: their KV goes, and they are computed."""
    draw = random.Random(6)
    for _ in range(3):
        busy = [trio.pool.submit(trio.timed, trio.b, prompt_of(1800, draw), 240) for _ in range(2)]
        prompts = [prompt_of(1000, draw) for _ in range(4)]
        answers = [trio.send("put_async", prompt, OUTPUT) for prompt in prompts]
        got = [answer.result(120).tokens for answer in answers]
        for one in busy:
            one.result(120)
        trio.wait_empty()
        assert got == [trio.timed(trio.a, prompt, OUTPUT)[0] for prompt in prompts]
        if trio.total(trio.b, metrics.UNCLAIMED):
            return
    pytest.fail("nothing was left unclaimed")
