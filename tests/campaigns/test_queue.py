"""A million messages through the broadcast queue: readers stall, are stopped and are killed, and messages overflow.

Figures go to bench/results/campaign_queue.json.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from queue_peers import Figures, play

MESSAGES = 1_000_000
ROUND = 25_000
RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "campaign_queue.json"


@pytest.mark.timeout(3600)
def test_a_million_messages_and_nothing_is_lost_torn_or_reordered() -> None:
    figures = Figures()
    for seed in range(MESSAGES // ROUND):
        play(figures, messages=ROUND, seed=100 + seed)
        print(f"{figures.messages:9,} messages, {figures.killed} killed, {figures.stuck} stuck, "
              f"wrong: {figures.wrong}, {figures.seconds:.0f} s", flush=True)
    RESULTS.write_text(msgspec.json.format(msgspec.json.encode(figures.record()), indent=2).decode() + "\n")
    assert figures.wrong == []
    assert figures.messages == MESSAGES
    assert figures.deliveries >= 2 * MESSAGES
    assert figures.killed >= MESSAGES // ROUND
    assert figures.overflows > MESSAGES // 1000
