"""What strangers without a key cost a router: memory, and the time that others wait. Prints one line of JSON per attack.

    python -m lab strangers            half a minute; exit code 1: a goal is missed

The goals are those for a machine that does nothing else: memory grows by at most 64 MiB (bodies: the process stays below
700 MiB), /health answers within half a second throughout, and every request that is read is answered.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support")]

import strangers  # noqa: E402 (tests/support is not on the path before)

WORST_S, GROWN_MIB, BODIES_MIB = 0.5, 64, 700


async def main() -> int:
    """All attacks on one router, one after the other; how many goals are missed."""
    missed = 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        async with strangers.router(folder / "a") as attacked, strangers.router(folder / "b") as idle:
            attacks: dict[str, Any] = {
                "answers that are never read": strangers.unread, "metrics in one read": strangers.metrics_in_one_read,
                "upgrades": strangers.upgrades, "bodies held open": strangers.held_bodies}
            for name, attack in attacks.items():
                try:
                    cost = await strangers.measured(attacked, idle, attack(attacked))
                except (AssertionError, TimeoutError, OSError, asyncio.IncompleteReadError) as error:
                    print(json.dumps({"attack": name, "failed": repr(error)}), flush=True)
                    missed += 1
                    continue
                bodies = attack is strangers.held_bodies
                small = attacked.peak <= BODIES_MIB if bodies else cost.grown_mib <= GROWN_MIB
                good = small and cost.worst_s <= WORST_S
                missed += not good
                print(json.dumps({"attack": name, "grown_mib": round(cost.grown_mib, 1),
                                  "peak_mib": round(attacked.peak, 1), "health_worst_s": round(cost.worst_s, 3),
                                  "beside_worst_s": round(cost.idle_s, 3), "seconds": round(cost.seconds, 1),
                                  **cost.told, "good": good}), flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(1 if asyncio.run(main()) else 0)
