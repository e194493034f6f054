"""Real engines: a prefill that lasts several load timeouts, with no block for longer than one, is handed over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_pair import Pair, started
from slow_prefill import TOKENS, check, hand_over, slow_pair

pytestmark = pytest.mark.engines
LOAD_S = 10.0
"""Of silence: more than a step takes on a full machine."""
STEP_S = 3.0
"""A block comes after 12 s."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder: Path = tmp_path_factory.mktemp("long")
    yield from started(slow_pair(folder, STEP_S, load_timeout_s=LOAD_S))


def test_a_prompt_whose_prefill_lasts_longer_than_a_load_timeout_is_handed_over(pair: Pair) -> None:
    check(hand_over(pair, TOKENS / 32 * STEP_S), longer_than_s=4 * LOAD_S)
