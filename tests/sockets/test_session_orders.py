"""Orders in which messages, calls of engines' threads, time and lost connections meet.

    XPYD_SEEDS=2000 XPYD_FIRST_SEED=10000 pytest tests/sockets/test_session_orders.py      others, and more of them
"""

from __future__ import annotations

import gc
import os
from collections import Counter

import pytest
from session_orders import Orders

from xpyd_sidecar.kv.keys import Outcome

SEEDS = int(os.environ.get("XPYD_SEEDS", "100"))
FIRST = int(os.environ.get("XPYD_FIRST_SEED", "0"))


def test_no_order_ends_a_session_fails_a_load_or_leaves_anything_behind() -> None:
    outcomes: Counter[Outcome] = Counter()
    buffered = 0
    for seed in range(FIRST, FIRST + SEEDS):
        with pytest.MonkeyPatch.context() as patch:
            orders = Orders(seed, patch)
            orders.explore()
            outcomes.update(orders.outcomes)
            buffered += orders.buffered
        if not seed % 50:
            gc.collect()  # of memory that was shared, which its file goes with
    assert outcomes[Outcome.OK] > SEEDS / 2  # not all orders are of failures
    assert len(outcomes) > 1
    assert buffered > SEEDS / 8  # nor without what is fetched ahead
