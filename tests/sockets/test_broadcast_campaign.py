"""Ten seconds of the campaign (`python -m lab campaign-queue`): stalls, kills and messages larger than a chunk."""

from __future__ import annotations

import pytest
from queue_peers import Figures, play


@pytest.mark.test_all
def test_under_stalls_kills_and_overflow_nothing_is_lost_torn_or_reordered() -> None:
    figures = Figures()
    for seed in range(2):
        play(figures, messages=8_000, seed=seed)
    assert figures.wrong == []
    assert figures.messages == 16_000
    assert figures.deliveries >= 32_000
    assert figures.overflows > 20
    assert figures.killed >= 2
    assert figures.stopped == 2
