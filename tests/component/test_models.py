"""Models of several KV cache groups on real engines: a hand-over says what one engine says.

Prompts end around blocks, windows and chunks, above all where ``(N - W + 1) % b`` is 0. All 49 lengths, preemptions, kills
and more models are a campaign (``campaign-models``).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_pair import OUTPUT, PEER_TIMEOUT_S, started
from model_pairs import BLOCK, FACTS, PATIENCE_S, ModelPair, prompt_of

from xpyd_sidecar.contract import metrics

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
LAYER_BLOCK = 2 * BLOCK * 2 * 32 * 4
"""Bytes of a block of a layer of the models with windows: heads, tokens, K and V, values."""


@pytest.fixture(scope="module", params=[
    pytest.param("tiny-gpt-oss", marks=pytest.mark.smoke), "tiny-granite", "tiny-qwen-next"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelPair]:
    patient = {"claim_s": PATIENCE_S, "peer_timeout_s": PEER_TIMEOUT_S, "load_timeout_s": PATIENCE_S}
    yield from started(ModelPair(tmp_path_factory.mktemp(request.param), request.param, **patient))


def lengths(window: int) -> list[int]:
    edge = max(window, 1) + 2 * BLOCK - 1
    return [1, 2, BLOCK, BLOCK + 1, BLOCK + 2, edge - 1, edge, edge + 1, 513, 514, 1100]


def test_answers_are_those_of_one_engine_and_a_window_moves_its_blocks_alone(pair: ModelPair) -> None:
    window = FACTS[pair.model].window
    for length in lengths(window):
        before, sent = pair.computed(), pair.d.metric(metrics.LOADED_BYTES + "_total")
        prompt = prompt_of(length)
        got = pair.handed(prompt)
        pair.wait_empty()
        assert pair.computed() - before == OUTPUT + 1, length
        moved = pair.d.metric(metrics.LOADED_BYTES + "_total") - sent
        for found in (pair.compare(prompt_of(length, 20000), decode_first=True), pair.compared(got, prompt)):
            assert pair.same(found), (length, found)
        if window and length > 1:  # two layers of each kind
            most = -(-(length - 1) // BLOCK), -(-(window - 1) // BLOCK) + 1
            assert moved <= 2 * LAYER_BLOCK * (most[0] + min(most))
