"""Two real engines whose prefill computes a prompt in many small chunks, each as slow as a large model's.

A step of 32 tokens is a quarter of a block, so blocks arrive in every fourth step. Steps last as long as a test says
(``slow_steps``); that time is slept.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final, NamedTuple

from engine_pair import OUTPUT, Pair, ask, new, tokens

from xpyd_sidecar.contract import metrics

CHUNK: Final = 32
TOKENS: Final = 512
"""Of the prompt: 16 steps, 4 blocks."""
ANSWER_S: Final = 120.0


class HandOver(NamedTuple):
    """What became of a prompt."""

    answer: list[int]
    expected: list[int]
    seconds: float
    """Until prefill had computed it."""
    computed: float
    """Tokens that decode computed."""
    loaded: float
    """Loads that decode ended with ok."""


def slow_pair(folder: Path, step_s: float, **options: object) -> Pair:
    """``step_s``: of each step of prefill; ``options`` of both connectors."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent / "slow_steps"), os.environ.get("PYTHONPATH"))))
    return Pair(folder, policy="recompute", prefill_args=("--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "8"),
                prefill_env={"SLOW_STEP_S": str(step_s), "PYTHONPATH": path}, **options)


def hand_over(pair: Pair, prefill_s: float) -> HandOver:
    """A prompt goes through both; ``prefill_s``: what its prefill takes, roughly."""
    prompt, transfer = tokens(TOKENS), new()
    pair.answer_s = 2 * prefill_s + ANSWER_S
    before, loads, began = pair.computed(), pair.outcomes(pair.d, "receive", "ok"), time.monotonic()
    decode = pair.d_leg(prompt, transfer, wait_s=60.0)
    pair.p_leg(prompt, transfer).result(pair.answer_s)
    seconds = time.monotonic() - began
    answer = decode.result(ANSWER_S)
    pair.wait_empty()
    computed, loaded = pair.computed() - before, pair.outcomes(pair.d, "receive", "ok") - loads
    assert pair.p.metric(metrics.SENDS_OPEN) == 0
    return HandOver(answer, ask(pair.d, prompt, OUTPUT, None), seconds, computed, loaded)


def check(done: HandOver, *, longer_than_s: float) -> None:
    """The prompt was handed over, although its prefill took so long."""
    assert done.seconds > longer_than_s
    assert (done.computed, done.loaded) == (OUTPUT + 1, 1)
    assert done.answer == done.expected
