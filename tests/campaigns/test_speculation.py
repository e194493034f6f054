"""Speculation between real engines, case by case: accepted drafts by output token beside one engine's, and texts compared.

    make campaign-speculation          into bench/results/campaign_speculation.json

Cases: how prefill drafts, how decode drafts. Models are those of ``draft_models``: drafts are good only with right KV. What
a decode engine does alone is the measure; each text is compared with that of an engine that does not speculate.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from draft_models import by_a_model, by_tokens, speculating
from drafting_engines import Drafting
from engine_pair import tokens

pytestmark = pytest.mark.timeout(1200)
RESULTS = Path(__file__).parents[2] / "bench/results/campaign_speculation.json"
LENGTHS = (1, 2, 3, 5, 8, 17, 33, 64, 100, 126, 127, 128, 129, 130, 200, 254, 255, 256, 257, 258, 300, 382, 383, 384, 385,
           386, 450, 510, 511, 512, 513, 514, 600, 639, 640, 641, 700, 767, 768, 769, 900, 1000, 1023, 1024, 1025, 1279,
           1280, 1281, 1500)
OUTPUT = 24


HOW = {"eagle": speculating, "draft model": by_a_model, "ngram": by_tokens}


class Case(NamedTuple):
    """Methods of both roles with their numbers of drafts (none: 0), and the share of one engine's acceptance."""

    prefill: tuple[str, int]
    decode: tuple[str, int]
    least: float
    most: float

    @property
    def name(self) -> str:
        """As results have it."""
        return " to ".join(f"{method} {tokens}" if tokens else "none" for method, tokens in (self.prefill, self.decode))


CASES = (
    Case(("eagle", 3), ("eagle", 3), 0.95, 1.05),
    Case(("eagle", 1), ("eagle", 5), 0.95, 1.05),
    Case(("", 0), ("eagle", 3), 0.0, 0.5),
    Case(("draft model", 3), ("draft model", 3), 0.95, 1.05),
    Case(("", 0), ("draft model", 3), 0.0, 0.5),
    Case(("draft model", 3), ("eagle", 3), 0.0, 0.5),
    Case(("", 0), ("ngram", 3), 0.0, 2.0),
    Case(("eagle", 3), ("ngram", 3), 0.0, 2.0),
)


def args(method: str, tokens: int) -> tuple[str, ...]:
    """Of an engine that drafts so."""
    return HOW[method](tokens) if tokens else ()


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, object]]:
    found: dict[str, object] = {}
    yield found
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case(case: Case, results: dict[str, object], tmp_path: Path) -> None:
    prompts = [tokens(length, f"campaign {length}") for length in LENGTHS]
    shared = tokens(640, "campaign shared")
    growing = [shared[:512] + tokens(more, f"campaign {more}") for more in (1, 100, 129, 300, 400)]
    with Drafting(tmp_path, {"p": args(*case.prefill), "d": args(*case.decode), "plain": ()}) as made:
        p, d, plain = made.engines
        one_by_one = made.run(p, d, prompts, OUTPUT)
        together = made.run(p, d, [tokens(length, f"campaign {length} again") for length in LENGTHS], OUTPUT, at_once=8)
        grown = made.run(p, d, growing, OUTPUT)
        alone = made.run(d, d, [tokens(length, f"campaign {length} alone") for length in LENGTHS], OUTPUT)
        wrong = sum(a != b for a, b in zip(one_by_one.tokens, made.run(plain, plain, prompts, OUTPUT).tokens, strict=True))
        wrong += sum(a != b for a, b in zip(grown.tokens, made.run(plain, plain, growing, OUTPUT).tokens, strict=True))
    share = one_by_one.accepted / alone.accepted if alone.accepted else 0.0
    results[case.name] = {
        "requests": len(prompts) * 2 + len(growing), "wrong": wrong, "accepted_per_token": round(one_by_one.accepted, 4),
        "accepted_per_token_8_at_once": round(together.accepted, 4),
        "accepted_per_token_of_one_engine": round(alone.accepted, 4),
        "share": round(share, 4), "drafted": one_by_one.drafted, "within": int(case.least <= share <= case.most)}
    assert wrong == 0
    assert case.least <= share <= case.most
