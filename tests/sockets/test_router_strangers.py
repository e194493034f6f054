"""A stranger without a key costs the others of a real router little memory and little time, whatever it sends.

How long /health takes is compared with a router beside it that nobody attacks: on a machine that is busy both are slow. The
exact figures are those of ``lab/campaigns/strangers.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import strangers
from strangers import Cost

LOOPS = ("asyncio",)
pytestmark = [pytest.mark.unsanitized, pytest.mark.timeout(180)]
GROWN_MIB = 64
BODIES_MIB = 700
WAIT_S, TIMES = 1.0, 20
"""How much longer /health may take than beside it, and how many times as long; before, it was up to five seconds."""


def check(cost: Cost) -> None:
    """Others have noticed little."""
    assert cost.grown_mib <= GROWN_MIB, cost
    assert cost.worst_s <= WAIT_S + TIMES * cost.idle_s, cost


async def test_pipelined_requests_cost_neither_memory_nor_others_time(tmp_path: Path) -> None:
    async with strangers.router(tmp_path / "a") as attacked, strangers.router(tmp_path / "b") as idle:
        check(await strangers.measured(attacked, idle, strangers.unread(attacked)))
        read = await strangers.measured(attacked, idle, strangers.metrics_in_one_read(attacked))
        check(read)
        assert read.told["answers"] > 4000
        offered = await strangers.measured(attacked, idle, strangers.upgrades(attacked))
        check(offered)
        assert offered.told["answers"] == strangers.UPGRADES
        assert "Traceback" not in attacked.process.tail()


async def test_bodies_that_strangers_hold_open_are_bounded_and_honest_requests_pass(tmp_path: Path) -> None:
    async with strangers.router(tmp_path / "a") as attacked, strangers.router(tmp_path / "b") as idle:
        cost = await strangers.measured(attacked, idle, strangers.held_bodies(attacked))
        assert (cost.told["answered"], cost.told["of"]) == (100, 100), cost
        assert attacked.peak <= BODIES_MIB, cost
