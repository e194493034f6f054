"""A million messages through the broadcast queue: readers stall, are stopped and are killed, and messages overflow.

Figures go to bench/results/campaign_queue.json. What is done so far is kept in .cache, round by round: a campaign that was
ended goes on from there (with the same code; remove the file to begin anew).
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from queue_peers import Figures, play

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = 1_000_000
ROUND = 25_000
RESULTS = ROOT / "bench" / "results" / "campaign_queue.json"
SO_FAR = ROOT / ".cache" / "campaign_queue.json"


@pytest.mark.timeout(3600)
def test_a_million_messages_and_nothing_is_lost_torn_or_reordered() -> None:
    figures = msgspec.json.decode(SO_FAR.read_bytes(), type=Figures) if SO_FAR.exists() else Figures()
    while figures.messages < MESSAGES:
        play(figures, messages=ROUND, seed=100 + figures.rounds)
        SO_FAR.parent.mkdir(exist_ok=True)
        SO_FAR.write_bytes(msgspec.json.encode(figures))
        print(f"{figures.messages:9,} messages, {figures.killed} killed, {figures.stuck} stuck, wrong: {figures.wrong}, "
              f"{figures.seconds:.0f} s", flush=True)
    SO_FAR.unlink()
    RESULTS.write_text(msgspec.json.format(msgspec.json.encode(figures.record()), indent=2).decode() + "\n")
    assert figures.wrong == []
    assert figures.messages == MESSAGES
    assert figures.deliveries >= 2 * MESSAGES
    assert figures.killed >= MESSAGES // ROUND
    assert figures.overflows > MESSAGES // 1000
