"""Prefill and decode engines of unequal tensor or pipeline sizes, with vLLM: both legs are sent straight to the engines.

Answers are compared with those of the prefill engine without ``kv_transfer_params``; ``iteration_tokens_total`` shows that
decode computed no prompt token. Workers of one engine poll at full speed, so deadlines are generous.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from engines import Engine, held
from parallel_engines import PATIENCE_S, ask

from xpyd_sidecar.contract import legs, metrics
from xpyd_sidecar.contract.ids import Attempt, InstanceName, Role, TransferId
from xpyd_sidecar.contract.launch import KvOptions

pytestmark = pytest.mark.timeout(600)
OUTPUT = 12
BLOCK_BYTES = 4 * 2 * 128 * 2 * 32 * 4
"""Of all ranks together: layers, KV heads, tokens, K and V, head size, bytes."""


class Sizes(NamedTuple):
    tensor: int = 1
    pipeline: int = 1


def engine(name: str, folder: Path, sizes: Sizes) -> Engine:
    options = KvOptions(claim_s=20.0, peer_timeout_s=PATIENCE_S, load_timeout_s=PATIENCE_S)
    executor = "mp" if sizes.tensor * sizes.pipeline > 1 else "uni"
    return Engine(name, folder, on_load_failure="fail", options=options, args=(
        "--tensor-parallel-size", str(sizes.tensor), "--pipeline-parallel-size", str(sizes.pipeline),
        "--distributed-executor-backend", executor, "--num-gpu-blocks-override", "34", "--max-num-batched-tokens", "512"))


class Pair:
    """Both engines."""

    def __init__(self, folder: Path, prefill: Sizes, decode: Sizes) -> None:
        self.p, self.d = engine("p", folder, prefill), engine("d", folder, decode)
        self.pool = ThreadPoolExecutor(16)

    def start(self) -> None:
        for one in (self.p, self.d):
            one.start()
        for one in (self.p, self.d):
            one.wait_ready()
        for one in (self.p, self.d):  # the first request compiles kernels, which takes long beside an engine that waits
            ask(one, tokens(300), 2)

    def both(self, prompt: list[int]) -> list[int]:
        known = self.d.record()
        assert known is not None
        transfer = TransferId(uuid.uuid4().hex)
        decode = self.pool.submit(ask, self.d, prompt, OUTPUT, legs.Leg(1, Role.DECODE, transfer, Attempt(1), PATIENCE_S))
        peer = legs.Peer(InstanceName(self.d.name), known.incarnation, known.control)
        ask(self.p, prompt, 1, legs.Leg(1, Role.PREFILL, transfer, Attempt(1), PATIENCE_S, peer))
        return decode.result(PATIENCE_S)

    def computed(self) -> float:
        return self.d.metric("vllm:iteration_tokens_total_sum")

    def pushed(self) -> float:
        return self.p.metric(metrics.PUSHED_BYTES + "_total")

    def wait_empty(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while held(self.p.url) or held(self.d.url):
            assert time.monotonic() < end, (held(self.p.url), held(self.d.url))
            time.sleep(0.05)

    def stop(self) -> None:
        self.pool.shutdown(wait=False)
        self.p.kill()
        self.d.kill()


def tokens(n: int) -> list[int]:
    source = random.Random(uuid.uuid4().hex)
    return [source.randrange(3, 500) for _ in range(n)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Sizes, Sizes], Pair]]:
    made: list[Pair] = []

    def build(prefill: Sizes, decode: Sizes) -> Pair:
        made.append(Pair(tmp_path, prefill, decode))
        made[-1].start()
        return made[-1]

    yield build
    for pair in made:
        pair.stop()


@pytest.mark.parametrize(("prefill", "decode"), [
    (Sizes(tensor=2), Sizes()), (Sizes(), Sizes(tensor=2)), (Sizes(pipeline=2), Sizes()), (Sizes(), Sizes(pipeline=2)),
], ids=["tp2 to tp1", "tp1 to tp2", "pp2 to pp1", "pp1 to pp2"])
def test_decode_answers_like_one_engine_and_computes_no_prompt_token(start: Callable[[Sizes, Sizes], Pair], prefill: Sizes,
                                                                     decode: Sizes) -> None:
    pair = start(prefill, decode)
    for length in (1, 127, 129, 700, 1300):
        prompt, before, sent = tokens(length), pair.computed(), pair.pushed()
        got = pair.both(prompt)
        pair.wait_empty()
        assert pair.computed() - before == OUTPUT + (length == 1)  # vLLM always computes the token of a 1-token prompt
        assert pair.pushed() - sent == -(-length // 128) * BLOCK_BYTES
        assert got == ask(pair.p, prompt, OUTPUT)
    prompts = [tokens(150 + 40 * n) for n in range(6)]
    before = pair.computed()
    with ThreadPoolExecutor(len(prompts)) as clients:
        answers = list(clients.map(pair.both, prompts))
    pair.wait_empty()
    assert answers == [ask(pair.p, prompt, OUTPUT) for prompt in prompts]
    assert pair.computed() - before == len(prompts) * OUTPUT
    assert pair.d.metric(metrics.TRANSFERS + "_total", side="receive", outcome="ok") == 11
