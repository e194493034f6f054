"""Speculation on three real engines: the same draft on both roles, drafts on decode alone, n-grams on decode.

The draft computes what the model does, from its own KV: nearly all of its tokens are accepted if that KV is right, and next
to none if it is missing (``draft_models``).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from drafting_engines import Drafting
from engine_pair import tokens

pytestmark = pytest.mark.engines
LENGTHS = (2, 5, 64, 127, 128, 129, 200, 255, 256, 257, 383, 385, 511, 512, 513, 700, 1024, 1500)
"""Edges of blocks (128) and of chunks (512) among them."""
OUTPUT = 32
KV_BYTES = 2 * 2 * 32 * 4
"""Of a token, in one layer: K and V, heads, head size, float32."""


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafting]:
    with Drafting(tmp_path_factory.mktemp("drafting")) as made:
        yield made


def prompts(seed: str) -> list[list[int]]:
    """Nobody has them in a cache yet."""
    return [tokens(length, f"{seed} {length}") for length in LENGTHS]


@pytest.mark.smoke
def test_the_same_draft_on_both_is_accepted_as_in_one_engine(drafting: Drafting) -> None:
    ours = prompts("both")
    both = drafting.run(drafting.e, drafting.f, ours, OUTPUT)
    alone = drafting.run(drafting.e, drafting.e, ours, OUTPUT)
    assert both.tokens == alone.tokens
    assert alone.accepted > 0.6, "the draft is good"
    assert both.accepted == pytest.approx(alone.accepted, rel=0.05)


def test_a_decode_engine_that_drafts_alone_gives_the_same_text_and_accepts_few(drafting: Drafting) -> None:
    """So the test above fails where the draft's KV is not handed over."""
    ours = prompts("decode alone")
    without = drafting.run(drafting.n, drafting.f, ours, OUTPUT)
    alone = drafting.run(drafting.e, drafting.e, ours, OUTPUT)
    assert without.tokens == alone.tokens
    assert without.accepted < 0.5 * alone.accepted
    assert without.loaded < 1.1 * sum(-(-length // 128) * 128 for length in LENGTHS) * KV_BYTES, "one layer"


def test_n_grams_on_decode_give_the_same_text(drafting: Drafting) -> None:
    """Prefill's draft stays where it is. Few requests: vLLM takes long to look for n-grams on CPUs."""
    ours = [*prompts("by tokens")[::4], [7, 8, 9] * 100]
    found = drafting.run(drafting.e, drafting.n, ours, 12)
    assert found.tokens == drafting.run(drafting.e, drafting.e, ours, 12).tokens
    assert found.drafted > 0
