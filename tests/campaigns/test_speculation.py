"""Speculation between real engines, case by case: accepted drafts by output token beside one engine's, and texts compared.

    make campaign-speculation          into bench/results/campaign_speculation.json

Cases: how prefill drafts, how decode drafts. Models are those of ``draft_models``: drafts are good only with right KV. What
a decode engine does alone is the measure; each text is compared with that of an engine that does not speculate.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
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


ENGINES: dict[str, Callable[[], tuple[str, ...]]] = {
    "none": tuple, "ngram 3": lambda: by_tokens(3), "eagle 3": lambda: speculating(3), "eagle 5": lambda: speculating(5),
    "draft model 3": lambda: by_a_model(3), "draft model 2": lambda: by_a_model(2)}
"""How each drafts, and how many tokens."""


class Case(NamedTuple):
    """Engines of both roles, and the share of one engine's acceptance that is expected."""

    prefill: str
    decode: str
    least: float
    most: float


CASES = (
    Case("eagle 3", "eagle 5", 0.95, 1.05),
    Case("eagle 5", "eagle 3", 0.95, 1.05),
    Case("none", "eagle 3", 0.0, 0.5),
    Case("draft model 3", "draft model 2", 0.95, 1.05),
    Case("none", "draft model 3", 0.0, 0.5),
    Case("draft model 3", "eagle 3", 0.0, 0.5),
    Case("none", "ngram 3", 0.0, 2.0),
    Case("eagle 3", "ngram 3", 0.0, 2.0),
)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafting]:
    with Drafting(tmp_path_factory.mktemp("drafting"), {name: how() for name, how in ENGINES.items()}) as made:
        yield made


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, object]]:
    found: dict[str, object] = {}
    yield found
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


@pytest.fixture(scope="module")
def alone() -> dict[str, float]:
    """What decode engines accept by themselves, as far as it was asked."""
    return {}


@pytest.mark.parametrize("case", CASES, ids=[f"{case.prefill} to {case.decode}" for case in CASES])
def test_case(case: Case, drafting: Drafting, results: dict[str, object], alone: dict[str, float]) -> None:
    name = f"{case.prefill} to {case.decode}"
    p, d, plain = (drafting.by_name[each] for each in (case.prefill, case.decode, "none"))
    lengths = LENGTHS[::5] if case.decode.startswith("ngram") else LENGTHS  # vLLM takes long to look for n-grams on CPUs
    prompts = [tokens(length, f"{name} {length}") for length in lengths]
    shared = tokens(640, f"{name} shared")
    growing = [shared[:512] + tokens(more, f"{name} {more}") for more in (1, 100, 129, 300, 400)]
    if case.decode not in alone:
        others = [tokens(length, f"{name} alone {length}") for length in lengths]
        alone[case.decode] = drafting.run(d, d, others, OUTPUT).accepted
    one_by_one = drafting.run(p, d, prompts, OUTPUT)
    grown = drafting.run(p, d, growing, OUTPUT)
    together = drafting.run(p, d, [tokens(length, f"{name} again {length}") for length in lengths], OUTPUT, at_once=8)
    wrong = 0
    for asked, answers in ((prompts, one_by_one.tokens), (growing, grown.tokens)):
        right = drafting.run(plain, plain, asked, OUTPUT).tokens
        wrong += sum(one != other for one, other in zip(answers, right, strict=True))
    share = one_by_one.accepted / alone[case.decode] if alone[case.decode] else 0.0
    results[name] = {
        "requests": 2 * len(prompts) + len(growing), "compared": len(prompts) + len(growing), "wrong": wrong,
        "accepted_per_token": round(one_by_one.accepted, 4), "accepted_per_token_8_at_once": round(together.accepted, 4),
        "accepted_per_token_of_one_engine": round(alone[case.decode], 4), "share": round(share, 4),
        "drafted": one_by_one.drafted, "within": int(case.least <= share <= case.most)}
    assert wrong == 0
    assert case.least <= share <= case.most
