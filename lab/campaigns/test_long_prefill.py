"""A prefill of five minutes on a CPU: ten times the load timeout, each chunk close to half of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_pair import started
from slow_prefill import CHUNK, TOKENS, check, hand_over, slow_pair

from xpyd_sidecar.contract.launch import KvOptions

RESULTS = Path(__file__).parents[2] / "bench/results/campaign_long.json"
MINUTES = 5.0
STEPS = TOKENS / CHUNK


@pytest.mark.timeout(1500)
def test_a_prompt_whose_prefill_lasts_five_minutes_is_handed_over(tmp_path: Path) -> None:
    seconds = MINUTES * 60
    for pair in started(slow_pair(tmp_path, seconds / (STEPS - 1), load_timeout_s=KvOptions().load_timeout_s)):
        done = hand_over(pair, seconds)
    check(done, longer_than_s=seconds)
    RESULTS.write_text(json.dumps({"prefill_s": round(done.seconds, 1), "load_timeout_s": KvOptions().load_timeout_s,
                                   "tokens": TOKENS, "computed_by_decode": done.computed, "loaded": done.loaded,
                                   "wrong": int(done.answer != done.expected)}, indent=2) + "\n")
